"""A process in which Triton interprets its kernels, since its functions decide that when imported;
and checkpoints of other sizes than the tiny one's."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
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


@pytest.fixture(scope="session")
def resized_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_folder: Path
) -> Callable[..., Path]:
    """`resized_checkpoint(hidden_size=128, ...)`: the tiny checkpoint's folder with another
    configuration, and random weights of its shapes."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from forerun.models.hf_config import config_from_json
    from forerun.models.weights import tensor_shapes

    def make(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / "resized"
        shutil.copytree(tiny_checkpoint_folder, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(4)
        weights = {
            name: torch.randn(*shape, generator=generator) * 0.1 + ("norm" in name)
            for name, shape in tensor_shapes(config_from_json(config, "config.json"))
        }
        save_file(weights, folder / "model.safetensors")
        return folder

    return make
