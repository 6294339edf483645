"""The kernel that chooses tokens, interpreted: against torch and against a CDF in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.compiler.kernel_choose import BLOCK, choose
from forerun.models.choose import Sampling
from forerun.models.choose import choose as choose_in_torch

BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1."""
SLACK = 5e-6
"""Of a cumulative probability that is summed in float32."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kept(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities in float64 by sorting; what ties with the last one that is kept stays."""
    p = np.exp(scaled)
    if 0 < top_k < len(p):
        p[scaled < np.sort(scaled)[-top_k] - 1e-7] = 0
    p /= p.sum()
    if 0 < top_p < 1:
        falling = np.sort(p)[::-1]
        last = falling[min(np.searchsorted(np.cumsum(falling), top_p), len(p) - 1)]
        p[p < last * (1 - 2e-7)] = 0
        p /= p.sum()
    return p


def possible(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: float
) -> set[int]:
    """The tokens that a float32 sum may end at; nearly always one."""
    x = logits.to(torch.float32).numpy()
    if temperature <= 0:
        return {int(x.argmax())}
    scaled = x / np.float32(temperature)
    scaled = (scaled - scaled.max()).astype(np.float64)
    tokens: set[int] = set()
    for share in (top_p - SLACK, top_p + SLACK) if top_p < 1 else (1.0,):
        p = kept(scaled, top_k, max(share, 1e-12))
        cdf = np.cumsum(p)
        inside = (p > 1e-45) & (cdf - p - SLACK <= uniform) & (uniform <= cdf + SLACK)
        tokens |= set(np.flatnonzero(inside).tolist())
    return tokens


def check(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor, found: torch.Tensor):
    """Every token is possible, and torch's where only one is."""
    expected = choose_in_torch(logits, sampling, uniform)
    clear = 0
    for row in range(logits.shape[0]):
        parameters = (
            sampling.temperature[row].item(),
            sampling.top_k[row].item(),
            sampling.top_p[row].item(),
        )
        for node in range(logits.shape[1]):
            tokens = possible(logits[row, node], *parameters, uniform[row, node].item())
            assert found[row, node].item() in tokens, (row, node, parameters)
            if len(tokens) == 1:
                clear += 1
                assert found[row, node] == expected[row, node], (row, node, parameters)
    return clear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 31, 1000, BLOCK + 5])
def test_rows_with_parameters_of_their_own(interpreted, dtype, size):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(6, 2, size, generator=generator) * 3).to(dtype)
    sampling = Sampling(
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1e-3, 100.0]),
        torch.tensor([3, 0, 5, 40, 0, size + 7]),
        torch.tensor([0.5, 1.0, 1.0, 0.8, 0.9, 1e-6]),
    )
    uniform = torch.rand(6, 2, generator=generator)
    found = interpreted(choose, logits, sampling, uniform)
    assert found.dtype == torch.int64
    assert check(logits, sampling, uniform, found) >= 10


@st.composite
def rows(draw):
    """(logits, sampling, uniforms) of few values, so that most of them tie."""
    batch, nodes, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    value = st.sampled_from([-np.inf, -1e4, -3.0, -0.5, 0.0, 0.25, 0.5, 2.0, 60.0])
    count = batch * nodes * size
    logits = torch.tensor(draw(st.lists(value, min_size=count, max_size=count)))
    logits = logits.reshape(batch, nodes, size)
    logits[..., draw(st.integers(0, size - 1))] = draw(st.sampled_from([-3.0, 0.0, 2.0]))

    def each(*values):
        return draw(st.lists(st.sampled_from(values), min_size=batch, max_size=batch))

    uniforms = [
        draw(st.sampled_from([0.0, BELOW_ONE, 0.5]) | st.floats(0, BELOW_ONE, width=32))
        for _ in range(batch * nodes)
    ]
    return (
        logits.to(torch.float32).to(draw(st.sampled_from(DTYPES))),
        Sampling(
            torch.tensor(each(0.0, 1e-3, 0.6, 1.0, 100.0)),
            torch.tensor(each(0, 1, 3, size, size + 1)),
            torch.tensor(each(1.0, 1e-6, 0.5, 0.99)),
        ),
        torch.tensor(uniforms).reshape(batch, nodes),
    )


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=rows())
def test_ties_and_masks(interpreted, drawn):
    logits, sampling, uniform = drawn
    check(logits, sampling, uniform, interpreted(choose, logits, sampling, uniform))


def test_greedy_takes_the_first_of_the_largest(interpreted):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (2, 4, BLOCK + 130), generator=generator).to(torch.float16)
    logits[0, 1] = float("-inf")
    logits[0, 2] = 0
    logits[1, 3] = float("-inf")
    logits[1, 3, BLOCK + 129] = -6e4  # the last of all, in the last block
    sampling = Sampling(torch.zeros(2), torch.tensor([0, 4]), torch.tensor([1.0, 0.5]))
    found = interpreted(choose, logits, sampling, torch.full((2, 4), 0.5))
    np.testing.assert_array_equal(found.numpy(), logits.to(torch.float32).numpy().argmax(-1))
    assert found[0, 1] == 0 and found[0, 2] == 0 and found[1, 3] == BLOCK + 129


def test_the_draw_goes_on_across_blocks(interpreted):
    """Only a few ids weigh anything, in different blocks: every uniform must land on its own."""
    ids = [3, BLOCK - 1, BLOCK, 2 * BLOCK + 9]
    chances = np.array([0.1, 0.2, 0.3, 0.4])
    logits = torch.full((1, 10, 2 * BLOCK + 10), float("-inf"))
    logits[..., ids] = torch.from_numpy(np.log(chances)).to(torch.float32)
    uniform = torch.tensor([[0.0, 0.09, 0.11, 0.29, 0.31, 0.5, 0.59, 0.61, 0.9, BELOW_ONE]])
    sampling = Sampling(torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    found = interpreted(choose, logits, sampling, uniform)
    assert found[0].tolist() == [ids[place] for place in (0, 0, 1, 1, 2, 2, 2, 3, 3, 3)]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.9)])
def test_counts_over_a_grid_of_uniforms_are_the_distribution(interpreted, top_k, top_p):
    """Exact enumeration: so many grid points fall to a token as lie in its share of the CDF."""
    points = 60
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 2, 23).astype(np.float32))
    uniform = (torch.arange(points, dtype=torch.float64) + 0.37) / points
    found = interpreted(
        choose,
        logits.expand(1, points, 23).contiguous(),
        Sampling(torch.tensor([0.9]), torch.tensor([top_k]), torch.tensor([top_p])),
        uniform.to(torch.float32)[None],
    )
    scaled = (logits.double().numpy() - logits.double().max().item()) / np.float64(np.float32(0.9))
    cdf = np.cumsum(kept(scaled, top_k, top_p))
    assert np.abs(cdf[:, None] - uniform.numpy()).min() > SLACK  # no point is open to rounding
    expected = np.searchsorted(cdf, uniform.numpy(), side="right")
    np.testing.assert_array_equal(found[0].numpy(), expected)


def test_a_row_does_not_depend_on_its_neighbours(interpreted):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 5, 300, generator=generator)
    sampling = Sampling(torch.tensor([0.9]), torch.tensor([30]), torch.tensor([0.95]))
    uniform = torch.rand(1, 5, generator=generator)
    together = interpreted(choose, logits, sampling, uniform)
    for node in range(5):
        alone = slice(node, node + 1)
        one = interpreted(choose, logits[:, alone].contiguous(), sampling, uniform[:, alone])
        assert one[0, 0] == together[0, node]


def test_no_rows_choose_nothing(interpreted):
    sampling = Sampling(torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    assert interpreted(choose, torch.empty(1, 0, 9), sampling, torch.empty(1, 0)).shape == (1, 0)
