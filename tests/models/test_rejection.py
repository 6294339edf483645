"""p/q rejection: exact in float64 by enumeration, and by chi-square through the whole step.

Every check is shown to fail on verifiers that are wrong in the ways that others have been.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from forerun.compiler.certificate import float32_logits
from forerun.errors import ForerunError
from forerun.models import draft_model, rejection
from forerun.models.choose import Sampling, inverse_cdf
from forerun.models.drafter import Drafter
from forerun.models.ngram import NGram
from forerun.models.rejection import ACCEPT, DRAFT, RESIDUAL, TABLES, TARGET, reject
from forerun.models.step import Step

WARPS = [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.8}]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def warped(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """Temperature, top-k, renormalise, top-p, renormalise, by sorting; no ties expected."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
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


# --- the rule, enumerated --------------------------------------------------------------------


def emitted(p: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """The exact distribution `[V]` of the token that `rule` gives where its child is drawn from q.

    The two remaining uniforms are integrated exactly: the rule is constant between the points at
    which a decision changes, so it is asked once between any two of them.
    """
    size = p.shape[0]
    total = torch.zeros_like(p)
    for child in range(size):
        if q[child] == 0:
            continue
        zero, one = p.new_zeros(()), p.new_ones(())
        accept = torch.stack([zero, torch.minimum(p[child] / q[child], one), one])
        residual = (p - q).clamp(min=0)
        cuts = [part.cumsum(0) / part.sum() for part in (residual, p) if part.sum() > 0]
        draws = torch.cat([torch.zeros(1, dtype=p.dtype), *cuts]).clamp(max=1).sort().values
        u, width_u = (accept[1:] + accept[:-1]) / 2, accept.diff()
        v, width_v = (draws[1:] + draws[:-1]) / 2, draws.diff()
        grid = torch.cartesian_prod(u, v)  # [n, 2]
        uniforms = torch.zeros(len(grid), TABLES, 1, dtype=p.dtype)
        uniforms[:, ACCEPT, 0], uniforms[:, RESIDUAL, 0] = grid[:, 0], grid[:, 1]
        chosen = rule(
            p.expand(len(grid), 1, -1),
            q.expand(len(grid), 1, -1),
            torch.full((len(grid), 1), child),
            uniforms,
        )[:, 0]
        weight = torch.cartesian_prod(width_u, width_v).prod(-1)
        total.index_add_(0, chosen, weight * q[child])
    return total


def pair(seed: int, size: int = 9, **warp) -> tuple[Tensor, Tensor]:
    """Two distributions in float64, of which warping has cut some tokens."""
    generator = np.random.default_rng(seed)
    return tuple(torch.from_numpy(warped(generator.normal(0, 1.5, size), **warp)) for _ in range(2))


@pytest.mark.parametrize("warp", [{}, {"top_k": 4}, {"top_p": 0.7}])
@pytest.mark.parametrize("seed", range(4))
def test_the_emitted_token_has_the_targets_distribution(warp, seed):
    p, q = pair(seed, **warp)
    error = (emitted(p, q, reject) - p).abs().max()
    assert error < 1e-12


@given(seed=st.integers(0, 10**6), size=st.integers(2, 12), top_k=st.integers(0, 5))
@settings(max_examples=1000, deadline=None)
def test_any_pair_of_distributions(seed, size, top_k):
    p, q = pair(seed, size, top_k=top_k)
    assert (emitted(p, q, reject) - p).abs().max() < 1e-12


def test_disjoint_and_equal_distributions():
    p = torch.tensor([0.5, 0.5, 0.0, 0.0]).double()
    assert torch.equal(emitted(p, p.flip(0), reject), p)
    assert torch.equal(emitted(p, p, reject), p)  # the residual's sum is zero


def residual_p(p: Tensor, q: Tensor, children: Tensor, uniforms: Tensor) -> Tensor:
    """Wrong: what is rejected is replaced by a draw from p."""
    child = children[..., None]
    kept = uniforms[:, ACCEPT] * q.gather(2, child)[..., 0] < p.gather(2, child)[..., 0]
    return torch.where(kept, children, inverse_cdf(p, uniforms[:, RESIDUAL]))


def one_uniform(p: Tensor, q: Tensor, children: Tensor, uniforms: Tensor) -> Tensor:
    """Wrong: the residual's draw reuses the uniform that rejected."""
    uniforms = uniforms.clone()
    uniforms[:, RESIDUAL] = uniforms[:, ACCEPT]
    return reject(p, q, children, uniforms)


def test_the_enumeration_rejects_wrong_rules():
    p, q = pair(0)
    cut_p, cut_q = pair(0, top_k=4)
    assert (emitted(p, q, residual_p) - p).abs().max() > 1e-3
    assert (emitted(p, q, one_uniform) - p).abs().max() > 1e-3

    q_raw = q

    def unwarped_q(p: Tensor, q: Tensor, children: Tensor, uniforms: Tensor) -> Tensor:
        """Wrong: the children were drawn from the warped q, but this compares with the raw one."""
        return reject(p, q_raw.expand_as(p), children, uniforms)

    assert (emitted(cut_p, cut_q, unwarped_q) - cut_p).abs().max() > 1e-3


def test_the_float32_graph_makes_the_enumerated_choices():
    """Acceptance and residual as the step computes them, from logits, against float64."""
    generator = np.random.default_rng(5)
    draws, size = 4000, 31
    for warp in WARPS:
        logits = generator.normal(0, 2, (2, size)).astype(np.float32)
        p, q = (torch.from_numpy(warped(row, **warp)) for row in logits)
        sampling = Sampling(
            torch.ones(draws),
            torch.full((draws,), warp.get("top_k", 0)),
            torch.full((draws,), warp.get("top_p", 1.0)),
        )
        uniforms = torch.from_numpy(generator.random((draws, TABLES, 1), np.float32))
        rows = torch.from_numpy(logits).expand(draws, -1, -1)
        children, made = rejection.draw(rows[:, 1:], sampling, uniforms[:, DRAFT])
        torch.testing.assert_close(made[0, 0].double(), q, atol=1e-6, rtol=0)
        chosen = rejection.choose_rejecting(rows[:, :1], made, sampling, uniforms, children)
        wide = uniforms.double()
        again = inverse_cdf(q.expand(draws, 1, -1), wide[:, DRAFT])
        expected = reject(p.expand(draws, 1, -1), q.expand(draws, 1, -1), again, wide)
        # A draw within 1e-6 of a border may fall on either side: next to none of 4,000 do.
        assert (children != again).sum() + (chosen != expected).sum() <= 3


def test_temperature_0_is_matching():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 20, generator=generator)
    mixed = Sampling(torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    uniforms = torch.rand(2, TABLES, 3, generator=generator)
    tokens, q = rejection.draw(logits, mixed, uniforms[:, DRAFT])
    assert tokens[0].tolist() == logits[0].argmax(-1).tolist()
    children = torch.tensor([[1, 2, -1], [1, 2, -1]])
    for branching in (True, False):
        chosen = rejection.choose_rejecting(logits, q, mixed, uniforms, children, branching)
        assert chosen[0].tolist() == logits[0].argmax(-1).tolist()
        # No child: the target's own draw.
        p = torch.softmax(logits[1:, 2:], -1)
        assert chosen[1, 2] == inverse_cdf(p, uniforms[1:, TARGET, 2:])[0, 0]


# --- the whole step ---------------------------------------------------------------------------

PROMPT = [3, 4, 5, 6, 0, 5]
ROWS, NEW = 7000, 3
TEMPERATURE = 2.0
SAME = {"num_layers": 1, "vocab_size": 12}
SMALL = SAME | {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}


def sample(make_target, make_draft_model, run_step, warp, rows=ROWS, gamma=3, ids=None):
    """(target, tokens `[rows, NEW]`, counts) of a batch whose rows differ in their seed alone."""
    target = make_target(4, **SAME)
    drafter = make_draft_model(8, gamma, "rejection", ids, **SMALL)
    run = run_step(
        Step(target, drafter),
        PROMPT,
        NEW,
        gamma + 1,
        temperature=TEMPERATURE,
        seed=list(range(rows)),
        **warp,
    )
    return target, np.array(run.tokens), run.counts


def p_value(target, tokens: np.ndarray, warp: dict) -> float:
    """Chi-square of every token given what came before it, over all contexts that recur.

    A context's tokens are multinomial, so the statistics add up, and so do the degrees of freedom.
    """
    statistic, freedom, used = 0.0, 0, 0
    for place in range(tokens.shape[1]):
        contexts, inverse = np.unique(tokens[:, :place], axis=0, return_inverse=True)
        for number, context in enumerate(contexts):
            found = tokens[inverse.reshape(-1) == number, place]
            if len(found) < 20:
                continue
            used += len(found)
            logits = float32_logits(target, [*PROMPT, *context.tolist()])[-1].numpy()
            expected = warped(logits, TEMPERATURE, **warp) * len(found)
            counts = np.bincount(found, minlength=len(expected)).astype(float)
            if counts[expected == 0].any():
                return 0.0  # a token that warping had cut
            often = expected >= 5
            cells = [(counts[often], expected[often])]
            rest = counts[~often].sum(), expected[~often].sum()
            if rest[1] >= 5:
                cells.append((np.array([rest[0]]), np.array([rest[1]])))
            statistic += sum(((c - e) ** 2 / e).sum() for c, e in cells)
            freedom += sum(len(c) for c, _ in cells) - 1
    assert used > 0.9 * tokens.size
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(("warp", "gamma"), [*zip(WARPS, (3, 3, 2, 1), strict=True)])
def test_a_step_samples_the_targets_distribution(
    make_target, make_draft_model, run_step, warp, gamma
):
    target, tokens, counts = sample(make_target, make_draft_model, run_step, warp, gamma=gamma)
    assert tokens.size >= 20_000
    accepted = np.mean([row[0] == 2 for row in counts])
    assert 0.2 < accepted < 0.8
    assert p_value(target, tokens, warp) > 1e-4


REDUCED = torch.tensor([0, 1, 3, 4, 6, 7, 9, 11])
"""Of 12 tokens: the others can be emitted, not drafted."""


@pytest.mark.parametrize("warp", [{}, {"top_k": 6, "top_p": 0.8}])
def test_a_drafter_of_some_tokens_samples_from_all(make_target, make_draft_model, run_step, warp):
    target, tokens, counts = sample(make_target, make_draft_model, run_step, warp, ids=REDUCED)
    accepted = np.mean([row[0] == 2 for row in counts])
    assert 0.2 < accepted < 0.8
    assert len(set(tokens.reshape(-1).tolist()) - set(REDUCED.tolist())) > (0 if warp else 2)
    assert p_value(target, tokens, warp) > 1e-4


def test_a_reduced_q_is_zero_elsewhere():
    """Kept over its own tokens, it decides as the same q over all of them, spelled out."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(500, 3, 12, generator=generator) * 2
    small = torch.randn(500, 2, 8, generator=generator).softmax(-1)
    whole = torch.zeros(500, 2, 12)
    for place, token in enumerate(REDUCED.tolist()):
        whole[..., token] = small[..., place]
    columns = torch.tensor([0, 1, 8, 2, 3, 8, 4, 5, 8, 6, 8, 7])
    sampling = Sampling(torch.ones(500), torch.zeros(500, dtype=torch.int64), torch.ones(500))
    uniforms = torch.rand(500, TABLES, 3, generator=generator)
    children = REDUCED[torch.multinomial(small.flatten(0, 1), 1, generator=generator)]
    children = torch.cat([children.reshape(500, 2), torch.full((500, 1), -1)], dim=1)
    for branching in (True, False):
        found = rejection.choose_rejecting(
            logits, small, sampling, uniforms, children, branching, columns
        )
        expected = rejection.choose_rejecting(logits, whole, sampling, uniforms, children)
        assert torch.equal(found, expected)
        assert (found[:, :2] != children[:, :2]).any() and (found == children).any()


@pytest.mark.parametrize("seed", range(4))
def test_a_q_of_some_tokens_is_exact(seed):
    p, q = pair(seed)
    q[[2, 5]] = 0
    assert (emitted(p, q / q.sum(), reject) - p).abs().max() < 1e-12


def unwarped(original):
    """`draw` that keeps the raw q."""

    def draw(logits, sampling, uniform, branching=True):
        tokens, _ = original(logits, sampling, uniform, branching)
        raw = Sampling(sampling.temperature, sampling.top_k * 0, torch.ones_like(sampling.top_p))
        return tokens, original(logits, raw, uniform, branching)[1]

    return draw


@pytest.mark.parametrize("wrong", ["unwarped q", "accept reuses draft", "residual p"])
def test_the_chi_square_rejects_wrong_verifiers(
    make_target, make_draft_model, run_step, monkeypatch, wrong
):
    warp = {"top_k": 6} if wrong == "unwarped q" else {}
    if wrong == "unwarped q":
        monkeypatch.setattr(draft_model, "draw", unwarped(draft_model.draw))
    elif wrong == "accept reuses draft":
        monkeypatch.setattr(rejection, "ACCEPT", DRAFT)
    else:
        monkeypatch.setattr(
            rejection,
            "reject",
            lambda p, q, children, uniforms: torch.where(
                children < 0,
                reject(p, q, children, uniforms),
                residual_p(p, q, children.clamp(min=0), uniforms),
            ),
        )
    target, tokens, _ = sample(make_target, make_draft_model, run_step, warp)
    assert p_value(target, tokens, warp) < 1e-12


def test_greedy_tokens_and_plain_samples_are_those_of_matching(
    make_target, make_draft_model, run_step
):
    target = make_target(2)
    drafter = make_draft_model(7, acceptance="rejection", num_layers=1)
    step, reference = Step(target, drafter), Step(target, Drafter(), 5)
    greedy = run_step(reference, PROMPT, 40, 1)
    assert run_step(step, PROMPT, 40, 5).tokens == greedy.tokens
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    plain = run_step(reference, PROMPT, 40, 1, **sampling)
    assert run_step(step, PROMPT, 40, 1, **sampling).tokens == plain.tokens


@pytest.mark.parametrize("warp", [{}, {"top_p": 0.9}])
def test_the_target_as_its_own_drafter_is_always_accepted(
    make_target, make_draft_model, run_step, warp
):
    step = Step(make_target(2), make_draft_model(2, acceptance="rejection"))
    run = run_step(step, PROMPT, 51, 5, temperature=0.9, seed=list(range(8)), **warp)
    counts = [count for row in run.counts for count in row[:-1]]
    # p and q agree up to rounding: a uniform that close to 1 may reject.
    assert np.mean(counts) > 4.99


def test_a_prefill_in_chunks_changes_nothing(make_target, make_draft_model, run_step):
    step = Step(make_target(), make_draft_model(7, acceptance="rejection", num_layers=1))
    sampling = {"temperature": 0.9, "seed": 3}
    whole = run_step(step, PROMPT, 40, 5, **sampling)
    for chunk in (1, 4):
        parts = run_step(step, PROMPT, 40, 5, chunk=chunk, **sampling)
        assert parts.tokens == whole.tokens and parts.counts == whole.counts


def test_rejection_accepts_more_than_matching_with_independent_draws(
    make_target, make_draft_model, run_step
):
    """Independent draws agree with probability sum p q, rejection accepts sum min(p, q)."""
    target = make_target(4, **SAME)
    small = make_target(8, **SMALL)
    rows, first = 4000, []
    _, tokens, counts = sample(make_target, make_draft_model, run_step, {}, rows, gamma=1)
    for row in range(rows):  # the step after the prefill's token: was its only child accepted?
        first.append(counts[row][0] == 2)
    expected = independent = 0.0
    for token, times in zip(*np.unique(tokens[:, 0], return_counts=True), strict=True):
        p, q = (
            warped(float32_logits(model, [*PROMPT, int(token)])[-1].numpy(), TEMPERATURE)
            for model in (target, small)
        )
        expected += np.minimum(p, q).sum() * times / rows
        independent += (p * q).sum() * times / rows
    assert abs(np.mean(first) - expected) < 4 * (expected * (1 - expected) / rows) ** 0.5
    assert expected > independent + 0.1


def test_a_drafter_without_a_distribution_says_so():
    with pytest.raises(ForerunError, match="--acceptance rejection: the ngram drafter"):
        NGram().accept_by("rejection")
