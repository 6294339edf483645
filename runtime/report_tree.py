"""The draft tree as a picture: the root at the left, a column a depth, a row a leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import ForerunError

ROW = 34
"""Pixels from leaf to leaf."""
LABELLED = 40
"""Most nodes that have their share written beside them."""


@dataclass(frozen=True)
class Node:
    """A node's place (percent across, pixels down), and the share of steps that accepted it."""

    x: float
    y: float
    parent_x: float
    parent_y: float
    share: float
    label: str
    value: str


@dataclass(frozen=True)
class TreePicture:
    """All nodes, parents before children, and the columns that they stand in."""

    nodes: tuple[Node, ...]
    depths: tuple[float, ...]
    height: float
    by_node: bool
    """Whether shares were measured node by node; otherwise all of a depth have the depth's."""


def tree_picture(
    parents: Sequence[int], accepted: Sequence[float] | None, by_depth: Sequence[float]
) -> TreePicture:
    """Lays out the tree; without `accepted` a node has the share of its depth."""
    if not parents or (accepted is not None and len(accepted) != len(parents)):
        raise ForerunError("tree: one acceptance a node is needed, and at least one node")
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ForerunError(f"tree: node {node} has parent {parent}: not an earlier node")
        depths.append(depths[parent] + 1)
    shares = list(accepted) if accepted is not None else _shares(depths, by_depth)
    rows = _rows(parents)
    deepest = max(max(depths), 1)
    xs = [100 * depth / deepest for depth in depths]
    ys = [ROW * (row + 0.5) for row in rows]
    nodes = tuple(
        Node(
            *(xs[i], ys[i], xs[max(parent, 0)], ys[max(parent, 0)], min(max(shares[i], 0), 1)),
            _words(i, depths[i], shares[i], accepted is not None),
            f"{100 * shares[i]:.0f}%" if i > 0 and len(parents) <= LABELLED else "",
        )
        for i, parent in enumerate(parents)
    )
    columns = tuple(100 * depth / deepest for depth in range(max(depths) + 1))
    return TreePicture(nodes, columns, ROW * (max(rows) + 1), accepted is not None)


def _shares(depths: Sequence[int], by_depth: Sequence[float]) -> list[float]:
    known = [1.0, *by_depth, *[0.0] * len(depths)]
    return [known[depth] for depth in depths]


def _rows(parents: Sequence[int]) -> list[float]:
    """Leaves from the top down in the tree's own order, parents in the middle of their children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows = [0.0] * len(parents)
    free = 0
    stack = [0]
    while stack:
        node = stack.pop()
        if not children[node]:
            rows[node] = free
            free += 1
        stack += reversed(children[node])
    for node in reversed(range(len(parents))):
        if under := children[node]:
            rows[node] = (rows[under[0]] + rows[under[-1]]) / 2
    return rows


def _words(node: int, depth: int, share: float, by_node: bool) -> str:
    if node == 0:
        return "root: the last committed token"
    what = f"node {node}, depth {depth}" if by_node else f"depth {depth}"
    return f"{what}: accepted in {100 * share:.1f}% of steps"
