"""`forerun generate`, `bench`, `verify`, `inspect` and `doctor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from forerun.errors import ForerunError
from forerun.runtime.plan import Plan
from forerun.runtime.tree import Tree

PATH = click.Path(path_type=Path)
SHOWN_ANSWERS = 4
"""Answers that a page shows token by token."""
Command = TypeVar("Command", bound=Callable[..., Any])

JSON_FILE = click.option(
    "--json", "output", type=PATH, help="Also write the result to this file (-: standard output)."
)
REPORT_FILE = click.option(
    "--report", "page", type=PATH, help="Also write it to this file as a page to read (HTML)."
)
THREADS = click.option("--threads", type=click.IntRange(1), help="CPU threads; default: all cores.")
NODES = click.option(
    "--nodes", type=click.IntRange(1), help="Size of the draft tree; default: the bundle's own."
)


def sampling_options(command: Command) -> Command:
    """How tokens are chosen."""
    for option in (
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
        click.option("--top-p", type=float, default=1.0, show_default="off", help="0 to 1."),
        click.option("--top-k", type=int, default=0, show_default="off"),
        click.option("--temperature", type=float, default=0.0, show_default="0: greedy"),
    ):
        command = option(command)
    return command


@click.command("generate")
@click.argument("bundle", type=PATH)
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@sampling_options
@click.option("--plain", is_flag=True, help="Without speculation: slower, the same tokens.")
@NODES
@click.option("--stop", multiple=True, help="End before this text. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print text, tokens and statistics as JSON.")
@THREADS
def generate_command(
    bundle: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    plain: bool,
    nodes: int | None,
    stop: tuple[str, ...],
    as_json: bool,
    threads: int | None,
) -> None:
    """Answers PROMPT (-: standard input) with BUNDLE, as the text comes.

    The text goes to standard output, a line of statistics to standard error.
    """
    from forerun.runtime.model import load
    from forerun.runtime.sampling import SamplingParams

    params = SamplingParams(temperature, top_k, top_p, seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    model = load(bundle, threads)
    stream = model.stream(text, max_new_tokens, params, plain=plain, nodes=nodes, stop=stop)
    if not as_json:
        _echo_stream(stream)
    completion = stream.completion
    stats = completion.stats
    facts = {
        "tokens_per_s": stats.tokens_per_s,
        "tau": stats.tau,
        "steps": stats.steps,
        "prefill_ms": 1e3 * stats.prefill_seconds,
        "host_share": stats.host_share,
    }
    if as_json:
        answer = asdict(completion)
        del answer["stats"], answer["blocks"]
        click.echo(json.dumps({**answer, **facts}, ensure_ascii=False))
    click.echo(
        f"{len(completion.token_ids)} tokens ({completion.finish_reason}), "
        f"{stats.tokens_per_s:.1f} tokens/s, tau {stats.tau:.2f}, {stats.steps} steps, "
        f"prefill {1e3 * stats.prefill_seconds:.0f} ms",
        err=True,
    )


def _echo_stream(stream: Any) -> None:
    """Prints the pieces at once, and ends the line even where Ctrl-C cuts it."""
    started = False
    try:
        for piece in stream:
            click.echo(piece, nl=False)
            started = True
    finally:
        if started:
            click.echo()


@click.command("bench")
@click.argument("bundle", type=PATH)
@click.option("--prompts", type=PATH, help="JSON lines; default: the bundle's own prompts.")
@click.option("--limit", type=click.IntRange(1), help="Read only the first so many prompts.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
@sampling_options
@NODES
@THREADS
@JSON_FILE
@REPORT_FILE
def bench_command(
    bundle: Path,
    prompts: Path | None,
    limit: int | None,
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
    """Measures plain and speculative decoding side by side, prompt by prompt, in one run."""
    from forerun.progress import progress
    from forerun.runtime.bench import BenchConfig, bench, table
    from forerun.runtime.model import load
    from forerun.runtime.prompts import read_prompts
    from forerun.runtime.sampling import SamplingParams

    params = SamplingParams(temperature, top_k, top_p, seed)
    check_files(output, page)
    model = load(bundle, threads)
    read = read_prompts(prompts or model.bundle.file("prompts.jsonl"), limit)
    answers = SHOWN_ANSWERS if page else 0
    config = BenchConfig(model.pace(nodes=nodes), max_new_tokens, params, threads, answers)
    with progress("Measuring", total=len(read)) as advance:
        report = bench(model, read, config, advance)
    show_report(report, table(report), output)
    write_page(report, "bench", page)


@click.command("verify")
@click.argument("bundle", type=PATH)
@click.option("--limit", type=click.IntRange(1), default=40, show_default=True, help="Prompts.")
@click.option(
    "--tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens a prompt."
)
@THREADS
@JSON_FILE
def verify_command(
    bundle: Path, limit: int, tokens: int, threads: int | None, output: Path | None
) -> None:
    """Certifies BUNDLE on this machine: its files, its numerics, and that it is lossless.

    Speculative tokens are compared with plain ones, greedy and sampled. Status 1 where they differ.
    """
    from forerun.progress import progress
    from forerun.runtime.verify import VerifyConfig, table, verify

    check_files(output)
    with progress("Verifying", total=None) as advance:
        certificate = verify(bundle, VerifyConfig(limit, tokens, threads), advance)
    show_report(certificate.to_dict(), table(certificate), output)
    for check in certificate.checks:
        if check.passed is False:
            raise ForerunError(f"{bundle}: {check.name}: {check.detail}")


@click.command("inspect")
@click.argument("bundle", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect_command(bundle: Path, as_json: bool) -> None:
    """Prints what BUNDLE holds, once its files are as its manifest says."""
    from forerun.runtime.bundle import load_bundle

    manifest = load_bundle(bundle).manifest
    if as_json:
        click.echo(manifest.to_json(), nl=False)
        return
    target, drafter, engine = manifest.target, manifest.drafter, manifest.engine
    sizes = sorted(manifest.trees, key=int)
    total = sum(file.bytes for file in manifest.files.values())
    print_table(
        _facts(
            {
                "target": f"{target.name} ({target.architecture}, {target.num_layers} layers, "
                f"{target.vocab_size} tokens)",
                "stop ids": ", ".join(map(str, target.stop_ids)),
                "drafter": f"{drafter.name} ({drafter.kind})",
                **{f"  {name}": value for name, value in drafter.options.items()},
                "  digest": drafter.digest[:16],
                "engine": " ".join((engine.kind, *engine.devices)),
                **{f"  {name}": version for name, version in engine.versions.items()},
                "precision": manifest.precision,
                "capacity": f"{manifest.capacity} slots",
                "prefill chunk": f"{manifest.chunk} tokens",
                "draft trees": ", ".join(_tree_words(size, manifest.trees[size]) for size in sizes),
                "default tree": manifest.default_tree,
                "plan": _plan_words(manifest.plan),
                "files": f"{len(manifest.files)}, {total / 1e6:.1f} MB",
                "step contract": manifest.contract,
                "forerun": manifest.forerun,
                "recipe": manifest.recipe,
            }
        )
    )


def _facts(facts: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def print_table(table: Any) -> None:
    """A rich table on standard output, in full width where that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)


def check_files(output: Path | None, page: Path | None = None) -> None:
    """Raises ForerunError, before anything is measured, for a file that can't be written."""
    from forerun.runtime.output import check_output

    for path in (None if str(output) == "-" else output, page):
        if path is not None:
            check_output(path)


def show_report(report: dict[str, Any], table: Any, output: Path | None) -> None:
    """The report as a table, and as JSON where it is asked for ("-": instead of the table)."""
    from forerun.runtime.output import write_output

    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    print_table(table)
    if output is not None:
        write_output(output, text)


def write_page(report: dict[str, Any], command: str, page: Path | None) -> None:
    """The report of `forerun COMMAND` as a page, where one is asked for."""
    if page is None:
        return
    from forerun.runtime.output import write_output
    from forerun.runtime.report import render

    write_output(page, render(report, command))


def _plan_words(plan: Plan | None) -> str:
    if plan is None:
        return "none: forerun tune makes one"
    return ", ".join(
        f"{choice.nodes} from {choice.context} tokens"
        + (f" with {choice.rows} rows" if choice.rows > 1 else "")
        for choice in plan.choices
    )


def _tree_words(nodes: str, tree: Tree | None) -> str:
    return f"{nodes} (grown each step)" if tree is None else f"{nodes} (depth {tree.depth})"


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor_command(as_json: bool) -> None:
    """Says what this machine can build and run, and what to install for the rest."""
    from forerun.runtime.doctor import examine, table

    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print_table(table(report))
