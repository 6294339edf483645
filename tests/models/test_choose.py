"""Sampling against a float64 reference that sorts, and by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.models.choose import Sampling, argmax, choose, inverse_cdf, warp

CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.5},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 2.0, "top_p": 0.999},
]


def sampling(temperature=0.0, top_k=0, top_p=1.0, rows=1) -> Sampling:
    return Sampling(
        torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
    )


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """Temperature, top-k, renormalise, top-p, renormalise, by sorting; no ties expected."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [7, 1000, 50_000])
def test_warped_distribution(case, size):
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    weights = warp(torch.from_numpy(logits)[None, None], sampling(**case))[0, 0].double().numpy()
    expected = reference(logits, **case)
    np.testing.assert_array_equal(weights > 0, expected > 1e-45)
    np.testing.assert_allclose(weights / weights.sum(), expected, atol=1e-6)


@pytest.mark.parametrize("size", [7, 128, 1000, 1024])
def test_arg_max_is_the_first_of_the_largest(size):
    logits = np.random.default_rng(size).integers(-5, 5, (2, 3, size)).astype(np.float32)
    logits[0, 1] = -np.inf
    logits[1, 2] = 0
    np.testing.assert_array_equal(argmax(torch.from_numpy(logits)).numpy(), logits.argmax(-1))


def test_ties_at_the_cut_stay_together():
    logits = torch.tensor([[[1.0, 3.0, 3.0, 3.0, 0.0]]])
    kept = warp(logits, sampling(1.0, top_k=2))[0, 0] > 0
    assert kept.tolist() == [False, True, True, True, False]
    kept = warp(logits, sampling(1.0, top_p=0.4))[0, 0] > 0
    assert kept.tolist() == [False, True, True, True, False]


def test_masked_logits_have_no_probability():
    logits = torch.full((1, 1, 9), float("-inf"))
    logits[0, 0, 4] = 2.0
    for case in CASES:
        for uniform in (0.0, 0.5, 1 - 2**-24):
            chosen = choose(logits, sampling(**case), torch.tensor([[uniform]]))
            assert chosen.item() == 4


def test_an_id_without_probability_is_never_drawn():
    weights = torch.tensor([[[0.0, 0.5, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0]]])
    grid = torch.linspace(0, 1 - 2**-24, 1001)
    drawn = inverse_cdf(weights.expand(1, 1001, 8), grid[None])[0]
    assert set(drawn.tolist()) == {1, 4, 5}
    assert inverse_cdf(weights, torch.tensor([[0.0]])).item() == 1


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case):
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, 40).astype(np.float32)
    draws = 20_000
    uniforms = torch.from_numpy(generator.random((1, draws), np.float32))
    rows = torch.from_numpy(logits)[None, None].expand(1, draws, 40)
    counts = np.bincount(choose(rows, sampling(**case), uniforms)[0].numpy(), minlength=40)
    expected = reference(logits, **case) * draws
    assert not counts[expected == 0].any()
    often = expected >= 5
    if often.sum() > 1:
        rest = np.array([counts[~often].sum()]), np.array([expected[~often].sum()])
        found, wanted = counts[often], expected[often]
        if rest[1] > 0:
            found, wanted = np.append(found, rest[0]), np.append(wanted, rest[1])
        assert stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-4


def test_the_chi_square_rejects_a_reused_uniform():
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    rows = torch.from_numpy(logits)[None, None].expand(1, 2000, 40)
    reused = torch.full((1, 2000), 0.37)
    counts = np.bincount(choose(rows, sampling(1.0), reused)[0].numpy(), minlength=40)
    expected = reference(logits) * 2000
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue < 1e-12


def test_rows_mix_greedy_and_sampled():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (2, 3, 50)).astype(np.float32))
    mixed = Sampling(torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    uniforms = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    chosen = choose(logits, mixed, uniforms)
    assert chosen[0].tolist() == logits[0].argmax(-1).tolist()
    alone = choose(logits[1:], sampling(1.0), uniforms[1:])
    assert chosen[1].tolist() == alone[0].tolist()


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.from_numpy(
        np.random.default_rng(1).normal(0, 2, (1, 8, 5000)).astype(np.float32)
    )
    case = sampling(0.9, top_k=300, top_p=0.95)
    together = warp(logits, case)
    for row in range(8):
        assert torch.equal(warp(logits[:, row : row + 1], case)[0, 0], together[0, row])
