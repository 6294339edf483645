"""The step on ONNX Runtime's CPU provider: one session, every buffer bound once.

Caches grow by buckets, since the provider's attention computes over every slot it has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.buffers import RESULT, Array, HostMemory, Layout, Ticket
from forerun.runtime.bundle import Bundle
from forerun.runtime.cuda import device_count
from forerun.runtime.engine_step import Named, StepEngine

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingDependencyError("onnxruntime", "cpu", "running an ort bundle") from error

BUCKET = 64
"""Cache slots are added in multiples of this. A multiple of every vector and block length in use,
so that unused slots change no bit of a result."""

NUMPY_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}


class OrtEngine(StepEngine):
    """A bundle's ONNX graph on the CPU."""

    skips_empty = True

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        self.session = self._open(bundle, threads)
        inputs = {v.name: (v.shape, NUMPY_TYPES[v.type]) for v in self.session.get_inputs()}
        static = inputs["keys_0"][0][2]  # a number in a graph made for TensorRT
        bucket = static if isinstance(static, int) else BUCKET
        super().__init__(Layout(bundle.manifest, inputs), HostMemory(), rows, bucket)

    def launch(self, nodes: int) -> Ticket:
        """One launch for all rows. Where the drafter proposed nothing, only roots are verified."""
        here, span = self.buffers.sets[self.turn], self.span
        positions = (here["length"] + here["pending_count"])[:span]
        # A root's own position: a step commits what follows it.
        live = positions + 1 < self.buffers.fixed["limit"][:span]
        if not live.any():
            return span, np.zeros_like(here[RESULT])
        if self.drafted > 1 and not self._has_draft(here, live):
            self.drop_draft()
        self._grow(int(positions.max()) + self.drafted + self.manifest.pending)
        return super().launch(nodes)

    def _open(self, bundle: Bundle, threads: int | None) -> Any:
        return open_session(bundle, session_options(threads))

    def _has_draft(self, state: dict[str, Array], live: Array) -> bool:
        return bool((state[f"tokens_{self.drafted}"][: live.size][live, 1:] >= 0).any())

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        return bind(self.session, inputs, outputs)

    def _launch(self, bound: Any) -> None:
        self.session.run_with_iobinding(bound[0])


def bind(session: Any, inputs: Named, outputs: Named) -> Any:
    """A launch of `session`, by address, with what the binding points to kept alive."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    return binding, inputs, outputs


def open_engine(bundle: Bundle, threads: int | None = None, rows: int = 1) -> StepEngine:
    """On a GPU where onnxruntime-gpu and a device are there, else on the CPU.

    int8 steps are made for CPUs, and run there always. `CUDA_VISIBLE_DEVICES=` hides the device.
    """
    from forerun.runtime.engine_ort_cuda import PROVIDER, OrtCudaEngine

    gpu = bundle.manifest.precision != "int8" and PROVIDER in ort.get_available_providers()
    return (OrtCudaEngine if gpu and device_count() else OrtEngine)(bundle, threads, rows)


def session_options(threads: int | None) -> Any:
    """How ONNX Runtime is to run a step."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    return options


def open_session(bundle: Bundle, options: Any) -> Any:
    """The bundle's graph, loaded."""
    path = bundle.file(bundle.manifest.engine.file)
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen classes, RuntimeError the only base
        reason = str(error).splitlines()[0]
        raise ForerunError(f"{path}: ONNX Runtime can't load it: {reason}") from None
