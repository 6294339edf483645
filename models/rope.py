"""Rotary position embedding: inverse frequencies for every way of stretching a model's range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, max_positions: int, capacity: int
) -> tuple[Tensor, float]:
    """Inverse frequencies `[dim / 2]` (float32) and the factor multiplied into cos and sin.

    `max_positions` is the checkpoint's own range, `capacity` the number of positions that the
    engine will hold: the kinds whose frequencies depend on the length (longrope, dynamic) choose
    by it once, because a graph has one table.

    Raises ForerunError for an unknown kind, an odd or empty dimension, a scaling parameter that
    is missing or of no use, and for `dynamic` when `capacity` exceeds the original range.
    """
    if rope.kind not in _KINDS:
        raise ForerunError(
            f"unknown rotary scaling {rope.kind!r} (known: {', '.join(sorted(_KINDS))}): "
            "correct rope_type in the checkpoint's configuration"
        )
    if rope.dim <= 0 or rope.dim % 2:
        raise ForerunError(
            f"rotary embedding turns pairs, but {rope.dim} dimensions of a head are rotated: "
            "correct head_dim or partial_rotary_factor in the checkpoint's configuration"
        )
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise ForerunError(
            f"rotary base {rope.theta} is not a positive number: "
            "correct rope_theta in the checkpoint's configuration"
        )
    return _KINDS[rope.kind](rope, max_positions, capacity)


def rope_tables(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. capacity - 1, each `[capacity, dim / 2]` float32.

    The attention scaling factor is multiplied in. Raises as `inverse_frequencies`.
    """
    frequencies, scale = inverse_frequencies(rope, max_positions, capacity)
    angles = torch.outer(torch.arange(capacity, dtype=torch.float32), frequencies)
    return angles.cos() * scale, angles.sin() * scale


def _wavelengths(rope: RopeConfig) -> Tensor:
    """theta^(2i / dim) for i in 0 .. dim / 2 - 1: the inverse of the plain frequencies."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    wavelengths: Tensor = rope.theta**exponents
    return wavelengths


def _default(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """RoFormer (Su et al. 2021), section 3.2.2."""
    return 1.0 / _wavelengths(rope), 1.0


def _linear(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023), section 2.3: positions divided by the factor."""
    return 1.0 / _wavelengths(rope) / _positive(rope, "factor"), 1.0


def _dynamic(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """Dynamic NTK scaling (YaRN, Peng et al. 2023, section 3.3).

    It changes every frequency as the text grows past the original range, so keys already rotated
    would be wrong: no static table can follow it there, and inside the range it is the default.
    """
    original = int(_positive(rope, "original_max_position_embeddings", max_positions))
    if capacity > original:
        raise ForerunError(
            f"dynamic rotary scaling beyond its original range of {original} positions changes "
            f"with the length of the text, but the capacity is {capacity}: "
            f"compile with a capacity of at most {original}"
        )
    return _default(rope, max_positions, capacity)


def _llama3(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """Scaling by wavelength, of Llama 3.1 (its reference code; The Llama 3 Herd gives no formula).

    Long wavelengths are interpolated, short ones kept, those between blended linearly.
    """
    factor = _positive(rope, "factor")
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    original = _positive(rope, "original_max_position_embeddings", max_positions)
    if low == high:
        raise ForerunError(
            f"rotary scaling low_freq_factor equals high_freq_factor ({low}): "
            "correct them in the checkpoint's configuration"
        )
    plain = 1.0 / _wavelengths(rope)
    turns = original * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain, 1.0


def _yarn(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): NTK-by-parts (section 3.2) and attention scaling (section 3.4).

    mscale and mscale_all_dim are DeepSeek-V2's two temperatures, of which the ratio counts.
    """
    original = _positive(rope, "original_max_position_embeddings", max_positions)
    factor = _positive(rope, "factor", max_positions / original)
    fast, slow = _positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0)
    if rope.theta == 1.0:
        raise ForerunError("yarn needs a rotary base other than 1: correct rope_theta")

    def dimension(rotations: float) -> float:
        """The dimension that makes so many rotations over the original range."""
        span = math.log(original / (rotations * 2 * math.pi))
        return rope.dim * span / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(rope)
    # Blended as (1 - (1 - ramp)), the order in which the reference rounds.
    extrapolated = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - extrapolated)
    return frequencies + 1.0 / wavelengths * extrapolated, _yarn_attention(rope, factor)


def _yarn_attention(rope: RopeConfig, factor: float) -> float:
    """The factor on cos and sin: stated, or DeepSeek-V2's ratio, or YaRN's section 3.4."""
    if rope.scaling.get("attention_factor") is not None:
        return _positive(rope, "attention_factor")

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.scaling.get("mscale") and rope.scaling.get("mscale_all_dim"):
        above = temperature(_positive(rope, "mscale"))
        return above / temperature(_positive(rope, "mscale_all_dim"))
    return temperature(1.0)


def _longrope(rope: RopeConfig, max_positions: int, capacity: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024), section 3.1: a searched factor for every frequency.

    The reference switches from the short to the long factors when the text outgrows the original
    range; a static table takes the short ones when the capacity never does, else the long ones.
    """
    original = _positive(rope, "original_max_position_embeddings", max_positions)
    name = "short_factor" if capacity <= original else "long_factor"
    factors = _factors(rope, name)
    scale = _positive(rope, "factor", max_positions / original)
    if rope.scaling.get("attention_factor") is not None:
        attention = _positive(rope, "attention_factor")
    elif scale <= 1.0:
        attention = 1.0
    else:
        attention = math.sqrt(1 + math.log(scale) / math.log(original))
    return 1.0 / (factors * _wavelengths(rope)), attention


_KINDS: dict[str, Callable[[RopeConfig, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _positive(rope: RopeConfig, name: str, default: float | None = None) -> float:
    """The scaling parameter `name`, or `default` where it is absent or null."""
    value = rope.scaling.get(name)
    if value is None:
        value = default
    if value is None:
        raise ForerunError(
            f"{rope.kind} rotary scaling lacks {name!r}: "
            "add it to rope_scaling in the checkpoint's configuration"
        )
    if not _is_positive(value):
        raise ForerunError(
            f"{rope.kind} rotary scaling {name!r} must be a positive number, found {value!r}: "
            "correct it in the checkpoint's configuration"
        )
    return float(value)


def _factors(rope: RopeConfig, name: str) -> Tensor:
    """The list `name` of one factor a frequency, `[dim / 2]` float32."""
    values = rope.scaling.get(name)
    if (
        not isinstance(values, list | tuple)
        or len(values) != rope.dim // 2
        or not all(map(_is_positive, values))
    ):
        raise ForerunError(
            f"{rope.kind} rotary scaling {name!r} must list {rope.dim // 2} positive numbers: "
            "correct it in the checkpoint's configuration"
        )
    return torch.tensor(values, dtype=torch.float32)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
