"""The step as the torch module itself: eager on a CPU, under CUDA graphs on a device.

The reference for what is exported from it, and an engine where no other is installed. What needs a
GPU (the classes and branches that name CUDA) has not been run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.buffers import Array, Layout, Ticket, result_size
from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Request
from forerun.runtime.engine_step import Named, StepEngine

try:
    import torch
except ImportError as error:
    raise MissingDependencyError("torch", "compile", "running a torch bundle") from error

from torch import Tensor

from forerun.models.ops import scatter_in_place
from forerun.models.signature import signature
from forerun.models.step import StepInputs
from forerun.models.target import Caches
from forerun.models.torch_bundle import read_step

ACCELERATOR_ERRORS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""What torch raises for CUDA's errors, in versions that tell them from its own."""
SLOTS = 4
"""Results that may be on their way to the host at once: those of two steps, and some to spare."""


class TorchMemory:
    """torch's tensors on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds, self._begun = 0.0, 0.0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(list(shape), dtype=dtype, device=self.device)

    def load(self, array: Array) -> Tensor:
        return torch.tensor(array, device=self.device)

    def write(self, buffer: Tensor, array: Array) -> None:
        buffer.copy_(torch.from_numpy(np.asarray(array)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def clear(self, buffer: Tensor) -> None:
        buffer.zero_()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def send(self, buffer: Tensor) -> Ticket:
        self.seconds += time.perf_counter() - self._begun
        return buffer.clone()

    def receive(self, ticket: Ticket) -> Array:
        result: Array = ticket.numpy()
        return result

    def read(self, buffer: Tensor) -> Array:
        result: Array = buffer.cpu().numpy()
        return result


@dataclass
class Slot:
    """A place of the ring: pinned memory, and when its step began and its result was there."""

    host: Tensor
    begun: Any
    done: Any


class CudaMemory(TorchMemory):
    """torch's tensors on a CUDA device; all work is on the default stream, in order."""

    def __init__(self, device: torch.device, longest: int) -> None:
        """`longest` numbers are the longest result that is sent."""
        super().__init__(device)
        self._ring = [
            Slot(
                torch.zeros(longest, dtype=torch.int64).pin_memory(),
                *(_event() for _ in range(2)),
            )
            for _ in range(SLOTS)
        ]
        self._next = 0

    def begin(self) -> None:
        self._ring[self._next].begun.record()

    def send(self, buffer: Tensor) -> Ticket:
        slot = self._ring[self._next]
        self._next = (self._next + 1) % SLOTS
        slot.host[: buffer.numel()].copy_(buffer, non_blocking=True)
        slot.done.record()
        return slot, buffer.numel()

    def receive(self, ticket: Ticket) -> Array:
        slot, count = ticket
        slot.done.synchronize()
        self.seconds += slot.begun.elapsed_time(slot.done) / 1e3
        result: Array = slot.host[:count].numpy().copy()
        return result


@contextmanager
def _in_one_line(where: Path) -> Iterator[None]:
    """CUDA's failures, which come late and anywhere, as one line each."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ForerunError(
            f"{where}: the GPU's memory does not hold it: {_line(error)}: take fewer rows, or "
            "compile with a smaller --capacity"
        ) from None
    except ACCELERATOR_ERRORS as error:
        raise ForerunError(f"{where}: CUDA failed, see `forerun doctor`: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class Call:
    """A step's tensors; on a device its graphs, by what the host knew when it captured them."""

    inputs: StepInputs
    caches: Caches
    states: list[Tensor]
    outputs: Named
    again: bool
    graphs: dict[tuple[bool, bool], Any] = field(default_factory=dict)


class TorchEngine(StepEngine):
    """A bundle's step module, with caches of the whole capacity."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.cuda = torch.cuda.is_available()
        device = torch.device("cuda" if self.cuda else "cpu")
        self.ahead = int(self.cuda)
        self.captures = self.cuda
        self.where = bundle.path
        with _in_one_line(self.where):
            self.module = read_step(bundle).to(device)
            layout = Layout(bundle.manifest, signature(self.module).inputs)
            _, longest = result_size(rows, bundle.manifest.pending)
            memory = CudaMemory(device, longest) if self.cuda else TorchMemory(device)
            super().__init__(layout, memory, rows, bundle.manifest.capacity)

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        with _in_one_line(self.where):
            return super().prefill(request, nodes, row)

    def launch(self, nodes: int) -> Ticket:
        with _in_one_line(self.where):
            return super().launch(nodes)

    def wait(self, ticket: Ticket) -> list[list[int]]:
        with _in_one_line(self.where):
            return super().wait(ticket)

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Call:
        layers = self.manifest.target.num_layers
        named = {f.name: inputs[f.name] for f in fields(StepInputs)}
        # On the host, so that branching on it waits for no device.
        named["drafting"] = torch.tensor(nodes > 1)
        return Call(
            StepInputs(**named),
            Caches(*([inputs[f"{k}_{i}"] for i in range(layers)] for k in ("keys", "values"))),
            [inputs[state.name] for state in self.manifest.drafter.states],
            outputs,
            again,
        )

    @torch.no_grad()
    def _launch(self, bound: Call) -> None:
        known = self.remembers, any(not params.greedy for params in self.params)
        graph = self._graph(bound, known) if self.captures and bound.again else None
        if graph is None:
            self._run(bound, *known)
        else:
            graph.replay()

    def _run(self, call: Call, remembers: bool, samples: bool) -> None:
        """Compute the step; what it gives goes where the next one reads it."""
        self.module.sampling = samples
        inputs = replace(call.inputs, remembering=torch.tensor(remembers))
        outputs, _, states = self.module(inputs, call.caches, call.states, scatter_in_place)
        found = outputs.named()
        for spec, state in zip(self.manifest.drafter.states, states, strict=True):
            found[f"new_{spec.name}"] = state
        for name, target in call.outputs.items():
            if name in found and target is not found[name]:  # caches were written in place
                target.copy_(found[name])

    def _graph(self, call: Call, known: tuple[bool, bool]) -> Any:
        """The step as a graph; None, from then on for every step, where it can't be captured."""
        if known not in call.graphs:
            try:
                call.graphs[known] = self._captured(call, *known)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.captures = False
                warnings.warn(
                    f"{self.where}: without CUDA graphs, so slower: {_line(error)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return call.graphs.get(known)

    def _captured(self, call: Call, remembers: bool, samples: bool) -> Any:
        """The step as a CUDA graph, after a run that lets libraries set themselves up.

        That run is the step itself: it reads one set of buffers, writes the other, and is repeated
        without harm.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(call, remembers, samples)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(call, remembers, samples)
        return graph
