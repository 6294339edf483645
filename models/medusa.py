"""Medusa heads (Cai et al., 2024): head i reads the last hidden state, predicts token t + 2 + i."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Residual(nn.Module):
    """`x + silu(W x + b)`, a head's later layers."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.linear(x)
        return x + nn.functional.silu(update)


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
        self.candidates = config.heads * config.top_k
        first = [block[0] for block in blocks]
        biases = [linear.bias for linear in first]
        self.first: nn.Module = Linear(  # all heads read the same state: one matmul
            torch.cat([linear.weight for linear in first], dim=1),
            None if biases[0] is None else torch.cat([b for b in biases if b is not None]),
        )
        self.rest = nn.ModuleList(nn.Sequential(*map(Residual, block[1:])) for block in blocks)
        self.heads = nn.ModuleList(heads)
        self.register_buffer("ids", ids)

    def features(self, hidden: Tensor) -> Tensor:
        """`[B, H]` -> `[B, heads, H]`: each head's state before its vocabulary layer."""
        update = self.first(hidden).reshape(hidden.shape[0], self.config.heads, -1)
        x = hidden[:, None] + nn.functional.silu(update)
        if self.config.layers == 1:
            return x
        return torch.stack([rest(x[:, head]) for head, rest in enumerate(self.rest)], dim=1)

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

    def max_depth(self) -> int:
        return self.config.heads

    def options(self) -> dict[str, int | float | str]:
        return {
            "heads": self.config.heads,
            "layers": self.config.layers,
            "top_k": self.config.top_k,
            "vocabulary": "whole" if self.ids is None else int(self.ids.shape[0]),
        }
