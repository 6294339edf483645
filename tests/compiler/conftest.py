"""A process in which Triton interprets its kernels: its functions decide that when imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *arguments)` calls a launcher of a kernel there.

    The function is named by its module, which the other process imports; tensors travel both ways.
    """
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # spawned processes inherit it; this one has imported
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(abs, 0).result()
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
