"""`forerun synthesize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun.errors import ForerunError
from forerun.training.cli import DEVICE

if TYPE_CHECKING:
    from forerun.training.synthesize import Run

PATH = click.Path(path_type=Path)


@click.command("synthesize")
@click.argument("target")
@click.option("--prompts", type=PATH, required=True, help="JSON lines: prompt, messages or turns.")
@click.option("-o", "--output", type=PATH, required=True, help="Folder of the data.")
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(0),
    multiple=True,
    default=(0.0,),
    show_default=True,
    help="Repeatable: every prompt is answered at each.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Answers to a prompt at each temperature above 0.",
)
@click.option(
    "--greedy-share",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of the prompts answered at temperature 0 alone.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=160, show_default=True)
@click.option(
    "--max-prompt-tokens",
    type=click.IntRange(1),
    default=640,
    show_default=True,
    help="Longer prompts are dropped.",
)
@click.option(
    "--exclude",
    type=PATH,
    multiple=True,
    help="Prompt file, repeatable: what it asks and the functions it names are dropped.",
)
@click.option(
    "--features", help="Keep these too: eagle, eagle3, mtp, dflash, or layers as 2,15,27."
)
@click.option(
    "--top-logprobs",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Keep the log-probabilities of so many of the likeliest tokens.",
)
@click.option("--batch", type=click.IntRange(1), default=192, show_default=True)
@click.option(
    "--shard",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Answers in a file; a killed run loses those that it was working on.",
)
@click.option("--limit", type=click.IntRange(1), help="Read only the first so many prompts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="What a shard is decoded with; Ray's workers take as many CPUs. Default: one a core.",
)
@click.option("--ray", is_flag=True, help="On the Ray cluster of RAY_ADDRESS, or a local one.")
@DEVICE
def synthesize_command(
    target: str,
    prompts: Path,
    output: Path,
    temperatures: tuple[float, ...],
    samples: int,
    greedy_share: float,
    max_new_tokens: int,
    max_prompt_tokens: int,
    exclude: tuple[Path, ...],
    features: str | None,
    top_logprobs: int,
    batch: int,
    shard: int,
    limit: int | None,
    seed: int,
    dtype: str,
    threads: int | None,
    ray: bool,
    device: str,
) -> None:
    """Lets TARGET answer prompts, as training data. Goes on where a killed run stopped."""
    import time

    import torch

    from forerun.models.checkpoint import load_checkpoint
    from forerun.runtime.prompts import read_prompts
    from forerun.training.device import find_device
    from forerun.training.filters import Excluded
    from forerun.training.plan import SynthesizeConfig
    from forerun.training.synthesize import synthesize

    config = SynthesizeConfig(
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperatures=tuple(dict.fromkeys(temperatures)),
        samples=samples,
        greedy_share=greedy_share,
        seed=seed,
        shard=shard,
        batch=batch,
        top_logprobs=top_logprobs,
        dtype=dtype,
        threads=threads or torch.get_num_threads(),
        # Whether a cluster has GPUs is its own to say.
        device="cuda" if ray and device == "cuda" else find_device(device).type,
    )
    asked = read_prompts(prompts, limit)
    excluded = Excluded.of(prompt for path in exclude for prompt in read_prompts(path))
    run = _on_ray(target) if ray else None
    checkpoint = load_checkpoint(target)
    layers = _layers(features, checkpoint.config.num_layers) if features else ()
    if top_logprobs > checkpoint.config.vocab_size:
        raise ForerunError(
            f"--top-logprobs {top_logprobs}: the target has {checkpoint.config.vocab_size} tokens"
        )
    start = time.monotonic()
    added = synthesize(checkpoint, asked, output, config, excluded, layers, click.echo, run)
    seconds = time.monotonic() - start
    click.echo(f"{output}: {added} answer tokens in {seconds:.0f} s ({added / seconds:.0f}/s)")


def _on_ray(target: str) -> Run:
    from functools import partial

    from forerun.models.checkpoint import load_checkpoint
    from forerun.training.ray_blocks import ray_run

    return ray_run(partial(load_checkpoint, _everywhere(target)))


def _everywhere(target: str) -> str:
    """The target's name, or its path from the root: workers start in other folders."""
    path = Path(target)
    return str(path.absolute()) if path.exists() else target


def _layers(features: str, count: int) -> tuple[int, ...]:
    """The layers that `--features` asks for, of a target of `count` layers."""
    from forerun.training.kinds import READING, features_of_kind

    if features in READING:
        return features_of_kind(features, count)
    names = features.split(",")
    if not all(name.strip().isdecimal() and int(name) <= count for name in names):
        raise ForerunError(
            f"--features {features}: give {', '.join(READING)}, or layers from 0 to {count} "
            "with commas in between"
        )
    return tuple(dict.fromkeys(int(name) for name in names))
