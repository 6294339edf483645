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


def expand(frontier: Frontier, logits: Tensor, top_k: int, ids: Tensor | None = None) -> Proposal:
    """The `top_k` best children of each node, `[B, W * top_k]`, a parent's side by side.

    `logits` are `[B, W, V']`; `ids` `[V']` are the token ids of its columns. A child never scores
    above its parent: its log-probability is `x - max` less the logarithm of a sum that is at
    least 1, in float32.
    """
    logits = logits.to(torch.float32)
    best = logits.topk(top_k, dim=-1)  # [B, W, top_k]
    first = best.values[..., :1]
    total = torch.exp(logits - first).sum(-1, keepdim=True)
    scores = frontier.scores[..., None] + (best.values - first - total.log())
    tokens = best.indices if ids is None else ids[best.indices]
    parents = frontier.nodes[..., None].expand_as(tokens)
    return Proposal(tokens.flatten(1), parents.flatten(1), scores.flatten(1))


def keep(level: Proposal, before: int, top_k: int) -> Frontier:
    """The `top_k` best nodes of a level; earlier ones where they tie.

    `before` counts the nodes above the level, the root included.
    """
    order = in_order(level.scores, torch.arange(top_k, device=level.scores.device))
    above = torch.div(order, top_k, rounding_mode="floor")
    return Frontier(
        level.tokens.gather(1, order), level.scores.gather(1, order), before + order, above
    )
