# mypy: disallow-untyped-decorators=False
"""`forerun.models.accept` as one kernel: a program accepts one row's path.

A lane is a verified node. Its mismatching ancestors are counted a few columns of the ancestor
matrix at a time; the deepest node that has none wins, and its own row of the matrix is the path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import Launch, Size, launch, power
from forerun.models.accept import TreeRows

COLUMNS = 16
"""Of the ancestor matrix, looked at together."""


@dataclass(frozen=True)
class AcceptedNodes:
    """What a step commits; `forerun.models.accept.Accepted` with nodes in the path's place."""

    count: Tensor  # [B] int64
    emitted: Tensor  # [B, P] int64: the path's choices, then 0
    nodes: Tensor  # [B, P] int64: the tree node accepted at each depth, -1 past the path


@triton.jit
def accept_kernel(
    tokens: tl.tensor,  # [B, R] int64
    chosen: tl.tensor,  # [B, R] int64
    depth: tl.tensor,  # [B, T] int64
    ancestors: tl.tensor,  # [B, T, T] bool
    verify: tl.tensor,  # [R] int64
    parents: tl.tensor,  # [B, R] int64
    allowed: tl.tensor,  # [B] int64
    R: tl.tensor,
    T: tl.tensor,
    count: tl.tensor,  # [B] int64
    emitted: tl.tensor,  # [B, P] int64
    nodes: tl.tensor,  # [B, P] int64
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATH: tl.constexpr,
) -> None:
    batch = tl.program_id(0)
    tokens += batch * R
    chosen += batch * R
    parents += batch * R
    depth += batch * T
    ancestors += batch * T * T
    top = tl.load(depth + tl.load(verify))

    rows = tl.arange(0, ROWS)
    here = rows < R
    node = tl.load(verify + rows, mask=here, other=0).to(tl.int32)
    level = (tl.load(depth + node, mask=here, other=0) - top).to(tl.int32)
    mismatches = tl.zeros((ROWS,), tl.int32)
    for start in range(0, R, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < R
        other = tl.load(verify + columns, mask=there, other=0).to(tl.int32)
        parent = tl.load(parents + columns, mask=there, other=0).to(tl.int32)
        expected = tl.load(chosen + parent, mask=there, other=0)
        token = tl.load(tokens + columns, mask=there, other=0)
        below = tl.load(depth + other, mask=there, other=0) > top
        wrong = below & (token != expected)
        pairs = here[:, None] & there[None, :]
        kin = tl.load(ancestors + node[:, None] * T + other[None, :], mask=pairs, other=0) != 0
        mismatches += tl.sum((kin & wrong[None, :]).to(tl.int32), 1)

    reached = tl.where(here & (mismatches == 0), level, -1)
    deepest = tl.max(reached, 0)
    best = tl.min(tl.where(reached == deepest, rows, ROWS - 1), 0)
    above = tl.load(ancestors + tl.load(verify + best) * T + node, mask=here, other=0) != 0
    steps = tl.arange(0, PATH)
    on_path = above[None, :] & (level[None, :] == steps[:, None])  # [PATH, ROWS]
    choice = tl.load(chosen + rows, mask=here, other=0).to(tl.int32)
    told = tl.sum(tl.where(on_path, choice[None, :], 0), 1)
    taken = tl.max(tl.where(on_path, node[None, :], -1), 1)
    tl.store(emitted + batch * P + steps, told.to(tl.int64), mask=steps < P)
    tl.store(nodes + batch * P + steps, taken.to(tl.int64), mask=steps < P)
    most = tl.maximum(tl.load(allowed + batch), 0)
    tl.store(count + batch, tl.minimum(deepest.to(tl.int64) + 1, most))


def accept_launch(batch: Size, rows: Size, nodes: Size, pending: int, most: int) -> Launch:
    """`rows` is R, `nodes` T, `pending` P; `most` is the largest R that comes."""
    lanes = power(most, COLUMNS)
    return launch(
        accept_kernel,
        (batch, 1, 1),
        {"tokens": "i64", "chosen": "i64", "depth": "i64", "ancestors": "i1", "verify": "i64"}
        | {"parents": "i64", "allowed": "i64"},
        {"R": rows, "T": nodes},
        {"count": "i64", "emitted": "i64", "nodes": "i64"},
        {"P": pending, "ROWS": lanes, "COLUMNS": COLUMNS, "PATH": power(pending)},
        warps=min(max(1, lanes // 16), 16),
    )


def accept(
    tokens: Tensor, chosen: Tensor, tree: TreeRows, pending: int, allowed: Tensor
) -> AcceptedNodes:
    """`forerun.models.accept.accept`, with the path as nodes of the tree."""
    batch, rows = tokens.shape
    count = torch.empty_like(allowed)
    emitted, nodes = (tokens.new_empty(batch, pending) for _ in range(2))
    accept_launch(batch, rows, tree.depth.shape[1], pending, rows).run(
        {
            "tokens": tokens,
            "chosen": chosen,
            "depth": tree.depth,
            "ancestors": tree.ancestors,
            "verify": tree.verify,
            "parents": tree.parents,
            "allowed": allowed,
            "count": count,
            "emitted": emitted,
            "nodes": nodes,
        }
    )
    return AcceptedNodes(count, emitted, nodes)
