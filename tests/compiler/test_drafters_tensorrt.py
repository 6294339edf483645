"""Every drafter's step as a real TensorRT-RTX engine, from a drafter's folder, for two devices.

Each bundle's ONNX file was checked against torch on the way; running the engine needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ir = pytest.importorskip("onnx_ir")
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")


from forerun.compiler.builder import BuilderSettings  # noqa: E402
from forerun.compiler.options import CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.models.checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from forerun.models.dflash import DFlashConfig  # noqa: E402
from forerun.models.dflash_folder import dflash_shapes, save_dflash  # noqa: E402
from forerun.models.draft_folder import save_draft_model  # noqa: E402
from forerun.models.draft_layer import DraftLayerConfig  # noqa: E402
from forerun.models.weights import tensor_shapes  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402
from forerun.training.dflash import spread_layers  # noqa: E402
from forerun.training.eagle import EagleTraining, start, write  # noqa: E402
from forerun.training.fit import Settings  # noqa: E402

LAYERS = 6
"""EAGLE-3 reads three of them."""


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(*shape, generator=draw) * 0.05
        for name, shape in shapes.items()
    }


def one_layer(kind: str) -> Callable[[Path, Checkpoint], None]:
    def make(folder: Path, checkpoint: Checkpoint) -> None:
        training = EagleTraining(kind=kind, draft_vocabulary=64, unroll=3, top_k=2)
        ids = torch.arange(64 if kind == "eagle3" else checkpoint.config.vocab_size)
        drafter, _ = start(checkpoint, training, ids, checkpoint.config.max_positions)
        write(folder, checkpoint, drafter, ids, training, Settings())

    return make


def dflash(folder: Path, checkpoint: Checkpoint) -> None:
    config = DFlashConfig(
        layer=DraftLayerConfig.of(checkpoint.config),
        num_layers=1,
        block_size=4,
        mask_token_id=1,
        feature_layers=spread_layers(checkpoint.config.num_layers),
        tree=True,
    )
    save_dflash(folder, config, random(dict(dflash_shapes(config))), {})


def draft(folder: Path, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    ids = torch.arange(config.vocab_size)
    save_draft_model(folder, config, random(dict(tensor_shapes(config))), ids, checkpoint, {})


FOLDERS: dict[str, Callable[[Path, Checkpoint], None]] = {
    **{kind: one_layer(kind) for kind in ("eagle", "eagle3", "mtp")},
    "dflash": dflash,
    "draft": draft,
}
DRAFTERS = ["plain", "ngram", *FOLDERS, "eagle3+ngram"]


@pytest.fixture(scope="module")
def target(resized_checkpoint) -> Path:
    """Six layers with heads that TensorRT-RTX has kernels for, and int4's blocks."""
    return resized_checkpoint(
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        head_dim=32,
    )


QUICK = ("ngram", "int4")
"""The one case that runs each time."""
CASES = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow)
    for case in product(DRAFTERS, ("fp16", "int4"))
]


@pytest.mark.parametrize("drafter, precision", CASES)
def test_every_drafters_step_builds(
    drafter: str, precision: str, target: Path, tmp_path: Path
) -> None:
    name, plus, _ = drafter.partition("+")
    if name in FOLDERS:
        FOLDERS[name](tmp_path / name, load_checkpoint(str(target)))
        drafter = f"{tmp_path / name}{plus}{'ngram' if plus else ''}"
    options = CompileOptions(
        target=str(target),
        output=tmp_path / "bundle",
        drafter=drafter,
        engine="tensorrt-rtx",
        precision=precision,
        capacity=128,
        chunk=32,
        trees=(4,),
        builder=BuilderSettings(devices=("sm_89", "sm_120")),
    )
    compile_bundle(options)
    bundle = load_bundle(tmp_path / "bundle")
    weights = ir.load(bundle.file(bundle.manifest.engine.graph)).graph.initializers.values()
    narrow = sum(value.dtype == ir.DataType.INT4 for value in weights)
    assert narrow == (4 * LAYERS if precision == "int4" else 0)  # the target's, in each block
    assert bundle.manifest.engine.devices == ("sm_89", "sm_120")
    assert bundle.file(bundle.manifest.engine.file).stat().st_size > 10_000
