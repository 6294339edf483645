# mypy: disallow-untyped-decorators=False
"""`forerun.models.grow.prune` as two kernels: the final rerank of a tree that grows.

1. `in_order`: a program ranks one row's proposal by counting what stands ahead of each node, and
   names the node at each wanted place.
2. `link`: a program follows one node of the new tree up to the root, which gives its parent, its
   depth and its row of the ancestor matrix.

The order is strict (the larger score, then the earlier node) and has the root in front, so that no
node is taken without its parent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import Launch, Size, launch, power
from forerun.models.grow import GrownTree, Proposal

MINE, OTHERS = 32, 128
"""Nodes ranked together, and nodes that they are compared with together."""
FIRST = tl.constexpr(torch.finfo(torch.float32).max)
"""The root's score."""


@triton.jit
def _scores(scores: tl.tensor, nodes: tl.tensor, M: tl.tensor) -> tl.tensor:
    """The root is node 0, the proposal's follow; what is past its end stands last."""
    inside = (nodes > 0) & (nodes <= M)
    past = tl.where(nodes == 0, FIRST, float("-inf"))
    return tl.where(inside, tl.load(scores + nodes - 1, mask=inside, other=0.0), past)


@triton.jit
def in_order_kernel(
    scores: tl.tensor,  # [B, M] float32
    places: tl.tensor,  # [N] int64
    M: tl.tensor,
    N: tl.tensor,
    order: tl.tensor,  # [B, N] int64: 0 is the root, i is the proposal's node i - 1
    NODES: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    batch = tl.program_id(0)
    scores += batch * M
    lanes = tl.arange(0, NODES)
    place = tl.load(places + lanes, mask=lanes < N, other=-1).to(tl.int32)
    found = tl.zeros((NODES,), tl.int32)
    for start in range(0, M + 1, MINE):
        node = start + tl.arange(0, MINE)
        mine = _scores(scores, node, M)
        ahead = tl.zeros((MINE, OTHERS), tl.int32)
        for beside in range(0, M + 1, OTHERS):
            other_node = beside + tl.arange(0, OTHERS)
            other = _scores(scores, other_node, M)
            earlier = (other[None, :] == mine[:, None]) & (other_node[None, :] < node[:, None])
            ahead += ((other[None, :] > mine[:, None]) | earlier).to(tl.int32)
        rank = tl.sum(ahead, 1)
        here = (rank[None, :] == place[:, None]) & (node[None, :] <= M)  # [NODES, MINE]
        found = tl.maximum(found, tl.max(tl.where(here, node[None, :], 0), 1))
    tl.store(order + batch * N + lanes, found.to(tl.int64), mask=lanes < N)


@triton.jit
def link_kernel(
    root: tl.tensor,  # [B] int64
    tokens: tl.tensor,  # [B, M] int64
    parents: tl.tensor,  # [B, M] int64
    order: tl.tensor,  # [B, N] int64
    M: tl.tensor,
    N: tl.tensor,
    tree_tokens: tl.tensor,  # [B, N] int64
    tree_depth: tl.tensor,  # [B, N] int64
    tree_ancestors: tl.tensor,  # [B, N, N] bool
    tree_parents: tl.tensor,  # [B, N] int64
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    batch, node = tl.program_id(0), tl.program_id(1)
    order += batch * N
    lanes = tl.arange(0, NODES)
    taken = tl.load(order + lanes, mask=lanes < N, other=-1)
    own = tl.load(order + node)
    token = tl.load(root + batch)
    if own > 0:
        token = tl.load(tokens + batch * M + own - 1)
    out = batch * N + node
    tl.store(tree_tokens + out, token)

    at = node
    kin = lanes == node
    for step in range(DEPTH):
        proposed = tl.load(order + at)
        wanted = tl.load(parents + batch * M + proposed - 1, mask=proposed > 0, other=0)
        above = tl.min(tl.where(taken == wanted, lanes, NODES), 0)
        at = tl.where(above < NODES, above, 0)
        kin = kin | (lanes == at)
        if step == 0:
            tl.store(tree_parents + out, at.to(tl.int64))
    tl.store(tree_depth + out, tl.sum(kin.to(tl.int64), 0) - 1)
    tl.store(tree_ancestors + out.to(tl.int64) * N + lanes, kin, mask=lanes < N)


def in_order_launch(batch: Size, proposed: Size, nodes: Size, most: int) -> Launch:
    """`proposed` is M, `nodes` N; `most` is the largest N that comes."""
    return launch(
        in_order_kernel,
        (batch, 1, 1),
        {"scores": "fp32", "places": "i64"},
        {"M": proposed, "N": nodes},
        {"order": "i64"},
        {"NODES": power(most, 16), "MINE": MINE, "OTHERS": OTHERS},
        warps=8,
    )


def link_launch(batch: Size, proposed: Size, nodes: Size, most: int, max_depth: int) -> Launch:
    """As `in_order_launch`, for trees of at most `max_depth` levels below the root."""
    return launch(
        link_kernel,
        (batch, nodes, 1),
        {"root": "i64", "tokens": "i64", "parents": "i64", "order": "i64"},
        {"M": proposed, "N": nodes},
        {"tree_tokens": "i64", "tree_depth": "i64", "tree_ancestors": "i1", "tree_parents": "i64"},
        {"DEPTH": max_depth, "NODES": power(most, 16)},
        warps=1,
    )


def prune(root: Tensor, proposal: Proposal, places: Tensor, max_depth: int) -> GrownTree:
    """`forerun.models.grow.prune`."""
    (batch, proposed), nodes = proposal.tokens.shape, places.shape[0]
    tensors = {
        "root": root,
        "tokens": proposal.tokens,
        "parents": proposal.parents,
        "scores": proposal.scores,
        "places": places,
        "order": root.new_empty(batch, nodes),
        "tree_tokens": root.new_empty(batch, nodes),
        "tree_depth": root.new_empty(batch, nodes),
        "tree_ancestors": root.new_empty(batch, nodes, nodes, dtype=torch.bool),
        "tree_parents": root.new_empty(batch, nodes),
    }
    in_order_launch(batch, proposed, nodes, nodes).run(tensors)
    link_launch(batch, proposed, nodes, nodes, max_depth).run(tensors)
    return GrownTree(
        tensors["tree_tokens"],
        tensors["tree_depth"],
        tensors["tree_ancestors"],
        tensors["tree_parents"],
    )
