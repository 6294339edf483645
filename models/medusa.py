"""Medusa heads (Cai et al., 2024): head i reads the last hidden state, predicts token t + 2 + i."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.models.drafter import Committed, Drafter, Vocabulary
from forerun.models.linear import Linear
from forerun.runtime.tree import Tree, best_tree


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads, and how good their choices were on held-out text."""

    heads: int
    layers: int
    hidden_size: int
    top_k: int
    accuracy: tuple[tuple[float, ...], ...]
    """`[heads][top_k]`: how often head i's k-th choice was the target's token."""


class Medusa(Drafter):
    """Residual blocks `x + silu(W x + b)` a head, then logits over a whole or reduced vocabulary.

    All heads at once: `hidden` `[B, H]` -> `[B, heads, H]` -> `[B, heads, V']` -> top-k.
    """

    kind: ClassVar[str] = "medusa"
    ids: Tensor | None

    def __init__(
        self,
        config: MedusaConfig,
        blocks: Sequence[Sequence[Linear]],
        heads: Sequence[nn.Module],
        ids: Tensor | None = None,
    ) -> None:
        """`blocks[i][j]` is head i's j-th residual layer `[H, H]`; `heads` is one vocabulary layer
        a head, or a single one that all share; `ids` `[V']` are the token ids of its columns."""
        super().__init__()
        self.config = config
        self.candidates, self.per_depth = config.heads * config.top_k, config.top_k
        self.blocks = nn.ModuleList(map(_beside, zip(*blocks, strict=True)))
        self.heads = nn.ModuleList(heads)
        self.register_buffer("ids", ids)

    def features(self, hidden: Tensor) -> Tensor:
        """`[B, H]` -> `[B, heads, H]`: each head's state before its vocabulary layer."""
        heads, size = self.config.heads, hidden.shape[1]
        own = torch.arange(heads, device=hidden.device) * (heads + 1)  # the diagonal of a square
        x = hidden[:, None]
        for layer, block in enumerate(self.blocks):
            update = block(x).reshape(hidden.shape[0], -1, size)
            # After the first layer a head's row went through every head's weights, which costs less
            # than a matmul a head: the weights are read once either way.
            x = x + nn.functional.silu(update[:, own] if layer else update)
        return x

    def choices(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's best token ids and their log-probabilities, `[B, heads, top_k]`."""
        features = self.features(hidden)
        if len(self.heads) == 1:
            logits = self.heads[0](features)  # [B, heads, V']
        else:
            logits = torch.stack([head(features[:, i]) for i, head in enumerate(self.heads)], dim=1)
        logits = logits.to(torch.float32)
        best, tokens = logits.topk(self.config.top_k, dim=-1)
        if self.ids is not None:
            tokens = self.ids[tokens]
        return tokens, (best - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0)

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        return self.choices(committed.hidden)[0].flatten(1)

    def tree(self, nodes: int) -> Tree:
        return best_tree(self.config.accuracy, nodes)

    def trim(self, sizes: Collection[int]) -> None:
        """Heads deeper and choices further down than these trees reach; the rest keep their order,
        so that the same trees are the best."""
        trees = [self.tree(nodes) for nodes in sizes]
        taken = [slot - 1 for tree in trees for slot in tree.slots[1:]] or [0]
        width = self.config.top_k
        self._keep(1 + max(taken) // width, 1 + max(slot % width for slot in taken))

    def trim_like(self, sizes: Collection[int], options: Mapping[str, int | float | str]) -> None:
        """As many heads and choices as that drafter had, for any tree can be made of them."""
        self._keep(int(options["heads"]), int(options["top_k"]))

    def _keep(self, heads: int, top_k: int) -> None:
        """The first so many heads and the first so many choices of each, where there are more."""
        config = self.config
        heads, top_k = min(heads, config.heads), min(top_k, config.top_k)
        accuracy = tuple(row[:top_k] for row in config.accuracy[:heads])
        self.config = replace(config, heads=heads, top_k=top_k, accuracy=accuracy)
        self.candidates, self.per_depth = heads * top_k, top_k
        width = heads * config.hidden_size
        for place, block in enumerate(self.blocks):
            assert isinstance(block, Linear)  # precisions come later
            bias = None if block.bias is None else block.bias[:width]
            self.blocks[place] = Linear(block.weight[:, :width], bias)
        if len(self.heads) > 1:
            self.heads = self.heads[:heads]

    def max_depth(self) -> int:
        return self.config.heads

    def options(self) -> dict[str, int | float | str]:
        return {
            "heads": self.config.heads,
            "layers": self.config.layers,
            "top_k": self.config.top_k,
            "vocabulary": "whole" if self.ids is None else int(self.ids.shape[0]),
        }


def _beside(linears: Sequence[Linear]) -> Linear:
    """Layers of one input size as one: `[K, N]` weights -> `[K, heads * N]`."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.cat([linear.weight for linear in linears], dim=1)
    return Linear(weight, torch.cat(biases) if biases else None)
