"""What a drafter is to the step, and the registry of those that exist.

A drafter reads what the step committed and proposes candidate tokens; the tree says which candidate
each node of the next step carries. One drafter is one module file and one line of `DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.models.target import Target
from forerun.runtime.tree import Tree

NO_TOKEN = -1
"""Stands where a drafter has no proposal; equals no token, so it is never accepted."""


@dataclass(frozen=True)
class StateSpec:
    """A drafter's own state: a tensor that one step writes and the next one reads."""

    name: str
    shape: tuple[int | str, ...]
    """Sizes; `"batch"` and `"slots"` (cache capacity at the time) are symbolic."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Committed:
    """What a step hands to its drafter, B rows."""

    tokens: Tensor  # [B, T] the step's input tokens (a prefill's: the prompt)
    positions: Tensor  # [B, T]
    emitted: Tensor  # [B, P] tokens committed by this step, then garbage
    count: Tensor  # [B] how many of them
    first_position: Tensor  # [B] the absolute position of emitted[:, 0]
    root: Tensor  # [B] the last committed token, the next tree's root
    hidden: Tensor  # [B, H] the target's normed hidden state that chose the root


class Drafter(nn.Module):
    """Base of all drafters: no candidates, no state. That is plain decoding."""

    kind: ClassVar[str] = "plain"
    candidates: int = 0
    """How many tokens `draft` proposes; slot i + 1 of a tree is candidate i."""

    def states(self) -> list[StateSpec]:
        """The state this drafter keeps between steps."""
        return []

    def remember(self, committed: Committed, states: list[Tensor]) -> list[Tensor]:
        """The state after this step: kept up to date even where nothing is drafted."""
        return states

    def draft(self, committed: Committed, states: list[Tensor]) -> Tensor:
        """Candidates `[B, candidates]` int64 for the positions after the root."""
        return committed.root.new_empty((committed.root.shape[0], 0))

    def tree(self, nodes: int) -> Tree:
        """The tree of `nodes` nodes that this drafter is best verified with."""
        return Tree.chain(nodes)

    def trim(self, sizes: Collection[int]) -> None:
        """Drop for good what no tree of these sizes asks for."""

    def max_depth(self) -> int:
        """The largest depth that any of its trees can have."""
        return 0

    def options(self) -> dict[str, int | float | str]:
        """Facts for the manifest."""
        return {}


DrafterFactory = Callable[[Target, str], Drafter]
"""(target, the drafter's folder or name) -> drafter."""
