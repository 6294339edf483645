"""The step as a TensorRT or TensorRT-RTX engine: one context a profile, CUDA graphs of the steps.

**It has not been run**: no GPU was at hand. All that can be decided without one (which profile,
which shapes, what is written when) is in `PinnedEngine`, whose tests run it on ONNX Runtime.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.axes import INPUT_AXES
from forerun.runtime.buffers import Array, Layout, Shape, result_size
from forerun.runtime.bundle import Bundle
from forerun.runtime.cuda import CudaMemory
from forerun.runtime.engine_pinned import PinnedEngine
from forerun.runtime.engine_step import Named

PACKAGES = {"tensorrt": ("tensorrt", "trt"), "tensorrt-rtx": ("tensorrt_rtx", "rtx")}
"""Engine kind -> its Python module, and the extra that brings it."""
TYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": np.uint16,  # numpy has no such type: its bits
    "INT64": np.int64,
    "INT32": np.int32,
    "BOOL": np.bool_,
}


@dataclass
class Bound:
    """A step's or a prefill's tensors, by name, on the context of their profile."""

    context: Any
    tensors: Named
    again: bool
    graph: Any = None
    runs: int = 0


class TensorRtEngine(PinnedEngine):
    """A bundle's engine file, with caches of the whole capacity."""

    ahead = 1

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        """`threads` bounds nothing here: the step runs on the GPU."""
        facts = bundle.manifest.engine
        if rows != 1:
            raise ForerunError(
                f"{bundle.path}: {facts.kind} bundles are built for one row: load it with rows=1"
            )
        self.trt = _package(facts.kind)
        _, longest = result_size(rows, bundle.manifest.pending)
        self.device = CudaMemory(longest)
        self.where = bundle.file(facts.file)
        self.messages = _collector(self.trt)
        self.runtime = self.trt.Runtime(self.messages)
        self.engine = self.runtime.deserialize_cuda_engine(self.where.read_bytes())
        if self.engine is None:
            raise self._error(
                "can't be loaded here", "was it built for this GPU and this version of TensorRT?"
            )
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        inputs = self.trt.TensorIOMode.INPUT
        self.inputs = [name for name in names if self.engine.get_tensor_mode(name) == inputs]
        self.outputs = [name for name in names if name not in self.inputs]
        self.varying = [name for name in self.inputs if -1 in self._sizes(name)]
        self.logits_type = self._type("logits")
        self.contexts: dict[int, Any] = {}
        self.captures = True
        # One profile runs at a time, so that all share the memory of the largest.
        self.scratch = self.device.zeros([self.engine.device_memory_size_v2], np.uint8)
        self.unread: Named = {}
        layout = Layout(bundle.manifest, {name: self._axes(name) for name in self.inputs})
        super().__init__(layout, self.device, rows)

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Bound:
        context = self._context({name: tuple(inputs[name].shape) for name in self.varying})
        tensors = {name: inputs[name] for name in self.inputs}
        for name in self.outputs:
            tensors[name] = outputs[name] if name in outputs else self._unread(name, context)
        return Bound(context, tensors, again)

    def _launch(self, bound: Bound) -> None:
        """Replay the captured step; the first launch is a plain one, after which it is captured."""
        if bound.graph is None and bound.again and bound.runs and self._capturable(bound):
            bound.graph = self._captured(bound)
        if bound.graph is None:
            self._enqueue(bound)
        else:
            self.device.replay(bound.graph)
        bound.runs += 1

    def _enqueue(self, bound: Bound) -> None:
        for name, buffer in bound.tensors.items():
            if not bound.context.set_tensor_address(name, buffer.address):
                raise self._error(f"refuses the memory of {name!r}")
        if not bound.context.execute_async_v3(int(self.device.stream)):
            raise self._error("could not be launched")

    def _captured(self, bound: Bound) -> Any:
        """The step as a graph; None, from then on for every step, where it can't be captured."""
        try:
            return self.device.capture(lambda: self._enqueue(bound))
        except ForerunError as error:
            self.captures = False
            warnings.warn(f"without CUDA graphs, so slower: {error}", RuntimeWarning, stacklevel=2)
            return None

    def _capturable(self, bound: Bound) -> bool:
        """TensorRT-RTX compiles kernels as it goes, and says when it is through with that."""
        if not self.captures:
            return False
        asks = getattr(bound.context, "is_stream_capturable", None)
        return asks is None or bool(asks(int(self.device.stream)))

    def _context(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        """The context of the profile that was built for these shapes."""
        index = self._profile(shapes)
        if index not in self.contexts:
            lent = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self.engine.create_execution_context(lent)
            if context is None:
                raise self._error("has no room for another context")
            context.set_device_memory(self.scratch.address, self.scratch.nbytes)
            if not context.set_optimization_profile_async(index, int(self.device.stream)):
                raise self._error(f"refuses its profile {index}")
            self.device.synchronize()
            for name, shape in shapes.items():
                if not context.set_input_shape(name, shape):
                    raise self._error(f"refuses the shape {list(shape)} of {name!r}")
            self.contexts[index] = context
        return self.contexts[index]

    def _profile(self, shapes: dict[str, tuple[int, ...]]) -> int:
        for index in range(self.engine.num_optimization_profiles):
            if all(
                tuple(self.engine.get_tensor_profile_shape(name, index)[1]) == shape
                for name, shape in shapes.items()
            ):
                return index
        rows, nodes = shapes["tokens"]
        raise ForerunError(
            f"{self.where}: it was not built for {rows} rows of {nodes} nodes: load the bundle "
            "with one row, or compile it again"
        )

    def _unread(self, name: str, context: Any) -> Any:
        """Memory for an output that nobody reads."""
        shape = tuple(context.get_tensor_shape(name))
        key = f"{name} {shape}"
        if key not in self.unread:
            self.unread[key] = self.device.zeros(shape, self._type(name))
        return self.unread[key]

    def _axes(self, name: str) -> tuple[Shape, Any]:
        """An input's axes, with names for the sizes that differ between profiles; of caches and
        drafter state that is the number of rows alone."""
        sizes = self._sizes(name)
        names = INPUT_AXES.get(name, ("batch",) * len(sizes))
        axes = [a if size < 0 else size for a, size in zip(names, sizes, strict=True)]
        return axes, self._type(name)

    def _sizes(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes, -1 where profiles differ."""
        return tuple(self.engine.get_tensor_shape(name))

    def _type(self, name: str) -> Any:
        kind = self.engine.get_tensor_dtype(name).name
        if kind not in TYPES:
            raise self._error(f"has {name!r} as {kind}, which this version does not know")
        return TYPES[kind]

    def _as_float32(self, logits: Array) -> NDArray[np.float32]:
        if logits.dtype == np.uint16:
            wide: NDArray[np.float32] = (logits.astype(np.uint32) << 16).view(np.float32)
            return wide
        return super()._as_float32(logits)

    def _error(self, what: str, otherwise: str = "compile the bundle again") -> ForerunError:
        """One line: TensorRT's own first complaint, or what might help."""
        return ForerunError(f"{self.where}: {what}: {self.messages.first() or otherwise}")


def _package(kind: str) -> Any:
    module, extra = PACKAGES[kind]
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.replace("_", "-")
        raise MissingDependencyError(package, extra, f"running a {kind} bundle") from None


def _collector(trt: Any) -> Any:
    """A TensorRT logger that keeps errors instead of printing them."""

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)

        def first(self) -> str:
            return " ".join(self.errors[0].split())[:300] if self.errors else ""

    return Collector()
