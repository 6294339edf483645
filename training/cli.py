"""`forerun train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
KINDS = ["medusa", "eagle", "eagle3", "mtp"]
"""Those of `forerun.training.kinds`, which imports torch; help must not."""


@click.command("train")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("target")
@click.option("--data", type=PATH, required=True, multiple=True, help="Data folder; repeatable.")
@click.option("-o", "--output", type=PATH, required=True, help="Folder of the drafter.")
@click.option("--heads", type=click.IntRange(1, 16), help="medusa. Default: 4.")
@click.option("--layers", type=click.IntRange(1, 8), help="medusa: blocks a head. Default: 3.")
@click.option(
    "--unroll", type=click.IntRange(1, 16), help="eagle, eagle3, mtp: steps drafted. Default: 5."
)
@click.option(
    "--decay",
    type=click.FloatRange(0, 1, min_open=True),
    help="eagle, eagle3, mtp: weight of each such step against the one before. Default: 0.8.",
)
@click.option(
    "--intermediate",
    type=click.IntRange(1),
    help="eagle, eagle3, mtp: width of the MLP. Default: the target's.",
)
@click.option("--epochs", type=click.IntRange(1), help="Default: 4.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Answer positions (medusa, default 1024) or padded tokens (default 4096) a step.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Default: 0.001.")
@click.option("--draft-vocabulary", type=click.IntRange(16), help="Default: 8192.")
@click.option("--seed", type=click.IntRange(0), help="Default: 0.")
def train_command(
    kind: str, target: str, data: tuple[Path, ...], output: Path, **given: Any
) -> None:
    """Trains a drafter of KIND for TARGET on its own answers, and measures it on held-out ones.

    A killed run goes on from its last checkpoint.
    """
    from forerun.models.checkpoint import load_checkpoint
    from forerun.training.kinds import TRAIN

    TRAIN[kind](load_checkpoint(target), data, output, given, click.echo)
    click.echo(f"{output}: done")
