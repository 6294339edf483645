"""How good a drafter's choices are on held-out answers: by head, and in tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.runtime.tree import Tree, best_tree
from forerun.training.data import Answers
from forerun.training.device import CPU, device_of

EVALUATION_ROWS = 512


def accuracy(choices: Tensor, following: Tensor) -> list[list[float]]:
    """`[heads][k]`: how often head i's k-th choice is the target's token.

    `choices` `[N, heads, k]` are token ids, `following` `[N, heads]` the truth, -1 where there is
    none: those are left out.
    """
    known = following >= 0  # [N, heads]
    hits = (choices == following[..., None]) & known[..., None]
    return (hits.sum(0) / known.sum(0).clamp(min=1)[:, None]).tolist()


def tau(choices: Tensor, answers: Answers, tree: Tree) -> float:
    """Tokens committed a step, the bonus token included, when `answers` are decoded with `tree`.

    Every answer is walked as the runtime would: the prefill commits the first token, then each step
    the accepted path and one more. `choices` `[N, heads, k]`. An answer's end cuts its last step.
    """
    children = _children(tree, choices.shape[2])
    tokens, picks = answers.tokens.tolist(), choices.tolist()
    steps = committed = 0
    for start, length in zip(answers.starts.tolist(), answers.lengths.tolist(), strict=True):
        at, end = start, start + length - 1  # the last token needs no draft behind it
        while at < end:
            accepted = _walk(children, picks[at], tokens[at + 1 : end + 1])
            advance = min(accepted + 1, end - at)
            steps, committed, at = steps + 1, committed + advance, at + advance
    return committed / max(steps, 1)


def _children(tree: Tree, width: int) -> list[list[tuple[int, int, int]]]:
    """For each node its children as (node, head, choice)."""
    children: list[list[tuple[int, int, int]]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents[1:], start=1):
        head, choice = divmod(tree.slots[node] - 1, width)
        children[parent].append((node, head, choice))
    return children


def _walk(
    children: list[list[tuple[int, int, int]]], picks: Sequence[Sequence[int]], truth: Sequence[int]
) -> int:
    """How many tokens of `truth` a path from the root spells."""
    node = depth = 0
    while depth < len(truth):
        hits = (
            child for child, head, choice in children[node] if picks[head][choice] == truth[depth]
        )
        found = next(hits, None)
        if found is None:
            break
        node, depth = found, depth + 1
    return depth


def greedy_chain(heads: int, width: int) -> Tree:
    """Every head's first choice, in a row."""
    return Tree(tuple(range(-1, heads)), (0, *(1 + head * width for head in range(heads))))


def in_vocabulary(following: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """`following` as columns of the reduced vocabulary `ids`; -1 for tokens outside of it."""
    return columns_of(ids, vocabulary)[following]  # -1 picks the last entry, which stays -1


def columns_of(ids: Tensor, vocabulary: int) -> Tensor:
    """`[vocabulary + 1]`: each token's place among `ids`, -1 for those that are not there."""
    column = torch.full((vocabulary + 1,), -1)
    column[ids] = torch.arange(len(ids))
    return column


@dataclass(frozen=True)
class Measured:
    """Held-out quality by kind of prompt; the kind `mean` weighs the others equally."""

    accuracies: dict[str, list[list[float]]]
    taus: dict[str, dict[str, float]]
    tokens: dict[str, int]

    def table(self, kind: str) -> tuple[tuple[float, ...], ...]:
        """`[heads][k]`, rounded."""
        return tuple(tuple(round(x, 4) for x in row) for row in self.accuracies[kind])

    @property
    def facts(self) -> dict[str, Any]:
        """For the configuration."""
        return {
            kind: {
                "tokens": self.tokens[kind],
                "accuracy": self.table(kind),
                "tau": {name: round(value, 3) for name, value in self.taus[kind].items()},
            }
            for kind in self.taus
        }

    @property
    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for kind, taus in self.taus.items():
            shown = ", ".join(f"tau {name} {value:.3f}" for name, value in taus.items())
            lines.append(f"held-out {kind}, {self.tokens[kind]} tokens: {shown}")
            for head, row in enumerate(self.accuracies[kind]):
                cells = " ".join(f"{share:.3f}" for share in row)
                lines.append(f"  head {head}, choice 1 to {len(row)}: {cells}")
        return lines


def measure(
    heads: nn.Module, answers: Answers, vocabulary: Tensor, ids: Tensor, top_k: int
) -> Measured:
    """Accuracy by head, and tau of a greedy chain and of trees of 8 and 16 nodes.

    `heads` maps states `[n, H]` to one `[n, H]` a head; `vocabulary` `[V, H]`, `ids` `[V']`.
    """
    count = len(list(heads(answers.states[:1].to(device_of(heads), torch.float32))))
    parts = {
        kind: answers.where([name == kind for name in answers.kinds])
        for kind in sorted(set(answers.kinds))
    }
    choices = {k: propose(heads, part.states, vocabulary, ids, top_k) for k, part in parts.items()}
    tables = {k: accuracy(choices[k], part.following(count)) for k, part in parts.items()}
    mean = torch.tensor(list(tables.values())).mean(0) if tables else torch.zeros(count, top_k)
    tables["mean"] = mean.tolist()
    trees = {
        "chain": greedy_chain(count, top_k),
        "tree 8": best_tree(tables["mean"], 8),
        "tree 16": best_tree(tables["mean"], 16),
    }
    taus = {
        kind: {name: tau(choices[kind], part, tree) for name, tree in trees.items()}
        for kind, part in parts.items()
    }
    return Measured(tables, taus, {kind: len(part.tokens) for kind, part in parts.items()})


@torch.no_grad()
def propose(
    heads: nn.Module, states: Tensor, vocabulary: Tensor, ids: Tensor, top_k: int
) -> Tensor:
    """Each head's best token ids `[N, heads, k]`, in float32: computed where the heads are."""
    device = device_of(heads)
    output = vocabulary[ids].T.contiguous().to(device)  # [H, V']
    rows = []
    for part in torch.split(states, EVALUATION_ROWS):
        states = heads(part.to(device, torch.float32))
        picks = [(x @ output).topk(top_k, dim=-1).indices for x in states]
        rows.append(ids[torch.stack(picks, dim=1).to(CPU)])
    return torch.cat(rows)
