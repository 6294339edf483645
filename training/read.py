"""Reading texts with the target, in batches; what several begin with is read once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from forerun.models.ops import scatter_in_place
from forerun.models.target import Caches, Forward, Rows, Target


@dataclass(frozen=True)
class Read:
    """B texts that were read: their first `shared` tokens once for all, the rest of each padded."""

    caches: Caches  # of as many slots as the longest text
    shared: int
    begun: Forward | None  # of one row, where anything is shared
    rest: Forward


def read_alike(target: Target, texts: Sequence[Sequence[int]], taps: Collection[int] = ()) -> Read:
    """Reads `texts` from their beginning; `taps` as in `Target.forward`."""
    longest = max(map(len, texts))
    shared = min(common_prefix(texts), min(map(len, texts)) - 1)
    caches = target.empty_caches(len(texts), longest)
    device = target.cos.device
    begun: Forward | None = None
    if shared:
        one = target.empty_caches(1, shared)
        prefix = torch.tensor([list(texts[0][:shared])]).to(device)
        begun = forward(target, prefix, prefix.new_zeros(1), one, taps)
        for ours, theirs in zip(tensors_of(caches), tensors_of(one), strict=True):
            ours[:, :, :shared] = theirs
    tokens = torch.full((len(texts), longest - shared), -1)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - shared] = torch.tensor(list(text[shared:]))
    start = torch.full((len(texts),), shared, device=device)
    rest = forward(target, tokens.to(device), start, caches, taps)
    return Read(caches, shared, begun, rest)


def forward(
    target: Target, tokens: Tensor, start: Tensor, caches: Caches, taps: Collection[int] = ()
) -> Forward:
    """`tokens` `[B, T]` written from slot `start` `[B]` on; each sees all slots up to its own."""
    positions = start[:, None] + torch.arange(tokens.shape[1], device=start.device)  # [B, T]
    slots = torch.arange(caches.keys[0].shape[2], device=start.device)
    mask = slots <= positions[..., None]  # [B, T, S]
    window = target.config.window
    sliding = mask & (positions[..., None] - slots < window) if window else None
    rows = Rows(positions, start, target.no_pending(tokens.shape[0]), mask, sliding)
    return target(tokens, caches, rows, scatter_in_place, taps)  # type: ignore[no-any-return]


def common_prefix(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all of `texts` start with."""
    same = (len(set(column)) == 1 for column in zip(*texts, strict=False))
    return sum(takewhile(bool, same))


def tensors_of(caches: Caches) -> list[Tensor]:
    """All tensors of the caches."""
    return [*caches.keys, *caches.values]
