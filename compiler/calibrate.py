"""What the linear layers read on real text: what rounding and smoothing work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forerun.compiler.certificate import float32_logits
from forerun.compiler.quantize import input_hessian
from forerun.models.linear import Linear
from forerun.models.target import Target

FUSED_NAMES = {
    "qkv": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
"""A block's linear layers -> the checkpoint's names for them (fused ones in the same style)."""


def linears(target: Target) -> dict[str, Linear]:
    """Every linear layer of the target, by the name of the weight it was made from."""
    found = {
        f"model.layers.{layer}.{name}.weight": getattr(block, place)
        for layer, block in enumerate(target.blocks)
        for place, name in FUSED_NAMES.items()
    }
    if isinstance(target.head, Linear):
        found["lm_head.weight"] = target.head
    return found


def input_hessians(target: Target, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """X^T X `[K, K]` of each linear layer's inputs over all tokens of `texts`, by weight name."""
    return over_inputs(target, texts, input_hessian, torch.add)


def input_maxima(target: Target, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The largest magnitude `[]` among each linear layer's inputs, by weight name."""
    return over_inputs(target, texts, lambda rows: rows.abs().amax(), torch.maximum)


def over_inputs(
    target: Target,
    texts: Sequence[Sequence[int]],
    measure: Callable[[Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """`measure` of each linear layer's inputs `[n, K]`, joined over all tokens of `texts`."""
    totals: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            found = measure(inputs[0].reshape(-1, inputs[0].shape[-1]))
            totals[name] = join(totals[name], found) if name in totals else found

        return add

    layers = linears(target)
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        for text in texts:
            float32_logits(target, text)
    finally:
        for handle in handles:
            handle.remove()
    return totals
