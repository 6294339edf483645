"""A static draft tree: which candidate each node carries and which node it hangs from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError


@dataclass(frozen=True)
class Tree:
    """Node 0 is the last committed token; every other node follows its parent.

    `parents[i]` is the node that node i hangs from (-1 for the root), always an earlier one.
    `slots[i]` says where node i's token lies among the drafter's candidates: slot 0 is the last
    committed token itself, the others are the drafter's own order. Siblings have distinct slots.
    """

    parents: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.slots):
            raise ForerunError(
                f"a draft tree needs one slot a node: {len(self.parents)} parents, "
                f"{len(self.slots)} slots"
            )
        if self.parents[0] != -1 or self.slots[0] != 0:
            raise ForerunError("a draft tree's node 0 must have parent -1 and slot 0")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ForerunError(
                    f"draft tree node {node} has parent {parent}: not an earlier node"
                )
        children = list(zip(self.parents[1:], self.slots[1:], strict=True))
        if len(set(children)) != len(children) or any(slot < 1 for slot in self.slots[1:]):
            raise ForerunError("a draft tree's siblings must carry distinct slots, from 1 on")

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The last committed token and `length - 1` drafted ones in a row."""
        return cls(tuple(range(-1, length - 1)), tuple(range(length)))

    @classmethod
    def star(cls, nodes: int) -> Tree:
        """The last committed token, and below it the drafter's first `nodes - 1` candidates."""
        return cls((-1, *[0] * (nodes - 1)), tuple(range(nodes)))

    @property
    def nodes(self) -> int:
        """How many nodes, the root included."""
        return len(self.parents)

    @property
    def depths(self) -> NDArray[np.int64]:
        """`[T]`: edges between each node and the root."""
        depths = np.zeros(self.nodes, np.int64)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def depth(self) -> int:
        """The deepest node's depth."""
        return int(self.depths.max())

    @property
    def ancestors(self) -> NDArray[np.bool_]:
        """`[T, T]`: row i is true at node i and at everything above it."""
        matrix = np.eye(self.nodes, dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            matrix[node] |= matrix[parent]
        return matrix


def best_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of `nodes` nodes with the highest expected acceptance, for independent heads.

    `accuracy[d][k]` is the measured probability that the drafter's (k+1)-th choice at depth d+1 is
    the target's token. A node's chance is the product along its path (Medusa, section 2.3.3), so
    chances fall along a path and among ordered siblings, and taking the best open node each time is
    optimal. Candidate (d, k) has slot 1 + d * K + k, K being the choices that every head offers.
    """
    width = len(accuracy[0]) if accuracy else 0
    if any(len(row) != width for row in accuracy):
        raise ForerunError("every head's accuracy must cover the same number of choices")
    reachable = sum(width**depth for depth in range(len(accuracy) + 1))
    if not 1 <= nodes <= reachable:
        raise ForerunError(f"a tree of {nodes} nodes is out of reach: between 1 and {reachable}")
    parents, slots, chances, depths = [-1], [0], [1.0], [0]
    taken: set[tuple[int, int]] = set()
    while len(parents) < nodes:
        open_nodes = (
            (chances[parent] * accuracy[depths[parent]][k], -parent, -k)
            for parent in range(len(parents))
            if depths[parent] < len(accuracy)
            for k in range(width)
            if (parent, k) not in taken
        )
        chance, parent, k = max(open_nodes)
        parent, k = -parent, -k
        taken.add((parent, k))
        parents.append(parent)
        slots.append(1 + depths[parent] * width + k)
        chances.append(chance)
        depths.append(depths[parent] + 1)
    return Tree(tuple(parents), tuple(slots))
