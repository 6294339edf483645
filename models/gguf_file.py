"""A GGUF file -> a checkpoint, dequantised to float32 and renamed to Hugging Face's names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, digest_files
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.gguf_reader import GgufFile, GgufTensor, read_gguf
from forerun.models.gguf_tokenizer import vocabulary_from_gguf
from forerun.models.rope import inverse_frequencies
from forerun.models.stored import StoredWeights
from forerun.models.weights import MAX_LAYERS, check_shapes

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's tensor names, without layer and suffix, and Hugging Face's."""

_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class _Architecture:
    """What a GGUF file leaves unsaid about its architecture."""

    interleaved: bool = False
    """Query and key rows are stored in llama.cpp's order, rotated pairs side by side."""
    nope_interval: int | None = None
    """Every so many layers one does not rotate."""
    windows: bool = False
    """`attention.sliding_window` makes every layer slide (Mistral)."""


_ARCHITECTURES = {
    "llama": _Architecture(interleaved=True, windows=True),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "smollm3": _Architecture(interleaved=True, nope_interval=4),
}


def checkpoint_from_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """The checkpoint in the GGUF file `path`, called `name` or else as the file.

    Raises ForerunError where it is damaged, inconsistent, or of an architecture, quantisation or
    tokenizer that is not supported.
    """
    file, where = read_gguf(path), str(path)
    config = config_from_gguf(file, where)
    vocabulary = vocabulary_from_gguf(file.metadata, where)
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        name=name or path.name,
        config=config,
        weights=_weights(file, config, where),
        tokenizer=vocabulary.tokenizer,
        chat_template=template if isinstance(template, str) else None,
        bos_token=vocabulary.bos_token,
        eos_token=vocabulary.eos_token,
        stop_ids=vocabulary.stop_ids,
        add_bos=vocabulary.add_bos,
        digest=digest_files([path]),
    )


def config_from_gguf(file: GgufFile, where: str) -> TargetConfig:
    """The target's configuration from a GGUF file's metadata and the tensors that it has.

    Raises ForerunError for an unsupported architecture, a missing or mistyped field, a split
    file, a mixture of experts, and a rotary scaling that is not supported.
    """
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ForerunError(
            f"{where} has the architecture {name!r}, supported are "
            f"{', '.join(_ARCHITECTURES)}: choose a checkpoint of one of these"
        )
    fields = _Fields(file.metadata, name, where)
    fields.refuse_variants()
    traits, layers = _ARCHITECTURES[name], fields.integer("block_count", high=MAX_LAYERS)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ForerunError(f"{where} lacks the tensor 'token_embd.weight': download it again")
    window = fields.integer("attention.sliding_window", 0, low=0)
    if window and not traits.windows:
        raise ForerunError(
            f"{where} has sliding windows without saying in which layers of {name!r}: "
            "use the model's Hugging Face folder"
        )
    config = TargetConfig(
        architecture=name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_positions=fields.integer("context_length"),
        rope=_rope(file, fields, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        window=window or None,
        sliding_layers=(True,) * layers if window else (),
        rope_layers=tuple((layer + 1) % traits.nope_interval != 0 for layer in range(layers))
        if traits.nope_interval
        else (),
    )
    if traits.interleaved and config.rope.dim != head_dim:
        raise ForerunError(
            f"{where} rotates {config.rope.dim} of {head_dim} dimensions a head, which leaves the "
            f"order of its {name!r} rows unclear: use the model's Hugging Face folder"
        )
    inverse_frequencies(config.rope, config.max_positions, capacity=1)
    return config


def _rope(file: GgufFile, fields: _Fields, head_dim: int) -> RopeConfig:
    """The rotary embedding, its scaling told by metadata or by tensors of factors."""
    theta = fields.number("rope.freq_base", 10_000.0)
    dim = fields.integer("rope.dimension_count", head_dim)
    context = fields.integer("context_length")
    kind = fields.text("rope.scaling.type", "none")
    scaling: dict[str, Any] = {
        "factor": fields.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", context
        ),
    }
    stretch = fields.number("rope.scaling.attn_factor", 1.0)
    common, short, long = (file.tensors.get(name) for name in _FACTORS)
    if common is not None or (short is not None and long is not None):
        # Llama 3.1's scaling is stored as one divisor a frequency, which is what longrope applies.
        scaling["short_factor"] = _numbers(common or short)
        scaling["long_factor"] = _numbers(common or long)
        scaling["attention_factor"] = 1.0 if common else stretch
        return RopeConfig(theta, dim, "longrope", scaling)
    if kind == "none":
        return RopeConfig(theta, dim)
    if kind == "linear":
        return RopeConfig(theta, dim, "linear", {"factor": scaling["factor"]})
    if kind != "yarn" or fields.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise ForerunError(
            f"{fields.where} has the rotary scaling {kind!r} without its tables of factors, or "
            "with a logarithmic multiplier: use the model's Hugging Face folder"
        )
    # llama.cpp multiplies its factor into YaRN's own temperature; Hugging Face replaces it.
    scaling["attention_factor"] = stretch * (1 + 0.1 * math.log(max(scaling["factor"], 1.0)))
    scaling["beta_fast"] = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    scaling["beta_slow"] = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    return RopeConfig(theta, dim, "yarn", scaling)


def _numbers(tensor: GgufTensor | None) -> list[float]:
    return [] if tensor is None else [float(value) for value in tensor.dequantised().ravel()]


def _weights(file: GgufFile, config: TargetConfig, where: str) -> StoredWeights:
    """Every tensor of the target, checked by name, shape and type; none is dequantised yet."""
    stored = {_hf_name(name): name for name in file.tensors if name not in _FACTORS}
    shapes = {name: file.tensors[source].shape for name, source in stored.items()}
    tensors = {name: file.tensors[stored[name]] for name in check_shapes(shapes, config, where)}
    for tensor in {tensor.kind: tensor for tensor in tensors.values()}.values():
        tensor.dequantised(rows=1)  # so that a type that gguf can't decode is refused here
    return StoredWeights({n: partial(_read, n, tensor, config) for n, tensor in tensors.items()})


def _read(name: str, tensor: GgufTensor, config: TargetConfig) -> Tensor:
    values = torch.from_numpy(tensor.dequantised())
    interleaved = _ARCHITECTURES[config.architecture].interleaved
    if interleaved and (".q_proj." in name or ".k_proj." in name):
        values = _halves(values, config.head_dim)
    return values.contiguous()


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows `[heads * head_dim, ...]` with each head's rotated pairs moved from (0,1)(2,3).. apart.

    llama.cpp's converter puts the two rows of a pair side by side; Hugging Face keeps the first
    members in the first half of the head and the second members in the second.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """Hugging Face's name of the GGUF tensor `name`, or `name` itself where there is none."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_NAMES[match[2]]}.{match[3]}"


@dataclass(frozen=True)
class _Fields:
    """Metadata of one architecture, typed."""

    metadata: Mapping[str, Any]
    architecture: str
    where: str

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise self._error(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._error(key, "a text", value)
        return value

    def refuse_variants(self) -> None:
        """Refuse what the metadata announces and no other check would notice."""
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ForerunError(
                f"{self.where} is one part of a split file: join the parts with "
                "llama-gguf-split --merge"
            )
        if self.integer("expert_count", 0, low=0):
            raise ForerunError(
                f"{self.where} is a mixture of experts, which is not supported: "
                "choose a dense checkpoint"
            )

    def _get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _error(self, key: str, expected: str, found: Any) -> ForerunError:
        shown = "nothing" if found is None else repr(found)[:60]
        return ForerunError(
            f"{self.where} has {shown} under {self.architecture}.{key}, expected {expected}: "
            "download it again"
        )
