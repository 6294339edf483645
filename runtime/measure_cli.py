"""`forerun predict` and `profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun.errors import ForerunError
from forerun.runtime.cli import (
    JSON_FILE,
    NODES,
    PATH,
    REPORT_FILE,
    SHOWN_ANSWERS,
    THREADS,
    check_files,
    print_table,
    sampling_options,
    show_report,
    write_page,
)

if TYPE_CHECKING:
    from forerun.runtime.predict import VerifyCurve


@click.command("predict")
@click.option("--alpha", type=float, help="Chance that a drafted token is accepted.")
@click.option("--gamma", type=int, help="Drafted tokens a step; of a tree its depth.")
@click.option("--cost", type=float, help="c: drafting one of them, in plain target steps.")
@click.option(
    "--verify", help="verify(n) relative to n = 1: a number, or points as 1:1,4:1.3,8:1.6."
)
@click.option("--acceptance", help="Shares accepted to depth 1, 2, ... as 0.7,0.5,0.3.")
@click.option("--nodes", type=click.IntRange(2), help="A tree's nodes, root included.")
@click.option(
    "--bundle-report", type=PATH, help="Predict from a report of bench --json, beside its speedup."
)
@click.option("--json", "as_json", is_flag=True, help="Print the prediction as JSON.")
def predict_command(
    alpha: float | None,
    gamma: int | None,
    cost: float | None,
    verify: str | None,
    acceptance: str | None,
    nodes: int | None,
    bundle_report: Path | None,
    as_json: bool,
) -> None:
    """Says what speculation should gain: by the textbook, and with what verifying really costs.

    Give --alpha (or --acceptance), --gamma and --cost; or --bundle-report alone.
    """
    from forerun.runtime.prediction import Setting, predict, predict_bench, table

    given = (alpha, gamma, cost, verify, acceptance, nodes)
    if bundle_report is not None:
        if any(value is not None for value in given):
            raise click.UsageError("--bundle-report brings its own numbers: leave the others out")
        report = predict_bench(bundle_report)
    else:
        shares = tuple(_number(text, "--acceptance") for text in _items(acceptance))
        if cost is None or (alpha is None and not shares) or (gamma is None and not shares):
            raise click.UsageError(
                "give --alpha (or --acceptance), --gamma and --cost, or --bundle-report"
            )
        depth = len(shares) if gamma is None else gamma
        setting = Setting(depth, cost, alpha, shares, _curve(verify), nodes)
        report = predict(setting)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        print_table(table(report))


def _curve(text: str | None) -> VerifyCurve | None:
    """`1.3`, or `1:1,4:1.3,8:1.6`."""
    from forerun.runtime.predict import VerifyCurve

    items = _items(text)
    if not items:
        return None
    if len(items) == 1 and ":" not in items[0]:
        return VerifyCurve.constant(_number(items[0], "--verify"))
    pairs = [item.partition(":")[::2] for item in items]
    costs = {_whole(size, "--verify"): _number(cost, "--verify") for size, cost in pairs}
    if len(costs) < len(pairs):
        raise ForerunError("--verify: one n stands there twice: give each once")
    return VerifyCurve.of(costs)


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ForerunError(f"{option}: {text!r} is not a number") from None


def _whole(text: str, option: str) -> int:
    if not text.isdecimal():
        raise ForerunError(f"{option}: {text!r} is not a number of tokens: write n:cost")
    return int(text)


@click.command("profile")
@click.argument("bundle", type=PATH)
@click.option("--prompts", type=PATH, help="JSON lines; default: the bundle's own prompts.")
@click.option("--limit", type=click.IntRange(1), default=8, show_default=True, help="Prompts.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True)
@sampling_options
@NODES
@THREADS
@JSON_FILE
@REPORT_FILE
def profile_command(
    bundle: Path,
    prompts: Path | None,
    limit: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    nodes: int | None,
    threads: int | None,
    output: Path | None,
    page: Path | None,
) -> None:
    """Says where a step's time goes, and what becomes of the speedup that acceptance promises."""
    from forerun.progress import progress
    from forerun.runtime.bench import BenchConfig
    from forerun.runtime.model import load
    from forerun.runtime.pace import Fixed
    from forerun.runtime.profile import profile
    from forerun.runtime.profile_table import table
    from forerun.runtime.prompts import read_prompts
    from forerun.runtime.sampling import SamplingParams

    params = SamplingParams(temperature, top_k, top_p, seed)
    check_files(output, page)
    model = load(bundle, threads)
    read = read_prompts(prompts or model.bundle.file("prompts.jsonl"), limit)
    # One size throughout: its own cost is asked for.
    pace = Fixed(model.pace(nodes=nodes).largest)
    config = BenchConfig(pace, max_new_tokens, params, threads, SHOWN_ANSWERS if page else 0)
    with progress("Profiling", total=len(read)) as advance:
        report = profile(model, read, config, advance)
    show_report(report, table(report), output)
    write_page(report, "profile", page)
