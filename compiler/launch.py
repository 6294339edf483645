"""How a kernel is launched: by torch here, by an ahead-of-time plugin in an engine.

Both read it from the same `Launch`, so that the plugin's argument order, grid and constants are
those that the tests ran in the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.compiler.kernels import KernelForm

Size = Any
"""A number, or an engine's symbol for one: it is only added, multiplied and divided by `//`."""

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
"""Triton's names of torch's types."""


@dataclass(frozen=True)
class Launch:
    """One kernel over tensors of given sizes. Its arguments are inputs, integers, outputs."""

    form: KernelForm
    grid: tuple[Size, Size, Size]
    inputs: tuple[str, ...]
    integers: Mapping[str, Size]
    """32-bit arguments by name: sizes that are known when it is launched."""
    outputs: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names in the order in which the compiled kernel takes them."""
        return (*self.inputs, *self.integers, *self.outputs)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Launch on tensors by name, a GPU's, or any where Triton interprets; outputs are new."""
        given = {name: tensors[name].contiguous() for name in self.inputs}
        given |= {name: tensors[name] for name in self.outputs}
        self.form.function[self.grid](
            **given,
            **self.integers,
            **self.form.constants,
            num_warps=self.form.warps,
            num_stages=self.form.stages,
        )


def launch(
    function: Any,
    grid: tuple[Size, Size, Size],
    inputs: Mapping[str, str],
    integers: Mapping[str, Size],
    outputs: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int = 4,
) -> Launch:
    """A `Launch` of tensors whose element types are given by name (`TYPES`)."""
    types = {
        **{name: f"*{element}" for name, element in inputs.items()},
        **dict.fromkeys(integers, "i32"),
        **{name: f"*{element}" for name, element in outputs.items()},
    }
    form = KernelForm(function, types, constants, warps)
    return Launch(form, grid, tuple(inputs), integers, tuple(outputs))


def power(size: int, least: int = 1) -> int:
    """The power of two from `least` on that holds `size`: what a block's size must be."""
    return max(least, 1 << max(0, size - 1).bit_length())


def blocks(size: Size, block: int) -> Size:
    """How many blocks hold `size`."""
    return (size + block - 1) // block
