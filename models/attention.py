"""Attention of a few query rows over a KV cache, in the forms that engines like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.models.tree_attention import TreeBits, TreeView, pack_ancestors, tree_attention

Sight = Tensor | TreeView
"""What rows attend to: a mask `[B, T, S]` bool, or a tree over what is committed."""


@dataclass(frozen=True)
class Attention:
    """A form of attention: its mask is made once a step, its product once a layer."""

    prepare: Callable[[Sight, int, int, torch.dtype], Any]
    """(what is seen, S, query heads a group, dtype) -> the mask as `attend` takes it."""
    attend: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]
    """(query `[B, h, T, D]`, keys, values `[B, kv, S, D]`, mask, scale) -> `[B, h, T, D]`."""
    wide_values: bool = False
    """Whether the value cache is float64."""


def _mask(sight: Sight, slots: int) -> Tensor:
    """`[B, T, S]` bool, of whatever is given."""
    return sight.mask(slots) if isinstance(sight, TreeView) else sight


def _grouped_mask(sight: Sight, slots: int, group: int, dtype: torch.dtype) -> Tensor:
    """Additive, `[B, 1, group * T, S]`; one row more where a group is a single head."""
    mask = _mask(sight, slots)
    bias = torch.where(mask, 0.0, float("-inf")).to(dtype)[:, None]  # [B, 1, T, S]
    if group == 1:
        return torch.cat([bias, bias[:, :, :1]], dim=2)
    return torch.cat([bias] * group, dim=2)


def _grouped(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Two batched matmuls with a group's query heads and rows side by side in one matrix.

    Measured on ONNX Runtime's CPU provider: a row's result does not depend, bit for bit, on how
    many rows or cache slots there are, as long as the matrix has two rows or more (with a single
    row another kernel runs); and it takes half the time of folding every row into the batch.

    What is summed over slots is summed in float64. A drafted token lies in another slot than the
    same token decoded plainly (its siblings and unused pending slots are in between), so a float32
    sum would be split otherwise and differ by 1e-7; that is enough to flip an int8 rounding.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    stacked = query.reshape(batch, kv_heads, group * rows, dim)
    if group == 1:  # T may be 1: a second row keeps the kernel the same
        stacked = torch.cat([stacked, stacked[:, :, :1]], dim=2)
    scores = (stacked * scale) @ keys.transpose(-1, -2) + bias
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).to(values.dtype)
    out = ((weights @ values) / weights.sum(-1, keepdim=True)).to(query.dtype)
    if group == 1:
        out = out[:, :, :-1]
    return out.reshape(batch, kv_heads, group, rows, dim).flatten(1, 2)


def _fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One ONNX `Attention` (opset 23), which TensorRT runs as a fused kernel."""
    output, *_ = torch.onnx.ops.attention(query, keys, values, mask, scale=scale)
    return output


def _torch(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )


def _bool_mask(sight: Sight, slots: int, group: int, dtype: torch.dtype) -> Tensor:
    return _mask(sight, slots)[:, None]  # [B, 1, T, S]


def _tree_bits(sight: Sight, slots: int, group: int, dtype: torch.dtype) -> Tensor | TreeBits:
    """The tree packed; a mask, which sliding windows need, as `fused` takes it."""
    if isinstance(sight, TreeView):
        return TreeBits(sight.committed, sight.first, pack_ancestors(sight.ancestors))
    return _bool_mask(sight, slots, group, dtype)


def _tree(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | TreeBits, scale: float
) -> Tensor:
    """Our own kernel where the engine has it, which reads no further than a row's end."""
    if not isinstance(mask, TreeBits):
        return _fused(query, keys, values, mask, scale)
    where = mask.committed, mask.first, mask.bits
    mixed: Tensor = tree_attention(query, keys, values, *where, scale)
    return mixed


def _stacked_mask(sight: Sight, slots: int, group: int, dtype: torch.dtype) -> Tensor:
    """Additive in float32, `[B, 1, group * T, S]`."""
    bias = torch.where(_mask(sight, slots), 0.0, float("-inf"))[:, None]  # [B, 1, T, S]
    return torch.cat([bias] * group, dim=2)


def _stacked(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """As `_grouped`, for a device's batched matmuls, which add in float32 by themselves.

    torch's own attention would first repeat the whole cache for every query head of a group.
    """
    batch, heads, rows, dim = query.shape
    stacked = (query * scale).reshape(batch, keys.shape[1], -1, dim)
    scores = (stacked @ keys.transpose(-1, -2)).to(torch.float32) + bias
    out = torch.softmax(scores, dim=-1).to(values.dtype) @ values
    return out.reshape(batch, heads, rows, dim)


ATTENTIONS: dict[str, Attention] = {
    "grouped": Attention(_grouped_mask, _grouped, wide_values=True),
    "fused": Attention(_bool_mask, _fused),
    "tree": Attention(_tree_bits, _tree),
    # For the torch engine.
    "stacked": Attention(_stacked_mask, _stacked),
    # For eager batches: on a CPU in bfloat16 a seventh faster than the engines' forms.
    "torch": Attention(_bool_mask, _torch),
}
