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

FLAGS = ("branching", "sampling")
TENSORS = tuple(field.name for field in fields(Committed) if field.name not in FLAGS)


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
        specs = [spec for spec in self.drafter.states() if not spec.drafted]
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
                for spec, state in zip(specs, before, strict=False)
            )

        # Rows come first out of the branch: torch.cond compares strides, and can't compare those
        # that hold C, which is no symbol but an expression.
        new = self._branch(remembering, remember, skip, states)
        after = list(states)
        for place, (spec, value) in enumerate(zip(specs, new, strict=True)):
            if spec.cache:
                rows = value.permute(1, 2, 0, 3)
                after[place] = update(states[place], rows, self.committed.start)
            else:
                after[place] = _of_shape(value, states[place])
        return after

    def next_tree(
        self, drafting: Tensor, slots: Tensor, states: list[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The outputs that describe the next tree of `slots.shape[0]` nodes, and the state with
        what was kept of drafting it."""
        drafter, root = self.drafter, self.committed.root
        if drafter.candidates == 0:
            return {"next_tokens": root[:, None][:, slots]}, states
        if isinstance(drafter, GrowingDrafter):
            return self._grown(drafter, drafting, slots, states), states
        kept = [place for place, spec in enumerate(drafter.states()) if spec.drafted]

        def draft(*operands: Tensor) -> tuple[Tensor, ...]:
            return drafter.draft_and_keep(*self._unpack(operands), self.vocabulary)

        def nothing(*operands: Tensor) -> tuple[Tensor, ...]:
            _, before = self._unpack(operands)
            return self._no_tokens(), *(before[place].clone() for place in kept)

        drafted, *new = self._branch(drafting, draft, nothing, states)
        states = list(states)
        for place, value in zip(kept, new, strict=True):
            states[place] = _of_shape(value, states[place])
        tokens = torch.cat([root[:, None], drafted], dim=1)[:, slots]
        return {"next_tokens": tokens}, states

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
        root, branching = self.committed.root, self.committed.branching
        tree = prune(root, proposal, slots, drafter.max_depth(), branching)
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
        committed = Committed(
            **named, branching=self.committed.branching, sampling=self.committed.sampling
        )
        return committed, list(operands[count:])


def _of_shape(value: Tensor, state: Tensor) -> Tensor:
    """A state's next value, whose shape a branch has made torch.export forget."""
    for axis, size in enumerate(state.shape):
        torch._check(value.shape[axis] == size)  # type: ignore[no-untyped-call]
    return value
