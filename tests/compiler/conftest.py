"""A process in which Triton interprets its kernels: its functions decide that when imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

WIDEN = """
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

plain = InterpreterBuilder.create_dot

def wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

InterpreterBuilder.create_dot = lambda self, a, b, *rest: plain(self, wide(a), wide(b), *rest)
"""
"""Triton 3.9 interprets a product of bfloat16 as one of the integers that stand for them."""


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *arguments)` calls a launcher of a kernel there.

    The function is named by its module, which the other process imports; tensors travel both ways.
    """
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # spawned processes inherit it; this one has imported
    try:
        with ProcessPoolExecutor(1, context, exec, (WIDEN, {})) as pool:
            pool.submit(abs, 0).result()
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
