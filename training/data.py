"""Answers end to end, as Medusa's heads learn from them, and how often tokens occur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.checkpoint import Checkpoint
from forerun.training.texts import Text

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


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


def data_of(texts: Sequence[Text], checkpoint: Checkpoint) -> Data:
    """What Medusa's heads learn from `texts`, the answers of `checkpoint`."""
    seen = [text for text in texts if not text.held_out]
    hidden = checkpoint.config.hidden_size
    return Data(
        _answers(seen, hidden),
        _answers([text for text in texts if text.held_out and text.greedy], hidden),
        frequencies(seen, checkpoint.config.vocab_size),
        checkpoint.digest,
    )


def _answers(texts: Sequence[Text], hidden: int) -> Answers:
    none = torch.zeros(0, hidden, dtype=torch.bfloat16)
    return Answers(
        torch.cat([none, *(text.states for text in texts)]),
        torch.cat([NO_TOKENS, *(text.tokens[text.prompt :] for text in texts)]),
        torch.tensor([len(text.states) for text in texts], dtype=torch.int64),
        tuple(text.kind for text in texts),
    )


def frequencies(texts: Sequence[Text], vocabulary: int) -> Tensor:
    """How often each token occurs in `texts`, prompts and answers, `[V]` int64."""
    tokens = torch.cat([NO_TOKENS, *(text.tokens for text in texts)])
    return torch.bincount(tokens, minlength=vocabulary)


def commonest(frequencies: Tensor, count: int) -> Tensor:
    """The `count` most frequent token ids, `[V']`; of equals the lowest, which is the shortest."""
    return frequencies.argsort(descending=True, stable=True)[:count]
