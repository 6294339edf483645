"""EAGLE-2's expansion (arXiv:2406.16858, section 4.1): which nodes of a level are drafted on from.

Each node that is expanded proposes its `top_k` best children; of a level's children the `top_k`
best by cumulative log-probability are expanded in turn. All children are proposed:
`forerun.models.grow.prune` takes the best of all levels afterwards (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.grow import Proposal, in_order


@dataclass(frozen=True)
class Frontier:
    """The W nodes of one depth that are drafted on from."""

    tokens: Tensor  # [B, W] int64
    scores: Tensor  # [B, W] float32: cumulative log-probability
    nodes: Tensor  # [B, W] int64: their places in the proposal; 0 is the root
    above: Tensor  # [B, W] int64: which of the frontier above each one hangs from

    @classmethod
    def root(cls, tokens: Tensor) -> Frontier:
        """The root alone: `tokens` `[B]`."""
        here = torch.zeros_like(tokens)[:, None]
        return cls(tokens[:, None], here.to(torch.float32), here, here)


def proposed(depth: int, top_k: int) -> int:
    """Nodes below the root that `depth` levels propose."""
    return top_k + (depth - 1) * top_k * top_k


def expand(
    frontier: Frontier,
    logits: Tensor,
    top_k: int,
    ids: Tensor | None = None,
    branching: bool = True,
) -> Proposal:
    """The `top_k` best children of each node, `[B, W * top_k]`, a parent's side by side.

    `logits` are `[B, W, V']`; `ids` `[V']` are the token ids of its columns. Where the engine is
    not `branching` it is one operation, which may be a kernel.
    """
    children = best_columns if branching else expand_columns
    columns, parents, scores = children(logits, frontier.scores, frontier.nodes, top_k)
    return Proposal(columns if ids is None else ids[columns], parents, scores)


def best_columns(
    logits: Tensor, scores: Tensor, nodes: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(columns, parents, scores) `[B, W * top_k]` of the best children of `nodes` `[B, W]`.

    A child never scores above its parent: its log-probability is `x - max` less the logarithm of a
    sum that is at least 1, in float32.
    """
    logits = logits.to(torch.float32)
    best = logits.topk(top_k, dim=-1)  # [B, W, top_k]
    first = best.values[..., :1]
    total = torch.exp(logits - first).sum(-1, keepdim=True)
    below = scores[..., None] + (best.values - first - total.log())
    parents = nodes[..., None].expand_as(best.indices)
    # A copy, for an operation's output may not share memory with its input (W or top_k of 1).
    return best.indices.flatten(1), parents.flatten(1).clone(), below.flatten(1)


expand_columns = torch.library.custom_op("forerun::expand_columns", best_columns, mutates_args=())
"""`best_columns` as one operation."""


@expand_columns.register_fake
def _(logits: Tensor, scores: Tensor, nodes: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = nodes.shape
    columns = nodes.new_empty(batch, width * top_k)
    return columns, torch.empty_like(columns), scores.new_empty(batch, width * top_k)


def keep(level: Proposal, before: int, top_k: int, branching: bool = True) -> Frontier:
    """The `top_k` best nodes of a level; earlier ones where they tie.

    `before` counts the nodes above the level, the root included. `branching` as in `expand`.
    """
    choose = best_nodes if branching else keep_nodes
    return Frontier(*choose(level.tokens, level.scores, before, top_k))


def best_nodes(
    tokens: Tensor, scores: Tensor, before: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A `Frontier`'s tensors of a level's `tokens` and `scores` `[B, M]`."""
    order = in_order(scores, torch.arange(top_k, device=scores.device))
    above = torch.div(order, top_k, rounding_mode="floor")
    return tokens.gather(1, order), scores.gather(1, order), before + order, above


keep_nodes = torch.library.custom_op("forerun::keep_nodes", best_nodes, mutates_args=())
"""`best_nodes` as one operation."""


@keep_nodes.register_fake
def _(
    tokens: Tensor, scores: Tensor, before: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = tokens.new_empty(tokens.shape[0], top_k)
    best = scores.new_empty(tokens.shape[0], top_k)
    return kept, best, torch.empty_like(kept), torch.empty_like(kept)
