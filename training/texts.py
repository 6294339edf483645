"""Whole sequences, prompt and answer, with what the target felt at every token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import NORMED
from forerun.models.target import Forward, Target
from forerun.progress import progress
from forerun.training.device import CPU
from forerun.training.read import read_alike
from forerun.training.shards import (
    DTYPES,
    check_target,
    shard_files,
    target_digest,
    write_whole,
)

TEXTS_AT_ONCE = 4
"""Their rows then stay in a core's cache; 16 were measured to take twice as long."""


@dataclass(frozen=True)
class Text:
    """A prompt of `prompt` tokens and its answer, n tokens in all."""

    tokens: Tensor  # [n] int64
    prompt: int
    features: Tensor  # [n, F]: the feature layers side by side, in the checkpoint's basis
    states: Tensor  # [n - prompt, H]: the normed hidden state that chose each answer token
    kind: str
    """The part of the prompt's category before the slash."""
    held_out: bool
    greedy: bool


def read_texts(
    checkpoint: Checkpoint,
    folders: Sequence[Path],
    layers: Sequence[int],
    dtype: str = "bfloat16",
    device: torch.device = CPU,
) -> list[Text]:
    """All texts of the data `folders`, with the target's feature `layers` (`NORMED`, or the layers
    that they enter; none: features of no width). They are computed once, on `device`, and kept
    beside the data.

    Raises ForerunError where a folder is no data or another target's, or a shard is damaged.
    """
    check_target(target_digest(folders), checkpoint)
    paths = [path for folder in folders for path in shard_files(folder)]
    missing = [path for path in paths if not _beside(path, layers).exists()]
    if layers and missing:
        _compute(checkpoint, missing, layers, dtype, device)
    texts: list[Text] = []
    for path in paths:
        try:
            texts += _read(path, layers)
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise ForerunError(
                f"{path}: damaged shard, or features of other data: {error}: delete it and run "
                "forerun synthesize again"
            ) from None
    return texts


def _beside(path: Path, layers: Sequence[int]) -> Path:
    names = ("normed" if layer == NORMED else str(layer) for layer in layers)
    return path.parent / f"features-{'-'.join(names)}" / path.name


def _read(path: Path, layers: Sequence[int]) -> Iterator[Text]:
    with safe_open(path, "pt") as file:
        kinds = json.loads(file.metadata()["categories"])
        lengths = file.get_tensor("lengths").tolist()
        prompts = file.get_tensor("prompt_lengths").tolist()
        tokens = file.get_tensor("tokens").to(torch.int64)
        answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
        states = file.get_tensor("states").split(answers)
        held_out = (file.get_tensor("held_out") != 0).tolist()
        greedy = (file.get_tensor("temperatures") == 0).tolist()
    features = torch.zeros(len(tokens), 0)
    if layers:
        with safe_open(_beside(path, layers), "pt") as more:
            features = more.get_tensor("features")
    felt = torch.split(features, lengths)
    parts = zip(tokens.split(lengths), prompts, felt, states, kinds, held_out, greedy, strict=True)
    for token, prompt, feature, state, kind, held, cold in parts:
        yield Text(token, prompt, feature, state, kind.partition("/")[0], held, cold)


def _compute(
    checkpoint: Checkpoint,
    paths: Sequence[Path],
    layers: Sequence[int],
    dtype: str,
    device: torch.device,
) -> None:
    """The features of shards, a file beside each."""
    target: Target | None = None
    with progress("reading features", len(paths)) as advance:
        for path in paths:
            with safe_open(path, "pt") as file:
                longest = int(file.get_tensor("lengths").max())
            if target is None or target.capacity < longest:
                capacity = max(longest, 1024)
                target = Target(checkpoint.config, checkpoint.weights, capacity, "torch").eval()
                target.to(device, DTYPES[dtype])
            write_features(target, path, layers)
            advance()


def has_features(path: Path, layers: Sequence[int]) -> bool:
    """Whether the features of the shard `path` lie beside it."""
    return _beside(path, layers).exists()


def write_features(target: Target, path: Path, layers: Sequence[int]) -> None:
    """The features of the shard `path`, in a file beside it."""
    with safe_open(path, "pt") as file:
        tokens = file.get_tensor("tokens").to(torch.int64)
        texts = tokens.split(file.get_tensor("lengths").tolist())
    rows = torch.cat(features_of(target, texts, layers)).to(torch.bfloat16)
    write_whole(_beside(path, layers), lambda part: save_file({"features": rows}, part))


@torch.inference_mode()
def features_of(target: Target, texts: Sequence[Tensor], layers: Sequence[int]) -> list[Tensor]:
    """Each text's features `[n, F]` on the CPU. Texts that begin alike go together."""
    tokens = [text.tolist() for text in texts]
    order = sorted(range(len(texts)), key=lambda place: tokens[place])
    taps = {layer for layer in layers if layer != NORMED}
    found: dict[int, Tensor] = {}
    for first in range(0, len(order), TEXTS_AT_ONCE):
        group = order[first : first + TEXTS_AT_ONCE]
        read = read_alike(target, [tokens[place] for place in group], taps)
        begun = [] if read.begun is None else [_side_by_side(read.begun, layers)[0].to(CPU)]
        rest = _side_by_side(read.rest, layers).to(CPU)
        for row, place in enumerate(group):
            own = rest[row, : len(tokens[place]) - read.shared]
            found[place] = torch.cat([*begun, own])
    return [found[place] for place in range(len(texts))]


def _side_by_side(forward: Forward, layers: Sequence[int]) -> Tensor:
    """The feature layers of a forward, `[B, T, F]`."""
    parts = [forward.hidden if layer == NORMED else forward.taps[layer] for layer in layers]
    return torch.cat(parts, dim=-1)
