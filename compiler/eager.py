"""The step run eagerly in torch, a call at a time: the reference for what is exported from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.models.step import Step, StepInputs, StepOutputs
from forerun.models.target import Caches

TREE_NAMES = ("depth", "ancestors", "parents")


class EagerStep:
    """One greedy row (B = 1) of `step`, with `slots` cache slots; keeps the state between calls."""

    def __init__(self, step: Step, slots: int, limit: int = 1 << 30) -> None:
        self.step = step
        self.caches = step.target.empty_caches(1, slots)
        self.states = [spec.zeros(1, slots) for spec in step.drafter.states()]
        self.slots, self.limit = slots, limit

    def prefill_inputs(
        self, tokens: Sequence[int], verify: Sequence[int], nodes: int = 1
    ) -> StepInputs:
        """A prefill of `tokens` into empty caches, of which the nodes `verify` are verified.

        It drafts a tree of `nodes` nodes.
        """
        count = len(tokens)
        return StepInputs(
            tokens=torch.tensor([list(tokens)]),
            length=torch.zeros(1, dtype=torch.int64),
            pending_count=torch.zeros(1, dtype=torch.int64),
            pending=self.step.target.no_pending(1),
            depth=torch.arange(count)[None],
            ancestors=torch.ones(1, count, count, dtype=torch.bool).tril(),
            verify=torch.tensor(list(verify)),
            parents=torch.tensor([[max(0, i - 1) for i in range(len(verify))]]),
            slots=self._slots(nodes),
            forced=torch.full((1,), -1),
            remembering=torch.tensor(nodes > 1),
            drafting=torch.tensor(nodes > 1),
            uniforms=torch.zeros(1, self.step.drafter.tables, self.slots),
            temperature=torch.zeros(1),
            top_k=torch.zeros(1, dtype=torch.int64),
            top_p=torch.ones(1),
            limit=torch.full((1,), self.limit),
        )

    def step_inputs(self, before: StepInputs, outputs: StepOutputs) -> StepInputs:
        """The step after `outputs`: verifies the tree that was drafted, drafts one like it."""
        nodes = outputs.next_tokens.shape[1]
        tree = self.step.drafter.tree(nodes)
        if tree is None:
            shape = {name: getattr(outputs, f"next_{name}") for name in TREE_NAMES}
        else:
            shape = {
                "depth": torch.from_numpy(tree.depths)[None],
                "ancestors": torch.from_numpy(tree.ancestors)[None],
                "parents": torch.tensor([tree.parents]).clamp(min=0),
            }
        return replace(
            before,
            tokens=outputs.next_tokens,
            length=outputs.next_length,
            pending_count=outputs.count,
            pending=outputs.next_pending,
            verify=torch.arange(nodes),
            **shape,
        )

    def _slots(self, nodes: int) -> Tensor:
        tree = self.step.drafter.tree(nodes)
        return torch.arange(nodes) if tree is None else torch.tensor(tree.slots)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> tuple[StepOutputs, Caches, list[Tensor]]:
        """One call; the state moves on."""
        outputs, self.caches, self.states = self.step(inputs, self.caches, self.states)
        return outputs, self.caches, self.states
