"""The target: one dense decoder for the Llama family, forward over a few rows and a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.attention import ATTENTIONS, Attention, Sight
from forerun.models.config import TargetConfig
from forerun.models.linear import Linear
from forerun.models.ops import matmul_transposed, tensor_scatter
from forerun.models.rope import rope_tables

CacheUpdate = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Caches:
    """The target's keys and values, a tensor a layer, each `[B, kv, S, D]`."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Rows:
    """What a forward needs to know of its T rows besides their tokens."""

    positions: Tensor  # [B, T] int64
    write_index: Tensor  # [B] int64: the cache slot that the first written row takes
    pending: Tensor  # [B, layers * 2 * kv, P, D]: earlier rows written along with these
    mask: Sight  # which slots a row attends to
    window_mask: Tensor | None = None  # [B, T, S] bool: those for sliding-window layers


@dataclass(frozen=True)
class Forward:
    """What a forward gives back."""

    hidden: Tensor  # [B, T, H] after the final norm
    caches: Caches  # with the rows written
    written: Tensor  # [B, layers * 2 * kv, T, D]: the rows' own keys and values
    taps: dict[int, Tensor]  # [B, T, H] each: the residual stream entering the layers asked for


@dataclass(frozen=True)
class Basis:
    """How rotated weights relate to the checkpoint's own basis."""

    stream: Tensor  # [H, H]: rotated residual stream @ this = the checkpoint's
    gain: Tensor  # [H]: the final norm's weight, which the rotated head has taken in


class Block(nn.Module):
    """One decoder layer: attention over the cache, then the gated feed-forward network."""

    def __init__(self, config: TargetConfig, layer: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.rotates, self.slides = config.rotates(layer), config.slides(layer)
        prefix = f"model.layers.{layer}."

        def fuse(*names: str) -> Linear:
            """Layers that read the same input, as one matmul."""
            weight = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])  # [N, K]
            biases = [weights.get(f"{prefix}{name}.bias") for name in names]
            bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
            return Linear(weight.T, bias)

        def norm(name: str) -> nn.RMSNorm:
            return rms_norm(weights[f"{prefix}{name}.weight"], config.rms_norm_eps)

        self.input_norm = norm("input_layernorm")
        self.qkv: nn.Module = fuse(*(f"self_attn.{name}_proj" for name in "qkv"))
        self.output: nn.Module = fuse("self_attn.o_proj")
        self.query_norm = norm("self_attn.q_norm") if config.qk_norm else nn.Identity()
        self.key_norm = norm("self_attn.k_norm") if config.qk_norm else nn.Identity()
        self.mlp_norm = norm("post_attention_layernorm")
        self.gate_up: nn.Module = fuse("mlp.gate_proj", "mlp.up_proj")
        self.down: nn.Module = fuse("mlp.down_proj")

    def project(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Queries `[B, h, T, D]`, keys and values `[B, kv, T, D]`, rotated where the layer does."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        shape = (*rows.positions.shape, heads + 2 * kv_heads, config.head_dim)
        both, value = (
            self.qkv(x).reshape(shape).transpose(1, 2).split([heads + kv_heads, kv_heads], 1)
        )
        if config.qk_norm:
            query, key = both.split([heads, kv_heads], dim=1)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if self.rotates:
            both = torch.onnx.ops.rotary_embedding(
                both,
                *rope,
                rows.positions,
                rotary_embedding_dim=config.rope.dim if config.rope.dim < config.head_dim else 0,
            )
        return [*both.split([heads, kv_heads], dim=1), value]

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        pending: tuple[Tensor, Tensor],
        rows: Rows,
        rope: tuple[Tensor, Tensor],
        attention: Attention,
        update: CacheUpdate,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """`x` `[B * T, H]` -> (x, key cache, value cache, new keys and values `[B, kv, T, D]`)."""
        query, key, value = self.project(self.input_norm(x), rows, rope)
        keys = update(keys, torch.cat([pending[0], key], dim=2), rows.write_index)
        new_values = torch.cat([pending[1], value], dim=2).to(values.dtype)
        values = update(values, new_values, rows.write_index)
        mask = rows.window_mask if self.slides and rows.window_mask is not None else rows.mask
        mixed = attention.attend(query, keys, values, mask, self.config.head_dim**-0.5)
        x = x + self.output(
            mixed.transpose(1, 2).reshape(-1, self.config.num_heads * mixed.shape[3])
        )
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        x = x + self.down(nn.functional.silu(gate) * up)
        return x, keys, values, [key, value]


class Target(nn.Module):
    """Tokens `[B, T]` -> hidden states `[B, T, H]` after the final norm, and the cache rows.

    Weights may be rotated (`Basis`); drafters read and write the checkpoint's own basis.
    """

    cos: Tensor
    sin: Tensor
    stream: Tensor | None
    gain: Tensor | None

    def __init__(
        self,
        config: TargetConfig,
        weights: Mapping[str, Tensor],
        capacity: int,
        attention: str = "grouped",
        basis: Basis | None = None,
    ) -> None:
        """`basis` says what was done to `weights` that are not the checkpoint's own."""
        super().__init__()
        self.config = config
        self.capacity = capacity
        self.attention = ATTENTIONS[attention]
        self.embed: nn.Module = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            weights["model.embed_tokens.weight"]
        )
        self.blocks = nn.ModuleList(
            Block(config, layer, weights) for layer in range(config.num_layers)
        )
        self.norm = rms_norm(weights["model.norm.weight"], config.rms_norm_eps)
        head = weights.get("lm_head.weight")
        self.head: nn.Module = TiedHead(self.embed) if head is None else Linear(head.T)
        cos, sin = rope_tables(config.rope, config.max_positions, capacity)  # [capacity, dim / 2]
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("stream", None if basis is None else basis.stream)
        self.register_buffer("gain", None if basis is None else basis.gain)

    def forward(
        self,
        tokens: Tensor,
        caches: Caches,
        rows: Rows,
        update: CacheUpdate = tensor_scatter,
        taps: Collection[int] = (),
    ) -> Forward:
        """T rows through all layers; `taps` are the layers (0 to L) whose input is given back.

        A negative token stands for no token: it is embedded as token 0 and must not be attended to.
        """
        embedded = self.embed(tokens.clamp(min=0))
        x = embedded.flatten(0, 1)  # [B * T, H]: linear layers want a matrix
        rows = self._prepare(rows, caches.keys[0].shape[2])
        pending = torch.split(rows.pending, self.config.num_kv_heads, dim=1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        written: list[Tensor] = []
        tapped: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            tapped[layer] = x
            x, key, value, new = block(
                x,
                caches.keys[layer],
                caches.values[layer],
                (pending[2 * layer], pending[2 * layer + 1]),
                rows,
                (self.cos, self.sin),
                self.attention,
                update,
            )
            keys.append(key)
            values.append(value)
            written += new
        tapped[len(self.blocks)] = x
        shape = (*tokens.shape, -1)
        return Forward(
            self.norm(x).reshape(shape),
            Caches(keys, values),
            torch.cat(written, dim=1),
            # Layer 0's is never reshaped back: torch.export can't follow that.
            {layer: tapped[layer].reshape(shape) if layer else embedded for layer in taps},
        )

    def embedding(self, tokens: Tensor) -> Tensor:
        """Tokens `[...]` -> `[..., H]` in the checkpoint's basis."""
        return self.own_basis(self.embed(tokens.clamp(min=0)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states `[..., H]` in the checkpoint's basis -> logits `[..., V]`."""
        if self.stream is not None and self.gain is not None:
            # Not `@ stream.T`: inside torch.cond that counts as another input, and an alias.
            hidden = nn.functional.linear(hidden / self.gain, self.stream)
        logits: Tensor = self.head(hidden)
        return logits

    def own_basis(self, stream: Tensor, normed: bool = False) -> Tensor:
        """A residual stream (or, `normed`, the state after the final norm) in that basis."""
        if self.stream is None or self.gain is None:
            return stream
        own = stream @ self.stream
        return own * self.gain if normed else own

    def _prepare(self, rows: Rows, slots: int) -> Rows:
        """The masks over `slots` cache slots in the form that this attention takes."""

        def prepare(sight: Sight) -> Any:
            group = self.config.num_heads // self.config.num_kv_heads
            return self.attention.prepare(sight, slots, group, self.cos.dtype)

        window = rows.window_mask
        return replace(
            rows,
            mask=prepare(rows.mask),
            window_mask=None if window is None else prepare(window),
        )

    def no_pending(self, batch: int) -> Tensor:
        """`pending` of no rows, as a prefill takes it."""
        config = self.config
        return self.cos.new_zeros(
            batch, config.num_layers * 2 * config.num_kv_heads, 0, config.head_dim
        )

    def empty_caches(self, batch: int, slots: int) -> Caches:
        """Zeroed caches of `slots` slots, on the module's device."""
        config = self.config
        shape = (batch, config.num_kv_heads, slots, config.head_dim)

        def zeros(dtype: torch.dtype) -> list[Tensor]:
            return [self.cos.new_zeros(shape, dtype=dtype) for _ in range(config.num_layers)]

        return Caches(zeros(self.cos.dtype), zeros(self.value_dtype))

    @property
    def value_dtype(self) -> torch.dtype:
        """The value cache's dtype; everything else has the module's."""
        return torch.float64 if self.attention.wide_values else self.cos.dtype


class TiedHead(nn.Module):
    """Logits from the embedding's own matrix, held once."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.embed.weight  # type: ignore[assignment]
        logits: Tensor = matmul_transposed(x.reshape(-1, x.shape[-1]), weight)
        return logits.reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    """Root-mean-square layer normalisation over the last dimension, with the given gain."""
    norm = nn.RMSNorm(weight.shape[0], eps=eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
