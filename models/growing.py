"""Drafters with fixed trees as ones that grow a tree each step, from how sure they are."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.drafter import Committed, Drafter, GrowingDrafter, StateSpec, Vocabulary
from forerun.models.grow import Proposal
from forerun.models.medusa import Medusa
from forerun.runtime.tree import Tree

WIDEST = 32
"""Nodes of Medusa's best fixed tree that compete for a place in each step's."""
CHAIN_CHANCE = 0.6
"""How likely a chain's next token is taken to be right: those drafters don't say."""


class Growing(GrowingDrafter):
    """Around a drafter, of which `candidates` nodes are proposed."""

    def __init__(self, drafter: Drafter, candidates: int) -> None:
        super().__init__()
        self.drafter, self.candidates = drafter, candidates
        self.feature_layers, self.tables = drafter.feature_layers, drafter.tables

    def states(self) -> list[StateSpec]:
        return self.drafter.states()

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        return self.drafter.remember(committed, states, vocabulary)

    def max_depth(self) -> int:
        return self.drafter.max_depth()

    def options(self) -> dict[str, int | float | str]:
        return self.drafter.options()


class GrowingMedusa(Growing):
    """The nodes of the best fixed tree, scored by what the heads say of them here and now.

    A node's score is the sum of its path's log-probabilities. (The fixed tree takes each choice's
    average accuracy instead: Medusa, section 2.3.3.)
    """

    drafter: Medusa
    slots: Tensor
    parents: Tensor
    paths: Tensor

    def __init__(self, drafter: Medusa, shape: Tree) -> None:
        """`shape` is one of its best trees."""
        super().__init__(drafter, shape.nodes - 1)
        # Buffers, since torch.cond's branches take no constants.
        self.register_buffer("slots", torch.tensor(shape.slots[1:]) - 1)  # [M]
        self.register_buffer("parents", torch.tensor(shape.parents[1:]))  # [M]
        self.register_buffer("paths", torch.tensor(_paths(shape, drafter.max_depth())))

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        tokens, log_chances = self.drafter.choices(committed.hidden)  # [B, heads, k]
        batch = tokens.shape[0]
        none = log_chances.new_zeros(batch, 1)
        log_chances = torch.cat([none, log_chances.flatten(1)], dim=1)  # [B, 1 + heads * k]
        scores = torch.zeros_like(log_chances[:, :1])
        for depth in range(self.paths.shape[0]):
            # Step by step, so that rounding never lifts a child above its parent.
            scores = scores + log_chances[:, self.paths[depth]]
        parents = self.parents.expand(batch, -1).contiguous()
        return Proposal(tokens.flatten(1)[:, self.slots], parents, scores)


def _paths(shape: Tree, depth: int) -> list[list[int]]:
    """`[depth][M]`: the slots on each node's way from the root down to it, then 0."""
    paths: list[list[int]] = [[]]
    for parent, slot in zip(shape.parents[1:], shape.slots[1:], strict=True):
        paths.append([*paths[parent], slot])
    padded = [path + [0] * (depth - len(path)) for path in paths[1:]]
    return [list(column) for column in zip(*padded, strict=True)]


class GrowingChain(Growing):
    """A drafter of one chain, each token as likely as the other once the ones before it are right.

    Its scores only matter beside another drafter's.
    """

    def trim(self, sizes: Collection[int]) -> None:
        self.drafter.trim(sizes)
        self.candidates = self.drafter.candidates

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        tokens = self.drafter.draft(committed, states, vocabulary)  # [B, M]
        places = torch.arange(self.candidates, device=tokens.device)
        scores = (places + 1).to(torch.float32) * math.log(CHAIN_CHANCE)
        return Proposal(
            tokens.clone(),
            places.expand_as(tokens).contiguous(),
            scores.expand_as(tokens).contiguous(),
        )


def as_growing(drafter: Drafter) -> GrowingDrafter:
    """`drafter` as one that grows its tree, with logarithms of chances as scores."""
    if isinstance(drafter, GrowingDrafter):
        return drafter
    if isinstance(drafter, Medusa):
        heads, width = drafter.config.heads, drafter.config.top_k
        reachable = sum(width**depth for depth in range(heads + 1))
        return GrowingMedusa(drafter, drafter.tree(min(WIDEST, reachable)))
    if drafter.candidates != drafter.max_depth():
        raise ForerunError(f"the {drafter.kind} drafter drafts no chain: use it by itself")
    return GrowingChain(drafter, drafter.candidates)
