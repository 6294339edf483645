"""DFlash drafters on disk: our folders, z-lab's published ones, and speculators-style ones.

A published folder (github.com/z-lab/dflash) holds a Qwen3 configuration with `block_size` and
`dflash_config.{mask_token_id,target_layer_ids}`, and `fc`, `hidden_norm`, `norm` and
`layers.{i}.*` in `model.safetensors`; the target's embedding and head serve. Speculators nests the
layers' configuration, may add copies of the target's own tensors, and may reduce the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.config import TargetConfig
from forerun.models.dflash import DFlash, DFlashConfig, dflash
from forerun.models.draft_layer import DraftLayerConfig, projection_shapes
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import (
    check_tensors,
    find_weights,
    layer_facts,
    read_layer,
    read_tensors,
    take_vocabulary,
    write_folder,
)
from forerun.models.hf_config import Fields, read_json, read_windows
from forerun.models.weights import MAX_LAYERS

WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "pytorch_model.bin")
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "sample_from_anchor": False,
    "fc_layernorm": False,
}
"""Fields of DFlash's relatives that change what is computed, and the values at which they don't."""
BUDGET = 32


def load_dflash(folder: Path, target: TargetConfig, capacity: int) -> DFlash:
    """The drafter in `folder`, in float32, for `target`.

    Raises ForerunError for a file that is absent, damaged or untrustworthy, for a field or key that
    is missing, unknown, mis-shaped or of a wrong type, and for what doesn't fit the target.
    """
    path, where = find_weights(folder, FILES, "DFlash drafter"), folder / "config.json"
    tensors = read_tensors(path)
    ids = take_vocabulary(tensors, target.vocab_size, path)
    config = _config(read_json(where), where, target, ids)
    expected = dict(dflash_shapes(config))
    vocabulary, hidden = target.vocab_size, target.hidden_size
    copies = {"embed_tokens.weight": (vocabulary, hidden), "verifier_norm.weight": (hidden,)}
    rows = vocabulary if ids is None else len(ids)
    copies |= {f"{name}.weight": (rows, hidden) for name in ("lm_head", "verifier_lm_head")}
    optional = [name for name in (*expected, *copies) if name in copies or name.endswith(".bias")]
    if ids is not None:
        optional.remove("lm_head.weight")
    check_tensors(tensors, expected | copies, path, "a DFlash drafter's", optional)
    own = expected.keys() | (set() if ids is None else {"lm_head.weight"})
    weights = {name: value.to(torch.float32) for name, value in tensors.items() if name in own}
    return dflash(config, weights, capacity, ids)


def save_dflash(
    folder: Path, config: DFlashConfig, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes `config.json` and `model.safetensors`, `tensors` by their published names.

    `facts` joins the configuration: which target the drafter belongs to, and how it was made.
    """
    layer, slides = config.layer, config.sliding_layers or (False,) * config.num_layers
    values = {
        "kind": "dflash",
        **layer_facts(layer),
        "num_hidden_layers": config.num_layers,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "use_sliding_window": any(slides),
        "sliding_window": config.window,
        "causal_layers": list(config.causal_layers or (False,) * config.num_layers),
        "feature_layers": list(config.feature_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "tree": config.tree,
        "budget": config.budget,
    }
    write_folder(folder, WEIGHTS, values | dict(facts), tensors)


def _config(
    values: dict[str, Any], where: Path, target: TargetConfig, ids: Tensor | None
) -> DFlashConfig:
    """The drafter that `config.json` describes, whichever of the three forms it has."""
    inner = Fields(values, str(where)).table("dflash_config")
    unknown = sorted(inner.keys() - NEUTRAL.keys() - _INNER)
    if unknown:
        raise ForerunError(f"{where}: unknown field {unknown[0]!r} in dflash_config")
    fields = Fields(values | inner, str(where))
    _check_kind(fields)
    nested = fields.table("transformer_layer_config")
    shape = Fields(nested, f"{where}: transformer_layer_config") if nested else fields
    layers = shape.integer("num_hidden_layers", high=MAX_LAYERS)
    first = shape.integer("max_window_layers", 28, low=0)
    windows = read_windows(shape, tuple(i >= first for i in range(layers)), default_window=4096)
    choices = target.vocab_size if ids is None else len(ids)
    try:
        return DFlashConfig(
            layer=_layer(shape, target),
            num_layers=layers,
            feature_layers=_feature_layers(fields, target.num_layers),
            block_size=fields.integer("block_size", low=2),
            mask_token_id=fields.integer("mask_token_id", low=0, high=target.vocab_size - 1),
            causal_layers=_causal(fields, layers, windows.get("sliding_layers", ())),
            tree=fields.flag("tree", True),
            budget=fields.integer("budget", min(BUDGET, choices), low=2, high=choices + 1),
            **windows,
        )
    except ForerunError as error:
        text = str(error)
        raise ForerunError(text if str(where) in text else f"{where}: {text}") from None


_INNER = {"block_size", "mask_token_id", "target_layer_ids"}


def _check_kind(fields: Fields) -> None:
    """Refuse other kinds, and relatives that compute something else."""
    kind = fields.text("kind", fields.text("speculators_model_type", "dflash"))
    if kind != "dflash":
        raise fields.error("kind", "'dflash'", kind)
    classes = fields.items("architectures", str)
    if classes and classes[0] not in ARCHITECTURES:
        raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}", classes[0])
    for name, neutral in NEUTRAL.items():
        value = fields.values.get(name)
        if value is not None and value != neutral:
            raise fields.error(name, f"{neutral!r}, for nothing else is supported", value)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", "'silu'", activation)


def _layer(fields: Fields, target: TargetConfig) -> DraftLayerConfig:
    layer = read_layer(fields, head_dim=128)
    if layer.hidden_size != target.hidden_size:
        raise fields.error("hidden_size", f"the target's, {target.hidden_size}", layer.hidden_size)
    return layer


def _feature_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Which hidden states `fc` reads, as `Drafter.feature_layers` counts them.

    z-lab counts layers whose output is read, from transformers' `hidden_states`, of which the last
    is normed. Speculators' numbers are one higher, which makes them ours.
    """
    forms = {
        "feature_layers": (NORMED, layers),
        "aux_hidden_state_layer_ids": (0, layers),
        "target_layer_ids": (0, layers - 1),
    }
    name = next((name for name in forms if name in fields.values), "target_layer_ids")
    ids, (low, high) = fields.items(name, int), forms[name]
    if not ids or any(isinstance(i, bool) or not low <= i <= high for i in ids):
        raise fields.error(name, f"layers of the target, from {low} to {high}", ids)
    if name != "target_layer_ids":
        return tuple(ids)
    return tuple(NORMED if i == layers - 1 else i + 1 for i in ids)


def _causal(fields: Fields, layers: int, slides: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers look back only inside the block: the sliding ones, where nothing else is said
    (z-lab's `is_causal` for all of them, speculators' `sliding_window_non_causal`)."""
    own = fields.items("causal_layers", bool)
    if own is not None:
        return tuple(own)
    if fields.values.get("is_causal") is not None:
        return (fields.flag("is_causal"),) * layers
    return () if fields.flag("sliding_window_non_causal") else slides


def dflash_shapes(config: DFlashConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a drafter's own; biases are optional."""
    layer = config.layer
    hidden = layer.hidden_size
    yield "fc.weight", (hidden, hidden * len(config.feature_layers))
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for prefix in (f"layers.{number}." for number in range(config.num_layers)):
        for name, shape in projection_shapes(layer):
            yield f"{prefix}{name}", shape
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", layer.head_dim),
            ("self_attn.k_norm", layer.head_dim),
        ):
            yield f"{prefix}{name}.weight", (size,)
