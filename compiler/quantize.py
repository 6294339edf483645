"""Weight rounding for the int8 matmul of the runtime.

The kernel computes y = (round(x / sx) @ Q) * sx * s with one scale sx per token and one scale s
per output channel. Weights keep 7 bits: AVX2 without VNNI adds pairs of uint8 * int8 products in
16 bits, and 2 * 255 * 64 is the largest such sum that cannot saturate.

With calibration data the columns are rounded one after another and each error is pushed into the
columns that follow (GPTQ, arXiv:2210.17323); without, each weight goes to its nearest level.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 64  # codes lie in [-LEVELS, LEVELS]
DAMPING = 0.3  # share of each channel's energy treated as independent of all other channels
BLOCK = 64  # columns whose errors are pushed on together
OUTPUTS = 4096  # output channels rounded together, so that the working set stays in cache


def quantize_weight(weight: Tensor, hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Linear weight [N, K] to codes int8 [K, N] in [-64, 64] and scales float32 [N].

    weight[n, k] ~ codes[k, n] * scale[n]. `hessian` [K, K] is X^T X of the inputs X [T, K] that
    the linear reads, as `input_hessian` makes it.
    """
    weight = weight.detach().float()
    scale = channel_scale(weight)
    targets = weight.T / scale
    if hessian is None:
        codes = round_to_levels(targets)
    else:
        feedback, order = error_feedback(hessian.float())
        parts = torch.split(targets[order], OUTPUTS, dim=1)
        codes = torch.empty_like(targets)
        codes[order] = torch.cat([round_in_order(part, feedback) for part in parts], dim=1)
    return codes.to(torch.int8).contiguous(), scale


def input_hessian(inputs: Tensor) -> Tensor:
    """X^T X [K, K] of the inputs [T, K] of a linear, every token scaled to unit length.

    Without the scaling the attention sink, one token with activations a hundred times larger,
    decides alone where errors go, and all other tokens pay. Sums over batches are Hessians too.
    """
    rows = torch.nn.functional.normalize(inputs.float(), dim=-1)
    return rows.T @ rows


def round_to_levels(values: Tensor) -> Tensor:
    """The nearest codes, still in the dtype of the values."""
    return values.round().clamp_(-LEVELS, LEVELS)


def channel_scale(weight: Tensor) -> Tensor:
    """The scale [N] that maps the largest weight of each row of [N, K] to the last level.

    Narrower ranges, searched for the least squared error, gained nothing on rotated weights.
    """
    tiny = torch.finfo(torch.float32).tiny
    return (weight.abs().amax(dim=1) / LEVELS).clamp_min(tiny)


def error_feedback(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Upper triangular feedback [K, K] with unit diagonal, and the order [K] of the columns.

    Row j says how the error of column j, once rounded, is best made up for by the later columns.
    Columns of high energy come first, while many columns are left to correct them. The algebra is
    done on correlations: scaling a channel then changes nothing, and float32 is precise enough.
    """
    energy = hessian.diagonal()
    # A channel that was never active has no say: its correlations are zero, its damping is not.
    energy = energy.clamp_min(energy.mean() * 1e-9 + torch.finfo(torch.float32).tiny)
    order = energy.argsort(descending=True)
    norm = energy.sqrt()[order]
    correlation = hessian[order][:, order] / norm[:, None] / norm
    correlation.diagonal().fill_(1.0 + DAMPING)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(correlation))
    upper = torch.linalg.cholesky(inverse, upper=True)
    return upper / upper.diagonal()[:, None] * norm[:, None] / norm, order


def round_in_order(targets: Tensor, feedback: Tensor) -> Tensor:
    """Round the rows of targets [K, N] from the first to the last, pushing each error on."""
    targets = targets.clone()
    size = len(targets)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        block = targets[start:end]
        errors = torch.empty_like(block)
        for row in range(end - start):
            codes = round_to_levels(block[row])
            torch.sub(block[row], codes, out=errors[row])
            block[row] = codes
            ahead = feedback[start + row, start + row + 1 : end]
            block[row + 1 :].addr_(ahead, errors[row], alpha=-1)
        targets[end:].addmm_(feedback[start:end, end:].T, errors, alpha=-1)
    return targets
