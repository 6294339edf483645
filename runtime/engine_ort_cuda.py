"""The step on ONNX Runtime's CUDA provider: device addresses bound once, all on one stream.

**It has not been run**: no GPU was at hand. The tests run it over the host's memory, on the CPU
provider.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort  # `engine_ort` says so where it is missing

from forerun.errors import ForerunError
from forerun.runtime.buffers import Layout, result_size
from forerun.runtime.bundle import Bundle
from forerun.runtime.cuda import CudaMemory
from forerun.runtime.engine_ort import NUMPY_TYPES
from forerun.runtime.engine_step import Named, StepEngine

PROVIDER = "CUDAExecutionProvider"
NO_GRAPH = "-1"


class OrtCudaEngine(StepEngine):
    """A bundle's ONNX graph on a GPU, with caches of the whole capacity."""

    ahead = 1
    branches_on_host = True  # an `If` there is the host's, which would fetch its condition
    place = "cuda"

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        _, longest = result_size(rows, bundle.manifest.pending)
        self.device = self._memory(longest)
        self.where = bundle.file(bundle.manifest.engine.file)
        self.session, self.graphs = self._open(bundle, threads)
        inputs = {v.name: (v.shape, NUMPY_TYPES[v.type]) for v in self.session.get_inputs()}
        self.captured = 0
        super().__init__(
            Layout(bundle.manifest, inputs), self.device, rows, bundle.manifest.capacity
        )

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        binding = self.session.io_binding()
        for name, buffer in inputs.items():
            if isinstance(buffer, np.ndarray):
                # Its memory as it is, so that later launches see what is written there.
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(buffer))
                continue
            place = (self.place, 0, buffer.dtype.type, buffer.shape, buffer.address)
            binding.bind_input(name, *place)
        for name, buffer in outputs.items():
            place = (self.place, 0, buffer.dtype.type, buffer.shape, buffer.address)
            binding.bind_output(name, *place)
        run = ort.RunOptions()
        # The host goes on at once: what comes next is behind it on the same stream.
        run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self.graphs:
            self.captured += again
            run.add_run_config_entry("gpu_graph_id", str(self.captured) if again else NO_GRAPH)
        return binding, run, inputs, outputs

    def _launch(self, bound: Any) -> None:
        try:
            self.session.run_with_iobinding(bound[0], bound[1])
        except Exception as error:  # it raises classes of its own, one a status
            reason = " ".join(str(error).split())[:300]
            raise ForerunError(
                f"{self.where}: ONNX Runtime could not run it: {reason}: if memory is short, take "
                "fewer rows, or compile with a smaller --capacity"
            ) from None

    def _memory(self, longest: int) -> CudaMemory:
        return CudaMemory(longest)

    def _open(self, bundle: Bundle, threads: int | None) -> tuple[Any, bool]:
        """The session, and whether its steps are captured as CUDA graphs.

        The provider refuses to capture a graph with branches or loops in it, or with operators
        that it leaves to the CPU.
        """
        path = bundle.file(bundle.manifest.engine.file)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 4  # a refused capture is no error
        stream = str(int(self.device.stream))
        errors = []
        for graphs in (True, False):
            facts = {"user_compute_stream": stream, "enable_cuda_graph": str(int(graphs))}
            providers = [(PROVIDER, facts), "CPUExecutionProvider"]
            try:
                # Its own fallback to the CPU prints to standard output.
                session = ort.InferenceSession(
                    str(path), options, providers=providers, enable_fallback=0
                )
            except Exception as error:  # as in `engine_ort`
                errors.append(str(error).splitlines()[0])
                continue
            if PROVIDER not in session.get_providers():
                raise ForerunError(
                    f"{path}: ONNX Runtime can't start its CUDA provider: install CUDA and cuDNN "
                    "in the versions it asks for, or set CUDA_VISIBLE_DEVICES= to use the CPU"
                )
            return session, graphs
        raise ForerunError(f"{path}: ONNX Runtime can't load it: {errors[-1]}")
