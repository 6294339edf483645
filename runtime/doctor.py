"""What this machine can build and run, and what to install for the rest."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forerun import __version__
from forerun.errors import ForerunError
from forerun.runtime.bench import machine
from forerun.runtime.cuda import Cuda


@dataclass(frozen=True)
class Package:
    """A package that something needs: how it is imported, and what brings it."""

    module: str
    extra: str
    distributions: tuple[str, ...]
    """Names under which it may be installed."""


PACKAGES = {
    "torch": Package("torch", "compile", ("torch",)),
    "onnx": Package("onnx", "compile", ("onnx",)),
    "onnxscript": Package("onnxscript", "compile", ("onnxscript",)),
    "polygraphy": Package("polygraphy", "compile", ("polygraphy",)),
    "gguf": Package("gguf", "compile", ("gguf",)),
    "onnxruntime": Package("onnxruntime", "cpu", ("onnxruntime", "onnxruntime-gpu")),
    "tensorrt-rtx": Package("tensorrt_rtx", "rtx", ("tensorrt-rtx",)),
    "tensorrt": Package("tensorrt", "trt", ("tensorrt",)),
    "triton": Package("triton", "kernels", ("triton",)),
    "cuda-bindings": Package("cuda.bindings.runtime", "cuda", ("cuda-bindings",)),
}
EXPORT = ("torch", "onnx", "onnxscript", "polygraphy", "gguf", "onnxruntime")
"""What `forerun compile` needs for an engine that takes an ONNX graph."""
CUDA_PROVIDER = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Needs:
    """The packages behind one kind of engine, and whether it needs a GPU."""

    build: tuple[str, ...]
    run: tuple[str, ...]
    gpu_to_build: bool = False
    gpu_to_run: bool = False


ENGINES = {
    "ort": Needs(EXPORT, ("onnxruntime",)),
    "torch": Needs(("torch", "onnx", "onnxscript", "gguf"), ("torch",)),
    "tensorrt-rtx": Needs(
        (*EXPORT, "tensorrt-rtx"), ("tensorrt-rtx", "cuda-bindings"), gpu_to_run=True
    ),
    "tensorrt": Needs(
        (*EXPORT, "tensorrt"), ("tensorrt", "cuda-bindings"), gpu_to_build=True, gpu_to_run=True
    ),
}


@dataclass(frozen=True)
class Found:
    """What became of importing a package: `ok`, `missing` or `broken`, and why."""

    state: str
    version: str | None = None
    detail: str | None = None
    install: str | None = None


@dataclass(frozen=True)
class Device:
    """One CUDA device."""

    name: str
    capability: str
    """As `--device` takes it."""
    memory_bytes: int


@dataclass(frozen=True)
class CudaFacts:
    """The driver's CUDA version (None: no driver), its devices, and what is amiss."""

    driver: str | None
    devices: tuple[Device, ...]
    detail: str | None = None


def examine() -> dict[str, Any]:
    """The report that `forerun doctor --json` prints; imports every package there is."""
    packages = {name: look_for(package) for name, package in PACKAGES.items()}
    cuda = look_for_devices(packages["cuda-bindings"])
    providers = _providers(packages["onnxruntime"])
    return {
        "forerun": __version__,
        "python": platform.python_version(),
        "machine": machine(),
        "packages": {name: asdict(found) for name, found in packages.items()},
        "onnxruntime_providers": providers,
        "cuda": asdict(cuda),
        "engines": {
            kind: ability(needs, packages, cuda) | {"runs_on": _places(kind, cuda, providers)}
            for kind, needs in ENGINES.items()
        },
    }


def look_for(package: Package) -> Found:
    """Imports the package; one that fails in whatever way is broken, and the others go on."""
    install = f"pip install 'forerun[{package.extra}]'"
    try:
        # What a package prints when it is imported does not belong into the report.
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(package.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken package may raise anything, SystemExit too
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{package.module}.".startswith(f"{absent}."):
            return Found("missing", install=install)
        detail = f"{type(error).__name__}: {_line(error)}"
        return Found("broken", _version(package), detail, install)
    return Found("ok", _version(package))


def look_for_devices(bindings: Found) -> CudaFacts:
    """The CUDA driver and its devices, asked through cuda-bindings."""
    if bindings.state != "ok":
        return CudaFacts(None, (), "not looked for: cuda-bindings is not usable")
    try:
        cuda = Cuda()
        version = int(cuda.call("cudaDriverGetVersion"))
        if not version:
            return CudaFacts(None, (), "no NVIDIA driver: install one from NVIDIA")
        driver = f"{version // 1000}.{version % 1000 // 10}"
        try:
            count = int(cuda.call("cudaGetDeviceCount"))
            found = (cuda.call("cudaGetDeviceProperties", number) for number in range(count))
            devices = tuple(
                Device(_text(item.name), f"sm_{item.major}{item.minor}", int(item.totalGlobalMem))
                for item in found
            )
        except ForerunError as error:
            return CudaFacts(driver, (), str(error))
        return CudaFacts(driver, devices, None if devices else "a driver, but no device")
    except Exception as error:  # a driver that doesn't fit raises what it likes
        return CudaFacts(None, (), _line(error))


def ability(needs: Needs, packages: Mapping[str, Found], cuda: CudaFacts) -> dict[str, Any]:
    """Whether one kind of engine can be built and run, and what is in the way."""
    lacking = {
        name: found.install
        for name in dict.fromkeys((*needs.build, *needs.run))
        if (found := packages[name]).state != "ok"
    }
    gpu = bool(cuda.devices)
    build = not lacking.keys() & set(needs.build) and (gpu or not needs.gpu_to_build)
    run = not lacking.keys() & set(needs.run) and (gpu or not needs.gpu_to_run)
    missing = [f"{name}: {install}" for name, install in lacking.items()]
    if not gpu and (needs.gpu_to_build or needs.gpu_to_run):
        missing.append(f"a GPU: {cuda.detail}")
    return {"builds": build, "runs": run, "missing": missing}


def _places(kind: str, cuda: CudaFacts, providers: list[str]) -> list[str]:
    """Where the engine would run, the place it takes by itself first."""
    gpu = ["cuda"] if cuda.devices else []
    if kind == "ort":
        return [*(gpu if CUDA_PROVIDER in providers else []), "cpu"]
    if kind == "torch":
        return [*(gpu if _torch_sees_a_gpu() else []), "cpu"]
    return gpu


def _torch_sees_a_gpu() -> bool:
    try:
        return bool(importlib.import_module("torch").cuda.is_available())
    except Exception:  # missing or broken, which is said already
        return False


def _providers(found: Found) -> list[str]:
    if found.state != "ok":
        return []
    try:
        names: list[str] = importlib.import_module("onnxruntime").get_available_providers()
    except Exception:  # a folder left behind imports as an empty package
        return []
    return names


def _version(package: Package) -> str | None:
    for name in package.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _text(name: bytes | str) -> str:
    return (name.decode(errors="replace") if isinstance(name, bytes) else name).rstrip("\0")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def table(report: Mapping[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    place, cuda = report["machine"], report["cuda"]
    grid = Table("", "", "", title=f"forerun {report['forerun']}, Python {report['python']}")
    grid.add_row("machine", place["cpu"], f"{place['cores']} cores, {place['platform']}")
    for name, found in report["packages"].items():
        why = " ".join(filter(None, (found["detail"], found["install"])))
        grid.add_row(name, found["version"] or found["state"], why)
    grid.add_row("ONNX Runtime on", ", ".join(report["onnxruntime_providers"]) or "-", "")
    grid.add_row("CUDA driver", cuda["driver"] or "none", cuda["detail"] or "")
    for device in cuda["devices"]:
        memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
        grid.add_row("  device", device["name"], f"{device['capability']}, {memory}")
    grid.add_section()
    for kind, able in report["engines"].items():
        does = [word for word in ("builds", "runs") if able[word]]
        where = f" on {able['runs_on'][0]}" if able["runs"] and able["runs_on"] else ""
        grid.add_row(f"--engine {kind}", (" and ".join(does) or "no") + where, _needs(able))
    return grid


def _needs(able: Mapping[str, Any]) -> str:
    return "needs " + "; ".join(able["missing"]) if able["missing"] else ""
