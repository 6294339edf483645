"""Acceptance against a walk down the tree written as a loop."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.accept import TreeRows, accept


@st.composite
def drafted_trees(draw):
    """(parents, tokens with distinct siblings, the target's choice at each node), few token ids."""
    nodes = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)]
    tokens = [0]
    for node in range(1, nodes):
        siblings = {tokens[i] for i in range(1, node) if parents[i] == parents[node]}
        free = sorted(set(range(14)) - siblings)
        tokens.append(draw(st.sampled_from(free[:3])))
    chosen = [draw(st.integers(0, 4)) for _ in range(nodes)]
    return parents, tokens, chosen


def walk(parents: list[int], tokens: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """(accepted nodes, emitted tokens): go to the child that carries the chosen token."""
    node, path, emitted = 0, [0], []
    while True:
        emitted.append(chosen[node])
        children = [i for i, parent in enumerate(parents) if parent == node]
        hits = [i for i in children if tokens[i] == chosen[node]]
        if not hits:
            return path, emitted
        node = hits[0]
        path.append(node)


def tree_rows(parents: list[int]) -> TreeRows:
    nodes = len(parents)
    depth, ancestors = [0] * nodes, torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        depth[node] = depth[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]]
    return TreeRows(
        torch.tensor([depth]),
        ancestors[None],
        torch.arange(nodes),
        torch.tensor([[max(0, parent) for parent in parents]]),
    )


@settings(max_examples=1000, deadline=None)
@given(drafted_trees(), st.integers(0, 14))
def test_matches_the_walk(drawn, allowed):
    parents, tokens, chosen = drawn
    path, emitted = walk(parents, tokens, chosen)
    result = accept(
        torch.tensor([tokens]),
        torch.tensor([chosen]),
        tree_rows(parents),
        pending=12,
        allowed=torch.tensor([allowed]),
    )
    count = int(result.count[0])
    assert count == min(len(emitted), allowed)
    assert result.emitted[0, :count].tolist() == emitted[:count]
    accepted = result.path[0].nonzero()
    assert accepted[:, 0].tolist() == list(range(len(path)))
    assert accepted[:, 1].tolist() == path


def test_a_prefill_verifies_its_last_node_only():
    chain = tree_rows([-1, 0, 1, 2])
    rows = TreeRows(chain.depth, chain.ancestors, torch.tensor([3]), torch.tensor([[0]]))
    result = accept(torch.tensor([[9]]), torch.tensor([[5]]), rows, 4, torch.tensor([10]))
    assert result.count.tolist() == [1]
    assert result.emitted[0, 0].item() == 5


def test_a_child_is_never_accepted_without_its_parent():
    # Node 2 carries what node 1 chose, but node 1 itself is not what the root chose.
    rows = tree_rows([-1, 0, 1])
    result = accept(
        torch.tensor([[0, 7, 8]]), torch.tensor([[3, 8, 4]]), rows, 3, torch.tensor([9])
    )
    assert result.count.tolist() == [1]
    assert result.emitted[0, 0].item() == 3


def test_rows_have_limits_of_their_own():
    rows = tree_rows([-1, 0, 1])
    two = TreeRows(
        *(t.expand(2, *t.shape[1:]) for t in (rows.depth, rows.ancestors)),
        rows.verify,
        rows.parents.expand(2, -1),
    )
    tokens, chosen = torch.tensor([[0, 1, 2]] * 2), torch.tensor([[1, 2, 3]] * 2)
    assert accept(tokens, chosen, two, 3, torch.tensor([2, -4])).count.tolist() == [2, 0]
