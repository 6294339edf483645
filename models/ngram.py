"""Prompt lookup: draft what followed the last time the text ended like this, inside the graph."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forerun.models.drafter import NO_TOKEN, Committed, Drafter, StateSpec, Vocabulary


class NGram(Drafter):
    """The longest suffix of the committed tokens that occurred before; the latest such place wins.

    Draft token i is what followed that place. Where the proposal runs into the end of the text it
    wraps, so that a repetition with a short period is continued to full length.
    (Saxena, "Prompt lookup decoding", 2023; LLMA, section 3.)
    """

    kind: ClassVar[str] = "ngram"

    def __init__(self, gamma: int = 7, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        self.gamma, self.longest, self.shortest = gamma, longest, shortest
        self.candidates = gamma

    def states(self) -> list[StateSpec]:
        return [StateSpec("history", ("batch", "slots"), torch.int64)]

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        """Write every context row's token and the one after, each at its position.

        Rows that are not real leave garbage, but only behind the newest token.
        """
        last = states[0].shape[1] - 1
        ahead = torch.arange(committed.tokens.shape[1], device=committed.start.device)
        places = (committed.start[:, None] + ahead).clamp(max=last)
        return [states[0].scatter(1, places, committed.tokens)]

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        return self.look_up(committed, states[0])[0]

    def look_up(self, committed: Committed, history: Tensor) -> tuple[Tensor, Tensor]:
        """(what followed the match `[B, gamma]`, -1 without one; the match's length `[B, 1]`).

        `history` `[B, S]`; a length is at most `longest`, and 0 where it is below `shortest`.
        """
        last = (committed.start + committed.count)[:, None]  # [B, 1] the root's position
        places = torch.arange(history.shape[1], device=history.device)[None]  # [1, S]
        same = places < last  # matching so far; a place must end before the text does
        length = torch.zeros_like(history)
        for back in range(self.longest):
            suffix = history.gather(1, (last - back).clamp(min=0))  # [B, 1]
            shifted = history.gather(1, (places - back).clamp(min=0).expand_as(history))
            same = same & (shifted == suffix) & (places >= back) & (last >= back)
            length = length + same.to(torch.int64)
        score = length * history.shape[1] + places
        best = torch.minimum(score.argmax(-1, keepdim=True), last)  # [B, 1]
        matched = length.gather(1, best)
        matched = torch.where(matched >= self.shortest, matched, 0)
        period = (last - best).clamp(min=1)
        ahead = torch.arange(self.gamma, device=history.device)[None]
        drafted = history.gather(1, best + 1 + torch.remainder(ahead, period))
        return torch.where(matched > 0, drafted, NO_TOKEN), matched

    def max_depth(self) -> int:
        return self.gamma

    def options(self) -> dict[str, int | float | str]:
        return {"gamma": self.gamma, "longest": self.longest, "shortest": self.shortest}
