"""Attention of a few query rows over a KV cache, in the two forms that engines like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(query `[B, h, T, D]`, keys, values `[B, kv, S, D]`, mask `[B, T, S]` bool, scale) -> `[B, h, T, D]`."""


def grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Two batched matmuls with a group's query heads and rows side by side in one matrix.

    Measured on ONNX Runtime's CPU provider: a row's result does not depend, bit for bit, on how
    many rows or cache slots there are, as long as the matrix has two rows or more (with a single
    row another kernel runs); and it takes half the time of folding every row into the batch.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    stacked = query.reshape(batch, kv_heads, group * rows, dim)
    bias = torch.where(mask, 0.0, float("-inf")).to(query.dtype)[:, None]  # [B, 1, T, S]
    bias = torch.cat([bias] * group, dim=2)  # [B, 1, g * T, S]
    if group == 1:  # T may be 1: a second row keeps the kernel the same
        stacked = torch.cat([stacked, stacked[:, :, :1]], dim=2)
        bias = torch.cat([bias, bias[:, :, :1]], dim=2)
    scores = (stacked * scale) @ keys.transpose(-1, -2) + bias
    out = torch.softmax(scores, dim=-1) @ values
    if group == 1:
        out = out[:, :, :-1]
    return out.reshape(batch, kv_heads, group, rows, dim).flatten(1, 2)


def fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One ONNX `Attention` (opset 23), which TensorRT runs as a fused kernel."""
    output, *_ = torch.onnx.ops.attention(query, keys, values, mask[:, None], scale=scale)
    return output


ATTENTIONS: dict[str, Attend] = {"grouped": grouped, "fused": fused}
