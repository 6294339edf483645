"""Attention of a draft tree's nodes over a KV cache, without a mask of a column a slot.

A node sees the slots below `committed`, and those of its ancestors, which lie from `first` on. What
lies in between (pending rows that were not accepted) and beyond the tree is never read, so that a
kernel's cost goes by a row's length and not by the cache's capacity.
`forerun.compiler.kernel_attention` is that kernel; the op here is its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 64
"""Nodes that a word of the packed ancestors holds."""
BITS = (*(1 << bit for bit in range(WORD - 1)), -(1 << (WORD - 1)))
"""What each bit of a word is worth; the last one is the sign."""


@dataclass(frozen=True)
class TreeView:
    """Which cache slots T nodes see."""

    committed: Tensor  # [B] int64: all slots below it
    first: Tensor  # [B] int64: the slot of node 0; the others follow it
    ancestors: Tensor  # [B, T, T] bool: the nodes that a node sees, itself among them

    def mask(self, slots: int) -> Tensor:
        """The same as `[B, T, S]` bool."""
        slot, inside, at = self._nodes(slots)
        kin = self.ancestors.gather(2, at.expand(-1, self.ancestors.shape[1], -1))  # [B, T, S]
        return (slot < self.committed[:, None, None]) | (inside & kin)

    def held(self, positions: Tensor, slots: int) -> Tensor:
        """The absolute position that each slot holds `[B, 1, S]`; the nodes' are `[B, T]`."""
        slot, inside, at = self._nodes(slots)
        return torch.where(inside, positions.gather(1, at[:, 0])[:, None], slot)

    def _nodes(self, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots `[1, 1, S]`; whether each is a node's, and whose (or any), `[B, 1, S]`."""
        nodes = self.ancestors.shape[1]
        slot = torch.arange(slots, device=self.first.device)[None, None]
        node = (slot - self.first[:, None, None]).expand(self.first.shape[0], 1, slots)
        inside = (node >= 0) & (node < nodes)
        return slot, inside, node.clamp(min=0).minimum(torch.tensor(nodes - 1))


@dataclass(frozen=True)
class TreeBits:
    """A `TreeView` as the op takes it."""

    committed: Tensor  # [B] int64
    first: Tensor  # [B] int64
    bits: Tensor  # [B, T, W] int64


@torch.library.custom_op("forerun::pack_ancestors", mutates_args=())
def pack_ancestors(ancestors: Tensor) -> Tensor:
    """`[B, T, T]` bool -> `[B, T, ceil(T / 64)]` int64: node n is bit n % 64 of word n // 64.

    A sum of what the bits are worth, since ONNX has no shifts of signed words; distinct bits never
    overflow. An op, because torch.export can't leave open a T that is rounded up.
    """
    batch, nodes, _ = ancestors.shape
    words = (nodes + WORD - 1) // WORD
    empty = ancestors.new_zeros(batch, nodes, words * WORD - nodes)
    padded = torch.cat([ancestors, empty], dim=2).reshape(batch, nodes, words, WORD)
    return torch.where(padded, torch.tensor(BITS, device=ancestors.device), 0).sum(-1)


@pack_ancestors.register_fake
def _(ancestors: Tensor) -> Tensor:
    # Not ceil(T / 64): torch.export would take the traced T's, 1, for a constant.
    words = torch.library.get_ctx().new_dynamic_size()
    return ancestors.new_empty((*ancestors.shape[:2], words), dtype=torch.int64)


def unpack_ancestors(bits: Tensor) -> Tensor:
    """The inverse: `[B, T, W]` int64 -> `[B, T, T]` bool."""
    nodes = bits.shape[1]
    found = (bits[..., None] & torch.tensor(BITS, device=bits.device)) != 0  # [B, T, W, 64]
    return found.flatten(2)[..., :nodes]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    committed: Tensor,
    first: Tensor,
    bits: Tensor,
    scale: float,
) -> Tensor:
    """`query` `[B, h, T, D]` over the caches `keys` and `values` `[B, kv, S, D]` -> `[B, h, T, D]`.

    `committed` and `first` `[B]` int64, `bits` `[B, T, W]` int64 as `pack_ancestors` makes them;
    every node's keys and values are in the caches. h is a multiple of kv. Softmax in float32; slots
    that no node sees may hold anything, NaN too; a node that sees nothing gets zeros.
    """
    batch, heads, nodes, dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    mask = TreeView(committed, first, unpack_ancestors(bits)).mask(slots)[:, None, None]
    used = mask.any(dim=3)[..., None]  # [B, 1, 1, S, 1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads, nodes, dim)
    scores = (grouped @ keys.float()[:, :, None].transpose(-1, -2)) * scale
    scores = torch.where(mask, scores, float("-inf"))
    weights = torch.where(mask, scores.softmax(-1), 0.0)  # [B, kv, group, T, S]
    mixed = weights @ torch.where(used, values.float()[:, :, None], 0.0)
    return mixed.reshape(query.shape).to(query.dtype)


tree_attention = torch.library.custom_op("forerun::tree_attention", attend, mutates_args=())
"""`attend` as one operation."""


@tree_attention.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    committed: Tensor,
    first: Tensor,
    bits: Tensor,
    scale: float,
) -> Tensor:
    return query.new_empty(query.shape)
