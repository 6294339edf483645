"""A choice made on the device: `If` in the exported graph, a plain `if` in eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


def branch(
    predicate: Tensor,
    taken: Callable[..., Result],
    otherwise: Callable[..., Result],
    operands: tuple[Tensor, ...],
) -> Result:
    """`taken(*operands)` where `predicate` (one bool) holds, else `otherwise(*operands)`.

    Results are new tensors, never an operand itself.
    """
    if torch.compiler.is_exporting():
        result: Result = torch.cond(predicate, taken, otherwise, operands)
        return result
    return (taken if bool(predicate) else otherwise)(*operands)
