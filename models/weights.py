"""The tensors that a target must have: their names and shapes, checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forerun.errors import ForerunError
from forerun.models.config import TargetConfig

Shape = tuple[int, ...]

MAX_LAYERS = 4096
"""No real model comes near; a forged count would fill the memory with per-layer flags."""
MTP_PREFIX = "model.mtp_layers.0."
"""Of the drafter that MiMo keeps beside its own layers (`forerun.models.mtp`)."""


def tensor_shapes(config: TargetConfig) -> Iterator[tuple[str, Shape]]:
    """Name (Hugging Face's) and shape of every tensor that a target of `config` holds."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layer_shapes(config: TargetConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, bias in linears:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def check_shapes(found: Mapping[str, Shape], config: TargetConfig, where: str) -> list[str]:
    """The names to read from a checkpoint that holds the tensors `found` (name -> shape).

    Rotary buffers, an output projection that is tied to the embedding, and an MTP block are left
    out. Raises ForerunError for a tensor that is missing, of a wrong shape, or unknown to the
    architecture.
    """
    needed: list[str] = []
    for name, shape in tensor_shapes(config):
        if name not in found:
            raise ForerunError(
                f"{where} lacks the tensor {name!r} that its configuration calls for: "
                "download the checkpoint again, or correct its configuration"
            )
        if tuple(found[name]) != shape:
            raise ForerunError(
                f"{where} has the tensor {name!r} of shape {list(found[name])}, expected "
                f"{list(shape)}: the configuration and the weights belong to different models"
            )
        needed.append(name)
    for name in sorted(found.keys() - set(needed)):
        if not _is_idle(name, config):
            raise ForerunError(
                f"{where} has the tensor {name!r} that the architecture {config.architecture!r} "
                "does not use: its results would be wrong without it, so use a plain checkpoint"
            )
    return needed


def _is_idle(name: str, config: TargetConfig) -> bool:
    """Whether a tensor may be left out: computed buffers, a copy of the embedding, a drafter."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or name.startswith(MTP_PREFIX)
        or (name == "lm_head.weight" and config.tie_embeddings)
    )
