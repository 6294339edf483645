"""What a drafter is to the step.

A drafter reads what the step committed and proposes what may follow. Those that draft into a fixed
tree return candidates, of which each node of the next step carries one; those that grow a tree as
they go (`GrowingDrafter`) propose nodes with scores, of which the best become the next tree.
One drafter is one module file and one line of `forerun.models.drafters.DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.choose import Sampling, choose
from forerun.models.grow import Proposal
from forerun.runtime.tree import Tree

NO_TOKEN = -1
"""Stands where a drafter has no proposal; equals no token, so it is never accepted."""
NORMED = -1
"""As a feature layer: the target's hidden state after its final norm."""


@dataclass(frozen=True)
class StateSpec:
    """A drafter's own state: a tensor that one step writes and the next one reads."""

    name: str
    shape: tuple[int | str, ...]
    """Sizes; `"batch"` and `"slots"` (cache capacity at the time) are symbolic."""
    dtype: torch.dtype
    cache: bool = False
    """A cache `[B, heads, slots, D]`: `remember` gives the rows to write at `Committed.start`, and
    the engine lets input and output share their memory. Other state is replaced as a whole."""
    extra_rows: int = 0
    """A cache's rows beyond the C of `Committed` that `remember` gives."""
    drafted: bool = False
    """Its next value comes with the candidates, not from `remember`: what they were drawn from.
    Such states come after all others."""

    def zeros(self, batch: int, slots: int, device: torch.device | None = None) -> Tensor:
        """The state before anything was committed; None: on torch's default device."""
        sizes = {"batch": batch, "slots": slots}
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in self.shape]
        return torch.zeros(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Committed:
    """What a step hands to its drafter, B rows.

    Context row c is a committed token and what the target felt about it; C is P in a step, and
    covers the whole chunk in a prefill. Rows from `count` on are garbage.
    """

    tokens: Tensor  # [B, C + 1] int64: each row's token, then the one after; [count] is the root
    start: Tensor  # [B] int64: the position of context row 0
    count: Tensor  # [B] int64: context rows that are real
    root: Tensor  # [B] int64: the newest committed token, at position start + count
    features: Tensor  # [B, C, F]: the target's feature layers side by side (F = 0: none asked for)
    hidden: Tensor  # [B, H]: the normed hidden state that chose the root
    uniforms: Tensor  # [B, K, U] float32, by absolute position
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    branching: bool
    """Whether the engine can branch (`forerun.models.branch`)."""
    sampling: bool | None = None
    """As `Step.sampling`."""


class Vocabulary(Protocol):
    """The target's two ends, shared so that their weights are held once; `[.., H]` in the basis
    of the checkpoint."""

    def embedding(self, tokens: Tensor) -> Tensor:
        """Tokens `[...]` -> `[..., H]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm `[..., H]` -> `[..., V]`."""


class Drafter(nn.Module):
    """Base of all drafters: no candidates, no state. That is plain decoding."""

    kind: ClassVar[str] = "plain"
    candidates: int = 0
    """How many tokens are proposed; slot i + 1 of a tree is candidate i."""
    per_depth: int = 1
    """How many of them are for the same depth: candidate i is for depth 1 + i // per_depth, but in
    drafters that grow their trees."""
    feature_layers: tuple[int, ...] = ()
    """Hidden states to read: l is the residual stream entering layer l (L: leaving the last)."""
    tables: int = 1
    """Uniforms a position: K."""

    def states(self) -> list[StateSpec]:
        """The state this drafter keeps between steps."""
        return []

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        """A cache's new rows, another state's new value; kept up where nothing is drafted too."""
        return states  # one for each state that is not `drafted`

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        """Candidates `[B, candidates]` int64 for the positions after the root."""
        return committed.root.new_empty((committed.root.shape[0], 0))

    def draft_and_keep(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> tuple[Tensor, ...]:
        """`draft`'s candidates, then the next value of each state that is `drafted`."""
        return (self.draft(committed, states, vocabulary),)

    def accept_by(self, acceptance: str) -> None:
        """Have drafts accepted by this rule; those that know no distribution offer matching."""
        if acceptance != "matching":
            raise ForerunError(
                f"--acceptance {acceptance}: the {self.kind} drafter does not draw its tokens from "
                "a distribution: only a draft model does; use matching, which is exact too"
            )

    def choose(
        self,
        logits: Tensor,
        sampling: Sampling,
        uniforms: Tensor,
        children: Tensor,
        states: list[Tensor],
        branching: bool,
    ) -> Tensor:
        """The target's token after each verified node: `logits` `[B, R, V]` -> `[B, R]` int64.

        `uniforms` are `[B, K, R]`; `children` `[B, R]` are the tokens of the next nodes (-1: none),
        which a chain's acceptance rule may look at; matching does not.
        """
        return choose(logits, sampling, uniforms[:, 0], branching)

    def tree(self, nodes: int) -> Tree | None:
        """The tree of `nodes` nodes that it is best verified with; None where it is grown."""
        return Tree.chain(nodes)

    def trim(self, sizes: Collection[int]) -> None:
        """Drop for good what no tree of these sizes asks for."""

    def trim_like(self, sizes: Collection[int], options: Mapping[str, int | float | str]) -> None:
        """`trim`, to what a drafter with these `options` was trimmed to, where that is possible."""
        self.trim(sizes)

    def max_depth(self) -> int:
        """The largest depth that any of its trees can have."""
        return 0

    def options(self) -> dict[str, int | float | str]:
        """Facts for the manifest."""
        return {}


class GrowingDrafter(Drafter):
    """A drafter whose tree is another one each step, made on the device."""

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        """`candidates` nodes below the root."""
        raise NotImplementedError

    def tree(self, nodes: int) -> Tree | None:
        return Tree.chain(1) if nodes == 1 else None
