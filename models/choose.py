"""One token a node from the target's warped distribution, exactly, without sorting the vocabulary.

Warping order: temperature, top-k, renormalise, top-p. Both cuts are thresholds on the scaled logit,
found by bisection with compare-and-sum: nothing is truncated silently, however large the set is.
Ties are kept together (`forerun.models.ops.threshold` says what counts as tied).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.branch import branch
from forerun.models.ops import threshold


@dataclass(frozen=True)
class Sampling:
    """Each row's sampling parameters."""

    temperature: Tensor  # [B] float32; 0 is greedy
    top_k: Tensor  # [B] int64; 0 is off
    top_p: Tensor  # [B] float32; 1 is off


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor, branching: bool = True) -> Tensor:
    """Arg-max at temperature 0, else inverse-CDF sampling; uniforms are `[B, R]`.

    `[B, R, V]` -> `[B, R]`. A greedy call doesn't pay for sampling, which is a branch not
    taken, where the engine is `branching`.
    """
    logits = logits.to(torch.float32)
    greedy = logits.argmax(-1)
    tensors = (greedy, logits, sampling.temperature, sampling.top_k, sampling.top_p, uniform)
    if not branching:
        return _mixed(*tensors)
    return branch(sampling.temperature.amax(0) > 0, _mixed, _greedy, tensors)


def _greedy(greedy: Tensor, *_: Tensor) -> Tensor:
    return greedy.clone()  # torch.cond refuses an operand itself


def _mixed(
    greedy: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    weights = warp(logits, Sampling(temperature, top_k, top_p))
    return torch.where(temperature[:, None] > 0, inverse_cdf(weights, uniform), greedy)


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Unnormalised probabilities `[B, R, V]` after temperature, top-k and top-p; 0 where cut."""
    temperature = sampling.temperature[:, None, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    scaled = scaled - scaled.amax(-1, keepdim=True)
    weights = torch.exp(scaled)  # unnormalised: the maximum weighs 1
    ones = torch.ones_like(weights)
    top_k = sampling.top_k[:, None, None].to(weights.dtype).expand(-1, weights.shape[1], 1)
    weights = torch.where(scaled >= threshold(scaled, ones, top_k), weights, 0.0)
    wanted = sampling.top_p[:, None, None] * weights.sum(-1, keepdim=True)
    wanted = torch.where(sampling.top_p[:, None, None] < 1, wanted, 0.0)
    return torch.where(scaled >= threshold(scaled, weights, wanted), weights, 0.0)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds `uniform` times the total; its weight is > 0."""
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1]
    below = cumulative <= (uniform * total)[..., None]  # [B, R, V]
    return below.to(torch.int64).sum(-1).clamp(max=weights.shape[-1] - 1)
