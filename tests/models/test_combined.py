"""Prompt lookup beside a learned drafter, against joining by dictionaries of paths."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import load_checkpoint
from forerun.models.combined import ABSENT, Combined, MatchAccuracy, join
from forerun.models.drafter import Committed, Drafter, GrowingDrafter, Vocabulary
from forerun.models.drafters import find_drafter, load_drafter
from forerun.models.grow import Proposal, prune
from forerun.models.growing import as_growing
from forerun.models.ngram import NGram
from forerun.models.step import Step
from forerun.runtime.tree import best_tree

PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "warped": {"temperature": 1.0, "top_p": 0.9, "seed": 11},
}
Path = tuple[int, ...]
"""The tokens from the root down to a node."""


class Bushy(GrowingDrafter):
    """Three children of the root and two of each of those, with scores that follow the root."""

    kind: ClassVar[str] = "bushy"
    candidates = 9

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        place = torch.arange(9)
        parents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
        tokens = (committed.root[:, None] + 5 * place) % 61
        first = -((committed.root[:, None] + place[:3]) % 7).float()
        second = first[:, parents[3:] - 1] - (committed.root[:, None] + place[3:]) % 3
        return Proposal(tokens, parents.expand_as(tokens), torch.cat([first, second], dim=1))

    def max_depth(self) -> int:
        return 2


class Counting(Drafter):
    """A chain of a learned drafter without measurements: the numbers after the root."""

    kind: ClassVar[str] = "counting"
    candidates = 3

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        return (committed.root[:, None] + 1 + torch.arange(3)) % 61

    def max_depth(self) -> int:
        return 3


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("nodes", [2, 6, 8, 20])
@pytest.mark.parametrize("learned", ["medusa", "bushy", "counting", "draft"])
def test_tokens_are_the_plain_ones(
    make_target, make_medusa, make_draft_model, run_step, learned, nodes, sampling
):
    target = make_target()
    drafter = {
        "medusa": lambda: make_medusa(target),
        "bushy": Bushy,
        "counting": Counting,
        "draft": lambda: make_draft_model(7, num_layers=1),
    }[learned]()
    combined = Combined(as_growing(drafter), gamma=7 if nodes < 20 else 16)
    plain = run_step(Step(target, Drafter(), 8), PROMPT, 60, 1, **SAMPLING[sampling])
    run = run_step(Step(target, combined), PROMPT, 60, nodes, **SAMPLING[sampling])
    assert run.tokens == plain.tokens


@pytest.mark.parametrize("learned", ["medusa", "draft"])
def test_rows_of_a_batch_do_not_see_each_other(
    make_target, make_medusa, make_draft_model, run_step, learned
):
    target = make_target()
    drafter = make_medusa(target) if learned == "medusa" else make_draft_model(7, num_layers=1)
    step = Step(target, Combined(as_growing(drafter)))
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    sampling = {"temperature": 0.7, "top_p": 0.95}
    together = run_step(step, prompts, 30, 8, seed=[1, 2, 3], **sampling)
    for row, prompt in enumerate(prompts):
        alone = run_step(step, prompt, 30, 8, seed=row + 1, **sampling)
        assert together.tokens[row] == alone.tokens[0]
        assert together.counts[row] == alone.counts[0]


def test_a_draft_model_that_is_the_target_fills_the_tree_beside_the_lookup(
    make_target, make_draft_model, run_step
):
    """Its own caches are kept up in company as they are alone: every draft is right."""
    step = Step(make_target(2), Combined(as_growing(make_draft_model(2, gamma=4)), gamma=4))
    run = run_step(step, PROMPT, 51, 9)
    assert set(run.counts[0][:-1]) == {5}


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_prefill_in_chunks_changes_nothing(make_target, make_medusa, run_step, chunk):
    target = make_target()
    step = Step(target, Combined(as_growing(make_medusa(target))))
    whole = run_step(step, PROMPT, 40, 8)
    parts = run_step(step, PROMPT, 40, 8, chunk=chunk)
    assert (parts.tokens, parts.counts) == (whole.tokens, whole.counts)


def test_what_repeats_is_drafted_to_full_length(make_target, make_medusa, run_step):
    target = make_target()
    with torch.no_grad():  # a target that says 0 for ever, which no head knows
        target.head.weight.zero_()
        target.norm.weight.fill_(1.0)
    medusa = make_medusa(target)
    with torch.no_grad():  # random heads are very sure of themselves
        medusa.heads[0].weight.mul_(0.01)
    alone = run_step(Step(target, medusa), [5] + [0] * 12, 33, 8)
    both = run_step(Step(target, Combined(as_growing(medusa))), [5] + [0] * 12, 33, 8)
    assert both.tokens == alone.tokens == [[0] * 33]
    assert set(both.counts[0]) == {8} and 8 not in alone.counts[0]


@pytest.mark.parametrize("nodes", [1, 2, 5, 8, 16])
def test_without_a_match_the_tree_is_the_learned_one(make_target, make_medusa, nodes):
    """Which is: of the best fixed tree's nodes those that the heads find likeliest."""
    target = make_target()
    medusa = make_medusa(target, heads=3, top_k=4)
    combined = Combined(as_growing(medusa))
    text = list(range(10, 30))  # nothing occurs twice
    committed = committed_text(text, target.config.hidden_size)
    grown = grow(combined, committed, text, nodes, target)

    heads = medusa.heads[0](medusa.features(committed.hidden))[0].softmax(-1)  # [heads, V]
    choices = heads.argsort(dim=-1, descending=True)
    shape = best_tree(medusa.config.accuracy, 32)
    found: list[tuple[Path, float]] = [((), 1.0)]
    for parent, slot in zip(shape.parents[1:], shape.slots[1:], strict=True):
        head, choice = divmod(slot - 1, 4)
        token = int(choices[head, choice])
        path, chance = found[parent]
        found.append(((*path, token), chance * float(heads[head, token])))
    best = sorted(found, key=lambda item: -item[1])[:nodes]
    kept = paths(grown.tokens[0, 1:].tolist(), grown.parents[0, 1:].tolist())
    assert kept == [path for path, _ in best[1:]]
    assert grown.depth[0, 1:].tolist() == [len(path) for path in kept]


def test_a_long_match_takes_the_tree_over_and_a_short_one_does_not(make_target, make_medusa):
    target = make_target()
    medusa = make_medusa(target)
    with torch.no_grad():  # random heads are very sure of themselves
        medusa.heads[0].weight.mul_(0.02)
    combined = Combined(as_growing(medusa), gamma=5)

    def chain(text: list[int]) -> list[int]:
        """How many tokens of the lookup's proposal the tree of 6 holds."""
        committed = committed_text(text, target.config.hidden_size)
        grown = grow(combined, committed, text, 6, target)
        expected = NGram(5, 8, 1).look_up(committed, history(text))[0][0].tolist()
        node, depth = 0, 0
        children = list(zip(grown.parents[0].tolist(), grown.tokens[0].tolist(), strict=True))
        while (node, expected[depth]) in children[1:]:
            node, depth = children.index((node, expected[depth]), 1), depth + 1
            if depth == 5:
                break
        return depth

    assert chain([*range(20), *range(10)]) == 5
    assert chain([1, 2, 3, 4, 1]) < 5


def committed_text(text: list[int], hidden: int) -> Committed:
    """Everything but the last token of `text`, the root, as one block of context rows."""
    one = torch.ones(1)
    return Committed(
        tokens=torch.tensor([text]),
        start=torch.tensor([0]),
        count=torch.tensor([len(text) - 1]),
        root=torch.tensor([text[-1]]),
        features=torch.zeros(1, len(text) - 1, 0),
        hidden=torch.randn(1, hidden, generator=torch.Generator().manual_seed(7)),
        uniforms=torch.zeros(1, 1, 64),
        temperature=one,
        top_k=torch.tensor([0]),
        top_p=one,
        branching=True,
    )


def history(text: list[int]) -> Tensor:
    return torch.tensor([[*text, *[0] * (64 - len(text))]])


def grow(combined: Combined, committed: Committed, text: list[int], nodes: int, target):
    proposal = combined.propose(committed, [history(text)], target)
    return prune(committed.root, proposal, torch.arange(nodes), combined.max_depth())


@st.composite
def proposals(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of a random tree: siblings distinct, no child above its parent."""
    size = draw(st.integers(1, 12))
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for _ in range(size):
        parent = draw(st.integers(0, len(tokens)))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = sorted(set(range(5)) - taken)
        if not free:
            continue
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
        above = scores[parent - 1] if parent else 0.0
        scores.append(above - draw(st.sampled_from([0.0, 0.25, 0.5, 1.5])))
    return tokens, parents, scores


def paths(tokens: list[int], parents: list[int]) -> list[Path]:
    """Each node's path."""
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent - 1] if parent else ()), token))
    return found


@settings(max_examples=1000, deadline=None)
@given(
    proposals(),
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 0.25, 0.75]), min_size=6, max_size=6),
    st.integers(1, 16),
)
def test_the_joined_tree_holds_both(learned, chain, match, drops, nodes):
    tokens, parents, scores = learned
    own = paths(tokens, parents)
    depth = max(map(len, own))
    expected: dict[Path, float] = dict(zip(own, scores, strict=True))
    ranks = [-sum(drops[: place + 1]) for place in range(6)] if match else [ABSENT] * 6
    for place in range(6 if match else 0):
        path = tuple(chain[: place + 1])
        expected[path] = max(expected.get(path, ABSENT), ranks[place])

    joined = join(
        Proposal(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([scores])),
        torch.tensor([chain if match else [-1] * 6]),
        torch.tensor([ranks]),
        depth,
    )
    all_tokens, all_parents = joined.tokens[0].tolist(), joined.parents[0].tolist()
    real = [i for i, token in enumerate(all_tokens) if token >= 0]
    every = paths(all_tokens, all_parents)
    found = {every[i]: joined.scores[0, i].item() for i in real}
    assert found == expected
    assert len(found) == len(real)  # siblings are distinct, and nothing is there twice
    assert (all_tokens[: len(tokens)], all_parents[: len(tokens)]) == (tokens, parents)
    for i in real:
        parent = all_parents[i]
        assert parent <= i  # node `parent - 1` comes before
        assert not parent or joined.scores[0, i] <= joined.scores[0, parent - 1]

    nodes = min(nodes, len(real) + 1)
    tree = prune(torch.tensor([9]), joined, torch.arange(nodes), max(depth, 6))
    kept = paths(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist())
    best = sorted(expected.values(), reverse=True)[: nodes - 1]
    assert sorted((expected[path] for path in kept), reverse=True) == best
    assert len(set(kept)) == nodes - 1
    assert tree.depth[0, 1:].tolist() == [len(path) for path in kept]
    for node, parent in enumerate(tree.parents[0].tolist()[1:], start=1):
        assert parent < node


def test_a_chain_that_goes_on_is_a_longer_match():
    chances = MatchAccuracy((0.25, 0.5, 0.8)).log_chances(4)
    expected = [[0.25, 0.125, 0.1, 0.08], [0.5, 0.4, 0.32, 0.256], [0.8, 0.64, 0.512, 0.4096]]
    for row, right in zip(chances, expected, strict=True):
        assert [math.exp(value) for value in row] == pytest.approx(right)


def test_trimming_shortens_the_chain_to_the_deepest_tree(make_target, make_medusa, run_step):
    target = make_target()
    combined = Combined(as_growing(make_medusa(target)))
    combined.trim([1, 5])
    assert combined.lookup.gamma == 4 and combined.max_depth() == 4
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 40, 1)
    assert run_step(Step(target, combined), PROMPT, 40, 5).tokens == plain.tokens


def test_the_name_says_both(tmp_path, make_medusa):
    source = find_drafter("chat+ngram")
    alone = find_drafter("chat")
    assert (source.name, source.kind, source.folder) == (
        "chat+ngram",
        "medusa+ngram",
        alone.folder,
    )
    assert source.digest != alone.digest
    for name in ("ngram+ngram", "plain+ngram", "chat+ngram+ngram"):
        with pytest.raises(ForerunError, match=r"\+ngram"):
            find_drafter(name)
    with pytest.raises(ForerunError, match="drafter 'nobody'"):
        find_drafter("nobody+ngram")


def test_the_shipped_drafter_records_both():
    pytest.importorskip("gguf")
    checkpoint = load_checkpoint("smollm2")
    drafter = load_drafter(find_drafter("chat+ngram"), checkpoint, 64)
    assert isinstance(drafter, Combined)
    options = drafter.options()
    assert options["heads"] == 4 and options["ngram_longest"] == 8
    assert [state.name for state in drafter.states()] == ["history"]
    assert drafter.tree(1) is not None and drafter.tree(8) is None
