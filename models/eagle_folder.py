"""EAGLE drafters on disk: our folders, and those that are published, exactly as they are.

- EAGLE-1/2 (SafeAILab): `fc`, `layers.0.*` without an input norm; `bias` missing means true.
- EAGLE-3 (SafeAILab, SpecForge): `fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`.
- EAGLE-3 (ModelOpt): `layers.0.*`; facts in `eagle_config`, whose layer ids name the layer that a
  feature leaves: one less than the layer that it enters.
- EAGLE-3 (speculators): `layers.0.*`; the layer's facts in `transformer_layer_config`, layer ids at
  the top name the layer that a feature enters. Our own folders are of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_layer import projection_shapes
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import (
    check_tensors,
    find_weights,
    layer_facts,
    read_tensors,
    tensor_names,
    write_folder,
)
from forerun.models.eagle import LAYER_NORM, WHOLE_NORM, Eagle, Eagle3, EagleConfig
from forerun.models.eagle_config import AUX_LAYERS, Facts, read_facts
from forerun.models.hf_config import read_json

WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "pytorch_model.bin")
LAYER = "layers.0."
LAYER_PREFIXES = (LAYER, "midlayer.")


def eagle_kind(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Which EAGLE a published folder holds, by its configuration or else by its tensors."""
    classes = values.get("architectures")
    named = [*(classes if isinstance(classes, list) else ()), values.get("speculators_model_type")]
    if any("eagle3" in str(name).lower() for name in named):
        return "eagle3"
    if not any((folder / name).is_file() for name in FILES):
        return None
    names = tensor_names(find_weights(folder, FILES, "weights"))
    if any(f"{prefix}hidden_norm.weight" in names for prefix in LAYER_PREFIXES):
        return "eagle3"
    alone = {f"{LAYER}self_attn.q_proj.weight", "fc.weight"} <= names
    return "eagle" if alone and f"{LAYER}input_layernorm.weight" not in names else None


def load_eagle(kind: str, folder: Path, checkpoint: Checkpoint, capacity: int) -> Eagle:
    """The drafter in `folder`, in float32, for the target `checkpoint`.

    A copy of the target's embedding is not kept. Raises ForerunError for a file that is absent,
    damaged or untrustworthy, for a field or key that is missing, unknown, mis-shaped or of a wrong
    type, and for what doesn't fit the target.
    """
    where = folder / "config.json"
    path = find_weights(folder, FILES, "EAGLE drafter")
    facts = read_facts(read_json(where), str(where), kind, checkpoint.config)
    tensors = read_tensors(path)
    ids = _pop_vocabulary(tensors, facts, checkpoint, path) if kind == "eagle3" else None
    prefix = next((p for p in LAYER_PREFIXES if any(n.startswith(p) for n in tensors)), LAYER)
    tensors = {name: w for name, w in tensors.items() if not name.endswith(".inv_freq")}
    shapes = dict(_shapes(facts, kind, prefix, checkpoint.config.vocab_size))
    check_tensors(tensors, shapes, path, "an EAGLE drafter's", _optional(facts, shapes, checkpoint))
    own = tensors.get("embed_tokens.weight")
    if own is not None and _same(own, checkpoint.weights["model.embed_tokens.weight"]):
        del tensors["embed_tokens.weight"]
    weights = {
        LAYER + name.removeprefix(prefix) if name.startswith(prefix) else name: w.to(torch.float32)
        for name, w in tensors.items()
    }
    if kind == "eagle":
        return Eagle(facts.config, weights, capacity).eval()
    return Eagle3(facts.config, weights, capacity, ids).eval()


def save_eagle(
    folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes `config.json`, with fields that published readers know, and `model.safetensors`.

    `tensors` by published names, a layer's under `layers.0.`; `facts` joins the configuration:
    which target the drafter belongs to, and how it was made.
    """
    layer, head = config.layer, tensors.get("lm_head.weight")
    three = f"{LAYER}hidden_norm.weight" in tensors
    values: dict[str, Any] = {
        "kind": "eagle3" if three else "eagle",
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
        "model_type": "llama",
        **layer_facts(layer),
        "num_hidden_layers": 1,
        "bias": "fc.bias" in tensors,
        "tree": {"depth": config.depth, "top_k": config.top_k},
    }
    if three:
        values |= {
            AUX_LAYERS: list(config.feature_layers),
            "draft_vocab_size": None if head is None else len(head),
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "norm_before_fc": WHOLE_NORM in tensors,
            "fc_norm": LAYER_NORM.format(0) in tensors,
        }
    write_folder(folder, WEIGHTS, values | dict(facts), tensors)


def _shapes(
    facts: Facts, kind: str, prefix: str, vocabulary: int
) -> Iterator[tuple[str, list[int]]]:
    """Every key that such a drafter may have, and its shape."""
    config, layer = facts.config, facts.config.layer
    hidden = layer.hidden_size
    for name, shape in projection_shapes(layer, 2 * hidden if kind == "eagle3" else hidden):
        yield f"{prefix}{name}", list(shape)
    yield f"{prefix}post_attention_layernorm.weight", [hidden]
    yield "embed_tokens.weight", [vocabulary, hidden]
    if kind == "eagle":
        yield "fc.weight", [hidden, 2 * hidden]
        if facts.fc_bias:
            yield "fc.bias", [hidden]
        return
    features = len(config.feature_layers)
    yield f"{prefix}input_layernorm.weight", [hidden]
    yield f"{prefix}hidden_norm.weight", [hidden]
    yield "norm.weight", [hidden]
    yield "lm_head.weight", [facts.vocabulary, hidden]
    if config.feature_layers != (NORMED,):
        yield "fc.weight", [hidden, features * facts.feature_size]
    if facts.whole_norm:
        yield WHOLE_NORM, [features * facts.feature_size]
    for place in range(features if facts.layer_norms else 0):
        yield LAYER_NORM.format(place), [facts.feature_size]


def _optional(facts: Facts, shapes: Mapping[str, Any], checkpoint: Checkpoint) -> Sequence[str]:
    """The keys that may be absent: the target's own ends serve, where they fit."""
    names = []
    if facts.config.layer.hidden_size == checkpoint.config.hidden_size:
        names.append("embed_tokens.weight")
        if facts.vocabulary == checkpoint.config.vocab_size:
            names.append("lm_head.weight")
    if not facts.projection_bias:
        names += [name for name in shapes if name.endswith("_proj.bias")]
    return names


def _pop_vocabulary(
    tensors: dict[str, Tensor], facts: Facts, checkpoint: Checkpoint, path: Path
) -> Tensor | None:
    """Token ids of the drafter's columns, from `d2t`, which holds offsets; None: all in order."""
    vocabulary = checkpoint.config.vocab_size
    offsets, kept = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if facts.vocabulary != vocabulary:
            raise ForerunError(f"{path}: the key 'd2t' is missing: it maps the reduced vocabulary")
        return None
    if offsets.is_floating_point() or list(offsets.shape) != [facts.vocabulary]:
        raise ForerunError(
            f"{path}: 'd2t' is {offsets.dtype} {list(offsets.shape)}, expected "
            f"{facts.vocabulary} whole numbers, as draft_vocab_size says"
        )
    ids = torch.arange(facts.vocabulary) + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ForerunError(
            f"{path}: 'd2t' reaches from token {int(ids.min())} to {int(ids.max())}, outside the "
            f"target's vocabulary of {vocabulary}: this drafter belongs to another target"
        )
    if len(set(ids.tolist())) != len(ids):
        raise ForerunError(f"{path}: 'd2t' names a token twice: train or download it again")
    if kept is not None:
        expected = torch.zeros(vocabulary, dtype=torch.bool).scatter(0, ids, True)
        if list(kept.shape) != [vocabulary] or not torch.equal(kept.to(torch.bool), expected):
            raise ForerunError(
                f"{path}: 't2d' {list(kept.shape)} does not mark the tokens that 'd2t' names in a "
                f"vocabulary of {vocabulary}: train or download it again"
            )
    return None if torch.equal(ids, torch.arange(vocabulary)) else ids


def _same(own: Tensor, target: Tensor) -> bool:
    """Whether a copy of the target's tensor, at the copy's own precision."""
    return own.shape == target.shape and torch.equal(own, target.to(own.dtype))
