"""A decoder layer as drafters have it: its rows see a cache of context and a few rows beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.onnx.ops  # it registers the ops of torch.ops.onnx
from torch import Tensor, nn

from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.drafter import StateSpec
from forerun.models.linear import Linear
from forerun.models.rope import rope_tables
from forerun.models.target import rms_norm


@dataclass(frozen=True)
class DraftLayerConfig:
    """Sizes of a drafter's layers, and how they rotate."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig

    @classmethod
    def of(cls, target: TargetConfig) -> DraftLayerConfig:
        """The sizes of a language model's own layers."""
        return cls(**{field.name: getattr(target, field.name) for field in fields(cls)})


Beside = tuple[Tensor, Tensor]
"""Keys and values `[B, kv, m, D]` of rows that lie beside a layer's cache."""


@dataclass(frozen=True)
class Seen:
    """Keys and values that rows attend to."""

    keys: Tensor  # [B, kv, S, D], rotated
    values: Tensor  # [B, kv, S, D]
    mask: Tensor  # [B, n, S] bool: which of them each of n rows sees


class Rotary(nn.Module):
    """Tables `[capacity, dim / 2]` that all layers of a drafter share."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DraftLayerConfig, capacity: int) -> None:
        super().__init__()
        self.dim = config.rope.dim if config.rope.dim < config.head_dim else 0
        cos, sin = rope_tables(config.rope, config.max_positions, capacity)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` `[B, h, n, D]` at absolute `positions` `[B, n]`."""
        places = positions.clamp(min=0, max=self.cos.shape[0] - 1)
        # The op itself: inside torch.cond its wrapper torch.onnx.ops.rotary_embedding is refused.
        rotated: Tensor = torch.ops.onnx.RotaryEmbedding.opset23(
            x, self.cos, self.sin, places, rotary_embedding_dim=self.dim
        )
        return rotated


class DraftAttention(nn.Module):
    """Grouped-query attention whose keys the caller keeps.

    `weights` are named `q_proj.weight` `[heads * D, input]` and so on, as checkpoints have them;
    biases and `q_norm`, `k_norm` (Qwen3) where they are there.
    """

    def __init__(
        self,
        config: DraftLayerConfig,
        weights: Mapping[str, Tensor],
        rotary: Rotary,
        rotates: bool = True,
    ) -> None:
        """A layer that does not rotate has no positions (NoPE)."""
        super().__init__()
        self.config, self.rotary, self.rotates = config, rotary, rotates
        self.query: nn.Module = linear(weights, "q_proj")
        self.key: nn.Module = linear(weights, "k_proj")
        self.value: nn.Module = linear(weights, "v_proj")
        self.output: nn.Module = linear(weights, "o_proj")
        self.query_norm, self.key_norm = (
            rms_norm(weights[name], config.rms_norm_eps) if name in weights else nn.Identity()
            for name in ("q_norm.weight", "k_norm.weight")
        )

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, n, input]` -> rotated keys and values `[B, kv, n, D]`."""
        keys = self.key_norm(self._heads(self.key(x), self.config.num_kv_heads))
        values = self._heads(self.value(x), self.config.num_kv_heads)
        return self._rotate(keys, positions), values

    def forward(self, x: Tensor, positions: Tensor, seen: Sequence[Seen]) -> Tensor:
        """`x` `[B, n, input]` -> `[B, n, H]`; each row must see at least one slot.

        The parts of `seen` are not joined: a cache is never copied.
        """
        config = self.config
        queries = self.query_norm(self._heads(self.query(x), config.num_heads))
        queries = self._rotate(queries, positions) * config.head_dim**-0.5
        group = config.num_heads // config.num_kv_heads
        rows = queries.shape[2]
        # Query heads of a group side by side: [B, kv, group * n, D]
        queries = queries.reshape(
            queries.shape[0], config.num_kv_heads, group * rows, config.head_dim
        )
        scores = [
            (queries @ part.keys.transpose(-1, -2)).masked_fill(
                ~torch.cat([part.mask[:, None]] * group, dim=2), float("-inf")
            )
            for part in seen
        ]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        parts = torch.split(weights, [score.shape[-1] for score in scores], dim=-1)
        mixed = sum(
            (weight @ part.values for weight, part in zip(parts, seen, strict=True)),
            start=torch.zeros_like(queries),
        )
        mixed = mixed.reshape(mixed.shape[0], config.num_heads, rows, config.head_dim)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.rotary(x, positions) if self.rotates else x

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(*x.shape[:2], heads, self.config.head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    """`down(silu(gate x) * up x)`; weights named `gate_proj.weight` and so on."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.gate: nn.Module = linear(weights, "gate_proj")
        self.up: nn.Module = linear(weights, "up_proj")
        self.down: nn.Module = linear(weights, "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return mixed


class DecoderLayer(nn.Module):
    """One layer of a Llama-like decoder whose keys and values the caller keeps."""

    def __init__(
        self,
        config: DraftLayerConfig,
        weights: Mapping[str, Tensor],
        rotary: Rotary,
        rotates: bool = True,
    ) -> None:
        super().__init__()
        self.input_norm = rms_norm(weights["input_layernorm.weight"], config.rms_norm_eps)
        self.attention = DraftAttention(config, under(weights, "self_attn."), rotary, rotates)
        self.mlp_norm = rms_norm(weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        self.mlp = GatedMlp(under(weights, "mlp."))

    def forward(
        self, x: Tensor, positions: Tensor, cache: Seen, beside: Beside | None, mask: Tensor
    ) -> tuple[Tensor, Beside]:
        """`x` `[B, n, H]` -> x, and the m rows `beside` the cache followed by x's own.

        `mask` `[B, n, m + n]` says what x's rows see of those.
        """
        normed = self.input_norm(x)
        keys, values = self.attention.keys_values(normed, positions)
        if beside is not None:
            keys = torch.cat([beside[0], keys], dim=2)
            values = torch.cat([beside[1], values], dim=2)
        x = x + self.attention(normed, positions, [cache, Seen(keys, values, mask)])
        return x + self.mlp(self.mlp_norm(x)), (keys, values)


def cache_states(
    config: DraftLayerConfig, layers: int, dtype: torch.dtype, extra_rows: int = 0
) -> list[StateSpec]:
    """A cache of keys and one of values for each of `layers` layers."""
    shape = ("batch", config.num_kv_heads, "slots", config.head_dim)
    return [
        StateSpec(f"draft_{part}_{layer}", shape, dtype, cache=True, extra_rows=extra_rows)
        for layer in range(layers)
        for part in ("keys", "values")
    ]


def projection_shapes(
    config: DraftLayerConfig, width: int | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A layer's matrices and attention's biases by published names, and their shapes.

    `width` is what attention reads (by default the hidden size).
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    wide = width or hidden
    for name, rows, columns in (
        ("self_attn.q_proj", queries, wide),
        ("self_attn.k_proj", keys, wide),
        ("self_attn.v_proj", keys, wide),
        ("self_attn.o_proj", hidden, queries),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    ):
        yield f"{name}.weight", (rows, columns)
        if name.startswith("self_attn."):
            yield f"{name}.bias", (rows,)


def linear(weights: Mapping[str, Tensor], name: str) -> Linear:
    """The layer `name`.weight `[out, in]`, with its bias where it has one."""
    return Linear(weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))


def under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
