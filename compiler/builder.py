"""The TensorRT products, what each can build, and what a build is told beside the graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.errors import ForerunError, MissingDependencyError


@dataclass(frozen=True)
class Flavour:
    """One of the TensorRT products."""

    module: str
    extra: str
    title: str
    devices: tuple[str, ...] = ()
    """What it builds for without having it, any number at once; none: for the GPU present."""
    hardware_compatible: bool = False
    """Whether an engine can be made to run on newer GPUs than it was built for."""
    version_compatible: bool = False
    """Whether an engine can be made to run with later versions of the product."""
    plugins: bool = False
    """Whether it takes kernels of ours."""
    timing_cache: bool = False
    """Whether a build times kernels, which another one then need not time again."""


# TensorRT-RTX as tried with 1.7.1: Hopper is not among its devices; it says "unable to load
# libnvinfer_lean" to VERSION_COMPATIBLE, ignores a hardware compatibility level (it reads NONE
# afterwards), and calls timing caches no-ops: it picks kernels where the engine runs.
FLAVOURS: Mapping[str, Flavour] = {
    "tensorrt-rtx": Flavour(
        "tensorrt_rtx",
        "rtx",
        "TensorRT-RTX",
        devices=("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"),
    ),
    "tensorrt": Flavour(
        "tensorrt",
        "trt",
        "TensorRT",
        hardware_compatible=True,
        version_compatible=True,
        plugins=True,
        timing_cache=True,
    ),
}


@dataclass(frozen=True)
class BuilderSettings:
    """What a TensorRT build is told beside the graph and its profiles."""

    devices: tuple[str, ...] = ()
    """Compute capabilities (`sm_89`) that one engine is for; none: `DEFAULT_DEVICES`."""
    workspace: int | None = None
    """MiB that a layer may use as scratch memory; None: as much as there is."""
    hardware_compatible: bool = False
    version_compatible: bool = False
    refit: bool = False
    """Let the drafter's weights be replaced in the finished engine."""
    plugins: str = "auto"
    """on: attention, choice, acceptance, commit and growth by our own kernels; off; or auto, which
    is on where the product takes them and Triton is there to compile them."""

    def check(self, engine: str, precision: str | None = None) -> None:
        """Raises ForerunError in one line where this `engine` can't be built so.

        Or not in this precision. Other engines than TensorRT's have no use for a device, which
        does no harm there.
        """
        flavour = FLAVOURS.get(engine)
        asked = {
            "--workspace": self.workspace is not None,
            "--hardware-compatible": self.hardware_compatible,
            "--version-compatible": self.version_compatible,
            "--refit": self.refit,
            "--plugins on": self.plugins == "on",
        }
        if flavour is None:
            for flag in (flag for flag, given in asked.items() if given):
                raise ForerunError(f"{flag} is for TensorRT engines, not for {engine}: {LEAVE}")
            return
        for flag, has in (
            ("--hardware-compatible", flavour.hardware_compatible),
            ("--version-compatible", flavour.version_compatible),
            ("--plugins on", flavour.plugins),
        ):
            if asked[flag] and not has:
                raise ForerunError(f"{flag}: {flavour.title} has no such engines: {LEAVE}")
        if self.plugins == "on" and importlib.util.find_spec("triton") is None:
            raise MissingDependencyError("triton", "kernels", "--plugins on")
        if self.workspace is not None and self.workspace < 1:
            raise ForerunError(f"--workspace {self.workspace}: give at least 1 MiB")
        self._check_devices(flavour)
        oldest = OLDEST.get(precision or "", 0)
        for device in self.real_devices(engine):
            if int(device.removeprefix("sm_")) < oldest:
                raise ForerunError(
                    f"--device {device}: it has no {precision} arithmetic, which begins with "
                    f"sm_{oldest}: choose another --precision or --device"
                )

    def _check_devices(self, flavour: Flavour) -> None:
        if self.devices and not flavour.devices:
            raise ForerunError(
                f"--device {self.devices[0]}: {flavour.title} builds for the GPU that is present: "
                f"{LEAVE}"
            )
        for device in self.devices:
            if device not in flavour.devices:
                raise ForerunError(
                    f"--device {device}: {flavour.title} can't build for it; "
                    f"offered: {', '.join(flavour.devices)}"
                )
            if self.devices.count(device) > 1:
                raise ForerunError(f"--device {device}: given twice: name it once")

    def with_plugins(self, engine: str) -> bool:
        """Whether an `engine` so built runs our own kernels."""
        flavour = FLAVOURS.get(engine)
        if flavour is None or not flavour.plugins or self.plugins == "off":
            return False
        return self.plugins == "on" or importlib.util.find_spec("triton") is not None

    def real_devices(self, engine: str) -> tuple[str, ...]:
        """The devices asked for, or those of an engine where none were; none: the GPU present."""
        return self.devices or DEFAULT_DEVICES.get(engine, ())


OLDEST: Mapping[str, int] = {"bf16": 80, "int4": 80, "fp8": 89}
"""Compute capabilities below these can't have such a precision built for them (tried)."""
DEFAULTS = BuilderSettings()
DEFAULT_DEVICES: Mapping[str, tuple[str, ...]] = {"tensorrt-rtx": ("sm_89",)}
LEAVE = "leave it out"
