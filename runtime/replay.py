"""Recorded answers decoded again by other rules: how many tokens a step would commit.

Exact for greedy decoding, since a step accepts what its tree has in common with the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.runtime.record import Recording
from forerun.runtime.tree import Tree


@dataclass(frozen=True)
class Played:
    """What answers took when they were decoded again. Parts add up."""

    steps: int
    committed: int
    """Tokens, the bonus tokens included."""
    reached: tuple[int, ...]
    """Steps that accepted at least 1, 2, ... drafted tokens."""
    empty: int = 0
    """Steps for which the drafter proposed nothing."""

    @property
    def tau(self) -> float:
        """Tokens committed a step."""
        return self.committed / max(self.steps, 1)

    @property
    def empty_share(self) -> float:
        """Of the steps, those for which nothing was proposed."""
        return self.empty / max(self.steps, 1)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps that accepted at least 1, 2, ... drafted tokens."""
        return [count / max(self.steps, 1) for count in self.reached]

    def __add__(self, other: Played) -> Played:
        longest = max(len(self.reached), len(other.reached))
        columns = (part.reached + (0,) * (longest - len(part.reached)) for part in (self, other))
        reached = tuple(a + b for a, b in zip(*columns, strict=True))
        return Played(
            self.steps + other.steps,
            self.committed + other.committed,
            reached,
            self.empty + other.empty,
        )


NOTHING = Played(0, 0, ())


class Rule(Protocol):
    """What is drafted at a place of an answer."""

    @property
    def nodes(self) -> int:
        """Of its trees, the root included."""

    def draft(self, answer: Recording, at: int) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens and parents of the tree below token `at`: the root first, -1 for no token."""


@dataclass(frozen=True)
class FixedTree:
    """A tree whose nodes carry the drafter's candidates, always the same ones."""

    tree: Tree

    @property
    def nodes(self) -> int:
        return self.tree.nodes

    def draft(self, answer: Recording, at: int) -> tuple[Sequence[int], Sequence[int]]:
        tokens = [-1, *(int(answer.proposed[at, slot - 1]) for slot in self.tree.slots[1:])]
        return tokens, self.tree.parents


@dataclass(frozen=True)
class GrownTree:
    """The best `nodes - 1` of the drafter's own proposal of each step."""

    nodes: int

    def draft(self, answer: Recording, at: int) -> tuple[Sequence[int], Sequence[int]]:
        assert answer.parents is not None
        count = self.nodes - 1
        tokens = [-1, *answer.proposed[at, :count].tolist()]
        return tokens, [-1, *answer.parents[at, :count].tolist()]


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup by another rule than the recorded one's: a chain of `nodes - 1` tokens that
    followed the latest of the longest suffix matches (as `forerun.models.ngram` has it)."""

    nodes: int
    longest: int
    shortest: int

    def draft(self, answer: Recording, at: int) -> tuple[Sequence[int], Sequence[int]]:
        text = [*answer.prompt, *answer.tokens[: at + 1]]
        chain = look_up(text, self.nodes - 1, self.longest, self.shortest)
        return [-1, *chain], range(-1, len(chain))


def look_up(text: Sequence[int], gamma: int, longest: int, shortest: int) -> list[int]:
    """What followed the last place where `text` went like its end; nothing without a match."""
    last = len(text) - 1
    for length in range(min(longest, last), shortest - 1, -1):
        suffix = text[last + 1 - length :]
        for end in range(last - 1, length - 2, -1):
            if text[end + 1 - length : end + 1] == suffix:
                period = last - end
                return [text[end + 1 + ahead % period] for ahead in range(gamma)]
    return []


def replay(answers: Sequence[Recording], rule: Rule) -> Played:
    """All answers decoded by `rule`. What a step commits beyond an answer's end counts, as it does
    at run time."""
    total = NOTHING
    for answer in answers:
        at, steps, committed, empty = 0, 0, 0, 0
        reached: Counter[int] = Counter()
        while at < answer.length - 1:
            tokens, parents = rule.draft(answer, at)
            depth = len(accepted(tokens, parents, answer.tokens[at + 1 :]))
            steps, committed, at = steps + 1, committed + depth + 1, at + depth + 1
            reached.update(range(1, depth + 1))
            empty += all(token < 0 for token in tokens)
        deepest = max(reached, default=0)
        total += Played(steps, committed, tuple(reached[d] for d in range(1, deepest + 1)), empty)
    return total


def node_shares(answers: Sequence[Recording], rule: Rule) -> list[float]:
    """For each node of `rule`'s trees the share of steps that accept it; 1 for the root."""
    hits, steps = Counter[int](), 0
    for answer in answers:
        at = 0
        while at < answer.length - 1:
            path = accepted(*rule.draft(answer, at), answer.tokens[at + 1 :])
            hits.update(path)
            steps, at = steps + 1, at + len(path) + 1
    return [1.0, *(hits[node] / max(steps, 1) for node in range(1, rule.nodes))]


def best_fixed_tree(
    answers: Sequence[Recording], nodes: int, per_depth: int, max_depth: int
) -> Tree | None:
    """The tree of `nodes` nodes that accepts most over all recorded places: exact, no heads taken
    for independent. None where no answer ever goes that many ways.

    A node is accepted where its whole path is the answer's. So the tokens accepted, summed over
    places, are the sum of its nodes' counts; a parent's count is no lower than its child's; hence
    the nodes of the highest counts are a tree, and the best one.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for answer in answers:
        for at in range(answer.length - 1):
            path: tuple[int, ...] = ()
            for depth, token in enumerate(answer.tokens[at + 1 : at + 1 + max_depth]):
                row = answer.proposed[at, depth * per_depth : (depth + 1) * per_depth].tolist()
                if token not in row:
                    break
                path += (1 + depth * per_depth + row.index(token),)
                counts[path] += 1
    ranked = sorted(counts, key=lambda path: (-counts[path], len(path), path))[: nodes - 1]
    if len(ranked) < nodes - 1:
        return None
    place = {(): 0, **{path: node for node, path in enumerate(ranked, start=1)}}
    return Tree((-1, *(place[path[:-1]] for path in ranked)), (0, *(path[-1] for path in ranked)))


def accepted(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
    """The nodes, downwards, of the longest path from the root that begins `truth`."""
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        children.setdefault((parents[node], tokens[node]), node)
    path: list[int] = []
    for token in truth:
        found = children.get((path[-1] if path else 0, token))
        if found is None:
            break
        path.append(found)
    return path
