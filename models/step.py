"""The step: target forward over the draft tree, acceptance, lazy commit, next draft, as one module.

Contract version 2. A step's inputs and outputs are named here; the compiler exports them under
these names and the runtime binds them by name. Symbols: B rows, T tree nodes, R verified nodes (T
in a step, 1 in a prefill), N nodes of the next tree, P pending slots (0 going into a prefill), S
cache slots, U positions that have uniforms, K uniforms a position.

A prefill is a step too: its tree is the chain of the chunk's tokens, of which only the last node is
verified, and nothing is pending. What lies above the first verified node is committed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from forerun.models.accept import Accepted, TreeRows, accept, accept_fused
from forerun.models.choose import Sampling
from forerun.models.drafter import NO_TOKEN, NORMED, Committed, Drafter
from forerun.models.drafting import Drafting
from forerun.models.ops import tensor_scatter
from forerun.models.target import Caches, CacheUpdate, Forward, Rows, Target
from forerun.models.tree_attention import TreeView


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
    forced: Tensor  # [B] int64: what follows the first verified node, where known (-1: choose)
    remembering: Tensor  # [] bool: false leaves the drafter's state behind (a plain request)
    drafting: Tensor  # [] bool: false drafts nothing (a plain step, all but the last prefill)
    uniforms: Tensor  # [B, K, U] float32, by absolute position
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    limit: Tensor  # [B] int64: no token is committed at this position or later


@dataclass(frozen=True)
class StepOutputs:
    """All that a step writes besides caches and states; a tree only where the drafter grows it."""

    emitted: Tensor  # [B, P] int64: the committed tokens, then garbage
    count: Tensor  # [B] int64: how many; the next step's `pending_count`
    next_tokens: Tensor  # [B, N] int64
    next_length: Tensor  # [B] int64
    next_pending: Tensor  # [B, layers * 2 * kv, P, D]
    logits: Tensor  # [B, R, V] float32: for verification only
    next_depth: Tensor | None = None  # [B, N] int64
    next_ancestors: Tensor | None = None  # [B, N, N] bool
    next_parents: Tensor | None = None  # [B, N] int64

    def named(self) -> dict[str, Tensor]:
        """The outputs there are, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


INPUT_NAMES = tuple(field.name for field in fields(StepInputs))
GROWN_NAMES = ("next_depth", "next_ancestors", "next_parents")
OUTPUT_NAMES = tuple(f.name for f in fields(StepOutputs) if f.name not in GROWN_NAMES)


class Step(nn.Module):
    """Target and drafter composed; `pending` is P, one for every step of a bundle."""

    branching = True
    """False computes sampling and drafting always, for an engine that can't branch around them."""
    sampling: bool | None = None
    """Whether any row samples, where the host knows; None: the temperatures are looked at."""

    def __init__(self, target: Target, drafter: Drafter, pending: int | None = None) -> None:
        super().__init__()
        self.target, self.drafter = target, drafter
        self.pending = pending_rows(drafter) if pending is None else pending

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
        taps = {layer for layer in self.drafter.feature_layers if layer != NORMED}
        forward = self.target(inputs.tokens, caches, rows, update, taps)

        hidden = forward.hidden[:, inputs.verify]  # [B, R, H]
        logits = self.target.head(hidden)
        chosen = self._choose(inputs, logits, positions, states)
        # [B] the position after the first verified node; `positions[:, verify[0]]` would have the
        # host read the index
        first = positions.index_select(1, inputs.verify[:1])[:, 0] + 1
        tokens = inputs.tokens[:, inputs.verify]
        matching, commit = (
            (accept, select_rows) if self.branching else (accept_fused, select_rows_fused)
        )
        accepted = matching(tokens, chosen, tree, self.pending, inputs.limit - first)
        drafting = Drafting(self.target, self.drafter, self._committed(inputs, forward, accepted))
        states = drafting.remember(inputs.remembering, states, update)
        tree_outputs, states = drafting.next_tree(inputs.drafting, inputs.slots, states)
        outputs = StepOutputs(
            emitted=accepted.emitted,
            count=accepted.count,
            next_length=first - 1,
            next_pending=commit(accepted.path, inputs.verify, forward.written),
            logits=logits,
            **tree_outputs,
        )
        return outputs, forward.caches, states

    def _choose(
        self, inputs: StepInputs, logits: Tensor, positions: Tensor, states: list[Tensor]
    ) -> Tensor:
        """The token after each verified node `[B, R]`: forced, or the target's own choice."""
        places = (positions[:, inputs.verify] + 1).clamp(max=inputs.uniforms.shape[2] - 1)
        tables = inputs.uniforms.shape[1]
        uniforms = inputs.uniforms.gather(2, places[:, None].expand(-1, tables, -1))  # [B, K, R]
        row = torch.arange(places.shape[1], device=places.device)
        last = row == places.shape[1] - 1
        below = inputs.verify[torch.where(last, row, row + 1)]  # a chain's next node
        children = torch.where(last, NO_TOKEN, inputs.tokens[:, below])
        sampling = Sampling(inputs.temperature, inputs.top_k, inputs.top_p, self.sampling)
        chosen = self.drafter.choose(logits, sampling, uniforms, children, states, self.branching)
        forced = inputs.forced[:, None]
        return torch.where(forced >= 0, forced, chosen)

    def _rows(self, inputs: StepInputs, positions: Tensor, slots: int) -> Rows:
        """Which slots each node attends to: what is committed, what is pending, its ancestors."""
        root, pending = inputs.length + inputs.pending_count, inputs.pending.shape[2]
        view = TreeView(root, inputs.length + pending, inputs.ancestors)
        window_mask = None
        window = self.target.config.window
        if any(self.target.config.sliding_layers) and window is not None:
            distance = positions[..., None] - view.held(positions, slots)  # [B, T, S]
            window_mask = view.mask(slots) & (distance < window)
        return Rows(
            positions.clamp(max=self.target.capacity - 1),
            inputs.length,
            inputs.pending,
            view,
            window_mask,
        )

    def _committed(self, inputs: StepInputs, forward: Forward, accepted: Accepted) -> Committed:
        """What this step committed, as context rows: those above the first verified node, which
        are committed in place, and then the accepted path."""
        above, root = inputs.verify[0], inputs.length + inputs.pending_count
        verified = inputs.verify.shape[0]
        place = torch.arange(inputs.tokens.shape[1] - verified + self.pending, device=root.device)
        place = place[None].expand(root.shape[0], -1)  # [B, C]
        depth = (place - above).clamp(min=0, max=self.pending - 1)  # on the accepted path
        path = inputs.verify[accepted.path.to(torch.int32).argmax(-1)]  # [B, P] its nodes
        node = torch.where(place < above, place, path.gather(1, depth))  # [B, C]
        prompt = inputs.tokens.gather(1, torch.minimum(place + 1, above))
        following = torch.where(place < above, prompt, accepted.emitted.gather(1, depth))
        last = (accepted.count - 1).clamp(min=0)[:, None]  # [B, 1]
        return Committed(
            tokens=torch.cat([inputs.tokens[:, :1], following], dim=1),
            start=root,
            count=above + accepted.count,
            root=accepted.emitted.gather(1, last)[:, 0],
            features=self._features(forward, node),
            hidden=self.target.own_basis(
                gather_rows(forward.hidden, path.gather(1, last))[:, 0], normed=True
            ),
            uniforms=inputs.uniforms,
            temperature=inputs.temperature,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            branching=self.branching,
            sampling=self.sampling,
        )

    def _features(self, forward: Forward, node: Tensor) -> Tensor:
        """The feature layers that the drafter asks for, side by side, of `node` `[B, C]`."""
        layers = [
            self.target.own_basis(forward.hidden, normed=True)
            if layer == NORMED
            else self.target.own_basis(forward.taps[layer])
            for layer in self.drafter.feature_layers
        ]
        if not layers:  # a gather of nothing has another shape in ONNX Runtime than in torch
            return forward.hidden.new_zeros(*node.shape, 0)
        return gather_rows(torch.cat(layers, dim=-1), node)


def pending_rows(drafter: Drafter) -> int:
    """P: the longest path of any of its trees; 2 at least, since torch.export takes sizes that may
    be 1 for constants."""
    return max(drafter.max_depth() + 1, 2)


def gather_rows(rows: Tensor, at: Tensor) -> Tensor:
    """Rows `[B, T, F]` at `at` `[B, n]` -> `[B, n, F]`."""
    return rows.gather(1, at[..., None].expand(-1, -1, rows.shape[2]))


def select_rows(path: Tensor, verify: Tensor, written: Tensor) -> Tensor:
    """The accepted path's keys and values, `[B, layers * 2 * kv, T, D]` -> `[.., P, D]`.

    A one-hot product: TensorRT refuses a gather in front of a cache update (measured).
    """
    nodes = torch.arange(written.shape[2], device=verify.device)
    one_hot = (verify[:, None] == nodes[None]).to(written.dtype)  # [R, T]
    selection = path.to(written.dtype) @ one_hot  # [B, P, T]
    return selection[:, None] @ written


def rows_at(node: Tensor, written: Tensor) -> Tensor:
    """The rows of `written` `[B, C, T, D]` at `node` `[B, P]`, zeros where that is -1 ->
    `[B, C, P, D]`."""
    nodes = torch.arange(written.shape[2], device=node.device)
    return (node[:, :, None] == nodes).to(written.dtype)[:, None] @ written


commit_rows = torch.library.custom_op("forerun::commit_rows", rows_at, mutates_args=())
"""`rows_at` as one operation."""


@commit_rows.register_fake
def _(node: Tensor, written: Tensor) -> Tensor:
    batch, heads, _, dim = written.shape
    return written.new_empty(batch, heads, node.shape[1], dim)


def select_rows_fused(path: Tensor, verify: Tensor, written: Tensor) -> Tensor:
    """`select_rows` by that operation, for engines that may have a kernel for it."""
    pending: Tensor = commit_rows(torch.where(path, verify, -1).amax(-1), written)
    return pending
