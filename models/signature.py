"""A step's inputs and outputs by name, with their axes: what is exported, bound and allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from forerun.models.drafter import GrowingDrafter
from forerun.models.step import GROWN_NAMES, OUTPUT_NAMES, Step
from forerun.runtime.axes import INPUT_AXES

BOOL = ("ancestors", "remembering", "drafting")
FLOAT = ("uniforms", "temperature", "top_p")


def cache_names(layers: int, prefix: str = "") -> list[str]:
    """The names of the cache tensors, keys first, as inputs; outputs carry `prefix` "new_"."""
    return [f"{prefix}{kind}_{layer}" for kind in ("keys", "values") for layer in range(layers)]


@dataclass(frozen=True)
class Signature:
    """The graph's inputs and outputs by name, with their axes."""

    inputs: dict[str, tuple[tuple[str | int, ...], torch.dtype]]
    outputs: tuple[str, ...]


def signature(step: Step, fixed: Mapping[str, int] | None = None) -> Signature:
    """Names, axes and dtypes of everything that the exported step takes and gives.

    `fixed` gives sizes to symbols: TensorRT wants a static number of cache `slots`.
    """
    config = step.target.config
    sizes: dict[str, int] = {
        **(fixed or {}),
        "cached_heads": config.num_layers * 2 * config.num_kv_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tables": step.drafter.tables,
    }

    def resolve(axes: tuple[str | int, ...]) -> tuple[str | int, ...]:
        return tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in axes)

    real = step.target.cos.dtype
    inputs: dict[str, tuple[tuple[str | int, ...], torch.dtype]] = {}
    for name, axes in INPUT_AXES.items():
        dtype = torch.bool if name in BOOL else torch.float32 if name in FLOAT else torch.int64
        inputs[name] = (resolve(axes), real if name == "pending" else dtype)
    for name in cache_names(config.num_layers):
        dtype = step.target.value_dtype if name.startswith("values") else real
        inputs[name] = (resolve(("batch", "kv_heads", "slots", "head_dim")), dtype)
    states = step.drafter.states()
    for state in states:
        inputs[state.name] = (resolve(state.shape), state.dtype)
    outputs = (
        *OUTPUT_NAMES,
        *(GROWN_NAMES if isinstance(step.drafter, GrowingDrafter) else ()),
        *cache_names(config.num_layers, "new_"),
        *(f"new_{state.name}" for state in states),
    )
    return Signature(inputs, outputs)
