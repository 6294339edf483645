"""The kernels that accept a path and gather its keys and values, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.compiler.kernel_accept import accept
from forerun.compiler.kernel_commit import select_rows
from forerun.models.accept import TreeRows
from forerun.models.accept import accept as accept_in_torch
from forerun.models.step import select_rows as select_in_torch

PENDING = 9
FIXTURE = [HealthCheck.function_scoped_fixture]


def tree_rows(parents: list[list[int]], verify: list[int] | None = None) -> TreeRows:
    """A batch of trees of one size, each given by its nodes' parents (the root's is -1)."""
    batch, nodes = len(parents), len(parents[0])
    depth = torch.zeros(batch, nodes, dtype=torch.int64)
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for row, tree in enumerate(parents):
        for node in range(1, nodes):
            depth[row, node] = depth[row, tree[node]] + 1
            ancestors[row, node] |= ancestors[row, tree[node]]
    seen = list(range(nodes)) if verify is None else verify
    above = [[seen.index(tree[n]) if tree[n] in seen else 0 for n in seen] for tree in parents]
    return TreeRows(depth, ancestors, torch.tensor(seen), torch.tensor(above))


def walk(parents: list[int], tokens: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """(accepted nodes, emitted tokens): go to the child that carries the chosen token."""
    path = [0]
    while True:
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        hits = [node for node in children if tokens[node] == chosen[path[-1]]]
        if not hits:
            return path, [chosen[node] for node in path]
        path.append(hits[0])


def check(interpreted, parents, tokens, chosen, allowed, pending):
    """Against the walk, and against torch in every number."""
    trees = tree_rows(parents)
    arguments = (torch.tensor(tokens), torch.tensor(chosen), trees, pending, torch.tensor(allowed))
    found, expected = interpreted(accept, *arguments), accept_in_torch(*arguments)
    for row, (tree, carried, choice) in enumerate(zip(parents, tokens, chosen, strict=True)):
        path, emitted = walk(tree, carried, choice)
        count = max(0, min(len(path), allowed[row]))
        assert found.count[row] == count
        padded = [*path, *[-1] * pending][:pending]
        assert found.nodes[row].tolist() == padded
        assert found.emitted[row, :count].tolist() == emitted[:count]
    torch.testing.assert_close(found.count, expected.count)
    torch.testing.assert_close(found.emitted, expected.emitted)


@st.composite
def batches(draw):
    """Trees of one size whose siblings carry distinct tokens (-1 is padding)."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    drawn = []
    for _ in range(batch):
        parents, tokens, depth = [-1], [draw(st.integers(0, 3))], [0]
        for _ in range(1, nodes):
            free = [n for n in range(len(parents)) if depth[n] < PENDING - 1]
            parent = free[-1 - draw(st.integers(0, min(2, len(free) - 1)))]
            taken = {tokens[n] for n in range(1, len(parents)) if parents[n] == parent}
            tokens.append(draw(st.sampled_from([-1, *sorted(set(range(25)) - taken)[:2]])))
            parents.append(parent)
            depth.append(depth[parent] + 1)
        chosen = [draw(st.integers(0, 3)) for _ in range(nodes)]
        drawn.append((parents, tokens, chosen, draw(st.integers(-2, 12))))
    return tuple(list(column) for column in zip(*drawn, strict=True))


@settings(max_examples=200, deadline=None, suppress_health_check=FIXTURE)
@given(drawn=batches())
def test_matches_the_walk(interpreted, drawn):
    check(interpreted, *drawn, PENDING)


@pytest.mark.parametrize("nodes", [1, 2, 16, 17, 64])
def test_a_perfect_chain_is_accepted_whole(interpreted, nodes):
    chain = list(range(-1, nodes - 1))
    tokens = [(7 * node) % 5 for node in range(nodes)]  # token 0 is an ordinary one
    chosen = [*tokens[1:], 3]
    wrong = list(chosen)
    wrong[nodes // 2] = 9  # what hangs from here is lost
    check(interpreted, [chain] * 3, [tokens] * 3, [chosen, wrong, chosen], [999, 999, 0], nodes)


def test_a_wide_tree_of_many_nodes(interpreted):
    """256 nodes: the root's 3 children, and a chain of 8 under each leaf in turn."""
    parents = [-1, *(max(0, node - 3) for node in range(1, 256))]
    depth = [0] * 256
    for node in range(1, 256):
        depth[node] = depth[parents[node]] + 1
    tokens = list(range(256))
    chosen = [next((n for n in range(255, 0, -1) if parents[n] == node), 300) for node in tokens]
    check(interpreted, [parents], [tokens], [chosen], [999], max(depth) + 1)


def test_padding_is_never_accepted(interpreted):
    parents, tokens = [-1, 0, 0, 1], [5, -1, 0, 0]
    for first in (0, 1):
        check(interpreted, [parents], [tokens], [[first, 0, 0, 0]], [9], 3)


def test_a_prefill_verifies_its_last_node_only(interpreted):
    rows = tree_rows([[-1, 0, 1, 2]] * 2, verify=[3])
    arguments = (torch.tensor([[9]] * 2), torch.tensor([[5], [0]]), rows, 4, torch.tensor([10, 0]))
    found, expected = interpreted(accept, *arguments), accept_in_torch(*arguments)
    assert found.count.tolist() == expected.count.tolist() == [1, 0]
    assert found.emitted.tolist() == expected.emitted.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0]]
    assert found.nodes.tolist() == [[3, -1, -1, -1]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups, pending, width", [(2, 1, 8), (12, 5, 16), (7, 9, 80)])
def test_commit_is_the_one_hot_product(interpreted, dtype, groups, pending, width):
    generator = torch.Generator().manual_seed(pending)
    batch, nodes = 3, 6
    written = torch.randn(batch, groups, nodes, width, generator=generator).to(dtype)
    paths = [torch.randperm(nodes, generator=generator)[:pending].tolist() for _ in range(batch)]
    paths[0] = paths[0][:1]
    taken = [[*path, *[-1] * pending][:pending] for path in paths]
    one_hot = torch.zeros(batch, pending, nodes, dtype=torch.bool)
    for row, path in enumerate(taken):
        for depth, node in enumerate(path):
            one_hot[row, depth, node] = node >= 0
    found = interpreted(select_rows, torch.tensor(taken), written)
    assert torch.equal(found, select_in_torch(one_hot, torch.arange(nodes), written))
    for row, path in enumerate(taken):
        for depth, node in enumerate(path):
            expected = written[row, :, node] if node >= 0 else torch.zeros(groups, width).to(dtype)
            assert torch.equal(found[row, :, depth], expected)


def test_commit_moves_bytes_and_leaves_infinities_where_they_are(interpreted):
    written = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(1, 2, 3, 4)
    found = interpreted(select_rows, torch.tensor([[2, -1]]), written)
    np.testing.assert_array_equal(found[0, :, 0].numpy(), written[0, :, 2].numpy())
    assert not found[0, :, 1].any()
    poisoned = torch.ones(1, 1, 2, 4)
    poisoned[0, 0, 0] = float("inf")
    assert interpreted(select_rows, torch.tensor([[1, -1]]), poisoned).sum() == 4


def test_accept_feeds_commit(interpreted):
    """A whole step's second half: the rows of the accepted path, deepest last."""
    parents, tokens = [-1, 0, 0, 2, 2, 4], [8, 1, 2, 3, 0, 6]
    rows = tree_rows([parents])
    chosen = torch.tensor([[2, 9, 0, 9, 7, 9]])  # node 2, then node 4, then 7 as the bonus
    found = interpreted(accept, torch.tensor([tokens]), chosen, rows, 4, torch.tensor([9]))
    assert found.emitted[0].tolist() == [2, 0, 7, 0] and found.count.tolist() == [3]
    written = torch.arange(6.0)[None, None, :, None].expand(1, 2, 6, 3).contiguous()
    pending = interpreted(select_rows, found.nodes, written)
    assert pending[0, 0, :, 0].tolist() == [0, 2, 4, 0]
