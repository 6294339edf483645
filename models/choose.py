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
    known: bool | None = None
    """Whether any row samples, where the host knows: then no tensor has to be read to branch."""

    def any(self) -> Tensor:
        """Whether any row samples: one bool."""
        if self.known is not None:
            return torch.tensor(self.known)
        return self.temperature.amax(0) > 0


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor, branching: bool = True) -> Tensor:
    """Arg-max at temperature 0, else inverse-CDF sampling; uniforms are `[B, R]`.

    `[B, R, V]` -> `[B, R]`. A greedy call doesn't pay for sampling, which is a branch not
    taken, where the engine is `branching`; elsewhere it is one operation that may be a kernel.
    """
    params = (sampling.temperature, sampling.top_k, sampling.top_p)
    if not branching:
        chosen: Tensor = choose_tokens(logits, *params, uniform)
        return chosen
    logits = logits.to(torch.float32)
    tensors = (argmax(logits), logits, *params, uniform)
    return branch(sampling.any(), _mixed, _greedy, tensors)


def choice(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    """`choose` without a branch."""
    logits = logits.to(torch.float32)
    return _mixed(argmax(logits), logits, temperature, top_k, top_p, uniform)


choose_tokens = torch.library.custom_op("forerun::choose_tokens", choice, mutates_args=())
"""`choice` as one operation."""


@choose_tokens.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)


BLOCK = 128
"""Most vocabularies are a multiple of it."""


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest, `[B, R, V]` -> `[B, R]`: of the blocks' maxima, then in its block.

    ONNX Runtime's ArgMax looks at one number at a time, its ReduceMax at a vector: 0.29 ms become
    less than 0.1 for 6 rows of 49,152.
    """
    vocabulary = logits.shape[-1]
    if vocabulary % BLOCK:
        return logits.argmax(-1)
    blocks = logits.reshape(*logits.shape[:-1], vocabulary // BLOCK, BLOCK)
    block = blocks.amax(-1).argmax(-1, keepdim=True)  # [B, R, 1]
    inside = blocks.gather(2, block[..., None].expand(-1, -1, 1, BLOCK)).argmax(-1)  # [B, R, 1]
    return (block * BLOCK + inside)[..., 0]


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


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits `[B, R, V]` divided by each row's temperature, less their maximum."""
    temperature = temperature[:, None, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    return scaled - scaled.amax(-1, keepdim=True)


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Unnormalised probabilities `[B, R, V]` after temperature, top-k and top-p; 0 where cut."""
    scaled = temper(logits, sampling.temperature)
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
