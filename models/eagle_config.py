"""What an EAGLE folder's `config.json` says, in each of the published styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import ForerunError
from forerun.models.config import TargetConfig
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import read_layer
from forerun.models.eagle import EagleConfig
from forerun.models.expand import proposed
from forerun.models.hf_config import Fields

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
MAX_PROPOSED = 2048
"""Nodes that a tree is chosen from: choosing compares each with each."""
REFUSED_UNLESS = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""ModelOpt's flags, and the only value that is EAGLE-3."""


@dataclass(frozen=True)
class Facts:
    """What a folder's configuration says, and the tensors that follow from it."""

    config: EagleConfig
    feature_size: int
    """Of one feature layer: the target's hidden size."""
    vocabulary: int
    """The drafter's own; the target's where it has none."""
    fc_bias: bool = False
    projection_bias: bool = False
    whole_norm: bool = False
    layer_norms: bool = False


def read_facts(values: Mapping[str, Any], where: str, kind: str, target: TargetConfig) -> Facts:
    """The facts in `values`, the contents of the file `where`, checked against the target's."""
    top = Fields(values, where)
    nested = top.table("transformer_layer_config")
    fields = Fields(nested, f"{where}: transformer_layer_config") if nested else top
    refuse_quantised(top)
    layer = _layer(fields)
    if fields.integer("vocab_size", target.vocab_size) != target.vocab_size:
        raise foreign(fields, "vocab_size", target.vocab_size)
    bias = fields.flag("attention_bias") or fields.flag("qkv_bias")
    depth, top_k = read_tree(top)
    if kind == "eagle":
        if layer.hidden_size != target.hidden_size:
            raise foreign(fields, "hidden_size", target.hidden_size)
        config = EagleConfig(layer, (NORMED,), depth, top_k)
        return Facts(config, target.hidden_size, target.vocab_size, top.flag("bias", True), bias)
    if top.integer("target_hidden_size", layer.hidden_size) != target.hidden_size:
        name = "target_hidden_size" if values.get("target_hidden_size") else "hidden_size"
        raise foreign(top if name in values else fields, name, target.hidden_size)
    return _eagle3_facts(top, layer, target, (depth, top_k), bias)


def _eagle3_facts(
    top: Fields, layer: DraftLayerConfig, target: TargetConfig, tree: tuple[int, int], bias: bool
) -> Facts:
    eagle = Fields(top.table("eagle_config"), f"{top.where}: eagle_config")
    for name, wanted in REFUSED_UNLESS.items():
        if eagle.flag(name, wanted) != wanted:
            raise eagle.error(name, f"{wanted}, all that is supported", not wanted)
    if eagle.integer("parallel_draft_step", 1) != 1:
        raise eagle.error("parallel_draft_step", "1", eagle.values["parallel_draft_step"])

    def flag(name: str) -> bool:
        return top.flag(name, eagle.flag(name))

    if "speculators_model_type" in top.values and "norm_before_residual" not in top.values:
        raise top.error("norm_before_residual", "true or false", None)  # defaults have differed
    config = EagleConfig(
        layer,
        _feature_layers(top, eagle, target.num_layers),
        *tree,
        norm_before_residual=flag("norm_before_residual"),
        norm_output=flag("norm_output"),
    )
    own = top.integer("draft_vocab_size", target.vocab_size, high=target.vocab_size)
    if own < config.top_k:
        raise top.error("draft_vocab_size", f"at least top_k, {config.top_k}", own)
    norms = flag("norm_before_fc"), flag("fc_norm")
    return Facts(config, target.hidden_size, own, False, bias, *norms)


def _layer(fields: Fields) -> DraftLayerConfig:
    if fields.integer("num_hidden_layers", 1) != 1:
        raise fields.error("num_hidden_layers", "1", fields.values["num_hidden_layers"])
    return read_gated_layer(fields)


def read_gated_layer(fields: Fields) -> DraftLayerConfig:
    """The sizes of a layer whose MLP is gated by SiLU, the only activation there is."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", "'silu'", activation)
    return read_layer(fields)


def read_tree(top: Fields, top_k: int = EagleConfig.top_k) -> tuple[int, int]:
    """The depth and top-k that the table `tree` says, or else EAGLE's depth and this top-k."""
    fields = Fields(top.table("tree"), f"{top.where}: tree")
    depth = fields.integer("depth", EagleConfig.depth, high=64)
    top_k = fields.integer("top_k", top_k, high=64)
    if proposed(depth, top_k) > MAX_PROPOSED:
        raise fields.error("top_k", f"less: {depth} levels propose over {MAX_PROPOSED}", top_k)
    return depth, top_k


def _feature_layers(top: Fields, eagle: Fields, layers: int) -> tuple[int, ...]:
    """The layers whose inputs are the features; by default EAGLE-3's (arXiv:2503.01840, 3.1)."""
    if not eagle.flag("use_aux_hidden_state", True):
        return (NORMED,)
    entered, left = top.items(AUX_LAYERS, int), eagle.items(AUX_LAYERS, int)
    ids = entered or [layer + 1 for layer in left or ()] or [2, layers // 2, layers - 3]
    if any(isinstance(layer, bool) or not 0 <= layer <= layers for layer in ids):
        fields = eagle if left and not entered else top
        raise fields.error(AUX_LAYERS, f"layers of a target that has {layers}", ids)
    return tuple(ids)


def refuse_quantised(fields: Fields) -> None:
    """Raises ForerunError where the weights are declared to be quantised."""
    if fields.values.get("quantization_config"):
        raise fields.error("quantization_config", "none", fields.values["quantization_config"])


def foreign(fields: Fields, name: str, expected: int) -> ForerunError:
    """The error for a size that is not the target's."""
    return ForerunError(
        f"{fields.where}: {name} is {fields.values.get(name)!r}, but the target's is {expected}: "
        "this drafter belongs to another target"
    )
