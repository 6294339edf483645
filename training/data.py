"""The answers of one or several data folders, in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.training.shards import MANIFEST, shard_files


@dataclass(frozen=True)
class Answers:
    """Answers end to end, N tokens in all, of A sequences."""

    states: Tensor  # [N, H] bfloat16: the target's normed hidden state that chose each token
    tokens: Tensor  # [N] int64
    lengths: Tensor  # [A] int64
    kinds: tuple[str, ...]  # [A] the part of each prompt's category before the slash

    @property
    def starts(self) -> Tensor:
        """`[A]`: where each answer begins."""
        return self.lengths.cumsum(0) - self.lengths

    def following(self, heads: int) -> Tensor:
        """`[N, heads]`: the tokens that the heads are to predict; -1 behind the answer's end.

        The state that chose token n is followed by that token; head i's is the (i+1)-th after it.
        """
        count = len(self.tokens)
        left = torch.repeat_interleave(self.starts + self.lengths, self.lengths)  # [N] the end
        at = torch.arange(count)[:, None] + torch.arange(1, heads + 1)  # [N, heads]
        return torch.where(at < left[:, None], self.tokens[at.clamp(max=count - 1)], -1)

    def where(self, keep: Sequence[bool]) -> Answers:
        """The answers that `keep` `[A]` names."""
        mask = torch.tensor(keep)
        rows = torch.repeat_interleave(mask, self.lengths)
        kinds = tuple(kind for kind, kept in zip(self.kinds, keep, strict=True) if kept)
        return Answers(self.states[rows], self.tokens[rows], self.lengths[mask], kinds)


@dataclass(frozen=True)
class Data:
    """Training answers, the held-out ones apart, and how often each token occurs in all text."""

    train: Answers
    held_out: Answers
    """At temperature 0 only: what a drafter's acceptance is measured on."""
    frequencies: Tensor  # [V] int64, over prompts and answers of the training part
    target_digest: str


def read_data(folders: Sequence[Path], vocabulary: int) -> Data:
    """Reads every finished shard of `folders`.

    Raises ForerunError where a folder is no data, a shard is damaged, or targets differ.
    """
    digest = target_digest(folders)
    frequencies = torch.zeros(vocabulary, dtype=torch.int64)
    parts: list[tuple[Answers, Tensor, Tensor]] = []
    for path in (path for folder in folders for path in shard_files(folder)):
        try:
            parts.append(_read_shard(path, frequencies))
        except (SafetensorError, OSError, KeyError, ValueError, IndexError) as error:
            raise ForerunError(
                f"{path}: damaged shard: {error}: delete it and run forerun synthesize again"
            ) from None
    answers = Answers(
        torch.cat([part.states for part, _, _ in parts]),
        torch.cat([part.tokens for part, _, _ in parts]),
        torch.cat([part.lengths for part, _, _ in parts]),
        tuple(kind for part, _, _ in parts for kind in part.kinds),
    )
    held_out = torch.cat([held for _, held, _ in parts])
    greedy = torch.cat([temperatures for _, _, temperatures in parts]) == 0
    return Data(
        answers.where((~held_out).tolist()),
        answers.where((held_out & greedy).tolist()),
        frequencies,
        digest,
    )


def commonest(frequencies: Tensor, count: int) -> Tensor:
    """The `count` most frequent token ids, `[V']`; of equals the lowest, which is the shortest."""
    return frequencies.argsort(descending=True, stable=True)[:count]


def target_digest(folders: Sequence[Path]) -> str:
    """The digest of the target that answered; ForerunError where there are several, or no data."""
    digests = {_manifest(folder)["target_digest"] for folder in folders}
    if len(digests) != 1:
        raise ForerunError("the data folders hold answers of different targets: train on one's")
    return digests.pop()


def check_target(digest: str, checkpoint: Checkpoint) -> None:
    """Raises ForerunError where data of this digest are not `checkpoint`'s answers."""
    if digest != checkpoint.digest:
        raise ForerunError(f"the data are not {checkpoint.name}'s answers: synthesize them again")


def _manifest(folder: Path) -> dict[str, str]:
    try:
        manifest: dict[str, str] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise ForerunError(f"{folder}: no data in it: make some with forerun synthesize") from None
    return manifest


def _read_shard(path: Path, frequencies: Tensor) -> tuple[Answers, Tensor, Tensor]:
    """A shard's answers, which are held out, their temperatures; adds to `frequencies`."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        categories = json.loads(file.metadata()["categories"])
    tokens, lengths = tensors["tokens"].to(torch.int64), tensors["lengths"].to(torch.int64)
    prompts = tensors["prompt_lengths"].to(torch.int64)
    held_out = tensors["held_out"] != 0
    first = lengths.cumsum(0) - lengths + prompts  # [A] where each answer begins
    answer = torch.arange(len(tokens)) >= torch.repeat_interleave(first, lengths)
    seen = tokens[~torch.repeat_interleave(held_out, lengths)]
    frequencies += torch.bincount(seen, minlength=len(frequencies))
    kinds = tuple(category.partition("/")[0] for category in categories)
    answers = Answers(tensors["states"], tokens[answer], lengths - prompts, kinds)
    if len(answers.states) != len(answers.tokens) or len(kinds) != len(lengths):
        raise ValueError("its tensors do not fit together")
    return answers, held_out, tensors["temperatures"]
