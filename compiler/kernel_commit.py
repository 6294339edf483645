# mypy: disallow-untyped-decorators=False
"""`forerun.models.step.select_rows` as a gather: each number is read once and written once.

The one-hot product stands in the ONNX since TensorRT refuses its own gather in front of a cache
update. It reads all T rows, and turns an infinity in any of them into NaN everywhere; this doesn't.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.compiler.launch import TYPES, Launch, Size, blocks, launch

BLOCK = 1024
"""Numbers that a program moves."""


@triton.jit
def commit_kernel(
    nodes: tl.tensor,  # [B, P] int64: -1 past the path
    written: tl.tensor,  # [B, G, T, D], G = layers * 2 * kv_heads
    G: tl.tensor,
    T: tl.tensor,
    pending: tl.tensor,  # [B, G, P, D]
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    batch = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # among one row's G * P * D
    inside = place < G * P * D
    column = place % D
    group = place // (D * P)
    node = tl.load(nodes + batch * P + place // D % P, mask=inside, other=-1).to(tl.int32)
    source = written + batch * G * T * D + (group * T + node) * D + column
    value = tl.load(source, mask=inside & (node >= 0), other=0)
    tl.store(pending + batch * G * P * D + place, value, mask=inside)


def commit_launch(
    batch: Size, groups: Size, nodes: Size, pending: int, head_dim: int, written: str
) -> Launch:
    """`groups` is layers * 2 * kv_heads, `nodes` T; `written` names the caches' type.

    It is only moved, so that fp8 goes as `u8`.
    """
    return launch(
        commit_kernel,
        (batch, blocks(groups * (pending * head_dim), BLOCK), 1),
        {"nodes": "i64", "written": written},
        {"G": groups, "T": nodes},
        {"pending": written},
        {"P": pending, "D": head_dim, "BLOCK": BLOCK},
    )


def select_rows(nodes: Tensor, written: Tensor) -> Tensor:
    """The keys and values of `nodes` `[B, P]`, `[B, G, T, D]` -> `[B, G, P, D]`; 0 where it is -1.

    `nodes` are those of `forerun.compiler.kernel_accept`.
    """
    batch, groups, rows, width = written.shape
    pending = written.new_empty(batch, groups, nodes.shape[1], width)
    commit_launch(batch, groups, rows, nodes.shape[1], width, TYPES[written.dtype]).run(
        {"nodes": nodes, "written": written, "pending": pending}
    )
    return pending
