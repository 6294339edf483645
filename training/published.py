"""What is trained, by the names that published folders give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from forerun.models.linear import Linear

LAYER_NAMES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Modules of a layer (`forerun.models.draft_layer`)."""


def by_published_names(module: nn.Module, name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """The parameters of `module` on the CPU, linear layers as `[out, in]`; `name_of` names a
    submodule."""
    found: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        owner, _, part = name.rpartition(".")
        lies = weight.dim() == 2 and isinstance(module.get_submodule(owner), Linear)
        here = weight.detach().cpu()
        found[f"{name_of(owner)}.{part}"] = here.T if lies else here
    return found


def layered(outer: Mapping[str, str], prefix: str = "layers.") -> Callable[[str], str]:
    """`name_of` for a stack of layers: theirs under `prefix`, the others as `outer` says."""

    def name_of(owner: str) -> str:
        if owner in outer:
            return outer[owner]
        _, number, inner = owner.split(".", 2)
        return f"{prefix}{number}.{LAYER_NAMES[inner]}"

    return name_of
