"""ONNX step -> TensorRT engine, for TensorRT-RTX (no GPU needed to build) or full TensorRT.

Each profile pins every symbol to one size, so that the builder specialises a plan for each: the
step by its tree, the prefill by its chunk, plain decoding by T = 1. Cache slots are static.

The `tensorrt` flavour takes the same path but has not been run: its package can't be installed on
the machine that this was written on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from forerun.compiler.build_progress import build_watched
from forerun.compiler.builder import DEFAULTS, FLAVOURS, BuilderSettings, Flavour
from forerun.compiler.initializers import drafter_weights
from forerun.compiler.layers import LAYERS_FILE, write_layers
from forerun.compiler.plugins import Plan, with_kernels
from forerun.compiler.plugins_tensorrt import register_kernels
from forerun.compiler.timing_cache import kept_timings
from forerun.errors import ForerunError, MissingDependencyError
from forerun.models.signature import Signature
from forerun.runtime.cuda import compute_capability


def build_engine(
    onnx_path: Path,
    out: Path,
    signature: Signature,
    profiles: Sequence[Mapping[str, int]],
    flavour: str,
    settings: BuilderSettings = DEFAULTS,
    plans: Mapping[str, Plan] | None = None,
) -> dict[str, str]:
    """Build the step in `onnx_path` (weights beside it) into the engine file `out`.

    Each profile gives a size to every symbol of `signature` that was left open. One engine serves
    all of the settings' devices. The functions in `plans` become kernels of our own. Its layers
    are written beside it (`LAYERS_FILE`). Returns the versions of what built it. `out` is only ever
    seen complete. Raises ForerunError in one line: unknown flavour, settings that it doesn't have,
    absent package, a graph that doesn't parse, a failed build.
    """
    chosen = FLAVOURS.get(flavour)
    if chosen is None:
        raise ForerunError(f"engine {flavour!r}: unknown; offered: {', '.join(FLAVOURS)}")
    settings.check(flavour)
    trt = _load(chosen)
    if not onnx_path.is_file():
        raise ForerunError(f"{onnx_path}: no such ONNX file")
    if not profiles:
        raise ForerunError("a TensorRT engine needs at least one profile")
    log = _collector(trt)
    builder = _create(trt, log, chosen)
    network = _network(trt, builder)
    parser = trt.OnnxParser(network, log)  # kept: the network holds views into its weights
    with _planned(trt, onnx_path, plans or {}, settings) as path:
        _parse(parser, log, path)
    if not network.num_outputs:  # the parser takes some garbage for an empty graph
        raise ForerunError(f"{onnx_path}: TensorRT can't parse it: it holds no ONNX graph")
    config = builder.create_builder_config()
    _configure(trt, config, settings, settings.real_devices(flavour))
    if settings.refit:
        let_refit(trt, network, config, onnx_path)
    for sizes in profiles:
        _add_profile(builder, config, network, signature, sizes)
    version = str(trt.__version__)
    timings = kept_timings(config, flavour, version) if chosen.timing_cache else nullcontext()
    with _partial(out) as partial, timings:

        def build() -> bool:
            return _build_to_file(trt, builder, network, config, partial)

        if not build_watched(trt, config, build, f"{chosen.title} engine"):
            # TensorRT-RTX 1.7.1 without a GPU: not even a lone MatMul builds to be refitted.
            gpu = " to be refitted (leave out --refit where there is no GPU)"
            raise ForerunError(
                f"{onnx_path}: {chosen.title} can't build it{gpu if settings.refit else ''}: "
                f"{_first(log.errors)}"
            )
        write_layers(trt, log, network, partial, out.with_name(LAYERS_FILE))
    return {flavour: version}


def refit_engine(engine: Path, out: Path, weights: Mapping[str, Any], flavour: str) -> None:
    """Write the engine in the file `engine` to `out`, with `weights` (arrays by name) replaced.

    Needs the GPU that the engine was built for. It has not been run: none was at hand.
    """
    chosen = FLAVOURS[flavour]
    trt = _load(chosen)
    log = _collector(trt)
    loaded = trt.Runtime(log).deserialize_cuda_engine(engine.read_bytes())
    if loaded is None:
        raise ForerunError(
            f"{engine}: {chosen.title} can't load it here to refit it: "
            f"{_first(log.errors) or 'is there a GPU?'}"
        )
    if not loaded.refittable:
        raise ForerunError(f"{engine}: it can't be refitted: compile it again with --refit")
    refitter = trt.Refitter(loaded, log)
    for name, array in weights.items():
        if not refitter.set_named_weights(name, trt.Weights(array)):
            raise ForerunError(f"{engine}: {chosen.title} refuses {name!r}: {_first(log.errors)}")
    if refitter.get_missing_weights() or not refitter.refit_cuda_engine():
        raise ForerunError(f"{engine}: {chosen.title} can't refit it: {_first(log.errors)}")
    config = loaded.create_serialization_config()
    config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)  # the next swap needs it too
    with _partial(out) as partial:
        partial.write_bytes(loaded.serialize_with_config(config))


@contextmanager
def _planned(
    trt: Any, onnx_path: Path, plans: Mapping[str, Plan], settings: BuilderSettings
) -> Iterator[Path]:
    """The graph to parse: as it is, or with kernels in the bodies of the functions in `plans`."""
    if not plans:
        yield onnx_path
        return
    model = ir.load(onnx_path)
    kernels = with_kernels(model, plans)
    capability = 80 if settings.hardware_compatible else compute_capability()
    register_kernels(trt, kernels, capability)
    path = onnx_path.with_name(f"plugins-{onnx_path.name}")  # beside it, where its weights are
    try:
        ir.save(model, path)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A file to write that becomes `out` at the end: `out` is only ever seen complete."""
    partial = out.with_name(out.name + ".partial")
    try:
        yield partial
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _configure(trt: Any, config: Any, settings: BuilderSettings, devices: Sequence[str]) -> None:
    """Everything of `settings` but refitting, which names weights."""
    if devices:
        config.num_compute_capabilities = len(devices)
    for index, device in enumerate(devices):
        capability = getattr(trt.ComputeCapability, f"SM{device.removeprefix('sm_')}")
        config.set_compute_capability(capability, index)
    if settings.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace << 20)
    if settings.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if settings.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def _build_to_file(trt: Any, builder: Any, network: Any, config: Any, out: Path) -> bool:
    """Whether the engine is in the file `out` now: as it is made, and never whole in memory."""
    with out.open("wb") as stream:

        class Writer(trt.IStreamWriter):  # type: ignore[misc]
            def write(self, data: bytes) -> int:
                return stream.write(data)

        writer = Writer()
        return bool(builder.build_serialized_network_to_stream(network, config, writer))


def let_refit(trt: Any, network: Any, config: Any, onnx_path: Path) -> None:
    """Mark the drafter's weights, which the parser has named as the graph does, as replaceable.

    One by one: an engine whose every weight may change loses the target's optimisations.
    """
    config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    for value in drafter_weights(ir.load(onnx_path)).values():
        if not network.mark_weights_refittable(value.name):
            raise ForerunError(f"{onnx_path}: TensorRT can't make {value.name!r} refittable")


def _load(flavour: Flavour) -> ModuleType:
    try:
        return importlib.import_module(flavour.module)
    except ImportError:
        package = flavour.module.replace("_", "-")
        purpose = f"Building for {flavour.title}"
        raise MissingDependencyError(package, flavour.extra, purpose) from None


def _collector(trt: Any) -> Any:
    """A TensorRT logger that keeps errors and warnings instead of printing them."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)

    return Collector()


def _create(trt: Any, log: Any, flavour: Flavour) -> Any:
    try:
        return trt.Builder(log)
    except (RuntimeError, TypeError):  # full TensorRT without a driver
        raise ForerunError(
            f"{flavour.title} can't start here: {_first(log.errors) or 'is there a GPU?'}"
        ) from None


def _network(trt: Any, builder: Any) -> Any:
    """An empty strongly typed network: dtypes stay as they stand in the graph."""
    # TensorRT-RTX 1.7 knows no other kind and has no flag for it.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return builder.create_network(0 if flag is None else 1 << int(flag))


def _parse(parser: Any, log: Any, path: Path) -> None:
    """Fill the parser's network; by path, so that it finds the weights beside the graph."""
    if parser.parse_from_file(str(path)):
        return
    if not parser.num_errors:
        raise ForerunError(f"{path}: TensorRT can't read it: {_first(log.errors)}")
    error = parser.get_error(0)
    where = f"node {error.node_name()!r} ({error.node_operator()})"
    raise ForerunError(f"{path}: TensorRT can't parse it: {where}: {_line(error.desc())}")


def _add_profile(
    builder: Any, config: Any, network: Any, signature: Signature, sizes: Mapping[str, int]
) -> None:
    """One profile with minimum = optimum = maximum: a plan for just these sizes."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        axes, _ = signature.inputs[tensor.name]
        missing = [axis for axis in axes if isinstance(axis, str) and axis not in sizes]
        if missing:
            raise ForerunError(f"profile {dict(sizes)}: gives no size to {missing[0]!r}")
        if tensor.is_shape_tensor:
            raise ForerunError(f"input {tensor.name!r}: a step may not read it as a shape")
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        profile.set_shape(tensor.name, shape, shape, shape)
    if config.add_optimization_profile(profile) < 0:
        raise ForerunError(f"profile {dict(sizes)}: TensorRT refuses it")


def _first(messages: Sequence[str]) -> str:
    return _line(messages[0]) if messages else ""


def _line(message: str) -> str:
    return " ".join(message.split())
