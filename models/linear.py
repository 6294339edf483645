"""Linear layers: full precision, int8, and weights of 4 or 8 bits for GPUs.

Weights lie as `[K, N]`, the way a matmul reads them, but for `TransposedLinear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.models.ops import (
    dequantize_blocks,
    dequantize_float8,
    matmul_integer,
    matmul_transposed,
    quantize_rows,
    round_float8,
)


class Linear(nn.Module):
    """`y = x @ weight + bias` over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)  # [K, N]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class TransposedLinear(nn.Module):
    """The same on a weight that lies as `[N, K]`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.T.contiguous(), requires_grad=False)  # [N, K]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.weight.shape[1])  # [n, K]
        y: Tensor = matmul_transposed(rows, self.weight)
        if x.dim() != 2:
            y = y.reshape(*x.shape[:-1], self.weight.shape[0])
        return y if self.bias is None else y + self.bias


def transpose_linears(module: nn.Module) -> None:
    """Have every full-precision linear layer below `module` read its weight as `[N, K]`.

    For TensorRT: whatever the number of rows, its kernels take that order. Of `[K, N]` those for
    a single row have a copy of their own, so that an engine holds every weight twice (measured).
    """
    places: dict[Linear, list[tuple[nn.Module, str]]] = {}  # a layer may have several
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                places.setdefault(child, []).append((parent, name))
    while places:  # one after the other: a layer's weight is there twice for a moment only
        layer, homes = places.popitem()
        transposed = TransposedLinear(layer)
        for parent, name in homes:
            setattr(parent, name, transposed)


class Int8Linear(nn.Module):
    """Integer matmul whose rows do not see each other: one activation scale a row (token).

    The scale comes from the row alone and the product is exact, so a row's result is the same bit
    for bit however many rows are computed beside it: that is what makes a speculative step under
    int8 lossless.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous())  # [K, N] int8
        self.register_buffer("scale", scale)  # [N] float32
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # By the weight's sizes: x's own may be expressions that export can't tell are numbers.
        rows = x if x.dim() == 2 else x.reshape(-1, self.weight.shape[0])  # [n, K]
        # A row of zeros has scale 0 and whatever integers: the last product makes it 0 again.
        scale = rows.abs().amax(-1, keepdim=True) * (1 / 127)  # [n, 1]
        product = matmul_integer(quantize_rows(rows, scale), self.weight)  # [n, N] int32
        if x.dim() != 2:  # here and not at the end: a graph's output that is a view is a copy
            shape = x.shape[:-1]
            product = product.reshape(*shape, self.weight.shape[1])
            scale = scale.reshape(*shape, 1)
        y: Tensor = product.to(torch.float32) * self.scale * scale
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """Weights of 4 bits with a scale a block of input channels; activations stay as they are."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous())  # [K, N] int8, -8 to 7
        self.register_buffer("scale", scale)  # [K / block, N]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ dequantize_blocks(self.weight, self.scale)
        return y if self.bias is None else y + self.bias


class Float8Linear(nn.Module):
    """Weights and what they multiply in 8 bit floating point (E4M3).

    One scale an output channel, and one for all activations, fixed beforehand: rows don't see each
    other.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor

    def __init__(
        self, weight: Tensor, scale: Tensor, input_scale: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous())  # [K, N] the bits as uint8
        self.register_buffer("scale", scale)  # [N]
        self.register_buffer("input_scale", input_scale)  # []
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = round_float8(x, self.input_scale) @ dequantize_float8(self.weight, self.scale)
        return y if self.bias is None else y + self.bias


class Int8Embedding(nn.Module):
    """Embedding rows as int8 with one scale a row: tokens `[...]` -> `[..., H]` float32."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)  # [V, H] int8
        self.register_buffer("scale", scale)  # [V] float32

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].to(torch.float32) * self.scale[tokens][..., None]
