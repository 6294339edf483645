"""The files of a data folder: shards of texts, and how they appear all at once.

A shard is a safetensors file of A texts, end to end. A text is a prompt and one answer: whatever
lies behind `prompt_lengths` tokens is the target's own, and that is the whole loss mask. An answer
of a longer conversation is a text of its own, whose prompt is all that was said before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ForerunError
from forerun.training.generate import Answer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MANIFEST = "manifest.json"
PART = ".part"
"""What the names of unfinished files end with."""
TOKEN_BYTES, STATE_BYTES, TOP_BYTES = 4, 2, 4 + 2
"""Of a token id; of a number of a state or a feature; of one of the best tokens and its score."""


@dataclass(frozen=True)
class Said:
    """A text and where it comes from."""

    index: int
    """The prompt's place in its file, from 0."""
    sample: int
    turn: int
    temperature: float
    category: str
    held_out: bool
    answer: Answer


def write_shard(path: Path, texts: Sequence[Said]) -> None:
    """One file of texts, in the order given."""
    answers = [text.answer for text in texts]
    sequences = [[*answer.request.prompt, *answer.tokens] for answer in answers]

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    tensors = {
        "states": torch.cat([answer.states for answer in answers]).to(torch.bfloat16),
        "tokens": column([*chain.from_iterable(sequences)]),
        "lengths": column([len(sequence) for sequence in sequences]),
        "prompt_lengths": column([len(answer.request.prompt) for answer in answers]),
        "indices": column([text.index for text in texts]),
        "samples": column([text.sample for text in texts]),
        "turns": column([text.turn for text in texts]),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        "held_out": column([text.held_out for text in texts], torch.uint8),
    }
    tops = [answer.top for answer in answers if answer.top is not None]
    if tops:
        tensors["top_ids"] = torch.cat([top.ids for top in tops])
        tensors["top_logprobs"] = torch.cat([top.logprobs for top in tops])
    # One entry only: safetensors writes several in no fixed order.
    categories = json.dumps([text.category for text in texts])
    write_whole(path, lambda part: save_file(tensors, part, {"categories": categories}))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file that gets its name only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")  # a killed run may linger for a while
    write(part)
    part.replace(path)


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{number:05d}.safetensors"


def shard_files(folder: Path) -> Iterator[Path]:
    """The finished shards of a data folder, in order. Raises ForerunError where there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ForerunError(f"{folder}: no data in it: make some with forerun synthesize")
    yield from found


def remove_parts(folder: Path) -> None:
    """Takes away the shards and features that a killed run did not finish."""
    for part in (*folder.glob(f"*.safetensors.*{PART}"), *folder.glob(f"features-*/*{PART}")):
        part.unlink(missing_ok=True)
