"""Exact rewrites of a Llama-like model that make its linear layers easy to quantise.

RMSNorm without its weight commutes with every rotation of the residual stream, so norm weights
are folded into the linears that follow and the whole stream is rotated by one orthogonal matrix
(QuaRot, arXiv:2404.00456; SliceGPT, arXiv:2401.15024). Outlier channels spread over all channels
and one scale per token then loses little. The value channels inside each head are rotated too.
The function that the model computes does not change, and no operation is added to the graph.

Weights use Hugging Face names and layout: a linear weight is [out, in], a bias is [out]. The
residual stream is a row vector x [H]; rotated it is x @ Q, with Q = `residual_rotation` [H, H].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forerun.models.target import Basis

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Each norm of a layer, with the linears that read what it writes.
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
# The linears whose output is added to the residual stream.
RESIDUAL_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


class ModelShape(Protocol):
    """The sizes that the rewrites need, as every model config of the project has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


def mixing_matrix(size: int, generator: torch.Generator) -> Tensor:
    """Random orthogonal matrix [size, size] in float64 whose entries all have a like magnitude.

    It is the orthonormal DCT-II with random signs and a random order of the input channels. The
    DCT stands in for the Hadamard matrix of the paper, which does not exist for every size.
    """
    position = torch.arange(size, dtype=torch.float64)
    angles = math.pi / size * (position[:, None] + 0.5) * position[None, :]
    basis = torch.cos(angles) * math.sqrt(2.0 / size)
    basis[:, 0] /= math.sqrt(2.0)
    signs = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return (signs * basis)[torch.randperm(size, generator=generator)]


def residual_rotation(hidden_size: int, seed: int = 0) -> Tensor:
    """The rotation Q [H, H] (float64) that `rotate` applies to the residual stream."""
    return mixing_matrix(hidden_size, torch.Generator().manual_seed(seed))


def original_basis(weights: Mapping[str, Tensor], config: ModelShape, seed: int = 0) -> Basis:
    """How to get from a rotated model's hidden states to those of `weights`, before `rotate`.

    The rotated model's final norm has no weight, so undoing the rotation gives the original
    residual stream, and the original weight besides gives the state after the final norm.
    """
    rotation = residual_rotation(config.hidden_size, seed)
    norm = weights[FINAL_NORM]
    return Basis(stream=rotation.T.to(norm.dtype).contiguous(), gain=norm)


def rotate(weights: Mapping[str, Tensor], config: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """New weights of the same function, norms folded and residual and value channels rotated.

    Every norm weight of the residual stream becomes ones, and `lm_head.weight` a tensor of its own
    even where the embedding was tied. Query and key norms inside a head are left alone. The work
    is done in float64 and returned in the dtype of each weight.
    """
    rotated = dict(weights)
    rotation = residual_rotation(config.hidden_size, seed)

    def read(linear: str, norm: Tensor) -> None:
        """The input of `linear` is normed by `norm` [H] and rotated."""
        name = linear + ".weight"
        weight = weights[name]
        rotated[name] = ((weight.double() * norm.double()) @ rotation).to(weight.dtype)

    def write(linear: str) -> None:
        """The output of `linear` is rotated."""
        for name in (linear + ".weight", linear + ".bias"):
            if name in weights:
                value = weights[name]
                rotated[name] = (rotation.T @ value.double()).to(value.dtype)

    embedding = weights[EMBEDDING]
    rotated[EMBEDDING] = (embedding.double() @ rotation).to(embedding.dtype)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for norm_name, readers in NORM_READERS.items():
            norm = weights[f"{prefix}{norm_name}.weight"]
            rotated[f"{prefix}{norm_name}.weight"] = torch.ones_like(norm)
            for reader in readers:
                read(prefix + reader, norm)
        for writer in RESIDUAL_WRITERS:
            write(prefix + writer)

    final_norm = weights[FINAL_NORM]
    rotated[FINAL_NORM] = torch.ones_like(final_norm)
    head = weights.get(HEAD, embedding)
    rotated[HEAD] = ((head.double() * final_norm.double()) @ rotation).to(head.dtype)
    return rotate_values(rotated, config, seed)


def rotate_values(
    weights: Mapping[str, Tensor], config: ModelShape, seed: int = 0
) -> dict[str, Tensor]:
    """Rotate the value channels of each head: in v_proj's output, undone in o_proj's input.

    Attention mixes values over positions and never over channels, so the rotation passes through.
    All heads share one [D, D] rotation; grouped query heads thereby agree with their kv head.
    """
    rotated = dict(weights)
    rotation = mixing_matrix(config.head_dim, torch.Generator().manual_seed(seed))

    def by_head(value: Tensor) -> Tensor:
        """Rotate the last axis, heads * D, within each head."""
        heads = value.double().reshape(-1, config.head_dim)
        return (heads @ rotation).reshape(value.shape).to(value.dtype)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        value, bias, output = (
            prefix + x for x in ("v_proj.weight", "v_proj.bias", "o_proj.weight")
        )
        rotated[value] = by_head(weights[value].T).T.contiguous()
        if bias in weights:
            rotated[bias] = by_head(weights[bias])
        rotated[output] = by_head(weights[output])
    return rotated
