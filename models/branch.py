"""A choice made on the device: `If` in the exported graph, a plain `if` in eager torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def branch(
    predicate: Tensor,
    taken: Callable[..., Tensor],
    otherwise: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
) -> Tensor:
    """`taken(*operands)` where `predicate` (one bool) holds, else `otherwise(*operands)`."""
    if torch.compiler.is_exporting():
        result: Tensor = torch.cond(predicate, taken, otherwise, operands)
        return result
    return (taken if bool(predicate) else otherwise)(*operands)
