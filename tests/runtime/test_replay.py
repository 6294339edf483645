"""Recorded answers decoded again: step for step what the engine does with the same tree."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.runtime.bundle import load_bundle
from forerun.runtime.costs import stars, with_trees
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import decode
from forerun.runtime.record import Recording, record, widest
from forerun.runtime.replay import (
    FixedTree,
    GrownTree,
    Lookup,
    Played,
    Rule,
    accepted,
    best_fixed_tree,
    look_up,
    node_shares,
    replay,
)
from forerun.runtime.tree import Tree

PROMPTS = [[3, 4, 5, 6, 3, 4, 0], [0], list(range(40)), [*range(40, 50)] * 3, [9, 8, 9, 8, 200]]
NEW = 50


def recorded(folder: Path, extra: tuple[int, ...] = ()) -> tuple[Any, list[Recording]]:
    """(an engine that has the widest tree and `extra` stars besides, every prompt's recording)."""
    bundle = load_bundle(folder)
    wide = widest(bundle.manifest)
    nodes = wide if isinstance(wide, int) else wide.nodes
    trees = {str(nodes): None if isinstance(wide, int) else wide}
    engine = load_engine(with_trees(with_trees(bundle, trees), stars(bundle.manifest, extra)), 1)
    beyond = bundle.manifest.pending
    return engine, [record(engine, prompt, NEW, nodes, beyond=beyond) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_medusa_bundle", "tiny_combined_bundle"])
def test_a_replay_takes_the_steps_that_the_engine_takes(
    request: pytest.FixtureRequest, name: str
) -> None:
    folder = request.getfixturevalue(name)
    _, answers = recorded(folder)
    engine = load_engine(load_bundle(folder), 1)
    deeper = 0
    for key, tree in load_bundle(folder).manifest.trees.items():
        rule: Rule = GrownTree(int(key)) if tree is None else FixedTree(tree)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            decoding = decode(engine, Request(prompt, len(prompt) + NEW), int(key))
            tokens = [token for block in decoding for token in block.tokens]
            assert tuple(tokens) == answer.tokens[:NEW]
            stats, played = decoding.stats, replay([answer], rule)
            assert (played.steps, played.tau) == (stats.steps, stats.tau)
            assert played.acceptance_by_depth == stats.acceptance_by_depth
            deeper += sum(stats.committed[1:])
    assert deeper > 0 or name == "tiny_medusa_bundle"  # whose heads are random


def test_a_recording_ends_with_the_stop_token(tiny_bundle: Path) -> None:
    engine, answers = recorded(tiny_bundle)
    stop = answers[2].tokens[10]
    first = answers[2].tokens.index(stop)
    answer = record(engine, PROMPTS[2], NEW, 8, (stop,), 8)
    assert answer.tokens == answers[2].tokens[: first + 1]
    assert answer.length == first + 1


@pytest.mark.parametrize("longest", [1, 3, 8])
@pytest.mark.parametrize("shortest", [1, 2])
def test_look_up_is_the_graphs_own(longest: int, shortest: int) -> None:
    torch = pytest.importorskip("torch")
    from forerun.models.drafter import Committed
    from forerun.models.ngram import NGram

    drafter, draw = NGram(5, longest, shortest), random.Random(longest * 10 + shortest)
    for _ in range(60):
        text = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        size = len(text)
        zero = torch.zeros(1, dtype=torch.int64)
        committed = Committed(
            torch.zeros(1, 1, dtype=torch.int64),
            *(zero, torch.tensor([size - 1]), torch.tensor([text[-1]])),
            *(torch.zeros(1, 0, 0), torch.zeros(1, 1), torch.zeros(1, 1, 64)),
            *(torch.zeros(1), zero, torch.ones(1)),
            branching=True,
        )
        history = torch.zeros(1, 64, dtype=torch.int64)
        history[0, :size] = torch.tensor(text)
        expected = drafter.draft(committed, [history], None)[0].tolist()
        assert (look_up(text, 5, longest, shortest) or [-1] * 5) == expected


def test_another_lookup_rule_is_played_offline(tiny_bundle: Path) -> None:
    """The recorded drafter's own rule gives the same as its recorded proposals."""
    _, answers = recorded(tiny_bundle)
    tree = Tree.chain(6)
    same = replay(answers, Lookup(6, longest=4, shortest=1))
    assert same == replay(answers, FixedTree(tree))
    assert replay(answers, Lookup(6, longest=4, shortest=4)) != same


def invented(draw: random.Random, choices: int, depth: int, length: int = 60) -> Recording:
    """An answer of few different tokens, and candidates that are sometimes right."""
    tokens = [draw.randrange(6) for _ in range(length)]
    rows = [
        [token for _ in range(depth) for token in draw.sample(range(6), choices)]
        for _ in range(length)
    ]
    return Recording((1,), tuple(tokens), length, np.array(rows))


def all_trees(nodes: int, choices: int, depth: int) -> list[Tree]:
    """Every tree of that many nodes over so many choices a depth."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) < depth:
            paths += [(*path, 1 + len(path) * choices + k) for k in range(choices)]
    found = []
    for chosen in combinations(paths[1:], nodes - 1):
        place = {(): 0, **{path: i for i, path in enumerate(chosen, start=1)}}
        if all(path[:-1] in place for path in chosen):
            parents = (-1, *(place[path[:-1]] for path in chosen))
            found.append(Tree(parents, (0, *(path[-1] for path in chosen))))
    return found


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_no_fixed_tree_accepts_more_than_the_best_one(nodes: int) -> None:
    draw = random.Random(nodes)
    answers = [invented(draw, choices=2, depth=3) for _ in range(4)]

    def total(tree: Tree) -> int:
        rule = FixedTree(tree)
        return sum(
            len(accepted(*rule.draft(answer, at), answer.tokens[at + 1 :]))
            for answer in answers
            for at in range(answer.length - 1)
        )

    best = best_fixed_tree(answers, nodes, per_depth=2, max_depth=3)
    assert best is not None and best.nodes == nodes
    assert total(best) == max(total(tree) for tree in all_trees(nodes, 2, 3))


def test_a_tree_wider_than_what_was_ever_accepted_is_none() -> None:
    answer = Recording((1,), (1, 2, 3), 3, np.array([[2, 9], [9, 9], [9, 9]]))
    assert best_fixed_tree([answer], 2, 1, 2) == Tree((-1, 0), (0, 1))
    assert best_fixed_tree([answer], 3, 1, 2) is None


def test_shares_of_nodes_add_up_to_the_tokens_accepted() -> None:
    draw = random.Random(5)
    answers = [invented(draw, 2, 3) for _ in range(3)]
    tree = best_fixed_tree(answers, 6, 2, 3)
    assert tree is not None
    shares, played = node_shares(answers, FixedTree(tree)), replay(answers, FixedTree(tree))
    assert shares[0] == 1.0
    assert sum(shares) == pytest.approx(played.tau)
    by_depth = Counter[int]()
    for share, depth in zip(shares, tree.depths.tolist(), strict=True):
        by_depth[depth] += share  # type: ignore[assignment]
    for depth, share in enumerate(played.acceptance_by_depth, start=1):
        assert by_depth[depth] == pytest.approx(share)


def test_steps_without_a_proposal_are_counted() -> None:
    answer = Recording((1,), (1, 2, 3, 4), 4, np.array([[2], [-1], [-1], [-1]]))
    assert replay([answer], FixedTree(Tree.chain(2))) == Played(2, 3, (1,), 1)


def test_what_was_played_adds_up() -> None:
    assert Played(2, 5, (1,), 1) + Played(3, 4, (1, 1), 1) == Played(5, 9, (2, 1), 2)
    assert Played(0, 0, ()).tau == 0
