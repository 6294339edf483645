"""Prompt lookup beside a learned drafter: one tree that holds what both propose.

What is copied from the text (names, quotations, a format) the lookup finds and the learned drafter
doesn't; for new text it is the other way round. Each step the best nodes of both make the tree.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from forerun.models.drafter import (
    NO_TOKEN,
    Committed,
    GrowingDrafter,
    StateSpec,
    Vocabulary,
)
from forerun.models.grow import Proposal
from forerun.models.ngram import NGram

SUFFIX = "+ngram"
"""What a drafter's name and kind end with where prompt lookup drafts beside it."""
ABSENT = -1e9
"""Score of a place that holds no node: below that of every node."""


@dataclass(frozen=True)
class MatchAccuracy:
    """How often the token that followed a match is the target's, by the match's length.

    The defaults gave the most tokens a step beside Medusa on training prompts kept apart (tool
    calls and chat). They lie below the plain shares, since where the learned drafter proposes the
    same token, that token is likely in the tree anyway: what counts is who is right in a conflict.
    """

    by_length: tuple[float, ...] = (0.30, 0.40, 0.50, 0.55, 0.65, 0.72, 0.80, 0.92)
    """`by_length[m - 1]`: after a match of m tokens; the last one holds for longer ones too."""

    def log_chances(self, gamma: int) -> list[list[float]]:
        """`[longest][gamma]`: of each node of the chain that follows a match of 1, 2, ... tokens.

        Once i of its tokens are right, the match is i tokens longer.
        """
        logs = [math.log(chance) for chance in self.by_length]
        rows = [
            [logs[min(length + place, len(logs)) - 1] for place in range(gamma)]
            for length in range(1, len(logs) + 1)
        ]
        return [list(accumulate(row)) for row in rows]


class Combined(GrowingDrafter):
    """`learned`, whose scores are logarithms of chances, and the lookup's chain in one tree."""

    kind: ClassVar[str] = "combined"
    log_chances: Tensor

    def __init__(
        self, learned: GrowingDrafter, gamma: int = 7, accuracy: MatchAccuracy | None = None
    ) -> None:
        super().__init__()
        self.accuracy = accuracy or MatchAccuracy()
        self.learned = learned
        self.feature_layers, self.tables = learned.feature_layers, learned.tables
        self._look_up(gamma)

    def _look_up(self, gamma: int) -> None:
        self.lookup = NGram(gamma, longest=len(self.accuracy.by_length), shortest=1)
        self.candidates = self.learned.candidates + gamma
        # A buffer, since torch.cond's branches take no constants.
        self.register_buffer("log_chances", torch.tensor(self.accuracy.log_chances(gamma)))

    def trim(self, sizes: Collection[int]) -> None:
        """A chain that is longer than the deepest of these trees."""
        self.learned.trim(sizes)
        self._look_up(max(1, min(self.lookup.gamma, max(sizes) - 1)))

    def states(self) -> list[StateSpec]:
        return [*self.learned.states(), *self.lookup.states()]

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        return [
            *self.learned.remember(committed, states[:-1], vocabulary),
            *self.lookup.remember(committed, states[-1:], vocabulary),
        ]

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        learned = self.learned.propose(committed, states[:-1], vocabulary)
        chain, matched = self.lookup.look_up(committed, states[-1])
        chances = self.log_chances[(matched[:, 0] - 1).clamp(min=0)].to(torch.float32)
        return join(learned, chain, chances, self.learned.max_depth())

    def max_depth(self) -> int:
        return max(self.learned.max_depth(), self.lookup.gamma)

    def options(self) -> dict[str, int | float | str]:
        lookup = {f"ngram_{name}": value for name, value in self.lookup.options().items()}
        accuracy = " ".join(f"{chance:g}" for chance in self.accuracy.by_length)
        return {**self.learned.options(), **lookup, "ngram_accuracy": accuracy}


def join(learned: Proposal, chain: Tensor, scores: Tensor, depth: int) -> Proposal:
    """`learned`, at most `depth` deep, and below the same root the tokens `chain` `[B, G]`, -1 from
    where there are none.

    Walking down from the root, a learned node that carries the chain's next token stands for both
    and has the better score of the two; what is left of the chain hangs below the last such node.
    `scores` `[B, G]` fall along the chain, so that no child outranks its parent.
    """
    size = learned.tokens.shape[1]
    at = torch.zeros_like(chain[:, :1])  # [B, 1] the chain's node so far, 0 being the root
    best = learned.scores
    tokens, parents, ranks = [learned.tokens], [learned.parents], []
    for place in range(chain.shape[1]):
        token, score = chain[:, place : place + 1], scores[:, place : place + 1]  # [B, 1]
        own = torch.full_like(at, size + 1 + place)
        new = token >= 0
        if place < depth:
            same = new & (learned.parents == at) & (learned.tokens == token)  # [B, M]
            best = torch.where(same, torch.maximum(best, score), best)
            known = same.to(torch.int32)
            new = new & (known.amax(1, keepdim=True) == 0)
            shared = known.argmax(1, keepdim=True) + 1
            there = torch.where(new, own, shared)
        else:
            there = own
        tokens.append(torch.where(new, token, NO_TOKEN))
        parents.append(torch.where(new, at, 0))
        ranks.append(torch.where(new, score, ABSENT))
        at = there
    return Proposal(
        torch.cat(tokens, dim=1), torch.cat(parents, dim=1), torch.cat([best, *ranks], dim=1)
    )
