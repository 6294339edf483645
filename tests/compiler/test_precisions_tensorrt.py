"""Precisions that only TensorRT engines run: checked as ONNX against torch, and built for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


from forerun.compiler import pipeline  # noqa: E402
from forerun.compiler.builder import BuilderSettings  # noqa: E402
from forerun.compiler.options import CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint_folder(resized_checkpoint):
    """Wider than the tiny checkpoint: TensorRT-RTX has no kernels for heads of 8.

    Its layers read 128, 192 and 256 channels: blocks of both sizes.
    """
    return resized_checkpoint(
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory, checkpoint_folder):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    return CompileOptions(
        target=str(checkpoint_folder),
        output=tmp_path_factory.mktemp("bundles") / "bundle",
        engine="tensorrt-rtx",
        capacity=512,
        chunk=64,
        trees=(4,),
        builder=BuilderSettings(("sm_89", "sm_120")),
    )


@pytest.mark.parametrize("precision", ["bf16", "int4", "fp8"])
def test_a_bundle_of_each_precision_is_whole(options, precision):
    """`check_onnx` has compared its graph with torch: the compilation would have failed."""
    output = options.output.with_name(precision)
    compiled = compile_bundle(replace(options, precision=precision, output=output))
    manifest = load_bundle(output).manifest
    assert manifest == compiled.manifest
    assert manifest.precision == precision
    assert manifest.engine.devices == ("sm_89", "sm_120")
    assert {"model.engine", "engine.layers.json"} <= set(manifest.files)


@pytest.mark.parametrize("precision", ["bf16", "int4", "fp8"])
def test_a_graph_whose_weights_are_others_is_caught(options, monkeypatch, precision):
    real = pipeline.export_step

    def spoiled(step, path, *rest):
        facts = real(step, path, *rest)
        with torch.no_grad():
            step.target.norm.weight.mul_(1.5)
        return facts

    monkeypatch.setattr(pipeline, "export_step", spoiled)
    output = options.output.with_name(f"bad-{precision}")
    with pytest.raises(ForerunError, match="torch step"):
        compile_bundle(replace(options, precision=precision, output=output))
    assert not Path(output).exists()
