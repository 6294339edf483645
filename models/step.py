"""The step: target forward over the draft tree, acceptance, lazy commit, next draft, as one module.

Contract version 1. A step's inputs and outputs are named here; the compiler exports them under
these names and the runtime binds them by name. Symbols: B rows, T tree nodes, R verified nodes (T
in a step, 1 in a prefill), N nodes of the next tree, P pending slots (0 going into a prefill), S
cache slots, U positions that have uniforms.

A prefill is a step too: its tree is the chain of the chunk's tokens, of which only the last node is
verified, and nothing is pending. What lies above the first verified node is committed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from forerun.models.accept import Accepted, TreeRows, accept
from forerun.models.branch import branch
from forerun.models.choose import Sampling, choose
from forerun.models.drafter import Committed, Drafter
from forerun.models.ops import tensor_scatter
from forerun.models.target import Caches, CacheUpdate, Rows, Target


@dataclass(frozen=True)
class StepInputs:
    """All that a step reads besides caches and states."""

    tokens: Tensor  # [B, T] int64: the tree's tokens, the root first
    length: Tensor  # [B] int64: committed cache slots
    pending_count: Tensor  # [B] int64: accepted rows in `pending`
    pending: Tensor  # [B, layers * 2 * kv, P, D]: keys and values of the accepted path
    depth: Tensor  # [B, T] int64
    ancestors: Tensor  # [B, T, T] bool
    verify: Tensor  # [R] int64
    parents: Tensor  # [B, R] int64
    slots: Tensor  # [N] int64: the candidate that each node of the next tree takes
    drafting: Tensor  # [] bool: false skips the drafter (a plain step, all but the last prefill)
    uniforms: Tensor  # [B, U] float32: one uniform an absolute position
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    limit: Tensor  # [B] int64: no token is committed at this position or later


@dataclass(frozen=True)
class StepOutputs:
    """All that a step writes besides caches and states."""

    emitted: Tensor  # [B, P] int64: the committed tokens, then garbage
    count: Tensor  # [B] int64: how many; the next step's `pending_count`
    next_tokens: Tensor  # [B, N] int64
    next_length: Tensor  # [B] int64
    next_pending: Tensor  # [B, layers * 2 * kv, P, D]
    logits: Tensor  # [B, R, V] float32: for verification only


INPUT_NAMES = tuple(field.name for field in fields(StepInputs))
OUTPUT_NAMES = tuple(field.name for field in fields(StepOutputs))


class Step(nn.Module):
    """Target and drafter composed; `pending` is P, one for every step of a bundle."""

    branching = True
    """False computes sampling and drafting always, for an engine that can't branch around them."""

    def __init__(self, target: Target, drafter: Drafter, pending: int | None = None) -> None:
        super().__init__()
        self.target, self.drafter = target, drafter
        self.pending = drafter.max_depth() + 1 if pending is None else pending

    def forward(
        self,
        inputs: StepInputs,
        caches: Caches,
        states: list[Tensor],
        update: CacheUpdate = tensor_scatter,
    ) -> tuple[StepOutputs, Caches, list[Tensor]]:
        """One step for B rows. Caches come back with this step's rows written at `length`."""
        tree = TreeRows(inputs.depth, inputs.ancestors, inputs.verify, inputs.parents)
        root = inputs.length + inputs.pending_count  # [B] the root's position
        positions = root[:, None] + inputs.depth  # [B, T]
        rows = self._rows(inputs, positions, caches.keys[0].shape[2])
        hidden, caches, written = self.target(inputs.tokens, caches, rows, update)

        hidden = hidden[:, inputs.verify]  # [B, R, H]
        first = positions[:, inputs.verify[0]] + 1  # [B] the position after the first verified node
        places = (positions[:, inputs.verify] + 1).clamp(max=inputs.uniforms.shape[1] - 1)
        logits = self.target.head(hidden)
        sampling = Sampling(inputs.temperature, inputs.top_k, inputs.top_p)
        uniforms = inputs.uniforms.gather(1, places)
        chosen = choose(logits, sampling, uniforms, self.branching)
        accepted = accept(
            inputs.tokens[:, inputs.verify], chosen, tree, self.pending, inputs.limit - first
        )
        states, next_tokens = self._draft(inputs, positions, hidden, accepted, first, states)
        outputs = StepOutputs(
            emitted=accepted.emitted,
            count=accepted.count,
            next_tokens=next_tokens,
            next_length=first - 1,
            next_pending=select_rows(accepted.path, inputs.verify, written),
            logits=logits,
        )
        return outputs, caches, states

    def _rows(self, inputs: StepInputs, positions: Tensor, slots: int) -> Rows:
        """Which slots each node attends to: what is committed, what is pending, its ancestors."""
        slot = torch.arange(slots, device=positions.device)[None, None]  # [1, 1, S]
        length = inputs.length[:, None, None]
        pending = inputs.pending.shape[2]
        # [B, 1, S] index of a slot's node in the tree
        node = (slot - length - pending).expand(positions.shape[0], 1, slots)
        inside = (node >= 0) & (node < inputs.tokens.shape[1])
        at = node.clamp(min=0).minimum(torch.tensor(inputs.tokens.shape[1] - 1))
        kin = inputs.ancestors.gather(2, at.expand(-1, inputs.tokens.shape[1], -1))  # [B, T, S]
        committed = slot < length + inputs.pending_count[:, None, None]
        mask = committed | (inside & kin)
        window_mask = None
        window = self.target.config.window
        if any(self.target.config.sliding_layers) and window is not None:
            # [B, 1, S] absolute position held by each slot
            held = torch.where(inside, positions.gather(1, at[:, 0])[:, None], slot)
            window_mask = mask & (positions[..., None] - held < window)
        return Rows(
            positions.clamp(max=self.target.capacity - 1),
            inputs.length,
            inputs.pending,
            mask,
            window_mask,
        )

    def _draft(
        self,
        inputs: StepInputs,
        positions: Tensor,
        hidden: Tensor,
        accepted: Accepted,
        first: Tensor,
        states: list[Tensor],
    ) -> tuple[list[Tensor], Tensor]:
        """The drafter's state after this step, and the next tree's tokens `[B, N]`."""
        last = (accepted.count - 1).clamp(min=0)[:, None]  # [B, 1]
        root = accepted.emitted.gather(1, last)[:, 0]
        at_last = accepted.path.gather(1, last[..., None].expand(-1, 1, accepted.path.shape[2]))
        drafting_state = (at_last.to(hidden.dtype) @ hidden)[:, 0]  # [B, H]
        if self.target.basis is not None:
            drafting_state = drafting_state @ self.target.basis
        committed = Committed(
            tokens=inputs.tokens,
            positions=positions,
            emitted=accepted.emitted,
            count=accepted.count,
            first_position=first,
            root=root,
            hidden=drafting_state,
        )
        states = self.drafter.remember(committed, states)
        if self.drafter.candidates == 0:
            return states, root[:, None][:, inputs.slots]
        names = [field.name for field in fields(Committed)]

        def draft(*tensors: Tensor) -> Tensor:
            rest = dict(zip(names, tensors, strict=False))
            return self.drafter.draft(Committed(**rest), list(tensors[len(names) :]))

        def skip(*tensors: Tensor) -> Tensor:
            return torch.full_like(root[:, None], -1).expand(-1, self.drafter.candidates).clone()

        operands = (*(getattr(committed, name) for name in names), *states)
        if self.branching:
            drafted = branch(inputs.drafting, draft, skip, operands)
        else:
            drafted = draft(*operands)
        candidates = torch.cat([root[:, None], drafted], dim=1)
        return states, candidates[:, inputs.slots]


def select_rows(path: Tensor, verify: Tensor, written: Tensor) -> Tensor:
    """The accepted path's keys and values, `[B, layers * 2 * kv, T, D]` -> `[.., P, D]`.

    A one-hot product: TensorRT refuses a gather in front of a cache update (measured).
    """
    nodes = torch.arange(written.shape[2], device=verify.device)
    one_hot = (verify[:, None] == nodes[None]).to(written.dtype)  # [R, T]
    selection = path.to(written.dtype) @ one_hot  # [B, P, T]
    return selection[:, None] @ written
