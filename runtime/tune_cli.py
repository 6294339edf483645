"""`forerun tune`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from forerun.runtime.cli import (
    JSON_FILE,
    PATH,
    REPORT_FILE,
    THREADS,
    check_files,
    show_report,
    write_page,
)


@click.command("tune")
@click.argument("bundle", type=PATH)
@click.option("--prompts", type=PATH, help="JSON lines; default: the bundle's own prompts.")
@click.option("--limit", type=click.IntRange(2), help="Read only the first so many prompts.")
@click.option("--max-new-tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option(
    "--tree", "sizes", type=click.IntRange(2), multiple=True, help="Nodes to try; may be repeated."
)
@click.option("--rows", type=click.IntRange(1), multiple=True, help="Batch sizes.  [default: 1]")
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(32),
    multiple=True,
    help="Committed tokens at which steps are timed; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Measure and report, but leave the bundle as it is.")
@click.option("--target", help="To compile sizes that the engine lacks: what it was compiled from.")
@click.option("--drafter", help="The same for the drafter.")
@THREADS
@JSON_FILE
@REPORT_FILE
def tune_command(
    bundle: Path,
    prompts: Path | None,
    limit: int | None,
    max_new_tokens: int,
    sizes: tuple[int, ...],
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    dry_run: bool,
    target: str | None,
    drafter: str | None,
    threads: int | None,
    output: Path | None,
    page: Path | None,
) -> None:
    """Fits BUNDLE's draft trees to this machine and these prompts, and writes the plan into it.

    One half of the prompts is recorded and replayed with every tree; the choice is measured on the
    other half, against plain decoding and the bundle's default.
    """
    from forerun.progress import progress
    from forerun.runtime.bundle import load_bundle, replace_manifest
    from forerun.runtime.prompts import read_prompts
    from forerun.runtime.tune import TuneConfig
    from forerun.runtime.tune_report import table
    from forerun.runtime.tune_run import tune

    check_files(output, page)
    opened = load_bundle(bundle)
    read = read_prompts(prompts or opened.file("prompts.jsonl"), limit)
    config = TuneConfig(max_new_tokens=max_new_tokens, threads=threads)
    if sizes:
        from forerun.runtime.tune_sizes import with_sizes

        opened = with_sizes(opened, sizes, target, drafter, _say)
        config = replace(config, sizes=sizes)
    config = replace(config, rows=rows or config.rows, contexts=contexts or config.contexts)
    with progress("Tuning", total=None) as advance:
        tuned = tune(opened, read, config, _say, advance)
    if not dry_run:
        replace_manifest(opened.path, tuned.manifest)
    show_report(tuned.report, table(tuned.report), output)
    write_page(tuned.report, "tune", page)


def _say(line: str) -> None:
    click.echo(f"forerun: {line}", err=True)
