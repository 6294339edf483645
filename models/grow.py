"""Trees that are made on the device: the best nodes of a proposal, with static shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Nodes that may follow the root, B rows of M; a node's parent comes before it."""

    tokens: Tensor  # [B, M] int64; -1: no token
    parents: Tensor  # [B, M] int64: 0 is the root, i is node i - 1 of this proposal
    scores: Tensor  # [B, M] float32: finite, and nowhere above the parent's


@dataclass(frozen=True)
class GrownTree:
    """The next step's tree, N nodes, the root first and parents before children."""

    tokens: Tensor  # [B, N] int64
    depth: Tensor  # [B, N] int64
    ancestors: Tensor  # [B, N, N] bool, itself included
    parents: Tensor  # [B, N] int64; the root's own is 0


def prune(
    root: Tensor, proposal: Proposal, places: Tensor, max_depth: int, branching: bool = True
) -> GrownTree:
    """The nodes at `places` `[N]` of all in order of score, the root being place 0.

    With `places` 0 ... N - 1 those are the N best (EAGLE-2's rerank, arXiv:2406.16858, section
    4.2). A parent scores no less than its child and comes first where they tie, so that no node is
    taken without its parent. Where the engine is not `branching` it is one operation, which may be
    a kernel.
    """
    tree = best_tree if branching else prune_tree
    return GrownTree(
        *tree(root, proposal.tokens, proposal.parents, proposal.scores, places, max_depth)
    )


def best_tree(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, places: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A `GrownTree`'s tensors of a `Proposal`'s."""
    batch = root.shape[0]
    tokens = torch.cat([root[:, None], tokens], dim=1)  # [B, M + 1]
    parents = torch.cat([root.new_zeros(batch, 1), parents], dim=1)
    first = torch.full_like(scores[:, :1], torch.finfo(scores.dtype).max)
    scores = torch.cat([first, scores], dim=1)
    order = in_order(scores, places)  # [B, N]
    wanted = parents.gather(1, order)  # [B, N] each node's parent, as the proposal counts
    hits = (order[:, None] == wanted[:, :, None]).to(torch.int32)  # [B, N, N]
    above = hits.argmax(-1)
    nodes = torch.arange(places.shape[0], device=root.device)
    reach = (above[:, :, None] == nodes) | (nodes[:, None] == nodes)  # [B, N, N]
    steps = 1
    while steps < max_depth:  # who reaches whom within `steps` edges, doubled each time
        reach = (reach.to(torch.float32) @ reach.to(torch.float32)) > 0
        steps *= 2
    depth = reach.to(torch.int64).sum(-1) - 1
    return tokens.gather(1, order), depth, reach, above


prune_tree = torch.library.custom_op("forerun::prune_tree", best_tree, mutates_args=())
"""`best_tree` as one operation."""


@prune_tree.register_fake
def _(
    root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, places: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, nodes = root.shape[0], places.shape[0]
    tree = root.new_empty(batch, nodes)
    ancestors = root.new_empty(batch, nodes, nodes, dtype=torch.bool)
    return tree, torch.empty_like(tree), ancestors, torch.empty_like(tree)


def in_order(scores: Tensor, places: Tensor) -> Tensor:
    """Which of `scores` `[B, M]` stand at `places` `[N]` by size, the earlier where they tie.

    Every score's rank by counting, since engines differ in how their TopK breaks ties.
    """
    index = torch.arange(scores.shape[1], device=scores.device)
    mine, other = scores[:, :, None], scores[:, None]  # [B, M, 1], [B, 1, M]
    ahead = (other > mine) | ((other == mine) & (index[None] < index[:, None]))
    rank = ahead.to(torch.int32).sum(-1, dtype=torch.int32)  # [B, M]
    return (rank[:, None] == places[:, None]).to(torch.int32).argmax(-1)
