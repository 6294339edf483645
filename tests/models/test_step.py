"""The step: speculative equals plain, caches equal a fresh prefill, rows are independent."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from forerun.models.drafter import Committed, Drafter, Vocabulary
from forerun.models.ngram import NGram
from forerun.models.step import Step
from forerun.runtime.tree import Tree

PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "warped": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 11},
}


class Scripted(Drafter):
    """Proposes a fixed continuation, shifted by `wrong`: perfect at 0, always wrong otherwise."""

    kind: ClassVar[str] = "scripted"

    def __init__(self, text: list[int], vocabulary: int, gamma: int, wrong: int = 0) -> None:
        super().__init__()
        self.text = torch.tensor(text + [0] * (gamma + 2))
        self.vocabulary, self.candidates, self.wrong = vocabulary, gamma, wrong

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        after = committed.start + committed.count + 1  # [B] the position after the root
        places = after[:, None] + torch.arange(self.candidates)
        text = self.text[places.clamp(max=len(self.text) - 1)]
        return (text + self.wrong) % self.vocabulary

    def max_depth(self) -> int:
        return self.candidates


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("seed", range(3))
def test_ngram_gives_plain_tokens(make_target, run_step, sampling, seed):
    target = make_target(seed)
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 60, 1, **SAMPLING[sampling])
    drafted = run_step(Step(target, NGram(7, 4, 1)), PROMPT, 60, 8, **SAMPLING[sampling])
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens[0]) == 60


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("nodes", [2, 5, 13])
def test_medusa_gives_plain_tokens(make_target, make_medusa, run_step, sampling, nodes):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 4), PROMPT, 50, 1, **SAMPLING[sampling])
    drafted = run_step(Step(target, make_medusa(target)), PROMPT, 50, nodes, **SAMPLING[sampling])
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("window", [3, 6])
def test_sliding_windows_stay_lossless(make_target, make_medusa, run_step, window):
    target = make_target(window=window, sliding_layers=(True, False))
    plain = run_step(Step(target, Drafter(), 4), PROMPT, 40, 1)
    drafted = run_step(Step(target, make_medusa(target)), PROMPT, 40, 13)
    assert drafted.tokens == plain.tokens


def test_heads_without_groups_stay_lossless(make_target, run_step):
    target = make_target(num_kv_heads=4)
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 40, 1)
    assert run_step(Step(target, NGram(7, 4, 1)), PROMPT, 40, 8).tokens == plain.tokens


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_perfect_drafter_commits_its_depth_and_the_bonus(make_target, run_step, gamma):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 41, 1).tokens[0]
    drafter = Scripted(PROMPT + plain, target.config.vocab_size, gamma)
    run = run_step(Step(target, drafter), PROMPT, 41, gamma + 1)
    assert run.tokens[0] == plain
    assert set(run.counts[0][:-1]) == {gamma + 1}


def test_an_always_wrong_drafter_commits_one_right_token_a_step(make_target, run_step):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 30, 1).tokens[0]
    drafter = Scripted(PROMPT + plain, target.config.vocab_size, 4, wrong=7)
    run = run_step(Step(target, drafter), PROMPT, 30, 5)
    assert run.tokens[0] == plain
    assert set(run.counts[0]) == {1}


@pytest.mark.parametrize("kind", ["ngram", "medusa"])
@pytest.mark.parametrize("new", [9, 32])
def test_caches_equal_a_fresh_prefill(make_target, make_medusa, run_step, kind, new):
    target = make_target()
    drafter = NGram(7, 4, 1) if kind == "ngram" else make_medusa(target)
    run = run_step(Step(target, drafter), PROMPT, new, 8)
    text = PROMPT + run.tokens[0]
    length, pending = int(run.last.length[0]), int(run.last.pending_count[0])
    assert length + pending == len(text) - 1  # all but the newest token
    fresh = run_step(Step(target, Drafter(), 8), text[:-1], 0, 1).caches
    for layer in range(target.config.num_layers):
        for part, (old, new_) in enumerate(
            zip((run.caches.keys, run.caches.values), (fresh.keys, fresh.values), strict=True)
        ):
            torch.testing.assert_close(
                old[layer][0, :, :length], new_[layer][0, :, :length], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                run.last.pending[0].unflatten(0, (-1, 2, 2))[layer, part, :, :pending],
                new_[layer][0, :, length : length + pending].float(),
                atol=1e-4,
                rtol=1e-4,
            )
    if kind == "ngram":
        assert run.states[0][0, : len(text)].tolist() == text


def test_tree_logits_equal_each_path_run_alone(make_target, make_medusa, run_step):
    target = make_target()
    step = Step(target, make_medusa(target))
    run = run_step(step, PROMPT, 12, 13)
    committed = PROMPT + run.tokens[0][:-1]
    tree = step.drafter.tree(13)
    with torch.no_grad():
        outputs, _, _ = step(run.last, run.caches, run.states)
    for node in range(tree.nodes):
        path = [int(run.last.tokens[0, i]) for i in range(tree.nodes) if tree.ancestors[node, i]]
        fresh = _logits(target, committed + path)
        torch.testing.assert_close(outputs.logits[0, node], fresh[-1], atol=1e-3, rtol=1e-3)


def _logits(target, tokens: list[int]) -> Tensor:
    from forerun.compiler.certificate import float32_logits

    return float32_logits(target, tokens)


def test_rows_of_a_batch_do_not_see_each_other(make_target, make_medusa, run_step):
    target = make_target()
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    for drafter in (NGram(7, 4, 1), make_medusa(target)):
        step = Step(target, drafter)
        sampling = {"temperature": 0.7, "top_p": 0.95}
        together = run_step(step, prompts, 30, 8, seed=[1, 2, 3], **sampling)
        for row, prompt in enumerate(prompts):
            alone = run_step(step, prompt, 30, 8, seed=row + 1, **sampling)
            assert together.tokens[row] == alone.tokens[0]
            assert together.counts[row] == alone.counts[0]


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_prefill_in_chunks_changes_nothing(make_target, run_step, chunk):
    target = make_target()
    whole = run_step(Step(target, NGram(7, 4, 1)), PROMPT, 40, 8)
    parts = run_step(Step(target, NGram(7, 4, 1)), PROMPT, 40, 8, chunk=chunk)
    assert parts.tokens == whole.tokens
    assert parts.counts == whole.counts


@pytest.mark.parametrize("new", range(1, 12))
def test_the_limit_cuts_in_the_middle_of_a_block(make_target, run_step, new):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 20, 1).tokens[0]
    drafter = Scripted(PROMPT + plain, target.config.vocab_size, 4)
    assert run_step(Step(target, drafter), PROMPT, new, 5).tokens[0] == plain[:new]


def test_token_0_is_drafted_and_accepted_like_any_other(make_target, run_step):
    target = make_target()
    with torch.no_grad():  # a target that says 0 for ever
        target.head.weight.zero_()
        target.norm.weight.fill_(1.0)
    run = run_step(Step(target, NGram(7, 4, 2)), [5, 0, 0, 0], 32, 8)
    assert run.tokens[0] == [0] * 32
    assert 8 in run.counts[0]


def test_no_proposal_is_never_accepted(make_target, run_step):
    target = make_target()
    step = Step(target, NGram(7, 8, 8))  # suffixes of 8 tokens do not recur in so short a text
    run = run_step(step, [1, 2, 3], 5, 8)
    assert set(run.counts[0]) == {1}
    assert (run.last.tokens[0, 1:] == -1).all()


def test_trees_of_different_size_alternate(make_target, make_medusa, run_step):
    """A step that verifies 1 node after one that drafted 13 reads the same pending rows."""
    target = make_target()
    step = Step(target, make_medusa(target))
    run = run_step(step, PROMPT, 20, 13)
    root = run.last.tokens[:, :1]
    chain = Tree.chain(1)
    inputs = replace(
        run.last,
        tokens=root,
        depth=torch.from_numpy(chain.depths)[None],
        ancestors=torch.from_numpy(chain.ancestors)[None],
        verify=torch.arange(1),
        parents=torch.zeros(1, 1, dtype=torch.int64),
        limit=torch.tensor([1000]),
    )
    with torch.no_grad():
        outputs, _, _ = step(inputs, run.caches, run.states)
    expected = _logits(target, PROMPT + run.tokens[0])[-1]
    torch.testing.assert_close(outputs.logits[0, 0], expected, atol=1e-3, rtol=1e-3)
