"""TensorRT's profiler: each layer's time, by a name that its nodes' names are in.

**It has not been run**: no GPU was at hand. Where TensorRT fuses nodes of several parts into one
layer, the first that the layer names has it.
"""

from __future__ import annotations

import json
from typing import Any

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine_tensorrt import Bound, TensorRtEngine
from forerun.runtime.profilers import Labelled, Timed


class ProfiledTensorRt(Labelled, TensorRtEngine):
    """`TensorRtEngine` whose layers are timed: launched one by one, for a graph reports nothing."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        self.layers: list[list[tuple[str, float]]] = []
        super().__init__(bundle, threads, rows)
        self.nodes_of = self._nodes_of()

    def timed(self) -> dict[str, Timed]:
        """As `Profiled` says. Layers are timed on the device, which costs them nothing."""
        return self._sorted(
            (sum(ms for _, ms in layers), [(self.nodes_of.get(n, n), ms) for n, ms in layers])
            for layers in self.layers
        )

    def _launch(self, bound: Bound) -> None:
        self.layers.append([])
        if bound.context.profiler is None:
            bound.context.profiler = _reporter(self.trt, self.layers)
        super()._launch(bound)

    def _capturable(self, bound: Bound) -> bool:
        return False

    def _nodes_of(self) -> dict[str, str]:
        """Layer -> its ONNX nodes, where the engine was built to tell."""
        inspector = self.engine.create_engine_inspector()
        text = inspector.get_engine_information(self.trt.LayerInformationFormat.JSON)
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
