"""`forerun train` and `forerun simulate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from forerun.errors import ForerunError

PATH = click.Path(path_type=Path)
KINDS = ["medusa", "eagle", "eagle3", "mtp", "dflash", "draft"]
"""Those of `forerun.training.kinds`, which imports torch; help must not."""

DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU where torch finds one.",
)


@click.command("train")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("target")
@click.option("--data", type=PATH, required=True, multiple=True, help="Data folder; repeatable.")
@click.option("-o", "--output", type=PATH, required=True, help="Folder of the drafter.")
@click.option(
    "--heads",
    type=click.IntRange(1, 128),
    help="medusa: default 4. draft: attention heads, by default one for each 64 of the width.",
)
@click.option("--layers", type=click.IntRange(1, 8), help="medusa: blocks a head. Default: 3.")
@click.option(
    "--unroll",
    type=click.IntRange(1, 16),
    help="eagle, eagle3, mtp: steps drafted, the tree's depth. Default: 5.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 64),
    help="eagle, eagle3, mtp: nodes a level goes on with (default: 8; mtp: 1). medusa: choices "
    "a head (default: 10).",
)
@click.option(
    "--decay",
    type=click.FloatRange(0, 1, min_open=True),
    help="eagle, eagle3, mtp: weight of each such step against the one before. Default: 0.8.",
)
@click.option(
    "--intermediate",
    type=click.IntRange(1),
    help="Not medusa: width of the MLP. Default: the target's; draft: 8/3 of the width.",
)
@click.option("--depth", type=click.IntRange(1, 64), help="dflash, draft: layers. Default: 2.")
@click.option("--block", type=click.IntRange(2, 64), help="dflash: slots. Default: 8.")
@click.option(
    "--feature-layer",
    "features",
    type=click.IntRange(-1),
    multiple=True,
    callback=lambda _context, _option, given: given or None,
    help="dflash: a hidden state of the target to read; repeatable. Default: five spread out.",
)
@click.option(
    "--reach",
    type=click.FloatRange(0, min_open=True),
    help="dflash: slots over which the loss's weight falls by e. Default: 4 for 8 slots.",
)
@click.option("--anchors", type=click.IntRange(1), help="dflash: blocks a text. Default: 16.")
@click.option("--width", type=click.IntRange(2), help="draft: hidden size. Default: 192.")
@click.option(
    "--reading",
    type=click.FloatRange(0),
    help="draft: weight of the prompts' tokens against the answers'. Default: 0.1.",
)
@click.option("--start", help="A drafter of this kind and these sizes to go on from.")
@click.option("--epochs", type=click.IntRange(1), help="Default: 4.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Answer positions (medusa, default 1024) or padded tokens (default 4096) a step.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Default: 0.001.")
@click.option("--draft-vocabulary", type=click.IntRange(16), help="Default: 8192.")
@click.option(
    "--average",
    type=click.FloatRange(0, 1, max_open=True),
    help="Decay of a running mean of the weights, which is kept. Default: none.",
)
@click.option(
    "--patience",
    type=click.IntRange(1),
    help="End after so many epochs without a better held-out tau; keep the best. Default: never.",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: bfloat16.")
@click.option("--seed", type=click.IntRange(0), help="Default: 0.")
@click.option(
    "--bundle",
    type=PATH,
    help="A bundle with a drafter of this shape: what it costs here predicts the speedup.",
)
@click.option(
    "--sweep",
    multiple=True,
    metavar="NAME=N,N",
    help="Train and compile each of several sizes, as in intermediate=384,768; repeatable.",
)
@click.option(
    "--measure",
    "most",
    type=click.IntRange(1),
    help="Held-out answers that it is measured on at the end. Default: all.",
)
@DEVICE
def train_command(
    kind: str,
    target: str,
    data: tuple[Path, ...],
    output: Path,
    bundle: Path | None,
    sweep: tuple[str, ...],
    most: int | None,
    device: str,
    **given: Any,
) -> None:
    """Trains a drafter of KIND for TARGET on its own answers, and measures it on held-out ones.

    A killed run goes on from its last checkpoint. Started by torchrun, several processes train
    together, on a GPU each.
    """
    from forerun.models.checkpoint import load_checkpoint
    from forerun.training.device import find_device
    from forerun.training.kinds import sweep_sizes, train

    place = find_device(device)
    checkpoint = load_checkpoint(target)
    if sweep and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ForerunError("--sweep trains one size after the other in one process: no torchrun")
    if sweep:
        sweep_sizes(kind, target, checkpoint, data, output, given, sweep, click.echo, place, most)
    else:
        train(kind, checkpoint, data, output, given, click.echo, bundle, place, most)
    click.echo(f"{output}: done")


@click.command("simulate")
@click.argument("target")
@click.option("--drafter", required=True, help="Name or folder, as in forerun compile.")
@click.option("--data", type=PATH, required=True, multiple=True, help="Data folder; repeatable.")
@click.option("--tree", "trees", type=click.IntRange(2), multiple=True, help="Nodes; repeatable.")
@click.option("--all", "everything", is_flag=True, help="Not only the answers held out by hash.")
@click.option(
    "--bundle", type=PATH, help="As in forerun train: predicts the speedup, for its own trees."
)
@DEVICE
def simulate_command(
    target: str,
    drafter: str,
    data: tuple[Path, ...],
    trees: tuple[int, ...],
    everything: bool,
    bundle: Path | None,
    device: str,
) -> None:
    """What a drafter is worth on TARGET's own greedy answers, without compiling anything.

    The answers come from forerun synthesize. They are decoded again with the drafter alone at work:
    tau and acceptance by depth are those of the step that would be compiled.
    """
    from forerun.models.checkpoint import load_checkpoint
    from forerun.training.device import find_device
    from forerun.training.kinds import MEASURED, simulate

    place, sizes = find_device(device), trees or MEASURED
    simulate(load_checkpoint(target), drafter, data, click.echo, bundle, sizes, everything, place)
