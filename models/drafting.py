"""The step's second half: the drafter's state and the next tree, each behind a branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from forerun.models.branch import Result, branch
from forerun.models.drafter import NO_TOKEN, Committed, Drafter, GrowingDrafter, Vocabulary
from forerun.models.grow import Proposal, prune
from forerun.models.target import CacheUpdate

TENSORS = tuple(field.name for field in fields(Committed) if field.name != "branching")


@dataclass(frozen=True)
class Drafting:
    """One step's drafting: `committed` is what the drafter reads."""

    vocabulary: Vocabulary
    drafter: Drafter
    committed: Committed

    def remember(
        self, remembering: Tensor, states: list[Tensor], update: CacheUpdate
    ) -> list[Tensor]:
        """The drafter's state after this step."""
        specs = self.drafter.states()
        if not specs:
            return states

        def remember(*operands: Tensor) -> tuple[Tensor, ...]:
            new = self.drafter.remember(*self._unpack(operands), self.vocabulary)
            return tuple(
                value.permute(2, 0, 1, 3).contiguous() if spec.cache else value
                for spec, value in zip(specs, new, strict=True)
            )

        def skip(*operands: Tensor) -> tuple[Tensor, ...]:
            committed, before = self._unpack(operands)
            rows = committed.features.shape[1]  # C
            return tuple(
                state.new_zeros(rows + spec.extra_rows, *state.shape[:2], state.shape[3])
                if spec.cache
                else state.clone()
                for spec, state in zip(specs, before, strict=True)
            )

        # Rows come first out of the branch: torch.cond compares strides, and can't compare those
        # that hold C, which is no symbol but an expression.
        new = self._branch(remembering, remember, skip, states)
        after = []
        for spec, state, value in zip(specs, states, new, strict=True):
            if spec.cache:
                after.append(update(state, value.permute(1, 2, 0, 3), self.committed.start))
                continue
            for axis, size in enumerate(state.shape):  # which the branch has made torch forget
                torch._check(value.shape[axis] == size)
            after.append(value)
        return after

    def next_tree(self, drafting: Tensor, slots: Tensor, states: list[Tensor]) -> dict[str, Tensor]:
        """The outputs that describe the next tree of `slots.shape[0]` nodes."""
        drafter, root = self.drafter, self.committed.root
        if drafter.candidates == 0:
            return {"next_tokens": root[:, None][:, slots]}
        if isinstance(drafter, GrowingDrafter):
            return self._grown(drafter, drafting, slots, states)

        def draft(*operands: Tensor) -> Tensor:
            return drafter.draft(*self._unpack(operands), self.vocabulary)

        drafted = self._branch(drafting, draft, lambda *_: self._no_tokens(), states)
        return {"next_tokens": torch.cat([root[:, None], drafted], dim=1)[:, slots]}

    def _grown(
        self, drafter: GrowingDrafter, drafting: Tensor, slots: Tensor, states: list[Tensor]
    ) -> dict[str, Tensor]:
        def propose(*operands: Tensor) -> tuple[Tensor, ...]:
            proposal = drafter.propose(*self._unpack(operands), self.vocabulary)
            return proposal.tokens, proposal.parents, proposal.scores

        def nothing(*_: Tensor) -> tuple[Tensor, ...]:
            tokens = self._no_tokens()
            return tokens, torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.float32)

        proposal = Proposal(*self._branch(drafting, propose, nothing, states))
        tree = prune(self.committed.root, proposal, slots, drafter.max_depth())
        return {
            "next_tokens": tree.tokens,
            "next_depth": tree.depth,
            "next_ancestors": tree.ancestors,
            "next_parents": tree.parents,
        }

    def _no_tokens(self) -> Tensor:
        root = self.committed.root[:, None]
        return torch.full_like(root, NO_TOKEN).expand(-1, self.drafter.candidates).clone()

    def _branch(
        self,
        predicate: Tensor,
        taken: Callable[..., Result],
        otherwise: Callable[..., Result],
        states: list[Tensor],
    ) -> Result:
        """A branch whose operands are the committed tensors and then the states."""
        operands = (*(getattr(self.committed, name) for name in TENSORS), *states)
        if self.committed.branching:
            return branch(predicate, taken, otherwise, operands)
        return taken(*operands)

    def _unpack(self, operands: tuple[Tensor, ...]) -> tuple[Committed, list[Tensor]]:
        count = len(TENSORS)
        named = dict(zip(TENSORS, operands[:count], strict=True))
        committed = Committed(**named, branching=self.committed.branching)
        return committed, list(operands[count:])
