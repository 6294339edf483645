"""EAGLE: one decoder layer that continues the target's own features, into a tree grown each step.

EAGLE-1/2 (Li et al., arXiv:2401.15077 and 2406.16858) continue the state before the vocabulary
layer; EAGLE-3 (arXiv:2503.01840) continues a fusion of three layers' states, and has a vocabulary
of its own. Row c of the context pairs the feature of token c with the token after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.models.draft_layer import (
    DraftAttention,
    DraftLayerConfig,
    GatedMlp,
    Rotary,
    Seen,
    cache_states,
    linear,
    under,
)
from forerun.models.drafter import NORMED, Committed, GrowingDrafter, StateSpec, Vocabulary
from forerun.models.expand import Frontier, expand, keep, proposed
from forerun.models.grow import Proposal
from forerun.models.step import gather_rows
from forerun.models.target import rms_norm

WHOLE_NORM, LAYER_NORM = "input_norm.weight", "fc_norm.{}.weight"
"""Norms in front of EAGLE-3's fusion: speculators' norm_before_fc and fc_norm."""


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE drafter: its layer, and the trees it grows."""

    layer: DraftLayerConfig
    feature_layers: tuple[int, ...] = (NORMED,)
    depth: int = 5
    """Levels of the tree below the root."""
    top_k: int = 8
    """Children that a node proposes, and nodes of a level that are expanded."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual is the normed feature (speculators trains it so)."""
    norm_output: bool = False
    """EAGLE-3: the next feature is the output after the final norm."""


@dataclass(frozen=True)
class Drafted:
    """The drafted rows' keys and values, all levels; `mask` is what the last level sees."""

    keys: Tensor  # [B, kv, n, D]
    values: Tensor
    mask: Tensor  # [B, W, n] bool

    def then(self, keys: Tensor, values: Tensor, above: Tensor) -> Drafted:
        """With another level's rows; `above` `[B, W]` are their parents in the level before."""
        kin = self.mask.gather(1, above[..., None].expand(-1, -1, self.mask.shape[2]))
        return Drafted(
            torch.cat([self.keys, keys], dim=2),
            torch.cat([self.values, values], dim=2),
            torch.cat([kin, itself(above)], dim=2),
        )


def itself(rows: Tensor) -> Tensor:
    """The mask `[B, W, W]` by which each of `rows` `[B, W]` sees itself alone."""
    row = torch.arange(rows.shape[1], device=rows.device)
    return (row[:, None] == row).expand(rows.shape[0], -1, -1)


class Eagle(GrowingDrafter):
    """EAGLE-1/2: `fc(cat(embedding, feature))` through a layer without input norm.

    Its output goes straight to the target's vocabulary layer, and is the next feature.
    """

    kind: ClassVar[str] = "eagle"
    ids: Tensor | None

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], capacity: int) -> None:
        """`weights` by published names; without `embed_tokens.weight` the target's serves."""
        super().__init__()
        self.config = config
        self.candidates = proposed(config.depth, config.top_k)
        self.feature_layers = config.feature_layers
        own = weights.get("embed_tokens.weight")
        self.embed = None if own is None else nn.Embedding.from_pretrained(own)  # type: ignore[no-untyped-call]
        self.fc: nn.Module | None = linear(weights, "fc") if "fc.weight" in weights else None
        layer, eps = under(weights, "layers.0."), config.layer.rms_norm_eps
        self.rotary = Rotary(config.layer, capacity)
        self.attention = DraftAttention(config.layer, under(layer, "self_attn."), self.rotary)
        self.mlp_norm = rms_norm(layer["post_attention_layernorm.weight"], eps)
        self.mlp = GatedMlp(under(layer, "mlp."))
        self.register_buffer("ids", None)

    # --- what drafters of this kind do differently --------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features `[B, n, F]` as the layer continues them, `[B, n, H]`."""
        return features

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """-> the residual stream `[B, n, H]`, and what attention reads."""
        assert self.fc is not None
        x: Tensor = self.fc(torch.cat([embedded, features], dim=-1))
        return x, x

    def leave(self, x: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """-> logits `[B, n, V']`, and the features of the next level `[B, n, H]`."""
        return vocabulary.logits(x), x

    # --- the drafter ------------------------------------------------------------------------

    def states(self) -> list[StateSpec]:
        return cache_states(self.config.layer, 1, self.rotary.cos.dtype)

    def remember(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> list[Tensor]:
        """Keys and values of the context rows, from the target's own features."""
        rows = committed.features.shape[1]  # C
        positions = committed.start[:, None] + torch.arange(rows, device=committed.start.device)
        embedded = self._embedding(committed.tokens.narrow(1, 1, rows), vocabulary)
        _, x = self.enter(embedded, self.fuse(committed.features))
        return list(self.attention.keys_values(x, positions))

    def propose(
        self, committed: Committed, states: list[Tensor], vocabulary: Vocabulary
    ) -> Proposal:
        """The last context row is run again, as a query; then a level of the tree at a time."""
        end = committed.start + committed.count  # [B] context rows in the cache
        context = self._context(states, end)
        last = (committed.count - 1).clamp(min=0)[:, None]
        features = self.fuse(gather_rows(committed.features, last))  # [B, 1, H]
        frontier, levels, before = Frontier.root(committed.root), [], 1
        drafted: Drafted | None = None
        for depth in range(self.config.depth):
            width = frontier.tokens.shape[1]
            positions = (end - 1 + depth)[:, None].expand(-1, width)
            residual, x = self.enter(self._embedding(frontier.tokens, vocabulary), features)
            seen = [Seen(context.keys, context.values, context.mask.expand(-1, width, -1))]
            if depth:
                drafted = self._join(drafted, *self.attention.keys_values(x, positions), frontier)
                seen.append(Seen(drafted.keys, drafted.values, drafted.mask))
            x = residual + self.attention(x, positions, seen)
            x = x + self.mlp(self.mlp_norm(x))
            logits, features = self.leave(x, vocabulary)
            top_k, branching = self.config.top_k, committed.branching
            level = expand(frontier, logits, top_k, self.ids, branching)
            frontier = keep(level, before, top_k, branching)
            features = gather_rows(features, frontier.above)
            levels.append(level)
            before += level.tokens.shape[1]
        return Proposal(
            torch.cat([level.tokens for level in levels], dim=1),
            torch.cat([level.parents for level in levels], dim=1),
            torch.cat([level.scores for level in levels], dim=1),
        )

    def trim(self, sizes: Collection[int]) -> None:
        """A node of a tree of N nodes is at most N - 1 deep, and the N - 1 best of a level hold all
        that such a tree may take: nothing that is left out could have been chosen."""
        most, config = max(max(sizes) - 1, 1), self.config
        self.config = replace(config, depth=min(config.depth, most), top_k=min(config.top_k, most))
        self.candidates = proposed(self.config.depth, self.config.top_k)

    def max_depth(self) -> int:
        return self.config.depth

    def options(self) -> dict[str, int | float | str]:
        return {"depth": self.config.depth, "top_k": self.config.top_k}

    def _embedding(self, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Tokens `[B, n]` -> `[B, n, H]`; a negative one stands for none."""
        if self.embed is None:
            return vocabulary.embedding(tokens)
        embedded: Tensor = self.embed(tokens.clamp(min=0))
        return embedded

    @staticmethod
    def _context(states: list[Tensor], end: Tensor) -> Seen:
        """The cache, of which all slots before `end` are seen; one at least, even by idle rows."""
        slots = torch.arange(states[0].shape[2], device=end.device)
        return Seen(states[0], states[1], (slots < end.clamp(min=1)[:, None])[:, None])

    @staticmethod
    def _join(drafted: Drafted | None, keys: Tensor, values: Tensor, frontier: Frontier) -> Drafted:
        if drafted is not None:
            return drafted.then(keys, values, frontier.above)
        return Drafted(keys, values, itself(frontier.above))


class Eagle3(Eagle):
    """EAGLE-3: reads `cat(norm(embedding), norm(feature))`, proposes from a vocabulary of its own.

    The target's layers are fused by `fc`; the layer's output before the final norm is the next
    feature.
    """

    kind: ClassVar[str] = "eagle3"

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        capacity: int,
        ids: Tensor | None = None,
    ) -> None:
        """`ids` `[V']` are the token ids of `lm_head.weight`'s rows; where there is no such
        weight the target's vocabulary layer serves."""
        super().__init__(config, weights, capacity)
        eps = config.layer.rms_norm_eps
        self.input_norm = rms_norm(weights["layers.0.input_layernorm.weight"], eps)
        self.hidden_norm = rms_norm(weights["layers.0.hidden_norm.weight"], eps)
        self.norm = rms_norm(weights["norm.weight"], eps)
        own = "lm_head.weight" in weights
        self.head: nn.Module | None = linear(weights, "lm_head") if own else None
        # One norm over all features, or one a layer, or none.
        norms = (WHOLE_NORM, *(LAYER_NORM.format(i) for i in range(len(config.feature_layers))))
        self.feature_norms = nn.ModuleList(
            rms_norm(weights[name], eps) for name in norms if name in weights
        )
        self.ids = ids

    def fuse(self, features: Tensor) -> Tensor:
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        fused: Tensor = features if self.fc is None else self.fc(features)
        return fused

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_before_residual else features
        return residual, torch.cat([self.input_norm(embedded), normed], dim=-1)

    def leave(self, x: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        logits = vocabulary.logits(normed) if self.head is None else self.head(normed)
        return logits, normed if self.config.norm_output else x

    def options(self) -> dict[str, int | float | str]:
        vocabulary = "whole" if self.ids is None else int(self.ids.shape[0])
        return super().options() | {"vocabulary": vocabulary}
