"""A Hugging Face `config.json` -> a target's configuration, for every supported architecture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.rope import inverse_frequencies
from forerun.models.weights import MAX_LAYERS


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ForerunError where it can't be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ForerunError(
            f"{path} is not readable JSON ({str(error) or type(error).__name__}): download it again"
        ) from None
    if not isinstance(value, dict):
        raise ForerunError(f"{path} holds no JSON object: download it again")
    return value


@dataclass(frozen=True)
class Fields:
    """A JSON object whose values are asked for by type. A null counts as absent."""

    values: Mapping[str, Any]
    where: str

    def integer(
        self, name: str, default: int | None = None, low: int = 1, high: int = 2**31
    ) -> int:
        """A whole number from `low` to `high`, required where there is no `default`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number, required where there is no `default`."""
        value = self._get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise self.error(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a text", value)
        return value

    def items(self, name: str, kind: type) -> list[Any] | None:
        """A list of `kind`, or None where absent."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(name, f"a list of {kind.__name__}", value)
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return value

    def error(self, name: str, expected: str, found: Any) -> ForerunError:
        """The error for the field `name`, found to be something else than `expected`."""
        shown = "is missing" if found is None else f"is {repr(found)[:60]}"
        return ForerunError(
            f"{self.where}: the field {name!r} {shown}, expected {expected}: correct it"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def config_from_json(values: Mapping[str, Any], where: str) -> TargetConfig:
    """The configuration that the contents of a `config.json` describe.

    Absent fields take the defaults of the architecture's class in transformers. Raises
    ForerunError for an unsupported architecture, a field that is missing or of the wrong type,
    quantised weights, another activation than SiLU, and a rotary scaling without its parameters.
    """
    fields = Fields(values, where)
    family = _family(fields)
    if values.get("quantization_config"):
        raise ForerunError(
            f"{where} declares quantised weights (quantization_config), which are not supported: "
            "use the unquantised checkpoint"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", "'silu'", activation)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", family.head_dim or max(hidden // heads, 1))
    positions = fields.integer("max_position_embeddings")
    config = TargetConfig(
        architecture=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_positions=positions,
        rope=read_rope(fields, head_dim, positions, family.theta),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        **family.traits(fields, layers),
    )
    inverse_frequencies(config.rope, positions, capacity=1)
    return config


def _family(fields: Fields) -> _Family:
    """The family of `architectures[0]`, or of `model_type` where that is absent."""
    classes = fields.items("architectures", str)
    name = classes[0] if classes else fields.text("model_type", "")
    family = _FAMILIES.get(name) if classes else _BY_MODEL_TYPE.get(name)
    if family is None:
        raise ForerunError(
            f"{fields.where} has the architecture {name!r}, supported are "
            f"{', '.join(_FAMILIES)}: choose a checkpoint of one of these"
        )
    return family


def read_rope(fields: Fields, head_dim: int, positions: int, default_theta: float) -> RopeConfig:
    """Rotary parameters, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    scaling = dict(fields.table("rope_parameters") or fields.table("rope_scaling"))
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ForerunError(
            f"{fields.where} gives each kind of layer a rotary embedding of its own, which is not "
            "supported: choose a checkpoint with a single one"
        )
    parameters = Fields(scaling, f"{fields.where}: rotary parameters")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    theta = parameters.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = parameters.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)
    )
    if not 0 < partial <= 1:
        raise fields.error("partial_rotary_factor", "a number above 0 and up to 1", partial)
    for used in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
        scaling.pop(used, None)
    if kind in ("llama3", "yarn", "longrope"):
        original = fields.integer(
            "original_max_position_embeddings",
            parameters.integer("original_max_position_embeddings", positions),
        )
        scaling["original_max_position_embeddings"] = original
    return RopeConfig(theta, int(head_dim * partial), kind, scaling)


def _llama(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


def _mistral(fields: Fields, layers: int) -> dict[str, Any]:
    # A null turns the window off; only where the field is absent does the class's default hold.
    if fields.values.get("sliding_window", 4096) is None:
        return {}
    return {
        "window": fields.integer("sliding_window", 4096),
        "sliding_layers": (True,) * layers,
    }


def _qwen2(fields: Fields, layers: int) -> dict[str, Any]:
    full = fields.integer("max_window_layers", 28, low=0)
    slides = tuple(layer >= full for layer in range(layers))
    return {"qkv_bias": True} | read_windows(fields, slides, default_window=4096)


def _qwen3(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return _qwen2(fields, layers) | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _smollm3(fields: Fields, layers: int) -> dict[str, Any]:
    interval = fields.integer("no_rope_layer_interval", 4)
    flags = fields.items("no_rope_layers", int)
    if flags is None:
        flags = [(layer + 1) % interval for layer in range(layers)]
    # Despite the field's name, a 1 means that the layer does rotate.
    rotates = tuple(bool(flag) for flag in flags[:layers])
    slides = tuple(not rotated for rotated in rotates)
    return (
        _llama(fields, layers)
        | {"rope_layers": rotates}
        | read_windows(fields, slides, default_window=None)
    )


def read_windows(
    fields: Fields, slides: tuple[bool, ...], default_window: int | None
) -> dict[str, Any]:
    """The window and who slides: the layers that `layer_types` names, or else `slides`."""
    kinds = fields.items("layer_types", str)
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise fields.error("layer_types", "full_attention or sliding_attention", unknown.pop())
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    window = fields.values.get("sliding_window", default_window)
    if window is None or not fields.flag("use_sliding_window"):
        if kinds is not None and any(slides):
            raise fields.error("sliding_window", "a size, for layer_types has sliding layers", None)
        return {}
    if not any(slides):
        return {}
    return {"window": fields.integer("sliding_window", default_window), "sliding_layers": slides}


@dataclass(frozen=True)
class _Family:
    """An architecture: its own fields, and the defaults of its class in transformers."""

    model_type: str
    traits: Callable[[Fields, int], dict[str, Any]]
    """Fields and number of layers -> TargetConfig's arguments that only some families have."""
    theta: float = 10_000.0
    head_dim: int | None = None
    """None: the hidden size divided by the heads."""
    tied: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", _llama),
    "MistralForCausalLM": _Family("mistral", _mistral),
    "Qwen2ForCausalLM": _Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": _Family("qwen3", _qwen3, head_dim=128),
    "MiMoForCausalLM": _Family("mimo", _qwen2),
    "SmolLM3ForCausalLM": _Family("smollm3", _smollm3, theta=2_000_000.0, tied=True),
}
_BY_MODEL_TYPE = {family.model_type: family for family in _FAMILIES.values()}
