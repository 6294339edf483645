"""TensorRT's profiler: each layer's time, by a name that its nodes' names are in.

**It has not been run**: no GPU was at hand. Where TensorRT fuses nodes of several parts into one
layer, the first that the layer names has it.
"""

from __future__ import annotations

import json
from typing import Any

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Engine
from forerun.runtime.engine_tensorrt import Bound, TensorRtEngine
from forerun.runtime.profilers import Label, Labelled, Timed, by_label


class TensorRtProfiler:
    """Collects what TensorRT reports of each layer of each launch."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.notes: list[Label] = []
        self.launches: list[list[tuple[str, float]]] = []
        self.nodes_of: dict[str, str] = {}

    def engine(self, name: str) -> Engine:
        """As `Profiler` says."""
        engine = WatchedTensorRt(name, self)
        self.nodes_of = _nodes_of(engine)
        return engine

    def timed(self) -> dict[Label, Timed]:
        """As `Profiler` says. Layers are timed on the device, which costs them nothing."""
        named = ([(self.nodes_of.get(n, n), ms) for n, ms in layers] for layers in self.launches)
        return by_label(self.notes, ((sum(ms for _, ms in layers), layers) for layers in named))


class WatchedTensorRt(Labelled, TensorRtEngine):
    """Launches steps one by one, for a CUDA graph reports nothing."""

    def __init__(self, name: str, profiler: TensorRtProfiler) -> None:
        self.profiler = profiler
        super().__init__(name, profiler.notes, profiler.bundle)

    def _launch(self, bound: Bound) -> None:
        self.profiler.launches.append([])
        if bound.context.profiler is None:
            bound.context.profiler = _reporter(self.trt, self.profiler.launches)
        super()._launch(bound)

    def _capturable(self, bound: Bound) -> bool:
        return False


def open_profiler(bundle: Bundle, like: Engine) -> TensorRtProfiler:
    """TensorRT can time any engine's layers."""
    return TensorRtProfiler(bundle)


def _nodes_of(engine: TensorRtEngine) -> dict[str, str]:
    """Layer -> its ONNX nodes, where the engine was built to tell."""
    inspector = engine.engine.create_engine_inspector()
    text = inspector.get_engine_information(engine.trt.LayerInformationFormat.JSON)
    layers = [layer for layer in json.loads(text)["Layers"] if isinstance(layer, dict)]
    return {layer["Name"]: layer.get("Metadata") or layer["Name"] for layer in layers}


def _reporter(trt: Any, launches: list[list[tuple[str, float]]]) -> Any:
    """What TensorRT calls for each layer, at the end of a launch."""

    class Reporter(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            launches[-1].append((layer_name, ms))

    return Reporter()
