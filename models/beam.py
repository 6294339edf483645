"""Growing a proposal level by level: the best children of the best nodes, with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.grow import Proposal


def best_children(
    above: Tensor, scores: Tensor, tokens: Tensor, keep: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `keep` best of W nodes' K children each.

    `above` `[B, W]` are the nodes' scores, `scores` and `tokens` `[B, W, K]` (W may be 1: the same
    for all) those of their children, in log-probabilities: a child's score is the sum. -> the
    children's scores, tokens, and which of the W nodes each hangs from, `[B, keep]`, best first.
    """
    width, choices = above.shape[1], scores.shape[2]
    sums = (above[:, :, None] + scores).flatten(1)  # [B, W * K]
    best = sums.topk(keep, dim=1)
    tokens = tokens.expand(-1, width, -1).flatten(1)
    parents = torch.arange(width, device=above.device).repeat_interleave(choices)  # [W * K]
    return best.values, tokens.gather(1, best.indices), parents[best.indices]


def best_first(scores: Tensor, tokens: Tensor) -> Proposal:
    """What the best N nodes can be, where a token's chance depends on its depth alone.

    `scores` `[B, depth, N]` are the log-probabilities of the N best `tokens` of every depth, best
    first and none above 0; a node's score is the sum along its path. The best n <= N nodes of the
    whole product tree, and so the tree that is grown by taking the best open node n times (DDTree,
    arXiv:2604.12989, Algorithm 1), are among those kept. A node at depth d has d - 1 ancestors, all
    no worse than it. So are its better siblings, and what is better at its parent's depth. Hence at
    most N - d + 1 of the best N lie at depth d, each among the N - d + 1 best children of one of
    the N - d + 2 best nodes above.
    """
    batch, depths, nodes = scores.shape
    above, first = scores.new_zeros(batch, 1), 0  # the root, and the number of its node
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for depth in range(min(depths, nodes)):
        keep = nodes - depth
        choices = scores[:, depth, None, :keep], tokens[:, depth, None, :keep]
        width = above.shape[1]
        above, token, parent = best_children(above, *choices, keep)
        levels.append((token, parent + first, above))
        first += width
    return Proposal(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))


def proposed_nodes(depths: int, nodes: int) -> int:
    """How many nodes `best_first` proposes."""
    return sum(nodes - depth for depth in range(min(depths, nodes)))
