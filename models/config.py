"""What a target is: the facts of a checkpoint that shape its graph, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ForerunError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, section 3.4) and how its range is stretched."""

    theta: float
    dim: int
    """Rotated dimensions of a head (the first `dim`; the rest pass through unrotated)."""
    kind: str = "default"
    """default, linear, llama3, yarn, longrope or dynamic."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """The kind's own parameters, named as in Hugging Face's `rope_scaling`."""


@dataclass(frozen=True)
class TargetConfig:
    """One dense decoder: Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2/3 differ only in these."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """Tokens that a sliding-window layer sees, itself included."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty means none."""
    rope_layers: tuple[bool, ...] = ()
    """Which layers rotate; empty means all (SmolLM3 leaves some without positions: NoPE)."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ForerunError(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} "
                "key/value heads: correct the checkpoint's configuration"
            )
        for name in ("sliding_layers", "rope_layers"):
            flags = getattr(self, name)
            if flags and len(flags) != self.num_layers:
                raise ForerunError(
                    f"{name} names {len(flags)} layers but the target has {self.num_layers}: "
                    "correct the checkpoint's configuration"
                )
        if any(self.sliding_layers) and not self.window:
            raise ForerunError("sliding layers without a window: the configuration lacks its size")

    def slides(self, layer: int) -> bool:
        """Whether `layer` attends to the last `window` tokens only."""
        return bool(self.sliding_layers) and self.sliding_layers[layer]

    def rotates(self, layer: int) -> bool:
        """Whether `layer` rotates its queries and keys."""
        return not self.rope_layers or self.rope_layers[layer]
