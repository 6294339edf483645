"""Scaling of down_proj's input channels, the one input that no rotation can reach for free.

SmoothQuant (arXiv:2211.10438) moves the spread of activation channels into the weights that read
them: channel k of the input is divided by s[k] and column k of the weight multiplied by it. Here
the division is folded into up_proj, in which silu(gate) * up is linear, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from forerun.compiler.rotate import ModelShape

STRENGTH = 0.5  # exponent of the channel magnitudes; 1 would move all of the spread
FLOOR = 1e-2  # least magnitude as a share of the median: silent channels stay representable


def smooth(
    weights: Mapping[str, Tensor], config: ModelShape, hessians: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """New weights of the same function, and the Hessians [K, K] of their inputs.

    `hessians` are those of `forerun.compiler.quantize.input_hessian`, by weight name. Only the
    ones of down_proj are read and rescaled; their diagonals hold the energy of each channel.
    """
    weights, hessians = dict(weights), dict(hessians)
    for layer in range(config.num_layers):
        mlp = f"model.layers.{layer}.mlp."
        down, up = mlp + "down_proj.weight", mlp + "up_proj.weight"
        scale = channel_scales(hessians[down])
        weights[down] = weights[down] * scale
        weights[up] = weights[up] / scale[:, None]
        bias = mlp + "up_proj.bias"
        if bias in weights:
            weights[bias] = weights[bias] / scale
        hessians[down] = hessians[down] / scale / scale[:, None]
    return weights, hessians


def channel_scales(hessian: Tensor) -> Tensor:
    """The divisors [K] of the input channels; all ones if no channel was ever active."""
    magnitude = hessian.diagonal().sqrt()
    floor = magnitude.median() * FLOOR
    if floor == 0:
        floor = magnitude.mean() * FLOOR
    if floor == 0:
        return magnitude + 1.0
    scale: Tensor = magnitude.clamp_min(floor) ** STRENGTH
    return scale / scale.log().mean().exp()  # a common factor would change nothing
