"""EAGLE drafters: lossless, and the trees that the papers' own definition gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.models.drafter import Committed, Drafter
from forerun.models.expand import Frontier, expand, keep, proposed
from forerun.models.grow import Proposal, prune
from forerun.models.step import Step

PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "warped": {"temperature": 1.0, "top_p": 0.9, "seed": 11},
}
KINDS = ("eagle", "eagle3")


# --- lossless ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("nodes", [2, 7, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_eagle_gives_plain_tokens(make_target, make_eagle, run_step, kind, nodes, sampling):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 4), PROMPT, 40, 1, **SAMPLING[sampling])
    step = Step(target, make_eagle(target, kind))
    drafted = run_step(step, PROMPT, 40, nodes, **SAMPLING[sampling])
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens[0]) == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_prefill_in_chunks_changes_nothing(make_target, make_eagle, run_step, kind, chunk):
    target = make_target()
    step = Step(target, make_eagle(target, kind))
    whole = run_step(step, PROMPT, 30, 8)
    parts = run_step(step, PROMPT, 30, 8, chunk=chunk)
    assert parts.tokens == whole.tokens
    assert parts.counts == whole.counts
    assert torch.equal(parts.last.tokens, whole.last.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_do_not_see_each_other(make_target, make_eagle, run_step, kind):
    target = make_target()
    step = Step(target, make_eagle(target, kind))
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    together = run_step(step, prompts, 24, 9, seed=[1, 2, 3], temperature=0.7, top_p=0.95)
    for row, prompt in enumerate(prompts):
        alone = run_step(step, prompt, 24, 9, seed=row + 1, temperature=0.7, top_p=0.95)
        assert together.tokens[row] == alone.tokens[0]
        assert together.counts[row] == alone.counts[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [5, 23])
def test_caches_equal_a_fresh_prefill(make_target, make_eagle, run_step, kind, new):
    """The target's, and the drafter's, whose rows come from true features alone."""
    target = make_target()
    step = Step(target, make_eagle(target, kind))
    run = run_step(step, PROMPT, new, 8)
    text = PROMPT + run.tokens[0]
    length = int(run.last.length[0])
    fresh = run_step(step, text[:-1], 1, 8)
    assert fresh.tokens[0] == text[-1:]
    pairs = zip(
        run.caches.keys + run.caches.values, fresh.caches.keys + fresh.caches.values, strict=True
    )
    for old, new_ in pairs:
        close(old[:, :, :length], new_[:, :, :length])
    for old, new_ in zip(run.states, fresh.states, strict=True):
        close(old[:, :, : len(text) - 1], new_[:, :, : len(text) - 1])
        assert new_[:, :, : len(text) - 1].abs().amin(-1).gt(0).all()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_drafter_commits_its_depth_and_the_bonus(make_target, make_eagle, run_step, kind):
    """A target that says the next number whatever else, and a drafter that says so too."""
    target = make_target()
    vocabulary, hidden = target.config.vocab_size, target.config.hidden_size
    with torch.no_grad():
        target.embed = torch.nn.Embedding.from_pretrained(
            torch.nn.functional.normalize(
                torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(0))
            )
        )
        for block in target.blocks:
            block.output.weight.zero_()
            block.down.weight.zero_()
        target.norm.weight.fill_(1.0)
        target.head.weight.copy_(target.embed.weight.roll(-1, 0).T.roll(2, 1))
        drafter = make_eagle(target, kind, vocabulary=vocabulary)
        silence(drafter)
        if kind == "eagle":  # fc passes the embedding on
            drafter.fc.weight.copy_(torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)]))
            drafter.fc.bias.zero_()
        else:  # attention passes the embedding on, to its own token alone
            through(drafter, hidden)
            drafter.head.weight.copy_(target.head.weight)
    run = run_step(Step(target, drafter), PROMPT, 33, 12)
    assert run.tokens[0] == run_step(Step(target, Drafter(), 4), PROMPT, 33, 1).tokens[0]
    assert set(run.counts[0][:-1]) == {drafter.max_depth() + 1}


def silence(drafter) -> None:
    drafter.attention.output.weight.zero_()
    drafter.mlp.down.weight.zero_()
