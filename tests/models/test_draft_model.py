"""The draft model: lossless, its drafts and caches those of the same model run plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.compiler.certificate import float32_logits
from forerun.errors import ForerunError
from forerun.models.config import RopeConfig
from forerun.models.drafter import Drafter
from forerun.models.step import Step

PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "warped": {"temperature": 1.0, "top_p": 0.9, "seed": 11},
}
SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("seed", range(3))
def test_matching_gives_plain_tokens(make_target, make_draft_model, run_step, sampling, seed):
    target = make_target(seed)
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 50, 1, **SAMPLING[sampling])
    drafter = make_draft_model(seed + 50, **SMALL)
    for nodes in (2, 5):
        drafted = run_step(Step(target, drafter), PROMPT, 50, nodes, **SAMPLING[sampling])
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_drafter_that_is_the_target_is_always_accepted(
    make_target, make_draft_model, run_step, sampling
):
    step = Step(make_target(2), make_draft_model(2))
    run = run_step(step, PROMPT, 51, 5, **SAMPLING[sampling])
    assert set(run.counts[0][:-1]) == {5}


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
@pytest.mark.parametrize("sampling", ["greedy", "warped"])
def test_prefill_in_chunks_changes_nothing(
    make_target, make_draft_model, run_step, chunk, sampling
):
    step = Step(make_target(), make_draft_model(7, **SMALL))
    whole = run_step(step, PROMPT, 40, 5, **SAMPLING[sampling])
    parts = run_step(step, PROMPT, 40, 5, chunk=chunk, **SAMPLING[sampling])
    assert parts.tokens == whole.tokens
    assert parts.counts == whole.counts


@pytest.mark.parametrize("acceptance", ["matching", "rejection"])
def test_rows_of_a_batch_do_not_see_each_other(make_target, make_draft_model, run_step, acceptance):
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    step = Step(make_target(), make_draft_model(7, acceptance=acceptance, **SMALL))
    sampling = {"temperature": 0.7, "top_p": 0.95}
    together = run_step(step, prompts, 30, 5, seed=[1, 2, 3], **sampling)
    for row, prompt in enumerate(prompts):
        alone = run_step(step, prompt, 30, 5, seed=row + 1, **sampling)
        assert together.tokens[row] == alone.tokens[0]
        assert together.counts[row] == alone.counts[0]


KINDS = {
    "llama": {},
    "qwen3": {"qk_norm": True, "head_dim": 16, "rope": RopeConfig(1e6, 16)},
    "qwen2": {"qkv_bias": True, "num_kv_heads": 4},
    "smollm3": {"rope_layers": (True, False)},
    "biased": {"output_bias": True, "mlp_bias": True},
    "tied": {"tie_embeddings": True},
    "partly rotated": {"rope": RopeConfig(10000.0, 4)},
    "linear scaling": {"rope": RopeConfig(10000.0, 8, "linear", {"factor": 4.0})},
    "wide window": {"window": 192, "sliding_layers": (True, True)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_same_model_says_plainly(make_target, make_draft_model, run_step, kind):
    """The plain model is `Target`, which is tested against transformers."""
    small = make_target(9, **KINDS[kind])
    step = Step(make_target(), make_draft_model(9, **KINDS[kind]))
    for new in (2, 9, 17):
        run = run_step(step, PROMPT, new, 5, chunk=4)
        text = PROMPT + run.tokens[0]
        with torch.no_grad():
            outputs, _, _ = step(
                replace(run.last, limit=torch.tensor([100])), run.caches, run.states
            )
        text += outputs.emitted[0, : int(outputs.count[0])].tolist()
        expected = text
        for _ in range(4):
            expected = [*expected, int(float32_logits(small, expected)[-1].argmax())]
        assert outputs.next_tokens[0].tolist() == expected[len(text) - 1 :]


@pytest.mark.parametrize("acceptance", ["matching", "rejection"])
@pytest.mark.parametrize("new", [9, 32])
def test_its_caches_equal_a_fresh_prefill(make_target, make_draft_model, run_step, acceptance, new):
    step = Step(make_target(), make_draft_model(7, acceptance=acceptance, **SMALL))
    run = run_step(step, PROMPT, new, 5, temperature=0.9, chunk=4)
    text = PROMPT + run.tokens[0]
    small = make_target(7, **SMALL)
    fresh = run_step(Step(small, Drafter(), 5), text, 0, 1).caches
    for state, cache in zip(run.states, (fresh.keys[0], fresh.values[0]), strict=False):
        torch.testing.assert_close(
            state[0, :, : len(text)], cache[0, :, : len(text)].float(), atol=1e-4, rtol=1e-4
        )


def test_a_plain_request_leaves_its_states_alone(make_target, make_draft_model, run_step):
    step = Step(make_target(), make_draft_model(7, acceptance="rejection", **SMALL))
    run = run_step(step, PROMPT, 9, 1)
    assert not any(state.any() for state in run.states)


@given(
    prompt=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    gamma=st.integers(1, 6),
    new=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.6, 1.3]),
)
# The fixtures are functions without state.
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_pair_is_lossless(
    make_target, make_draft_model, run_step, prompt, seed, gamma, new, temperature
):
    target = make_target(seed % 7)
    sampling = {"temperature": temperature, "seed": seed}
    plain = run_step(Step(target, Drafter(), 5), prompt, new, 1, **sampling)
    step = Step(target, make_draft_model(seed, gamma, **SMALL))
    assert run_step(step, prompt, new, gamma + 1, **sampling).tokens == plain.tokens


def test_a_narrow_window_is_an_error(make_draft_model):
    with pytest.raises(ForerunError, match="sliding windows of 100 tokens"):
        make_draft_model(window=100, sliding_layers=(True, False))


def test_it_drafts_as_many_tokens_as_the_largest_tree_takes(make_draft_model):
    drafter = make_draft_model(acceptance="rejection")
    drafter.trim([1, 3, 6])
    assert drafter.candidates == drafter.max_depth() == 5
    assert drafter.states()[-1].shape == ("batch", 5, 61)
    drafter.trim([1])
    assert drafter.candidates == 1


# --- a reduced vocabulary ---------------------------------------------------------------------

IDS = torch.arange(1, 61, 3)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("seed", range(3))
def test_a_reduced_vocabulary_gives_plain_tokens(
    make_target, make_draft_model, run_step, sampling, seed
):
    target = make_target(seed)
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 50, 1, **SAMPLING[sampling])
    step = Step(target, make_draft_model(seed + 50, ids=IDS, **SMALL))
    for chunk in (None, 3):
        drafted = run_step(step, PROMPT, 50, 5, chunk=chunk, **SAMPLING[sampling])
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("tied", [False, True])
def test_it_drafts_the_best_of_the_tokens_it_may(make_target, make_draft_model, run_step, tied):
    small = make_target(9, tie_embeddings=tied)
    step = Step(make_target(), make_draft_model(9, ids=IDS, tie_embeddings=tied))
    run = run_step(step, PROMPT, 12, 5, chunk=4)
    text = PROMPT + run.tokens[0]
    drafted = run.last.tokens[0].tolist()
    assert drafted[0] == text[-1]
    for token in drafted[1:]:
        assert token == int(IDS[float32_logits(small, text)[-1][IDS].argmax()])
        text = [*text, token]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_all_tokens_are_no_reduction(make_target, make_draft_model, run_step, sampling):
    """Drafting as the target does, so that a uniform falls on the same token in both."""
    step = Step(make_target(2), make_draft_model(2, ids=torch.arange(61)))
    run = run_step(step, PROMPT, 51, 5, **SAMPLING[sampling])
    assert set(run.counts[0][:-1]) == {5}


def test_q_is_kept_over_the_tokens_that_are_drafted(make_draft_model):
    drafter = make_draft_model(acceptance="rejection", ids=IDS)
    assert drafter.states()[-1].shape == ("batch", 4, len(IDS))
    assert drafter.options()["vocabulary"] == len(IDS)
