"""Weights of 4 bits in blocks, and of 8 bits in floating point, as GPUs multiply them.

Scales are rounded to float16 first, as the step holds them, and codes found for those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.compiler.quantize import error_feedback
from forerun.models.ops import FLOAT8, FLOAT8_MAX

BLOCK_SIZES = (128, 64)
"""Input channels that share a scale, the widest that fits."""
INT4_MAX = 7
"""Codes lie in [-8, 7]; a scale makes the largest weight of its block fit either way."""
SHRINK = torch.linspace(0.6, 1.0, 21)
"""Ranges tried for a block: cutting the largest weight off may cost less than wide steps."""


def block_size(channels: int) -> int | None:
    """The block for so many input channels; None where no offered one divides them."""
    return next((size for size in BLOCK_SIZES if channels % size == 0), None)


def quantize_blocks(weight: Tensor, size: int, hessian: Tensor | None) -> tuple[Tensor, Tensor]:
    """Linear weight `[N, K]` -> codes int8 `[K, N]` and scales `[K / size, N]`.

    weight[n, k] ~ codes[k, n] * scale[k // size, n]. With `hessian` `[K, K]` (`input_hessian`)
    each channel's error is pushed into those that follow (GPTQ), else rounding is to the nearest.
    """
    targets = weight.detach().float().T  # [K, N]
    scale = _block_scale(targets, size)  # [K / size, N]
    steps = scale.repeat_interleave(size, dim=0)  # [K, N]
    if hessian is None:
        return _codes(targets, steps).to(torch.int8), scale
    feedback, order = error_feedback(hessian.float())
    left, steps = targets[order], steps[order]
    codes = torch.zeros_like(left)
    for start in range(0, len(left), size):
        end = min(start + size, len(left))
        errors = torch.empty_like(left[start:end])
        for row in range(start, end):
            codes[row] = _codes(left[row], steps[row])
            error = left[row] - codes[row] * steps[row]
            left[row + 1 : end].addr_(feedback[row, row + 1 : end], error, alpha=-1)
            errors[row - start] = error
        left[end:].addmm_(feedback[start:end, end:].T, errors, alpha=-1)
    found = torch.zeros_like(codes)
    found[order] = codes
    return found.to(torch.int8), scale


def _block_scale(targets: Tensor, size: int) -> Tensor:
    """`[K, N]` -> `[K / size, N]`: the range of each block that rounds it with the least error."""
    blocks = targets.view(-1, size, targets.shape[1])
    largest = blocks.abs().amax(dim=1) / INT4_MAX
    best, least = _half(largest), torch.full_like(largest, torch.inf)
    for share in SHRINK.tolist():
        scale = _half(largest * share)
        rounded = _codes(blocks, scale[:, None]) * scale[:, None]
        error = (rounded - blocks).square().sum(1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _codes(targets: Tensor, steps: Tensor) -> Tensor:
    return (targets / steps).round_().clamp_(-INT4_MAX - 1, INT4_MAX)


def quantize_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight `[K, N]` -> the bits of its codes uint8 `[K, N]`, and scales `[N]`."""
    weight = weight.detach().float()
    scale = float8_scale(weight.abs().amax(dim=0))
    codes = (weight / scale).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return codes.view(torch.uint8), scale


def float8_scale(largest: Tensor) -> Tensor:
    """The scale at which `largest` (of any shape) is the largest number there is."""
    return _half(largest / FLOAT8_MAX)


def _half(scale: Tensor) -> Tensor:
    """The nearest float16 number above zero, as float32."""
    return scale.half().clamp_min(torch.finfo(torch.float16).smallest_normal).float()
