"""The few operations that torch lacks and ONNX has, each with the eager meaning that defines it.

`forerun.compiler.export` translates them one to one: `tensor_scatter` to TensorScatter (opset 24),
`quantize_rows` to QuantizeLinear, `matmul_integer` to MatMulInteger, `matmul_transposed` to Gemm,
`threshold` to a Loop, those of 4 and 8 bit floating weights to QuantizeLinear and DequantizeLinear
(`forerun.compiler.low_bits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATION_ZERO = 128
"""Zero point of quantised activations: symmetric int8 as uint8, which ORT multiplies best."""


@torch.library.custom_op("forerun::tensor_scatter", mutates_args=())
def tensor_scatter(cache: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Write `rows` `[B, h, n, D]` into `cache` `[B, h, S, D]` from slot `index[b]` on.

    Engines alias the result with `cache`; the eager form copies.
    """
    return scatter_in_place(cache.clone(), rows, index)


@tensor_scatter.register_fake
def _(cache: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return torch.empty_like(cache)


def scatter_in_place(cache: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """`tensor_scatter` for eager loops: the same write without the copy."""
    slots = index[:, None] + torch.arange(rows.shape[2], device=rows.device)  # [B, n]
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    cache[batch, :, slots] = rows.transpose(1, 2)
    return cache


@torch.library.custom_op("forerun::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Round `x` `[n, K]` to uint8 with one scale a row (`scale` `[n, 1]`), halves to even."""
    scaled = (x / scale).nan_to_num(0.0)
    return (scaled.round() + ACTIVATION_ZERO).clamp(0, 255).to(torch.uint8)


@quantize_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


@torch.library.custom_op("forerun::matmul_integer", mutates_args=())
def matmul_integer(rows: Tensor, weight: Tensor) -> Tensor:
    """Exact int32 product of uint8 `rows` `[n, K]` (less their zero point) and int8 `[K, N]`."""
    return torch._int_mm((rows.to(torch.int16) - ACTIVATION_ZERO).to(torch.int8), weight)


@matmul_integer.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]), dtype=torch.int32)


@torch.library.custom_op("forerun::matmul_transposed", mutates_args=())
def matmul_transposed(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` `[n, K]` times the transpose of `weight` `[N, K]`: a tied head, held once."""
    return rows @ weight.T


@matmul_transposed.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


SPAN = 104.0
"""exp(-104) is zero in float32: what lies further below the maximum has no probability at all."""
HALVINGS = 30
"""Bisection steps; values within `SPAN / 2**HALVINGS` (1e-7) of a threshold are tied with it."""


@torch.library.custom_op("forerun::threshold", mutates_args=())
def threshold(values: Tensor, measure: Tensor, wanted: Tensor) -> Tensor:
    """The highest cut `[B, R, 1]` whose upper side still keeps `wanted` of `measure`.

    `values` `[B, R, V]` are at most 0 and reach 0; `-inf` where `wanted` `[B, R, 1]` is 0. Found by
    bisection, whose lower end always keeps enough.
    """
    low = torch.full_like(wanted, -SPAN)
    for halving in range(1, HALVINGS + 1):
        middle = low + SPAN / 2**halving
        kept = torch.where(values >= middle, measure, 0.0).sum(-1, keepdim=True)
        low = torch.where(kept >= wanted, middle, low)
    return torch.where(wanted > 0, low, float("-inf"))


@threshold.register_fake
def _(values: Tensor, measure: Tensor, wanted: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], 1))


@torch.library.custom_op("forerun::dequantize_blocks", mutates_args=())
def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """int4 `codes` `[K, N]` (held as int8) -> weights, one scale a block (`scale` `[K / b, N]`)."""
    return codes.to(scale.dtype) * scale.repeat_interleave(len(codes) // len(scale), dim=0)


@dequantize_blocks.register_fake
def _(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=scale.dtype)


FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


@torch.library.custom_op("forerun::dequantize_float8", mutates_args=())
def dequantize_float8(codes: Tensor, scale: Tensor) -> Tensor:
    """FLOAT8 `codes` `[K, N]` (their bits as uint8) -> weights, one scale a column (`[N]`)."""
    return codes.view(FLOAT8).to(scale.dtype) * scale


@dequantize_float8.register_fake
def _(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=scale.dtype)


@torch.library.custom_op("forerun::round_float8", mutates_args=())
def round_float8(x: Tensor, scale: Tensor) -> Tensor:
    """`x` rounded to FLOAT8 numbers times `scale` `[]`; what lies beyond them saturates."""
    return (x / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).to(x.dtype) * scale


@round_float8.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)
