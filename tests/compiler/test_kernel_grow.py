"""The kernels that grow EAGLE-2's tree, interpreted: against torch, sorting and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.compiler.kernel_expand import BLOCK, expand, keep, keep_launch
from forerun.compiler.kernel_grow import prune
from forerun.errors import ForerunError
from forerun.models.expand import Frontier, proposed
from forerun.models.expand import expand as expand_in_torch
from forerun.models.expand import keep as keep_in_torch
from forerun.models.grow import GrownTree, Proposal
from forerun.models.grow import prune as prune_in_torch

FIXTURE = [HealthCheck.function_scoped_fixture]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def frontier(batch: int, width: int, score: float = -0.5) -> Frontier:
    places = torch.arange(batch * width).reshape(batch, width)
    return Frontier(places + 100, score * places.to(torch.float32), places + 1, places * 0)


def check_children(interpreted, above: Frontier, logits, top_k: int, ids=None) -> Proposal:
    """By a stable sort, and a log-sum-exp in float64."""
    found = interpreted(expand, above, logits, top_k, ids)
    x = logits.to(torch.float64).numpy()
    best = np.argsort(-x, axis=-1, kind="stable")[..., :top_k]  # the lowest column where they tie
    tokens = best if ids is None else ids.numpy()[best]
    np.testing.assert_array_equal(found.tokens.numpy(), tokens.reshape(len(x), -1))
    parents = above.nodes[..., None].expand(-1, -1, top_k).flatten(1)
    assert torch.equal(found.parents, parents)
    peak = x.max(-1, keepdims=True)
    log_total = peak + np.log(np.exp(x - peak).sum(-1, keepdims=True))
    expected = (
        above.scores.double().numpy()[..., None] + np.take_along_axis(x, best, -1) - log_total
    )
    np.testing.assert_allclose(found.scores.numpy(), expected.reshape(len(x), -1), 1e-6, 4e-6)
    by_parent = found.scores.reshape(*above.nodes.shape, top_k)
    assert (by_parent <= above.scores[..., None]).all()  # never above the parent
    assert (by_parent[..., :-1] >= by_parent[..., 1:]).all()
    in_torch = expand_in_torch(above, logits, top_k, ids)
    assert torch.equal(found.parents, in_torch.parents)
    torch.testing.assert_close(found.scores, in_torch.scores, rtol=1e-6, atol=4e-6)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "batch, width, size, top_k",
    [(1, 1, 1, 1), (2, 3, 5, 5), (1, 4, 333, 4), (2, 2, BLOCK + 1, 10), (1, 1, 3 * BLOCK, 8)],
)
def test_children(interpreted, dtype, batch, width, size, top_k):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(batch, width, size, generator=generator) * 4).to(dtype)
    check_children(interpreted, frontier(batch, width), logits, top_k)


def test_children_of_a_reduced_vocabulary(interpreted):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 50, generator=generator)
    ids = torch.randperm(1000, generator=generator)[:50]
    check_children(interpreted, frontier(2, 3), logits, 6, ids)


def test_the_best_lie_in_the_last_block_or_at_the_borders(interpreted):
    logits = torch.zeros(1, 3, 2 * BLOCK + 3)
    logits[0, 0, -3:] = torch.tensor([5.0, 7.0, 6.0])
    logits[0, 1, [0, BLOCK - 1, BLOCK, 2 * BLOCK]] = 9.0
    logits[0, 2] = -40.0
    logits[0, 2, BLOCK : BLOCK + 2] = 3.0
    found = check_children(interpreted, frontier(1, 3), logits, 4)
    best = found.tokens.reshape(3, 4).tolist()
    assert best[0] == [2 * BLOCK + 1, 2 * BLOCK + 2, 2 * BLOCK, 0]
    assert best[1] == [0, BLOCK - 1, BLOCK, 2 * BLOCK]
    assert best[2] == [BLOCK, BLOCK + 1, 0, 1]


def test_certain_and_masked_children(interpreted):
    """One finite logit in two blocks, at each end: its child is certain, the others impossible."""
    logits = torch.full((1, 2, BLOCK + 40), float("-inf"))
    logits[0, 0, BLOCK + 7] = -3.0
    logits[0, 1, 0] = 80.0
    above = frontier(1, 2)
    found = interpreted(expand, above, logits, 3, None)
    assert found.tokens.tolist() == [[BLOCK + 7, 0, 1, 0, 1, 2]]
    certain, impossible = above.scores[0].tolist(), float("-inf")
    expected = [certain[0], impossible, impossible, certain[1], impossible, impossible]
    assert found.scores[0].tolist() == expected
    in_torch = expand_in_torch(above, logits, 3)
    assert in_torch.scores[0].tolist() == expected


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURE)
@given(data=st.data())
def test_tied_children(interpreted, data):
    batch, width, size = (data.draw(st.integers(1, most)) for most in (2, 3, 40))
    value = st.sampled_from([-30.0, -1.0, 0.0, 0.5, 0.5, 12.0])
    count = batch * width * size
    logits = torch.tensor(data.draw(st.lists(value, min_size=count, max_size=count)))
    dtype = data.draw(st.sampled_from(DTYPES))
    top_k = data.draw(st.integers(1, size))
    logits = logits.reshape(batch, width, size).to(dtype)
    check_children(interpreted, frontier(batch, width, -1e4), logits, top_k)


@pytest.mark.parametrize("size, top_k", [(4, 5), (4, 0), (2 * BLOCK, BLOCK + 1)])
def test_more_children_than_there_are_columns_are_refused(size, top_k):
    with pytest.raises(ForerunError, match=f"top_k {top_k} of {size} draft tokens"):
        expand(frontier(1, 1), torch.zeros(1, 1, size), top_k)


@st.composite
def levels(draw):
    """(a level, its top_k) with many ties."""
    top_k, batch = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    nodes = top_k * draw(st.integers(1, top_k))
    value = st.sampled_from([0.0, -0.5, -1.0, -1e30, float("-inf")])
    scores = draw(st.lists(value, min_size=batch * nodes, max_size=batch * nodes))
    tokens = torch.arange(batch * nodes).reshape(batch, nodes) * 3
    return Proposal(tokens, tokens * 0, torch.tensor(scores).reshape(batch, nodes)), top_k


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURE)
@given(drawn=levels(), before=st.integers(1, 500))
def test_the_best_of_a_level(interpreted, drawn, before):
    level, top_k = drawn
    found, in_torch = interpreted(keep, level, before, top_k), keep_in_torch(level, before, top_k)
    order = np.argsort(-level.scores.numpy(), axis=-1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(found.nodes.numpy(), before + order)
    for name in ("tokens", "scores", "nodes", "above"):
        assert torch.equal(getattr(found, name), getattr(in_torch, name)), name


def by_loop(root: int, proposal: Proposal, row: int, nodes: int) -> GrownTree:
    """The root and the best nodes of one row, as lists."""
    scores = proposal.scores[row].tolist()
    order = [0, *(1 + at for at in sorted(range(len(scores)), key=lambda at: (-scores[at], at)))]
    order = order[:nodes]
    tokens = [root if at == 0 else proposal.tokens[row, at - 1].item() for at in order]
    parents = [0, *(order.index(proposal.parents[row, at - 1].item()) for at in order[1:])]
    depth, ancestors = [0] * nodes, torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        assert parents[node] < node
        depth[node] = depth[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]]
    return GrownTree(torch.tensor(tokens), torch.tensor(depth), ancestors, torch.tensor(parents))


def check_tree(interpreted, root, proposal: Proposal, nodes: int, max_depth: int) -> GrownTree:
    found = interpreted(prune, root, proposal, torch.arange(nodes), max_depth)
    in_torch = prune_in_torch(root, proposal, torch.arange(nodes), max_depth)
    for name in ("tokens", "depth", "ancestors", "parents"):
        assert torch.equal(getattr(found, name), getattr(in_torch, name)), name
        for row in range(root.shape[0]):
            expected = by_loop(root[row].item(), proposal, row, nodes)
            assert torch.equal(getattr(found, name)[row], getattr(expected, name)), (name, row)
    return found


@st.composite
def proposals(draw):
    """(root, proposal, the tree's size, its depth): children score no more than their parents."""
    batch, size, most = draw(st.integers(1, 3)), draw(st.integers(1, 40)), 5
    drop = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1e3, float("inf")])
    parents = torch.zeros(batch, size, dtype=torch.int64)
    scores = torch.zeros(batch, size)
    for row in range(batch):
        depth, score = [0], [0.0]
        for node in range(size):
            free = [above for above in range(node + 1) if depth[above] < most]
            above = free[draw(st.integers(0, len(free) - 1))]
            parents[row, node] = above
            depth.append(depth[above] + 1)
            score.append(score[above] - draw(drop))
        scores[row] = torch.tensor(score[1:])
    tokens = torch.arange(batch * size).reshape(batch, size)
    root = torch.arange(batch) + 1000
    return root, Proposal(tokens, parents, scores), draw(st.integers(1, size + 1)), most


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURE)
@given(drawn=proposals())
def test_no_node_is_taken_without_its_parent(interpreted, drawn):
    check_tree(interpreted, *drawn)


@pytest.mark.parametrize("nodes", [1, 64, 256])
def test_a_large_proposal(interpreted, nodes):
    """EAGLE-2's own sizes: 8 levels, 10 best, 711 nodes with the root."""
    generator = np.random.default_rng(nodes)
    size = proposed(8, 10)
    parents = np.zeros((2, size), np.int64)
    scores = np.zeros((2, size), np.float32)
    for row in range(2):
        for level in range(8):
            first = 0 if level == 0 else 10 + (level - 1) * 100
            last = 10 if level == 0 else first + 100
            before = [0] if level == 0 else range(1 + max(0, first - 100), 1 + first)
            parents[row, first:last] = generator.choice(before, last - first)
            above = np.append(0, scores[row])[parents[row, first:last]]
            scores[row, first:last] = above - generator.integers(0, 4, last - first) / 4
    proposal = Proposal(*map(torch.from_numpy, (generator.integers(0, 99, (2, size)), parents)), (
        torch.from_numpy(scores)
    ))  # fmt: skip
    check_tree(interpreted, torch.tensor([7, 0]), proposal, nodes, 8)


def test_places_may_be_any(interpreted):
    """As `models.grow.prune`: places name ranks, the parent's among them."""
    root = torch.tensor([5])
    proposal = Proposal(
        torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 0]]), torch.tensor([[-1.0, -1.0, -0.5]])
    )
    places = torch.tensor([0, 2, 3])
    found = interpreted(prune, root, proposal, places, 2)
    expected = prune_in_torch(root, proposal, places, 2)
    assert found.tokens.tolist() == expected.tokens.tolist() == [[5, 1, 2]]
    assert torch.equal(found.ancestors, expected.ancestors)
    assert found.parents.tolist() == expected.parents.tolist() == [[0, 0, 1]]


def test_a_tree_grown_by_kernels_is_torchs(interpreted):
    """All of them in a row, as an EAGLE drafter calls them, on logits drawn for every level."""
    generator = torch.Generator().manual_seed(8)
    batch, size, top_k, depth, nodes = 2, 90, 4, 3, 12
    root = torch.tensor([3, 0])
    trees = []
    drawn = [torch.randn(batch, top_k, size, generator=generator) * 3 for _ in range(depth)]
    for call in (interpreted, lambda function, *arguments: function(*arguments)):
        mine = call is interpreted
        functions = (
            (expand, keep, prune) if mine else (expand_in_torch, keep_in_torch, prune_in_torch)
        )
        front, grown, before = Frontier.root(root), [], 1
        for logits in drawn:
            width = front.tokens.shape[1]
            level = call(functions[0], front, logits[:, :width].contiguous(), top_k, None)
            front = call(functions[1], level, before, top_k)
            before += level.tokens.shape[1]
            grown.append(level)
        proposal = Proposal(
            *(torch.cat([getattr(g, n) for g in grown], 1) for n in ("tokens", "parents", "scores"))
        )
        trees.append(call(functions[2], root, proposal, torch.arange(nodes), depth))
    for name in ("tokens", "depth", "ancestors", "parents"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name


def test_levels_of_both_sizes_share_a_kernel():
    assert keep_launch(1, 10, 1, 10).form == keep_launch(1, 100, 11, 10).form
