"""DFlash (arXiv:2602.06036): one parallel pass drafts a block, conditioned on target features.

The target's hidden states after chosen layers are fused into one context feature a token, from
which every draft layer projects keys and values of its own. The block is the newest committed
token (the anchor) and mask tokens after it; it attends to the context and to itself, and each slot
predicts the token at its own position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.beam import best_first, proposed_nodes
from forerun.models.choose import argmax
from forerun.models.draft_layer import (
    DecoderLayer,
    DraftLayerConfig,
    Rotary,
    Seen,
    cache_states,
    linear,
    under,
)
from forerun.models.drafter import Committed, Drafter, GrowingDrafter, StateSpec, Vocabulary
from forerun.models.grow import Proposal
from forerun.models.linear import Linear
from forerun.models.target import rms_norm

Masks = tuple[Tensor, Tensor]
"""What n rows see: of the context `[B, n, S]`, of themselves `[B, n, n]`."""
LEAST_SCORE = -1e4
"""A log-probability's floor, so that a path's sum stays finite."""


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of the drafter, and what it is verified as."""

    layer: DraftLayerConfig
    num_layers: int
    feature_layers: tuple[int, ...]
    """As `Drafter.feature_layers`, in the order in which `fc` reads them."""
    block_size: int
    """Slots, the anchor included."""
    mask_token_id: int
    window: int | None = None
    """A sliding layer's row sees what lies less than this many positions away."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty means none."""
    causal_layers: tuple[bool, ...] = ()
    """Which layers look back only inside the block; empty means none."""
    tree: bool = True
    """Verified as a best-first tree over the slots' marginals; else as a chain of their best."""
    budget: int = 32
    """Up to so many nodes, the root included, the tree is exactly the best-first one."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ForerunError(f"block_size is {self.block_size}: a block drafts from 2 slots on")
        if self.budget < 2:
            raise ForerunError(f"budget is {self.budget}: a tree drafts from 2 nodes on")
        for name in ("sliding_layers", "causal_layers"):
            flags = getattr(self, name)
            if flags and len(flags) != self.num_layers:
                raise ForerunError(f"{name} names {len(flags)} layers of {self.num_layers}")
        if any(self.sliding_layers) and not self.window:
            raise ForerunError("sliding_layers without a window")

    def attention(self, layer: int) -> tuple[bool, bool]:
        """Whether `layer` slides, and whether it is causal inside the block."""
        slides, causal = self.sliding_layers, self.causal_layers
        return bool(slides) and slides[layer], bool(causal) and causal[layer]


class DFlash(Drafter):
    """The drafter as a chain: every slot's best token."""

    kind: ClassVar[str] = "dflash"
    ids: Tensor | None

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        capacity: int,
        ids: Tensor | None = None,
    ) -> None:
        """`weights` have their published names. `lm_head.weight` `[V', H]`, where it is there,
        is a head of its own over the token `ids` `[V']`; otherwise the target's serves."""
        super().__init__()
        self.config = config
        self.gamma = config.block_size - 1
        self.candidates = self.gamma
        self.feature_layers = config.feature_layers
        eps = config.layer.rms_norm_eps
        rotary = Rotary(config.layer, capacity)
        self.fuse: nn.Module = linear(weights, "fc")
        self.context_norm = rms_norm(weights["hidden_norm.weight"], eps)
        self.layers: Iterable[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config.layer, under(weights, f"layers.{layer}."), rotary)
            for layer in range(config.num_layers)
        )
        self.norm = rms_norm(weights["norm.weight"], eps)
        head = weights.get("lm_head.weight")
        self.head: nn.Module | None = None if head is None else Linear(head.T)
        self.register_buffer("ids", ids)

    def states(self) -> list[StateSpec]:
        return cache_states(self.config.layer, self.config.num_layers, self.norm.weight.dtype)

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        """Each draft layer's keys and values of the context."""
        ahead = torch.arange(committed.features.shape[1], device=committed.start.device)
        return self.context(committed.features, committed.start[:, None] + ahead)

    def context(self, features: Tensor, positions: Tensor) -> list[Tensor]:
        """Features `[B, C, F]` at `positions` `[B, C]` -> keys and values `[B, kv, C, D]` of each
        layer in turn, which no layer's own norm touches."""
        context = self.context_norm(self.fuse(features))  # [B, C, H]
        rows: list[Tensor] = []
        for layer in self.layers:
            rows += layer.attention.keys_values(context, positions)
        return rows

    def logits(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        """`[B, gamma, V']` float32: each slot's prediction of its own token, the anchor's not."""
        root, at = committed.root, committed.start + committed.count  # [B]
        masks = root.new_full((1, self.config.block_size - 1), self.config.mask_token_id)
        block = torch.cat([root[:, None], masks.expand(root.shape[0], -1)], dim=1)  # [B, n]
        positions = at[:, None] + torch.arange(self.config.block_size, device=root.device)
        kinds = {self.config.attention(layer) for layer in range(self.config.num_layers)}
        seen = {kind: self._masks(*kind, at, positions, states[0].shape[2]) for kind in kinds}
        masks_of = [seen[self.config.attention(layer)] for layer in range(self.config.num_layers)]
        x = self.through(vocabulary.embedding(block), positions, states, masks_of)
        return self.predict(x[:, 1 : 1 + self.gamma], vocabulary).to(torch.float32)

    def through(
        self, x: Tensor, positions: Tensor, states: Sequence[Tensor], masks: Sequence[Masks]
    ) -> Tensor:
        """Rows `[B, n, H]` through all layers, each with its own of `masks`; `states` are keys and
        values as `context` gives them."""
        for number, (layer, (context, block)) in enumerate(zip(self.layers, masks, strict=True)):
            keys, values = states[2 * number : 2 * number + 2]
            x, _ = layer(x, positions, Seen(keys, values, context), None, block)
        return x

    def predict(self, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        """What rows `[..., H]` that went `through` say: `[..., V']`."""
        hidden = self.norm(x)
        logits: Tensor = vocabulary.logits(hidden) if self.head is None else self.head(hidden)
        return logits

    def _masks(
        self, slides: bool, causal: bool, at: Tensor, positions: Tensor, slots: int
    ) -> Masks:
        slot = torch.arange(slots, device=at.device)[None, None]
        context = (slot < at[:, None, None]).expand(-1, positions.shape[1], -1)
        away = positions[:, :, None] - positions[:, None]  # [B, n, n] how far behind a row
        block = away >= (0 if causal else -self.config.block_size)
        if slides and self.config.window is not None:
            context = context & (positions[:, :, None] - slot < self.config.window)
            block = block & (away.abs() < self.config.window)
        return context, block

    def draft(self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        return self._tokens(argmax(self.logits(committed, states, vocabulary)))

    def _tokens(self, choices: Tensor) -> Tensor:
        return choices if self.ids is None else self.ids[choices]

    def trim(self, sizes: Collection[int]) -> None:
        """Slots deeper than these trees reach are still computed (the others attend to them, and
        the drafter was trained so), but predict nothing."""
        self.gamma = min(self.gamma, max(*sizes, 2) - 1)
        self.candidates = self.gamma

    def max_depth(self) -> int:
        return self.gamma

    def options(self) -> dict[str, int | float | str]:
        return {
            "block_size": self.config.block_size,
            "layers": self.config.num_layers,
            "verified_as": "tree" if self.config.tree else "chain",
        }


class DFlashTree(DFlash, GrowingDrafter):
    """The drafter as a tree over the slots' marginals (DDTree, arXiv:2604.12989)."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        capacity: int,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__(config, weights, capacity, ids)
        self.nodes = config.budget - 1  # below the root
        self.candidates = proposed_nodes(self.gamma, self.nodes)

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        chances = self.logits(committed, states, vocabulary).log_softmax(-1)
        best = chances.clamp(min=LEAST_SCORE, max=0.0).topk(self.nodes, dim=-1)
        return best_first(best.values, self._tokens(best.indices))

    def trim(self, sizes: Collection[int]) -> None:
        super().trim(sizes)
        self.nodes = min(self.nodes, max(*sizes, 2) - 1)
        self.candidates = proposed_nodes(self.gamma, self.nodes)

    def options(self) -> dict[str, int | float | str]:
        return super().options() | {"budget": self.nodes + 1}


def dflash(
    config: DFlashConfig,
    weights: Mapping[str, Tensor],
    capacity: int,
    ids: Tensor | None = None,
) -> DFlash:
    """The drafter in the form that `config` asks for."""
    form = DFlashTree if config.tree else DFlash
    return form(config, weights, capacity, ids)
