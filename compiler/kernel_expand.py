# mypy: disallow-untyped-decorators=False
"""`forerun.models.expand` as kernels: a level of EAGLE-2's tree, in two stages and a last choice.

1. `best_of_blocks`: a program looks at one block of one node's logits and leaves the `top_k` best
   in it and its sum of exponentials, so that a wide vocabulary keeps the whole device busy.
2. `children`: a program merges the blocks of one node: its `top_k` best children, scored.
3. `keep`: a program takes the `top_k` best of a row's whole level.

All three take the best one by one, each time the next after the last in one strict order: the
larger first, the lower index where they tie. `top_k` is small (EAGLE's is 10).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import TYPES, Launch, Size, blocks, launch, power
from forerun.errors import ForerunError
from forerun.models.expand import Frontier
from forerun.models.grow import Proposal

BLOCK = 4096
"""Logits of a block."""
NONE = tl.constexpr(2**31 - 1)
"""An index behind all others."""


@triton.jit
def next_best(
    values: tl.tensor, indices: tl.tensor, value: tl.tensor, index: tl.tensor
) -> tl.tensor:
    """The (value, index) that follows the given one: what is largest, then of lowest index."""
    behind = (values < value) | ((values == value) & (indices > index))
    best = tl.max(tl.where(behind, values, float("-inf")), 0)
    at = tl.min(tl.where(behind & (values == best), indices, NONE), 0)
    return best, at


@triton.jit
def best_of_blocks_kernel(
    logits: tl.tensor,  # [B, W, V]
    values: tl.tensor,  # [B * W, blocks, K] float32, the best first
    indices: tl.tensor,  # [B * W, blocks, K] int32: their columns; V or more where there is none
    sums: tl.tensor,  # [B * W, blocks] float32: of exp(x - the block's best)
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + node * V + columns
    x = tl.load(source, mask=columns < V, other=float("-inf")).to(tl.float32)
    part = node * tl.num_programs(1) + block
    peak = tl.max(x, 0)
    # A block of nothing but -inf weighs nothing; exp(-inf - -inf) would not be a number.
    weights = tl.where(x > float("-inf"), tl.exp(x - peak), 0.0)
    tl.store(sums + part, tl.sum(weights, 0))
    value = tl.full((), float("inf"), tl.float32)
    index = tl.full((), -1, tl.int32)
    for place in range(K):
        value, index = next_best(x, columns, value, index)
        tl.store(values + part * K + place, value)
        tl.store(indices + part * K + place, index)


@triton.jit
def children_kernel(
    values: tl.tensor,  # [B * W, blocks, K] float32
    indices: tl.tensor,  # [B * W, blocks, K] int32
    sums: tl.tensor,  # [B * W, blocks] float32
    scores: tl.tensor,  # [B, W] float32: the nodes' own
    nodes: tl.tensor,  # [B, W] int64: their places in the proposal
    ids: tl.tensor,  # [V] int64: the tokens of the columns; None: the columns themselves
    child_tokens: tl.tensor,  # [B, W * K] int64
    child_parents: tl.tensor,  # [B, W * K] int64
    child_scores: tl.tensor,  # [B, W * K] float32
    V: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    node = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    there = lanes < PARTS * K
    place_of = node * PARTS * K + lanes
    x = tl.load(values + place_of, mask=there, other=float("-inf"))
    columns = tl.load(indices + place_of, mask=there, other=NONE)
    peak = tl.max(x, 0)

    parts = tl.arange(0, PARTS_BLOCK)
    inside = parts < PARTS
    peaks = tl.load(values + (node * PARTS + parts) * K, mask=inside, other=float("-inf"))
    partial = tl.load(sums + node * PARTS + parts, mask=inside, other=0.0)
    total = tl.sum(partial * tl.exp(peaks - peak), 0)
    # At least 1 by its terms: no child scores above its parent, however the logarithm rounds.
    spread = tl.maximum(tl.log(total), 0.0)
    above, parent = tl.load(scores + node), tl.load(nodes + node)
    value = tl.full((), float("inf"), tl.float32)
    column = tl.full((), -1, tl.int32)
    for place in range(K):
        value, column = next_best(x, columns, value, column)
        known = tl.minimum(column, V - 1)  # a column even of logits that are not numbers
        token = known.to(tl.int64) if ids is None else tl.load(ids + known)
        tl.store(child_tokens + node * K + place, token)
        tl.store(child_parents + node * K + place, parent)
        tl.store(child_scores + node * K + place, above + (value - peak - spread))


@triton.jit
def keep_kernel(
    tokens: tl.tensor,  # [B, M] int64
    scores: tl.tensor,  # [B, M] float32
    M: tl.tensor,
    before: tl.tensor,
    kept_tokens: tl.tensor,  # [B, K] int64
    kept_scores: tl.tensor,  # [B, K] float32
    kept_nodes: tl.tensor,  # [B, K] int64
    kept_above: tl.tensor,  # [B, K] int64
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    batch = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    level = tl.load(scores + batch * M + lanes, mask=lanes < M, other=float("-inf"))
    score = tl.full((), float("inf"), tl.float32)
    at = tl.full((), -1, tl.int32)
    for place in range(K):
        score, at = next_best(level, lanes, score, at)
        node = tl.minimum(at, M - 1)  # in range even of scores that are not numbers
        out = batch * K + place
        tl.store(kept_tokens + out, tl.load(tokens + batch * M + node))
        tl.store(kept_scores + out, score)
        tl.store(kept_nodes + out, (before + node).to(tl.int64))
        tl.store(kept_above + out, (node // K).to(tl.int64))


def best_of_blocks_launch(nodes: Size, vocabulary: int, top_k: int, logits: str) -> Launch:
    """`nodes` is B * W, `vocabulary` V' (of the drafter); `logits` names their type."""
    check_top_k(top_k, vocabulary)
    block = _block(vocabulary, top_k)
    return launch(
        best_of_blocks_kernel,
        (nodes, blocks(vocabulary, block), 1),
        {"logits": logits},
        {},
        {"values": "fp32", "indices": "i32", "sums": "fp32"},
        {"V": vocabulary, "K": top_k, "BLOCK": block},
        warps=max(1, block // 512),
    )


def children_launch(nodes: Size, vocabulary: int, top_k: int, mapped: bool) -> Launch:
    """What follows `best_of_blocks_launch` of the same sizes; `mapped`: there are `ids`."""
    parts = blocks(vocabulary, _block(vocabulary, top_k))
    block = power(parts * top_k, 32)
    ids = {"ids": "i64"} if mapped else {}
    return launch(
        children_kernel,
        (nodes, 1, 1),
        {"values": "fp32", "indices": "i32", "sums": "fp32", "scores": "fp32", "nodes": "i64"}
        | ids,
        {},
        {"child_tokens": "i64", "child_parents": "i64", "child_scores": "fp32"},
        {"V": vocabulary, "K": top_k, "PARTS": parts, "PARTS_BLOCK": power(parts), "BLOCK": block}
        | ({} if mapped else {"ids": None}),
        warps=max(1, min(8, block // 128)),
    )


def keep_launch(batch: Size, level: Size, before: Size, top_k: int) -> Launch:
    """`level` is M, the nodes of a level: `top_k`, or its square."""
    return launch(
        keep_kernel,
        (batch, 1, 1),
        {"tokens": "i64", "scores": "fp32"},
        {"M": level, "before": before},
        {"kept_tokens": "i64", "kept_scores": "fp32", "kept_nodes": "i64", "kept_above": "i64"},
        {"K": top_k, "BLOCK": power(top_k * top_k, 32)},
        warps=1,
    )


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Raises ForerunError where a node has fewer children than are asked for."""
    if not 1 <= top_k <= min(vocabulary, BLOCK):
        raise ForerunError(
            f"top_k {top_k} of {vocabulary} draft tokens: give one from 1 to "
            f"{min(vocabulary, BLOCK)}"
        )


def _block(vocabulary: int, top_k: int) -> int:
    return power(min(max(vocabulary, top_k), BLOCK), 32)


def expand(frontier: Frontier, logits: Tensor, top_k: int, ids: Tensor | None = None) -> Proposal:
    """`forerun.models.expand.expand`, logits of any float type; equal logits: the lowest column."""
    batch, width, vocabulary = logits.shape
    first = best_of_blocks_launch(batch * width, vocabulary, top_k, TYPES[logits.dtype])
    parts = first.grid[1]
    tensors = {
        "logits": logits,
        "values": logits.new_empty(batch * width, parts, top_k, dtype=torch.float32),
        "indices": logits.new_empty(batch * width, parts, top_k, dtype=torch.int32),
        "sums": logits.new_empty(batch * width, parts, dtype=torch.float32),
        "scores": frontier.scores,
        "nodes": frontier.nodes,
        "child_tokens": frontier.nodes.new_empty(batch, width * top_k),
        "child_parents": frontier.nodes.new_empty(batch, width * top_k),
        "child_scores": frontier.scores.new_empty(batch, width * top_k),
    }
    if ids is not None:
        tensors["ids"] = ids
    first.run(tensors)
    children_launch(batch * width, vocabulary, top_k, ids is not None).run(tensors)
    return Proposal(tensors["child_tokens"], tensors["child_parents"], tensors["child_scores"])


def keep(level: Proposal, before: int, top_k: int) -> Frontier:
    """`forerun.models.expand.keep`: the earlier where they tie."""
    batch, nodes = level.tokens.shape
    new = level.tokens.new_empty
    kept = Frontier(
        new(batch, top_k),
        level.scores.new_empty(batch, top_k),
        new(batch, top_k),
        new(batch, top_k),
    )
    keep_launch(batch, nodes, before, top_k).run(
        {
            "tokens": level.tokens,
            "scores": level.scores,
            "kept_tokens": kept.tokens,
            "kept_scores": kept.scores,
            "kept_nodes": kept.nodes,
            "kept_above": kept.above,
        }
    )
    return kept
