"""Draft trees: shape, and the best one against an exhaustive search."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError
from forerun.runtime.tree import Tree, best_tree


def test_a_chain():
    tree = Tree.chain(4)
    assert tree.parents == (-1, 0, 1, 2)
    assert tree.depths.tolist() == [0, 1, 2, 3]
    assert tree.depth == 3
    np.testing.assert_array_equal(tree.ancestors, np.tril(np.ones((4, 4), bool)))


@pytest.mark.parametrize(
    ("parents", "slots"),
    [
        ((), ()),
        ((-1, 0), (0,)),
        ((0,), (0,)),
        ((-1, 1), (0, 1)),
        ((-1, 0, 3), (0, 1, 2)),
        ((-1, 0, 0), (0, 1, 1)),
        ((-1, 0), (0, 0)),
        ((-1, -1), (0, 1)),
    ],
)
def test_impossible_trees_are_refused(parents, slots):
    with pytest.raises(ForerunError):
        Tree(parents, slots)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_ancestors_are_what_following_parents_gives(picks):
    parents = [-1] + [pick % (node + 1) for node, pick in enumerate(picks)]
    tree = Tree(tuple(parents), tuple(range(len(parents))))
    for node in range(tree.nodes):
        above, at = set(), node
        while at != -1:
            above.add(at)
            at = parents[at]
        assert set(np.flatnonzero(tree.ancestors[node])) == above
        assert tree.depths[node] == len(above) - 1


def expected_acceptance(tree: Tree, accuracy: list[list[float]]) -> float:
    """Sum over nodes of the product of accuracies along the path."""
    width, total = len(accuracy[0]), 0.0
    for node in range(1, tree.nodes):
        chance, at = 1.0, node
        while at:
            depth, k = divmod(tree.slots[at] - 1, width)
            chance *= accuracy[depth][k]
            at = tree.parents[at]
        total += chance
    return total


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_no_other_tree_expects_more(nodes):
    accuracy = [[0.5, 0.3], [0.45, 0.1]]
    # Every path is a tuple of choices; a tree is a set of paths closed under prefixes.
    paths = [path for depth in (1, 2) for path in product(range(2), repeat=depth)]
    best = 0.0
    for chosen in combinations(paths, nodes - 1):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            total = sum(
                float(np.prod([accuracy[depth][k] for depth, k in enumerate(path)]))
                for path in chosen
            )
            best = max(best, total)
    assert expected_acceptance(best_tree(accuracy, nodes), accuracy) == pytest.approx(best)


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_a_tree_grows_by_the_likeliest_node(heads, width, nodes, draw):
    """Medusa, section 2.3.3: connected to the tree so far, the node of the highest product."""
    accuracy = [sorted((draw.random() for _ in range(width)), reverse=True) for _ in range(heads)]
    nodes = min(nodes, sum(width**depth for depth in range(heads + 1)))
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    while len(paths) < nodes:
        open_nodes = {
            (*path, k): chance * accuracy[len(path)][k]
            for path, chance in paths.items()
            if len(path) < heads
            for k in range(width)
            if (*path, k) not in paths
        }
        best = max(open_nodes, key=lambda path: open_nodes[path])
        paths[best] = open_nodes[best]
    tree = best_tree(accuracy, nodes)
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.nodes):
        depth, k = divmod(tree.slots[node] - 1, width)
        assert depth == len(found[tree.parents[node]])
        found.append((*found[tree.parents[node]], k))
    assert set(found) == set(paths)


def test_sizes_out_of_reach_are_refused():
    with pytest.raises(ForerunError, match="between 1 and 3"):
        best_tree([[0.5, 0.2]], 4)
    assert best_tree([[0.5, 0.2]], 1) == Tree.chain(1)
