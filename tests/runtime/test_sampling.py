"""Sampling parameters are checked, and the table of uniforms is repeatable and uniform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from forerun.errors import ForerunError
from forerun.runtime.sampling import SamplingParams, uniforms

SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": -1.0},
        {"top_p": math.nan},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ForerunError, match=f"^{next(iter(wrong))} is "):
        SamplingParams(**wrong)


def test_the_ends_of_the_ranges_are_valid() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(1e-6, 10**9, 1e-9, 2**64 - 1).greedy


@given(seed=SEEDS, shorter=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_table_starts_with_the_shorter_one(seed: int, shorter: int, more: int) -> None:
    table = uniforms(seed, shorter + more)
    assert table.dtype == np.float32 and table.shape == (shorter + more,)
    assert np.array_equal(table[:shorter], uniforms(seed, shorter))
    assert ((table >= 0) & (table < 1)).all()


def test_no_draw_is_rounded_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Highest:
        def __init__(self, key: int) -> None:
            pass

        def random_raw(self, size: int) -> Any:
            return np.full(size, 2**64 - 1, np.uint64)

    monkeypatch.setattr(np.random, "Philox", Highest)
    assert uniforms(0, 3).max() == np.nextafter(np.float32(1), np.float32(0))


def philox(seed: int, block: int) -> list[int]:
    """Four 64-bit words of Philox4x64-10 (Salmon et al., 2011) for a counter, in plain integers."""
    mask = 2**64 - 1
    words, keys = [block, 0, 0, 0], [seed, 0]
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        first, third = (high >> 64) ^ words[1] ^ keys[0], (low >> 64) ^ words[3] ^ keys[1]
        words = [first, high & mask, third, low & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words


@given(seed=SEEDS)
def test_a_seed_means_the_same_on_every_machine(seed: int) -> None:
    words = [word for block in (1, 2) for word in philox(seed, block)]
    expected = np.array([word >> 40 for word in words], np.float64) / 2**24
    assert np.array_equal(uniforms(seed, 8), expected)


def test_uniform_within_a_seed_and_across_seeds() -> None:
    within = uniforms(0, 200_000)
    across = np.array([uniforms(seed, 8)[7] for seed in range(20_000)])
    for table in (within, across):
        counts = np.histogram(table, bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-4
    # Neighbours in a table, and the same position of neighbouring seeds, are independent.
    for one, two in [(within[:-1], within[1:]), (across[:-1], across[1:])]:
        pairs = np.histogram2d(one, two, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ForerunError, match="positions"):
        uniforms(0, -1)
