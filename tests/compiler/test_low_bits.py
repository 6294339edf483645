"""Weights of 4 bits, and 8 bit floats: rounding against plain loops, ONNX against torch."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from forerun.compiler.blocks import (  # noqa: E402
    block_size,
    float8_scale,
    quantize_blocks,
    quantize_float8,
)
from forerun.compiler.export import TRANSLATIONS  # noqa: E402
from forerun.compiler.low_bits import store_low_bits  # noqa: E402
from forerun.compiler.quantize import input_hessian  # noqa: E402
from forerun.models.linear import Float8Linear, Int4Linear  # noqa: E402


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_blocks_are_the_widest_that_fit():
    assert [block_size(channels) for channels in (1024, 576, 192, 96)] == [128, 64, 64, None]


def test_int4_codes_are_the_nearest_to_their_weights():
    weight = random(24, 128)
    codes, scale = quantize_blocks(weight, 64, None)
    assert codes.shape == (128, 24)
    assert scale.shape == (2, 24)
    assert torch.equal(scale, scale.half().float())
    for channel, output in ((0, 0), (63, 3), (64, 7), (127, 23)):
        step = scale[channel // 64, output]
        levels = torch.arange(-8, 8) * step
        nearest = (levels - weight[output, channel]).abs().argmin()
        assert codes[channel, output] == nearest - 8


def test_error_feedback_lowers_the_error_of_the_product():
    """On inputs whose channels go together, as those of a model do."""
    weight = random(48, 256, seed=1)
    inputs = random(2000, 64, seed=2) @ random(64, 256, seed=3) + 0.2 * random(2000, 256, seed=4)
    errors = []
    for hessian in (None, input_hessian(inputs)):
        codes, scale = quantize_blocks(weight, 128, hessian)
        assert codes.min() >= -8
        assert codes.max() <= 7
        rounded = codes.float() * scale.repeat_interleave(128, 0)
        errors.append(float((inputs @ (rounded - weight.T)).square().mean()))
    assert errors[1] < 0.7 * errors[0]


def test_float8_codes_are_the_nearest_to_their_weights():
    weight = random(40, 12) * 0.05
    codes, scale = quantize_float8(weight)
    table = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    found = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    finite = table[np.isfinite(table)]
    scaled = np.clip((weight / scale).double().numpy(), -448, 448)
    nearest = np.abs(scaled[..., None] - finite).min(-1)
    np.testing.assert_allclose(np.abs(scaled - found), nearest, atol=1e-6)


def exported(layer: torch.nn.Module, path: Path) -> ir.Model:
    """`layer` over rows of 128 float16 numbers, as the compiler exports it."""
    program = torch.onnx.export(
        layer.half().eval(),
        (torch.zeros(3, 128, dtype=torch.float16),),
        dynamo=True,
        opset_version=24,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        custom_translation_table=dict(TRANSLATIONS),
        verbose=False,
    )
    model = program.model
    store_low_bits(model.graph)
    ir.save(model, path)
    return model


LAYERS = {
    "int4": lambda: Int4Linear(*quantize_blocks(random(96, 128), 64, None), random(96)),
    "fp8": lambda: Float8Linear(
        *quantize_float8(random(128, 96)), float8_scale(torch.tensor(3.0)), random(96)
    ),
}
STORED = {"int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_does_in_onnx_what_it_does_in_torch(kind, tmp_path):
    """ONNX Runtime multiplies float16 in float32; inputs beyond the calibrated range saturate."""
    onnxruntime = pytest.importorskip("onnxruntime")
    layer = LAYERS[kind]()
    model = exported(layer, tmp_path / "layer.onnx")
    weights = [v for v in model.graph.initializers.values() if v.dtype == STORED[kind]]
    assert [list(weight.shape) for weight in weights] == [[128, 96]]
    x = random(7, 128, seed=5).half()
    expected = layer(x).float()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Optimised, int4 products become MatMulNBits, which rounds activations to 8 bits.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        tmp_path / "layer.onnx", options, providers=["CPUExecutionProvider"]
    )
    found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]).float()
    assert (x.abs() > 3).any()
    assert (found - expected).abs().mean() < 2e-3 * expected.abs().mean()


@pytest.mark.parametrize(
    ("kind", "refused"), [("int4", ("SM75",)), ("fp8", ("SM75", "SM80", "SM86"))]
)
def test_a_layer_builds_where_the_hardware_has_its_type(kind, refused, tmp_path):
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    exported(LAYERS[kind](), tmp_path / "layer.onnx")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(tmp_path / "layer.onnx"))
    for name, capability in trt.ComputeCapability.__members__.items():
        if name.startswith("SM"):
            config = builder.create_builder_config()
            config.num_compute_capabilities = 1
            config.set_compute_capability(capability, 0)
            profile = builder.create_optimization_profile()
            profile.set_shape("x", (4, 128), (4, 128), (4, 128))
            config.add_optimization_profile(profile)
            plan = builder.build_serialized_network(network, config)
            assert (plan is None) == (name in refused), name
