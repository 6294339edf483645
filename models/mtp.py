"""MTP (multi-token prediction): one block applied repeatedly to hidden state and embedding.

A decoder layer reads the target's last hidden state and the next token's embedding, each normed;
its own normed output stands for the hidden state of the token that it predicts (DeepSeek-V3,
arXiv:2412.19437, section 2.2; one block for all depths: FastMTP, arXiv:2509.18362). That is an
EAGLE layer with more norms, drafting a chain unless its configuration asks for more children.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from forerun.models.drafter import Vocabulary
from forerun.models.eagle import Eagle, EagleConfig
from forerun.models.target import rms_norm


class Mtp(Eagle):
    """`fc(cat(norm(hidden), norm(embedding)))` through a whole decoder layer and a final norm."""

    kind: ClassVar[str] = "mtp"

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], capacity: int) -> None:
        """`weights` by MiMo's names, without a prefix."""
        layer = {f"layers.0.{name}": weight for name, weight in weights.items()}
        super().__init__(config, layer | {"fc.weight": weights["input_proj.weight"]}, capacity)
        self.token_norm, self.hidden_norm, self.input_norm, self.norm = (
            rms_norm(weights[f"{name}_layernorm.weight"], config.layer.rms_norm_eps)
            for name in ("token", "hidden", "input", "final")
        )

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert self.fc is not None
        pair = torch.cat([self.hidden_norm(features), self.token_norm(embedded)], dim=-1)
        x: Tensor = self.fc(pair)
        return x, self.input_norm(x)

    def leave(self, x: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return vocabulary.logits(normed), normed
