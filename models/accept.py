"""Acceptance by matching: the longest path of the draft tree that the target chose itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeRows:
    """The draft tree's shape: T nodes, of which R are verified (in a prefill only the last)."""

    depth: Tensor  # [B, T] int64, 0 at the root
    ancestors: Tensor  # [B, T, T] bool, itself included
    verify: Tensor  # [R] int64: the verified nodes; the first one is accepted unseen
    parents: Tensor  # [B, R] int64: each verified node's parent, counted among the verified


@dataclass(frozen=True)
class Accepted:
    """What a step commits."""

    count: Tensor  # [B] int64: committed tokens, the bonus token included; 0 where the row is done
    emitted: Tensor  # [B, P] int64: those tokens, then garbage
    path: Tensor  # [B, P, R] bool: which verified node is accepted at each depth (past count: none)


def accept(
    tokens: Tensor, chosen: Tensor, tree: TreeRows, pending: int, allowed: Tensor
) -> Accepted:
    """Walk down while a child carries the token that its parent's row chose.

    `tokens` `[B, R]` are the verified nodes' own, `chosen` `[B, R]` the target's choice after each.
    Without loops: a node is accepted if none of its ancestors mismatches, which is one product with
    the ancestor matrix, and the deepest accepted node wins (siblings carry distinct tokens, so
    there is one a depth). `allowed` `[B]` caps the count. `pending` is P.
    """
    depth = tree.depth[:, tree.verify]  # [B, R]
    depth = depth - depth[:, :1]
    ancestors = tree.ancestors[:, tree.verify][:, :, tree.verify]  # [B, R, R]
    expected = chosen.gather(1, tree.parents)
    wrong = (tokens != expected) & (depth > 0)
    mismatches = (ancestors & wrong[:, None]).to(torch.int32).sum(-1, dtype=torch.int32)
    best = torch.where(mismatches == 0, depth, -1).argmax(-1)  # [B]
    above = ancestors.gather(1, best[:, None, None].expand(-1, 1, ancestors.shape[2]))  # [B, 1, R]
    depths = torch.arange(pending, device=depth.device)
    path = above & (depth[:, None] == depths[:, None])  # [B, P, R]
    emitted = (path.to(torch.int64) * chosen[:, None]).sum(-1)
    count = depth.gather(1, best[:, None])[:, 0] + 1
    count = torch.minimum(count, allowed.clamp(min=0))
    return Accepted(count, emitted, path)


def accept_nodes(
    tokens: Tensor,
    chosen: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    verify: Tensor,
    parents: Tensor,
    allowed: Tensor,
    pending: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accept` as a kernel has it: count `[B]`, emitted `[B, P]`, and the tree's node accepted at
    each depth `[B, P]`, -1 past the path."""
    tree = TreeRows(depth, ancestors, verify, parents)
    accepted = accept(tokens, chosen, tree, pending, allowed)
    nodes = (accepted.path.to(torch.int64) * (verify + 1)).sum(-1) - 1
    return accepted.count, accepted.emitted, nodes


accept_path = torch.library.custom_op("forerun::accept_path", accept_nodes, mutates_args=())
"""`accept_nodes` as one operation."""


@accept_path.register_fake
def _(
    tokens: Tensor,
    chosen: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    verify: Tensor,
    parents: Tensor,
    allowed: Tensor,
    pending: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    path = tokens.new_empty(batch, pending)
    return tokens.new_empty(batch), path, torch.empty_like(path)


def accept_fused(
    tokens: Tensor, chosen: Tensor, tree: TreeRows, pending: int, allowed: Tensor
) -> Accepted:
    """`accept` by that operation, for engines that may have a kernel for it."""
    shape = tree.depth, tree.ancestors, tree.verify, tree.parents
    count, emitted, nodes = accept_path(tokens, chosen, *shape, allowed, pending)
    return Accepted(count, emitted, nodes[:, :, None] == tree.verify)
