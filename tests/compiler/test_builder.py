"""What a TensorRT build may be told, and what each flavour refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.compiler.builder import FLAVOURS, BuilderSettings
from forerun.compiler.options import CompileOptions
from forerun.errors import ForerunError


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ("tensorrt-rtx", {"devices": ("sm_89", "sm_90")}, "sm_90: .*offered: sm_75, .*, sm_121$"),
        ("tensorrt-rtx", {"devices": ("sm_89", "sm_120", "sm_89")}, "sm_89: given twice"),
        ("tensorrt-rtx", {"hardware_compatible": True}, "^--hardware-compatible: TensorRT-RTX"),
        ("tensorrt-rtx", {"version_compatible": True}, "^--version-compatible: TensorRT-RTX"),
        ("tensorrt-rtx", {"workspace": 0}, "at least 1 MiB"),
        ("tensorrt", {"devices": ("sm_89",)}, "the GPU that is present: leave it out"),
        ("ort", {"workspace": 64}, "^--workspace is for TensorRT engines, not for ort"),
        ("ort", {"refit": True}, "^--refit is for TensorRT engines"),
    ],
)
def test_what_an_engine_does_not_have_is_one_line(engine, settings, message):
    with pytest.raises(ForerunError, match=message) as caught:
        CompileOptions("smollm2", Path("out"), engine=engine, builder=BuilderSettings(**settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "precision", "fits"),
    [
        ("sm_75", "fp16", True),
        ("sm_75", "bf16", False),
        ("sm_75", "int4", False),
        ("sm_80", "int4", True),
        ("sm_86", "fp8", False),
        ("sm_89", "fp8", True),
    ],
)
def test_a_device_must_have_the_precision(device, precision, fits):
    """test_low_bits.py builds for each of them."""
    settings = BuilderSettings(("sm_120", device))
    if fits:
        settings.check("tensorrt-rtx", precision)
    else:
        with pytest.raises(ForerunError, match=f"{device}: it has no {precision} arithmetic"):
            settings.check("tensorrt-rtx", precision)


def test_what_an_engine_has_is_taken():
    every = BuilderSettings((), 64, hardware_compatible=True, version_compatible=True)
    every.check("tensorrt")
    BuilderSettings(FLAVOURS["tensorrt-rtx"].devices, 64, refit=True).check("tensorrt-rtx")
    BuilderSettings(("sm_89",)).check("ort")  # make passes a device whatever the engine


def test_the_devices_of_tensorrt_rtx_are_those_that_it_knows():
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    known = {name for name in trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert {f"sm_{name.removeprefix('SM')}" for name in known} == set(
        FLAVOURS["tensorrt-rtx"].devices
    )


def test_tensorrt_rtx_still_lacks_what_it_is_said_to_lack():
    """By its own account, so that a version that brings it is noticed."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    config = builder.create_builder_config()
    config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert config.hardware_compatibility_level == trt.HardwareCompatibilityLevel.NONE
    network = builder.create_network(0)
    tensor = network.add_input("x", trt.float32, (4,))
    network.mark_output(network.add_unary(tensor, trt.UnaryOperation.NEG).get_output(0))
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert builder.build_serialized_network(network, config) is not None
    config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert builder.build_serialized_network(network, config) is None
    with pytest.warns(DeprecationWarning, match="no-ops"):
        config.set_timing_cache(config.create_timing_cache(b""), False)
