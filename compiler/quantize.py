"""Weight rounding for the int8 matmul of the runtime.

The kernel computes y = (round(x / sx) @ Q) * sx * s with one scale sx per token and one scale s
per output channel. AVX2 without VNNI adds the uint8 * int8 products of two neighbouring input
channels in 16 bits, where 255 * 128 is the largest sum that cannot saturate. So the codes of such
a pair add up to 128 at most where their signs agree; one alone may use all 8 bits. Steps are a
third finer than with 7 bits for every weight, since the largest weights seldom are neighbours.

With calibration data the columns are rounded one after another and each error is pushed into the
columns that follow (GPTQ, arXiv:2210.17323); without, each weight goes to its nearest level.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127  # codes lie in [-LEVELS, LEVELS]
PAIR = 128  # codes of like sign in the channels 2i and 2i + 1 add up to at most this
DAMPING = 0.3  # share of each channel's energy treated as independent of all other channels
BLOCK = 64  # columns whose errors are pushed on together
OUTPUTS = 4096  # output channels rounded together, so that the working set stays in cache


def quantize_weight(weight: Tensor, hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Linear weight [N, K] to codes int8 [K, N] and scales float32 [N].

    weight[n, k] ~ codes[k, n] * scale[n]. `hessian` [K, K] is X^T X of the inputs X [T, K] that
    the linear reads, as `input_hessian` makes it.
    """
    weight = weight.detach().float()
    scale = channel_scale(weight)
    targets = weight.T / scale
    if hessian is None:
        codes = targets.round()  # fits: see channel_scale
    else:
        feedback, order = error_feedback(hessian.float())
        parts = torch.split(targets, OUTPUTS, dim=1)
        codes = torch.cat([round_in_order(part, feedback, order) for part in parts], dim=1)
    return codes.to(torch.int8).contiguous(), scale


def input_hessian(inputs: Tensor) -> Tensor:
    """X^T X [K, K] of the inputs [T, K] of a linear, every token scaled to unit length.

    Without the scaling the attention sink, one token with activations a hundred times larger,
    decides alone where errors go, and all other tokens pay. Sums over batches are Hessians too.
    """
    rows = torch.nn.functional.normalize(inputs.float(), dim=-1)
    return rows.T @ rows


def channel_scale(weight: Tensor) -> Tensor:
    """The scale [N] that makes the largest pair of each row of [N, K] just fit.

    Pairs add up to LEVELS, one less than allowed: that is what rounding both may add. Narrower
    ranges, searched for the least squared error, gained nothing on rotated weights.
    """
    tiny = torch.finfo(torch.float32).tiny
    even = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2))
    pairs = even.view(len(weight), -1, 2)
    sums = torch.maximum(pairs.clamp(min=0).sum(-1), pairs.clamp(max=0).sum(-1).neg())  # [N, K/2]
    return (sums.amax(dim=1) / LEVELS).clamp_min(tiny)


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


def round_in_order(targets: Tensor, feedback: Tensor, order: Tensor) -> Tensor:
    """Codes of targets [K, N], rounded in the given order [K], each error pushed on.

    `feedback` is in that order too. A code leaves to its neighbour what the pair has left.
    """
    size = len(targets)
    codes = targets.new_zeros(size + size % 2, targets.shape[1])
    left = targets[order]
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        block = left[start:end]
        errors = torch.empty_like(block)
        for row, channel in enumerate(order[start:end].tolist()):
            neighbour = codes[channel ^ 1]
            high = (PAIR - neighbour).clamp_(max=LEVELS)
            low = (-PAIR - neighbour).clamp_(min=-LEVELS)
            torch.clamp(block[row].round(), low, high, out=codes[channel])
            torch.sub(block[row], codes[channel], out=errors[row])
            ahead = feedback[start + row, start + row + 1 : end]
            block[row + 1 :].addr_(ahead, errors[row], alpha=-1)
        left[end:].addmm_(feedback[start:end, end:].T, errors, alpha=-1)
    return codes[:size]
