# mypy: disallow-untyped-decorators=False
"""`forerun.models.choose` as one kernel: a program chooses the token of one row of logits.

A row is read in blocks: once for its maximum, which is all that a greedy row costs; a sampled one
reads it again for its total and once more for its draw, and `HALVINGS` times for each cut that is
active. Nothing is stored in between, so that scaled logits and weights are computed at each pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import TYPES, Launch, Size, launch, power
from forerun.models import ops
from forerun.models.choose import Sampling

SPAN = tl.constexpr(ops.SPAN)
HALVINGS = tl.constexpr(ops.HALVINGS)
BLOCK = 4096
"""Logits that a program holds at a time, 8 a thread: with 16, some architectures spill."""


@triton.jit
def choose_kernel(
    logits: tl.tensor,  # [B, R, V]
    temperature: tl.tensor,  # [B] float32
    top_k: tl.tensor,  # [B] int64
    top_p: tl.tensor,  # [B] float32
    uniform: tl.tensor,  # [B, R] float32
    R: tl.tensor,
    chosen: tl.tensor,  # [B, R] int64
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    batch = row // R
    values = logits + row * V
    token, peak = _arg_max(values, V, BLOCK)
    heat = tl.load(temperature + batch)
    if heat > 0:
        peak = tl.div_rn(peak, heat)
        floor = _floor(values, heat, peak, tl.load(top_k + batch), tl.load(top_p + batch), V, BLOCK)
        token = _draw(values, heat, peak, floor, tl.load(uniform + row), V, BLOCK)
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _arg_max(values: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """(lowest id of the largest, the largest): each lane keeps the first of its own."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = lanes
    for start in range(0, V, BLOCK):
        ids = start + lanes
        x = tl.load(values + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        at = tl.where(x > best, ids, at)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, 0)
    return tl.min(tl.where(best == peak, at, V), 0), peak


@triton.jit
def _scaled(
    values: tl.tensor, ids: tl.tensor, heat: tl.tensor, peak: tl.tensor, V: tl.constexpr
) -> tl.tensor:
    """Logits over the temperature, less their maximum; rounded as torch rounds, to the last bit."""
    x = tl.load(values + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, heat) - peak


@triton.jit
def _weights(
    values: tl.tensor,
    ids: tl.tensor,
    heat: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """Unnormalised probabilities: the maximum weighs 1, what lies below `floor` nothing."""
    scaled = _scaled(values, ids, heat, peak, V)
    return tl.where(scaled >= floor, tl.exp(scaled), 0.0)


@triton.jit
def _floor(
    values: tl.tensor,
    heat: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The scaled logit below which top-k, and then top-p of what it leaves, cut."""
    floor = tl.full((), float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < V):
        floor = _threshold(values, heat, peak, floor, top_k.to(tl.float32), False, V, BLOCK)
    if (top_p > 0) & (top_p < 1):
        wanted = top_p * _total(values, heat, peak, floor, V, BLOCK)
        floor = tl.maximum(floor, _threshold(values, heat, peak, floor, wanted, True, V, BLOCK))
    return floor


@triton.jit
def _threshold(
    values: tl.tensor,
    heat: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    wanted: tl.tensor,
    WEIGHED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """`forerun.models.ops.threshold`: the highest cut that keeps `wanted` ids, or so much weight of
    those above `floor`."""
    lanes = tl.arange(0, BLOCK)
    low = tl.full((), -SPAN, tl.float32)
    step = tl.full((), SPAN, tl.float32)
    for _ in range(HALVINGS):
        step = step * 0.5
        middle = low + step
        kept = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            scaled = _scaled(values, start + lanes, heat, peak, V)
            measure = tl.where(scaled >= floor, tl.exp(scaled), 0.0) if WEIGHED else 1.0
            kept += tl.where(scaled >= middle, measure, 0.0)
        low = tl.where(tl.sum(kept, 0) >= wanted, middle, low)
    return low


@triton.jit
def _total(
    values: tl.tensor,
    heat: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sum of the weights, block after block as `_draw` adds them."""
    lanes = tl.arange(0, BLOCK)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        total += tl.sum(_weights(values, start + lanes, heat, peak, floor, V), 0)
    return total


@triton.jit
def _draw(
    values: tl.tensor,
    heat: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    uniform: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id whose cumulative weight exceeds `uniform` times the total.

    Only ids that weigh something are ever named, whatever the sums' rounding: the last one of its
    block, or of all, stands in where a sum falls short of another.
    """
    goal = uniform * _total(values, heat, peak, floor, V, BLOCK)
    lanes = tl.arange(0, BLOCK)
    before = tl.full((), 0.0, tl.float32)
    token = tl.full((), V, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + lanes
        weights = _weights(values, ids, heat, peak, floor, V)
        after = before + tl.sum(weights, 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        if (token == V) & (after > goal):
            beyond = (before + tl.cumsum(weights, 0) > goal) & (weights > 0)
            token = tl.minimum(last, tl.min(tl.where(beyond, ids, V), 0))
        before = after
    return tl.minimum(token, last)


def choose_launch(batch: Size, rows: Size, vocabulary: int, logits: str) -> Launch:
    """`rows` is R, `vocabulary` V; `logits` names their type."""
    block = power(min(vocabulary, BLOCK), 32)
    return launch(
        choose_kernel,
        (batch * rows, 1, 1),
        {"logits": logits, "temperature": "fp32", "top_k": "i64", "top_p": "fp32"}
        | {"uniform": "fp32"},
        {"R": rows},
        {"chosen": "i64"},
        {"V": vocabulary, "BLOCK": block},
        warps=max(1, block // 256),
    )


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """`forerun.models.choose.choose`, `[B, R, V]` -> `[B, R]`; logits of any float type."""
    chosen = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    batch, rows, vocabulary = logits.shape
    if chosen.numel():
        choose_launch(batch, rows, vocabulary, TYPES[logits.dtype]).run(
            {
                "logits": logits,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "uniform": uniform,
                "chosen": chosen,
            }
        )
    return chosen
