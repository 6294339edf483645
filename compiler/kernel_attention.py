# mypy: disallow-untyped-decorators=False
"""`forerun.models.tree_attention` as a kernel: the cache is read once for all that looks at it.

A program holds a tile of a group's query heads and nodes, side by side, and reads one part of a
row's slots, block after block (softmax as it goes). Parts are cut from the row's own length, read
on the device, so that all of them work however long the cache is; what lies beyond costs nothing.
A second kernel combines the parts, if there are several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import TYPES, Launch, Size, blocks, launch, power

NONE = tl.constexpr(float("-inf"))
CACHE_TYPES = {**TYPES, torch.float8_e4m3fn: "fp8e4nv"}


@triton.jit
def tree_attention_kernel(
    query: tl.tensor,  # [B, KV * GROUP, T, D]
    keys: tl.tensor,  # [B, KV, S, D]
    values: tl.tensor,  # [B, KV, S, D]
    committed: tl.tensor,  # [B] int64
    first: tl.tensor,  # [B] int64
    bits: tl.tensor,  # [B, T, W] int64, as halves of words: the lower one first
    T: tl.tensor,
    S: tl.tensor,
    parts: tl.tensor,  # [B, KV * GROUP, T, PARTS, D]: the result, if there is a single part
    sums: tl.tensor,  # [B, KV * GROUP, T, PARTS, 2]: each part's maximum and total, if several
    EXPONENT: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    part = tl.program_id(1)
    pair = tl.program_id(2).to(tl.int64)  # of a row of the batch and a head of its cache
    row = pair // KV
    begin = tl.load(first + row).to(tl.int32)
    seen = tl.load(committed + row).to(tl.int32)
    end = tl.minimum(begin + T, S)
    span = tl.cdiv(tl.cdiv(end, BLOCK), PARTS) * BLOCK
    start = part * span
    if start >= end:
        return
    stop = tl.minimum(start + span, end)

    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of the group's rows: head by head
    inside = at < GROUP * T
    depth = tl.arange(0, DEPTH)
    rows = pair * GROUP * T + at  # of all rows
    held = inside[:, None] & (depth < D)[None, :]
    q = tl.load(query + rows[:, None] * D + depth[None, :], mask=held, other=0.0)
    words = 2 * tl.cdiv(T, 64)
    own = (at % T) * words  # offsets within a tile take 32 bits, and half the registers
    bits += row * T * words
    keys += pair * S * D
    values += pair * S * D
    slot = tl.arange(0, BLOCK)
    tile = slot[:, None] * D + depth[None, :]
    whole = (depth < D)[None, :]

    peak = tl.full((ROWS,), NONE, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DEPTH), tl.float32)
    plain = tl.minimum(seen, stop) // BLOCK * BLOCK  # blocks below hold nothing but committed slots
    for base in range(start, plain, BLOCK):
        k = tl.load(keys + base * D + tile, mask=whole, other=0.0)
        v = tl.load(values + base * D + tile, mask=whole, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        peak, total, mixed = _absorb(scores, v.to(q.dtype), peak, total, mixed, EXPONENT)
    for base in range(tl.maximum(start, plain), stop, BLOCK):
        node = base + slot - begin
        below = base + slot < seen
        ours = (node >= 0) & (base + slot < end)
        used = (below | ours)[:, None] & whole  # what was never written may be NaN
        k = tl.load(keys + base * D + tile, mask=used, other=0.0)
        v = tl.load(values + base * D + tile, mask=used, other=0.0)
        word = tl.load(
            bits + (own[:, None] + (node >> 5)[None, :]),
            mask=inside[:, None] & ours[None, :],
            other=0,
        )
        kin = ((word >> (node & 31)[None, :]) & 1) != 0
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        scores = tl.where(below[None, :] | kin, scores, NONE)
        peak, total, mixed = _absorb(scores, v.to(q.dtype), peak, total, mixed, EXPONENT)

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = rows * PARTS + part
    if PARTS > 1:
        tl.store(sums + place * 2, peak, mask=inside)
        tl.store(sums + place * 2 + 1, total, mask=inside)
    result = parts + place[:, None] * D + depth[None, :]
    tl.store(result, mixed.to(parts.dtype.element_ty), mask=held)


@triton.jit
def _absorb(
    scores: tl.tensor,
    v: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    EXPONENT: tl.constexpr,
) -> tl.tensor:
    """One block more: maximum, total and weighted values so far, of `ROWS` rows.

    Scores are scaled after the maximum is taken off: large ones lose nothing that way.
    """
    top = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(top == NONE, 0.0, top)  # a row that has seen nothing yet
    weights = tl.exp2((scores - base[:, None]) * EXPONENT)
    fade = tl.exp2((peak - base) * EXPONENT)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return top, total * fade + tl.sum(weights, 1), mixed


@triton.jit
def combine_parts_kernel(
    parts: tl.tensor,  # [B, H, T, PARTS, D] float32
    sums: tl.tensor,  # [B, H, T, PARTS, 2] float32
    first: tl.tensor,  # [B] int64
    T: tl.tensor,
    S: tl.tensor,
    out: tl.tensor,  # [B, H, T, D]
    EXPONENT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One row of the output; the parts that were made are counted as above."""
    batch = tl.program_id(1).to(tl.int64)
    row = batch * H * T + tl.program_id(0)
    end = tl.minimum(tl.load(first + batch).to(tl.int32) + T, S)
    blocks = tl.cdiv(end, BLOCK)
    made = tl.cdiv(blocks, tl.cdiv(blocks, PARTS))
    part = tl.arange(0, LANES)
    depth = tl.arange(0, DEPTH)
    place = row * PARTS + part
    peak = tl.load(sums + place * 2, mask=part < made, other=NONE)
    total = tl.load(sums + place * 2 + 1, mask=part < made, other=0.0)
    top = tl.max(peak, 0)
    weight = total * tl.exp2((peak - tl.where(top == NONE, 0.0, top)) * EXPONENT)
    whole = tl.sum(weight, 0)
    mixed = tl.load(
        parts + place[:, None] * D + depth[None, :],
        mask=(part < made)[:, None] & (depth < D)[None, :],
        other=0.0,
    )
    mixed = tl.sum(mixed * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + row * D + depth, mixed.to(out.dtype.element_ty), mask=depth < D)


@dataclass(frozen=True)
class Tiles:
    """How a form is cut; any choice is right, and none depends on the rows' lengths."""

    rows: int
    """Heads and nodes side by side in a program, a power of two from 16 on."""
    block: int
    """Slots that a program reads at a time, a power of two from 16 on."""
    parts: int
    """Parts that a row's slots are cut into."""
    warps: int


@dataclass(frozen=True)
class AttentionForm:
    """What is the same in every layer and every step."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    element: str
    """Triton's name of the query's type, and the result's."""
    cache: str
    """That of keys and values. A scale of theirs is the caller's: keys' times the query, values'
    times the result."""


MOST_ROWS = {"fp16": 64, "bf16": 64, "fp32": 16}
"""Rows of a tile; float32 is multiplied without tensor cores, in registers."""
MOST_SUMS, MOST_SCORES, BLOCK_BYTES = 8192, 2048, 1 << 14
"""A tile's rows times D, its rows times slots, and the bytes of keys in a block: no register
spills, and two blocks of keys and values fit in a multiprocessor's memory (99 KiB at least)."""
MOST_PARTS, PROCESSORS = 64, 132


def choose_tiles(
    form: AttentionForm, batch: int, nodes: int, slots: int, processors: int = PROCESSORS
) -> Tiles:
    """Tiles that keep `processors` multiprocessors busy, with two programs each.

    A tile holds all of a group's heads and nodes if it can. Slots are cut into no more parts than
    that takes, none shorter than two blocks where the cache is full.
    """
    all_rows = form.heads // form.kv_heads * nodes
    depth = power(form.dim, 16)
    rows = min(power(all_rows, 16), MOST_ROWS[form.element], max(16, MOST_SUMS // depth))
    key_bytes = depth * (4 if form.element == "fp32" else 2)
    block = max(16, min(MOST_SCORES // rows, BLOCK_BYTES // key_bytes))
    programs = batch * form.kv_heads * blocks(all_rows, rows)
    parts = min(blocks(2 * processors, programs), blocks(slots, 2 * block), MOST_PARTS)
    return Tiles(rows, block, parts, warps=8 if rows == 64 or depth > 128 else 4)


def attention_launches(
    form: AttentionForm, tiles: Tiles, batch: Size, nodes: Size, slots: Size
) -> tuple[Launch, ...]:
    """One launch, or two: the second reads the first one's `parts` and `sums`.

    These are `[B, h, T, parts, D]` and `[B, h, T, parts, 2]` float32; where there is one part,
    `parts` is the result itself in the query's type, and there are no `sums`. `bits` are taken as
    int32, twice as many: the same memory.
    """
    group = form.heads // form.kv_heads
    several = tiles.parts > 1
    sizes = {"T": nodes, "S": slots}
    common = {
        "EXPONENT": form.scale * math.log2(math.e),
        "D": form.dim,
        "DEPTH": power(form.dim, 16),
        "BLOCK": tiles.block,
        "PARTS": tiles.parts,
    }
    own = {"KV": form.kv_heads, "GROUP": group, "ROWS": tiles.rows}
    made = {"parts": "fp32", "sums": "fp32"} if several else {"parts": form.element}
    attend = launch(
        tree_attention_kernel,
        (blocks(nodes * group, tiles.rows), tiles.parts, batch * form.kv_heads),
        {"query": form.element, "keys": form.cache, "values": form.cache}
        | {"committed": "i64", "first": "i64", "bits": "i32"},
        sizes,
        made,
        common | own | ({} if several else {"sums": None}),
        tiles.warps,
    )
    if not several:
        return (attend,)
    combine = launch(
        combine_parts_kernel,
        (nodes * form.heads, batch, 1),
        made | {"first": "i64"},
        sizes,
        {"out": form.element},
        common | {"H": form.heads, "LANES": power(tiles.parts)},
    )
    return attend, combine


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    committed: Tensor,
    first: Tensor,
    bits: Tensor,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """`forerun.models.tree_attention.tree_attention`.

    Caches should be contiguous, and are both of the query's type (float32, float16, bfloat16) or of
    float8_e4m3fn. `tiles`: other than `choose_tiles` gives.
    """
    batch, heads, nodes, dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    form = AttentionForm(heads, kv_heads, dim, scale, TYPES[query.dtype], CACHE_TYPES[keys.dtype])
    tiles = tiles or choose_tiles(form, batch, nodes, slots)
    launches = attention_launches(form, tiles, batch, nodes, slots)
    tensors = {"query": query.contiguous(), "keys": keys, "values": values}
    halves = bits.contiguous().view(torch.int32)
    tensors |= {"committed": committed, "first": first, "bits": halves}
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if len(launches) == 1:
        launches[0].run(tensors | {"parts": out})
        return out
    shape = (batch, heads, nodes, tiles.parts)
    parts = {
        "parts": query.new_empty(*shape, dim, dtype=torch.float32),
        "sums": query.new_empty(*shape, 2, dtype=torch.float32),
    }
    launches[0].run(tensors | parts)
    launches[1].run({"first": first, "out": out, **parts})
    return out
