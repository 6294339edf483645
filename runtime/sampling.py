"""Sampling parameters of a request, and the table of uniforms that makes them repeatable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen: warped by temperature, then top-k, then top-p; drawn with `seed`.

    Temperature 0 takes the likeliest token. `top_k` 0 and `top_p` 1 switch that warping off.
    Raises ForerunError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Written so that NaN, which compares false with everything, fails too.
        if not 0.0 <= self.temperature < float("inf"):
            raise ForerunError(f"temperature is {self.temperature}: use 0 or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ForerunError(f"top_p is {self.top_p}: use a number above 0, up to 1 (1 = off)")
        if self.top_k < 0:
            raise ForerunError(f"top_k is {self.top_k}: use 0 (off) or a positive number")
        if not 0 <= self.seed < 1 << 64:
            raise ForerunError(f"seed is {self.seed}: use a number from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no randomness."""
        return self.temperature == 0.0


def uniforms(seed: int, positions: int, table: int = 0) -> NDArray[np.float32]:
    """`[positions]` float32 in [0, 1), one for each absolute position: the request's randomness.

    A longer table starts with the shorter one, so a request may grow without changing its draws.
    Another `table` of the same seed is independent of it.
    """
    if positions < 0:
        raise ForerunError(f"a table of {positions} uniforms: use 0 or more positions")
    raw = np.random.Philox(key=seed + (table << 64)).random_raw(positions)
    # 24 bits are what a float32 below 1 holds exactly: no value is rounded up to 1.
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def uniform_tables(seed: int, positions: int, tables: int) -> NDArray[np.float32]:
    """`[tables, positions]`: as many tables as a step reads."""
    return np.stack([uniforms(seed, positions, table) for table in range(tables)])
