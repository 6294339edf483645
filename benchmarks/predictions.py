"""Predicted against measured speedup, for every drafter on every prompt set.

    python benchmarks/predictions.py FOLDER calls.jsonl mt_bench.jsonl --limit 40

Acceptance and costs come from one half of the prompts, the speedup from the other
(`forerun.runtime.tune_run`): nothing that is measured took part in its prediction. Bundles are
compiled into FOLDER once, and are not changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from forerun.compiler.options import CompileOptions
from forerun.compiler.pipeline import compile_bundle
from forerun.runtime.bundle import load_bundle
from forerun.runtime.prompts import read_prompts
from forerun.runtime.tune import TuneConfig
from forerun.runtime.tune_run import tune

DRAFTERS = ("ngram", "chat", "tool-calls", "chat+ngram", "tool-calls+ngram")
SIZES = (4, 6, 8)
CONTEXTS = (32, 256, 512, 1024)
NOTED = 0.1
"""Predictions that are off by more are marked."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompts", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--limit", type=int, default=40, show_default=True)
@click.option("--max-new-tokens", type=int, default=80, show_default=True)
@click.option("--drafter", "drafters", multiple=True, default=DRAFTERS)
def main(
    folder: Path,
    prompts: tuple[Path, ...],
    limit: int,
    max_new_tokens: int,
    drafters: tuple[str, ...],
) -> None:
    """Prints a table, and writes each run's report into FOLDER."""
    config = TuneConfig(max_new_tokens=max_new_tokens, sizes=SIZES, contexts=CONTEXTS)
    click.echo(
        "| prompts | drafter | nodes | predicted | measured (95%) | off by |\n" + "|---" * 6 + "|"
    )
    for drafter in drafters:
        bundle = load_bundle(
            compile_bundle(CompileOptions("smollm2", folder / drafter, drafter)).path
        )
        for path in prompts:
            report = tune(bundle, read_prompts(path, limit), config).report
            text = json.dumps(report, indent=1)
            (folder / f"{drafter}-{path.stem}.json").write_text(text, encoding="utf-8")
            sides = {side["nodes"]: side for side in report["measured"].values()}
            for nodes, side in sides.items():
                if nodes > 1:
                    off = side["predicted"] / side["speedup"] - 1
                    low, high = side["speedup_interval"]
                    click.echo(
                        f"| {path.stem} | `{drafter}` | {nodes} | {side['predicted']:.2f} "
                        f"| {side['speedup']:.2f} ({low:.2f} to {high:.2f}) "
                        f"| {off:+.0%}{' !' if abs(off) > NOTED else ''} |"
                    )


if __name__ == "__main__":
    main()
