"""What a drafter would be worth at run time: answers decoded again, the target's part read off.

A greedy answer says what the target chooses at every token, and its features were kept. So every
step can be played as the runtime would, with the drafter alone doing work, whatever its kind: its
state is kept up, its tree is drafted and walked along the true tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forerun.models.drafter import Committed, Drafter, Vocabulary
from forerun.models.drafting import Drafting
from forerun.models.ops import scatter_in_place
from forerun.runtime.replay import NOTHING, Played
from forerun.training.device import CPU, moved
from forerun.training.texts import Text

ROWS = 48
"""Answers that are played side by side."""


@torch.inference_mode()
def play(
    drafter: Drafter,
    vocabulary: Vocabulary,
    texts: Sequence[Text],
    nodes: int,
    device: torch.device = CPU,
) -> Played:
    """Decodes the answers of `texts` with draft trees of `nodes` nodes.

    `texts` are greedy answers with the feature layers that `drafter` reads; `drafter` and
    `vocabulary` are on `device`.
    """
    total = NOTHING
    ordered = sorted((text for text in texts if len(text.states) > 1), key=lambda t: len(t.tokens))
    for start in range(0, len(ordered), ROWS):
        game = _Game(drafter, vocabulary, ordered[start : start + ROWS], nodes, device)
        for found in game.steps():
            total += found
    return total


class _Game:
    """B answers side by side. The host keeps the books; drafting and its state are on `device`."""

    def __init__(
        self,
        drafter: Drafter,
        vocabulary: Vocabulary,
        texts: Sequence[Text],
        nodes: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.drafter, self.vocabulary, self.texts, self.nodes = drafter, vocabulary, texts, nodes
        self.depth = drafter.max_depth()
        size = len(texts)
        longest = max(len(text.tokens) for text in texts)
        prompt = max(text.prompt for text in texts)
        width = longest + max(prompt, self.depth + 1) + 1
        self.tokens = torch.zeros(size, width, dtype=torch.int64)
        features = texts[0].features
        self.features = features.new_zeros(size, width, features.shape[1]).to(torch.float32)
        self.slots = width + self.depth + 1
        for row, text in enumerate(texts):
            self.tokens[row, : len(text.tokens)] = text.tokens
            self.features[row, : len(text.tokens)] = text.features.to(torch.float32)
        self.states = [spec.zeros(size, self.slots, device) for spec in drafter.states()]
        self.yes = torch.tensor(True).to(device)
        self.at = torch.tensor([text.prompt for text in texts])  # [B] the root's position
        self.ends = torch.tensor([len(text.tokens) for text in texts])

    def steps(self) -> Iterator[Played]:
        """The prefill, then steps until every answer is told."""
        size = len(self.texts)
        longest = max(text.prompt for text in self.texts)
        drafting = self._committed(torch.zeros(size, dtype=torch.int64), self.at, longest)
        while True:
            tokens, parents = self._draft(drafting)
            live = self.at < self.ends - 1
            if not live.any():
                return
            accepted = torch.tensor(
                [
                    self._walk(row, tokens[row].tolist(), parents[row].tolist()) if alive else -1
                    for row, alive in enumerate(live.tolist())
                ]
            )
            advance = torch.minimum(accepted + 1, self.ends - 1 - self.at) * live
            reached = [int((accepted >= depth).sum()) for depth in range(1, self.depth + 1)]
            yield Played(int(live.sum()), int(advance.sum()), tuple(reached))
            start, self.at = self.at, self.at + advance
            drafting = self._committed(start, advance, self.depth + 1)

    def _committed(self, start: Tensor, count: Tensor, rows: int) -> Drafting:
        """Context rows `start` to `start + count`, of `rows` rows; the state after them is kept."""
        size = len(self.texts)
        places = start[:, None] + torch.arange(rows + 1)
        states = [
            text.states[min(at - text.prompt, len(text.states) - 1)]
            for text, at in zip(self.texts, self.at.tolist(), strict=True)
        ]
        wide = places[:, :rows, None].expand(-1, -1, self.features.shape[2])
        off = torch.zeros(size, dtype=torch.int64)
        committed = Committed(
            tokens=self.tokens.gather(1, places),
            start=start,
            count=count,
            root=self.tokens.gather(1, self.at[:, None])[:, 0],
            features=self.features.gather(1, wide),
            hidden=torch.stack(states).to(torch.float32),
            uniforms=torch.zeros(size, self.drafter.tables, self.slots),
            temperature=torch.zeros(size),
            top_k=off,
            top_p=torch.ones(size),
            branching=False,
        )
        drafting = Drafting(self.vocabulary, self.drafter, moved(committed, self.device))
        self.states = drafting.remember(self.yes, self.states, scatter_in_place)
        return drafting

    def _draft(self, drafting: Drafting) -> tuple[Tensor, Tensor]:
        """The next tree's tokens and parents, `[B, N]` each, on the CPU; the root's parent is
        itself."""
        shape = self.drafter.tree(self.nodes)
        slots = torch.arange(self.nodes) if shape is None else torch.tensor(shape.slots)
        found, self.states = drafting.next_tree(self.yes, slots.to(self.device), self.states)
        tree = moved(found, CPU)
        if shape is None:
            return tree["next_tokens"], tree["next_parents"]
        parents = torch.tensor(shape.parents).clamp(min=0)
        return tree["next_tokens"], parents.expand(len(self.texts), -1)

    def _walk(self, row: int, tokens: list[int], parents: list[int]) -> int:
        """How many drafted tokens are the answer's own, on a path from the root."""
        children: dict[tuple[int, int], int] = {}
        for node in range(1, len(tokens)):
            children.setdefault((parents[node], tokens[node]), node)
        node = depth = 0
        at = int(self.at[row])
        for truth in self.tokens[row, at + 1 : int(self.ends[row])].tolist():
            found = children.get((node, truth))
            if found is None:
                break
            node, depth = found, depth + 1
        return depth
