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
KINDS = ("eagle", "eagle3", "mtp")


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
    """A target whose layers do nothing says what the last token alone implies; so can a drafter."""
    target = make_target(hidden_size=16)  # as wide as the drafter's values
    drafter = make_eagle(
        target, kind, vocabulary=target.config.vocab_size, norm_before_residual=True
    )
    with torch.no_grad():
        for block in target.blocks:
            block.output.weight.zero_()
            block.down.weight.zero_()
        target.norm.weight.fill_(1.0)
        target.head.weight.mul_(20)  # sure of its choices
        pass_on_the_embedding(drafter, kind)
        if kind == "eagle3":
            drafter.head.weight.copy_(target.head.weight)
    run = run_step(Step(target, drafter), PROMPT, 33, 12)
    assert run.tokens[0] == run_step(Step(target, Drafter(), 4), PROMPT, 33, 1).tokens[0]
    assert set(run.counts[0][:-1]) == {drafter.max_depth() + 1}


def pass_on_the_embedding(drafter, kind: str) -> None:
    """The layer's output becomes its row's own embedding, whatever the features and the context."""
    attention = drafter.attention
    drafter.mlp.down.weight.zero_()
    attention.output.weight.zero_()
    size = attention.output.weight.shape[1]
    if kind == "eagle":
        drafter.fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)]))
        drafter.fc.bias.zero_()
        return
    if kind == "mtp":
        drafter.fc.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)]))
        drafter.token_norm.weight.fill_(1.0)
        drafter.norm.weight.fill_(1.0)
        return
    for norm in (drafter.input_norm, drafter.norm):
        norm.weight.fill_(1.0)
    drafter.hidden_norm.weight.zero_()  # and with it the residual
    for projection in (attention.query, attention.key):  # equal at equal positions alone
        projection.weight.zero_()
        projection.bias = torch.nn.Parameter(torch.full((projection.weight.shape[1],), 9.0))
    attention.value.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)]))
    for head, first in ((0, 0), (2, 8)):  # the first query head of either group
        attention.output.weight[8 * head : 8 * head + 8, first : first + 8] = torch.eye(8)


def test_int8_layers_stay_lossless(make_target, make_eagle, run_step):
    from forerun.compiler.precision import int8_drafter
    from forerun.models.linear import Int8Linear

    target = make_target()
    step = Step(target, make_eagle(target))
    int8_drafter(step.drafter)
    assert isinstance(step.drafter.fc, Int8Linear)
    assert isinstance(step.drafter.attention.query, Int8Linear)
    plain = run_step(Step(target, Drafter(), 4), PROMPT, 25, 1)
    assert run_step(step, PROMPT, 25, 9).tokens == plain.tokens


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_trimming_changes_no_tree(make_target, make_eagle, run_step, nodes):
    target = make_target()
    runs = []
    for sizes in ((1, 99), (1, nodes)):
        drafter = make_eagle(target, depth=5, top_k=5)
        drafter.trim(sizes)
        runs.append(run_step(Step(target, drafter), PROMPT, 20, nodes))
    assert drafter.max_depth() == min(5, nodes - 1)
    assert drafter.candidates < proposed(5, 5)
    assert runs[0].counts == runs[1].counts
    assert torch.equal(runs[0].last.tokens, runs[1].last.tokens)
    assert torch.equal(runs[0].last.ancestors, runs[1].last.ancestors)


def test_an_mtp_block_drafts_a_chain(make_target, make_eagle, run_step):
    """One child a node, unless it is asked for more: then no node has a sibling."""
    target = make_target()
    step = Step(target, make_eagle(target, "mtp", depth=5, top_k=1))
    run = run_step(step, PROMPT, 30, 6, temperature=0.8, seed=5)
    assert run.last.parents[0].tolist() == [0, 0, 1, 2, 3, 4]
    assert run.last.depth[0].tolist() == list(range(6))
    plain = run_step(Step(target, Drafter(), 6), PROMPT, 30, 1, temperature=0.8, seed=5)
    assert run.tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_with_a_random_drafter_stays_lossless(make_eagle, run_step, kind):
    from forerun.models.checkpoint import load_checkpoint
    from forerun.models.target import Target

    checkpoint = load_checkpoint("smollm2")
    target = Target(checkpoint.config, checkpoint.weights, 192).eval()
    layers = checkpoint.config.num_layers
    three = {"feature_layers": (2, layers // 2, layers - 3)} if kind == "eagle3" else {}
    drafter = make_eagle(target, kind, vocabulary=8192, depth=4, top_k=4, **three)
    prompt = checkpoint.tokenizer.encode("The three primary colours are").ids
    for sampling in ({}, SAMPLING["warped"]):
        plain = run_step(Step(target, Drafter(), 5), prompt, 16, 1, **sampling)
        assert run_step(Step(target, drafter), prompt, 16, 6, **sampling).tokens == plain.tokens


# --- the tree, from the papers' definition ----------------------------------------------------


@dataclass
class Node:
    """A node of the reference's tree."""

    path: tuple[int, ...]
    score: float
    features: list[Tensor]
    """What each token of the path is paired with."""


def rotate(x: Tensor, theta: float) -> Tensor:
    """RoFormer's rotation of `[n, heads, D]` at positions 0, 1, ..., in halves."""
    half = x.shape[2] // 2
    turns = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rms(x: Tensor, norm) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight


def last_output(drafter, embedded: Tensor, features: Tensor, kind: str) -> Tensor:
    """The layer's output `[H]` at the last of n rows, attention over all of them."""
    if kind == "eagle":
        read = residual = torch.cat([embedded, features], -1) @ drafter.fc.weight + drafter.fc.bias
    elif kind == "mtp":
        pair = [rms(features, drafter.hidden_norm), rms(embedded, drafter.token_norm)]
        residual = torch.cat(pair, dim=-1) @ drafter.fc.weight
        read = rms(residual, drafter.input_norm)
    else:
        normed = rms(features, drafter.hidden_norm)
        residual = normed if drafter.config.norm_before_residual else features
        read = torch.cat([rms(embedded, drafter.input_norm), normed], dim=-1)
    layer, rows = drafter.attention, read.shape[0]
    query = rotate((read @ layer.query.weight).view(rows, 4, 8), 5000.0)[-1]
    keys = rotate((read @ layer.key.weight).view(rows, 2, 8), 5000.0)
    values = (read @ layer.value.weight).view(rows, 2, 8)
    mixed = []
    for head in range(4):
        weights = (keys[:, head // 2] @ query[head] / math.sqrt(8)).softmax(0)
        mixed.append(weights @ values[:, head // 2])
    x = residual[-1] + torch.cat(mixed) @ layer.output.weight
    y, mlp = rms(x, drafter.mlp_norm), drafter.mlp
    gate = y @ mlp.gate.weight
    return x + (gate * gate.sigmoid() * (y @ mlp.up.weight)) @ mlp.down.weight


def reference_tree(drafter, target, text: list[int], features: Tensor, nodes: int, kind: str):
    """The paths of the `nodes - 1` best of all nodes that are proposed after `text`."""
    config = drafter.config
    context = list(drafter.fuse(features)) if kind == "eagle3" else list(features)
    level, proposals = [Node((), 0.0, [])], []
    for _ in range(config.depth):
        children = []
        for node in level:
            tokens = torch.tensor(text[1:] + list(node.path))
            rows = torch.stack(context + node.features)
            x = last_output(drafter, target.embed.weight[tokens], rows, kind)
            normed = x if kind == "eagle" else rms(x, drafter.norm)
            head = drafter.head if kind == "eagle3" else target.head
            log_p = (normed @ head.weight).log_softmax(-1)
            following = normed if kind == "mtp" or config.norm_output else x
            for column in log_p.argsort(descending=True)[: config.top_k].tolist():
                token = column if drafter.ids is None else int(drafter.ids[column])
                score = node.score + float(log_p[column])
                children.append(Node((*node.path, token), score, [*node.features, following]))
        proposals += children
        level = sorted(children, key=lambda node: -node.score)[: config.top_k]
    return {node.path for node in sorted(proposals, key=lambda node: -node.score)[: nodes - 1]}


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Every node's tokens from below the root on, of a tree whose parents come first."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        assert parent < len(found)
        found.append((*found[parent], token))
    assert len(set(found)) == len(found)  # siblings carry distinct tokens
    return set(found[1:])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [*KINDS, "normed"])
def test_the_tree_is_the_papers(make_target, make_eagle, run_step, kind, seed):
    target = make_target(seed)
    changes = {"norm_before_residual": True, "norm_output": True} if kind == "normed" else {}
    kind = "eagle3" if kind == "normed" else kind
    drafter = make_eagle(target, kind, seed=seed + 10, depth=2 + seed % 3, **changes)
    nodes, seen = 4 + 3 * (seed % 4), []
    with torch.no_grad():
        propose, drafter.propose = drafter.propose, lambda *a: seen.append(a[0]) or propose(*a)
        run = run_step(Step(target, drafter), PROMPT, 3 + seed, nodes)
        text = PROMPT + run.tokens[0]
        features = all_features(seen)[: len(text) - 1]
        expected = reference_tree(drafter, target, text, features, nodes, kind)
    assert run.last.tokens[0, 0] == text[-1]
    assert paths(run.last.tokens[0].tolist(), run.last.parents[0].tolist()) == expected


def all_features(calls: list[Committed]) -> Tensor:
    """The features of all context rows that a generation's steps handed over, `[n, F]`."""
    rows = [call.features[0, : int(call.count[0])] for call in calls]
    return torch.cat(rows)


def test_a_thousand_trees_grown_from_random_scores():
    """Growth alone, over tables of logits by the token before.

    Every other table's rows are permutations of one, so that many scores tie: then the scores of
    the chosen nodes must be the reference's, whichever of the tied ones were taken.
    """
    draw = torch.Generator().manual_seed(0)
    for case in range(1000):
        depth, top_k, width = 1 + case % 4, 2 + case % 3, 7
        nodes = 2 + case % proposed(depth, top_k)
        table = torch.randn(width, width, generator=draw)
        if case % 2:
            table = torch.stack([torch.randperm(width, generator=draw) for _ in table]).float()
        tree = prune(torch.tensor([3]), grow(table, 3, depth, top_k), torch.arange(nodes), depth)
        found = paths(tree.tokens[0].tolist(), tree.parents[0].tolist())
        expected = grow_plainly(table, 3, depth, top_k, nodes)
        if case % 2:
            found_scores, expected_scores = (scores(table, 3, some) for some in (found, expected))
            torch.testing.assert_close(found_scores, expected_scores, atol=1e-4, rtol=0)
        else:
            assert found == expected, case
        assert torch.equal(tree.depth, tree.ancestors.sum(-1) - 1)
        assert sorted(tree.depth[0, 1:].tolist()) == sorted(map(len, found))


def grow(table: Tensor, root: int, depth: int, top_k: int) -> Proposal:
    frontier, levels, before = Frontier.root(torch.tensor([root])), [], 1
    for _ in range(depth):
        levels.append(expand(frontier, table[frontier.tokens], top_k))
        frontier = keep(levels[-1], before, top_k)
        before += levels[-1].tokens.shape[1]
    fields = ("tokens", "parents", "scores")
    return Proposal(*(torch.cat([getattr(level, f) for level in levels], 1) for f in fields))


def grow_plainly(table: Tensor, root: int, depth: int, top_k: int, nodes: int):
    log_p = table.log_softmax(-1)
    level, proposals = [((root,), 0.0)], []
    for _ in range(depth):
        children = [
            ((*path, token), score + float(log_p[path[-1], token]))
            for path, score in level
            for token in log_p[path[-1]].argsort(descending=True)[:top_k].tolist()
        ]
        proposals += children
        level = sorted(children, key=lambda child: -child[1])[:top_k]
    best = sorted(proposals, key=lambda child: -child[1])[: nodes - 1]
    return {path[1:] for path, _ in best}


def scores(table: Tensor, root: int, chosen: set[tuple[int, ...]]) -> Tensor:
    """Cumulative log-probabilities of the `chosen` paths, in order."""
    log_p = table.log_softmax(-1)
    steps = [zip((root, *path), path, strict=False) for path in chosen]
    return (
        torch.tensor([sum(float(log_p[a, b]) for a, b in pairs) for pairs in steps]).sort().values
    )
