"""What the drafter would propose at every place of the target's own answers, recorded once.

With that any tree, chain length or lookup rule can be played afterwards without the engine
(`forerun.runtime.replay`): what is accepted depends on the proposals and the answer alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError
from forerun.runtime.engine import BUILT, Engine, Request
from forerun.runtime.manifest import Manifest
from forerun.runtime.tree import Tree

GROWN_NODES = 64
"""The widest tree that is recorded of a drafter that grows them."""


@dataclass(frozen=True)
class Recording:
    """One greedy answer of n tokens, and what the drafter proposed after each of them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The answer, a stop token at its end included, and what the target says after its limit."""
    length: int
    """Tokens of the answer: what is committed after them doesn't count."""
    proposed: NDArray[np.int64]
    """`[n, M]`: the drafter's candidates, or the widest grown tree's nodes, best first."""
    parents: NDArray[np.int64] | None = None
    """`[n, M]` where trees are grown: 0 is the root, j the j-th best node."""
    category: str | None = None


def widest(manifest: Manifest) -> Tree | int:
    """What is recorded: a tree that holds all candidates, or the size of a grown one.

    An engine that was built for fixed sizes can't draft a wider tree than the bundle's.
    """
    sizes = [int(key) for key in manifest.trees]
    grown = any(tree is None for tree in manifest.trees.values())
    candidates = manifest.drafter.candidates
    if manifest.engine.kind in BUILT:
        largest = max(sizes)
        return largest if grown else Tree.star(min(largest, candidates + 1))
    return min(GROWN_NODES, candidates + 1) if grown else Tree.star(candidates + 1)


def record(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    nodes: int,
    stop_ids: Collection[int] = (),
    beyond: int = 0,
    category: str | None = None,
) -> Recording:
    """Decodes plainly, greedily, while trees of `nodes` nodes are drafted and looked at.

    `beyond` tokens after the limit are decoded besides, so that the last steps of a replay accept
    what a real step would. Raises what the engine raises for the prompt.
    """
    wanted = new_tokens + beyond
    committed = engine.prefill(Request(prompt, len(prompt) + wanted + 1), nodes)
    tokens: list[int] = []
    proposed: list[NDArray[np.int64]] = []
    parents: list[NDArray[np.int64]] = []
    while committed:
        drafted, above = engine.draft()
        tokens.append(committed[0])
        proposed.append(drafted[0, 1:].copy())
        if above is not None:
            parents.append(above[0, 1:].copy())
        if len(tokens) == wanted or committed[0] in stop_ids:
            break
        engine.drop_draft()
        committed = engine.step(nodes)[0]
    if not tokens:
        raise ForerunError("the prompt leaves no room for an answer: shorten it")
    return Recording(
        tuple(prompt),
        tuple(tokens),
        min(len(tokens), new_tokens),
        np.stack(proposed),
        np.stack(parents) if parents else None,
        category,
    )
