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


def prune(root: Tensor, proposal: Proposal, places: Tensor, max_depth: int) -> GrownTree:
    """The nodes at `places` `[N]` of all in order of score, the root being place 0.

    With `places` 0 ... N - 1 those are the N best (EAGLE-2's rerank, arXiv:2406.16858, section
    4.2). A parent scores no less than its child and comes first where they tie, so that no node is
    taken without its parent.
    """
    batch = root.shape[0]
    tokens = torch.cat([root[:, None], proposal.tokens], dim=1)  # [B, M + 1]
    parents = torch.cat([root.new_zeros(batch, 1), proposal.parents], dim=1)
    first = torch.full_like(proposal.scores[:, :1], torch.finfo(proposal.scores.dtype).max)
    scores = torch.cat([first, proposal.scores], dim=1)
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
    return GrownTree(tokens.gather(1, order), depth, reach, above)


def in_order(scores: Tensor, places: Tensor) -> Tensor:
    """Which of `scores` `[B, M]` stand at `places` `[N]` by size, the earlier where they tie.

    Every score's rank by counting, since engines differ in how their TopK breaks ties.
    """
    index = torch.arange(scores.shape[1], device=scores.device)
    mine, other = scores[:, :, None], scores[:, None]  # [B, M, 1], [B, 1, M]
    ahead = (other > mine) | ((other == mine) & (index[None] < index[:, None]))
    rank = ahead.to(torch.int32).sum(-1, dtype=torch.int32)  # [B, M]
    return (rank[:, None] == places[:, None]).to(torch.int32).argmax(-1)
