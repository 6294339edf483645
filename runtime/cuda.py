"""CUDA as far as engines need it: memory, one stream, events, graphs, through cuda-bindings.

Written for a machine without a GPU: it has not been run on one. The tests run it over the host's
memory, with the calls that it makes in the place of CUDA's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.buffers import Array

SLOTS = 4
"""Results that may be on their way to the host at once: those of two steps, and some to spare."""
LEAST = 256
"""Bytes: an empty tensor has an address too, and all are aligned to this."""
_NO_DEVICE = ": is there an NVIDIA GPU and a driver? See `forerun doctor`"
HINTS = {
    "cudaErrorNoDevice": _NO_DEVICE,
    "cudaErrorInsufficientDriver": _NO_DEVICE,
    "cudaErrorMemoryAllocation": ": take fewer rows, or compile with a smaller --capacity",
}
"""What may help, by CUDA's name of an error."""


class Cuda:
    """CUDA's runtime, every call of it checked."""

    def __init__(self, api: Any = None) -> None:
        """`api` has the functions of `cuda.bindings.runtime`, which is taken where it is None."""
        self.api = api or _runtime()

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of the function `name`; raises ForerunError with CUDA's own words."""
        try:
            status, *results = getattr(self.api, name)(*arguments)
        except RuntimeError as error:  # how a library is missed that is loaded at the first call
            raise ForerunError(f"CUDA: {name}: {_line(error)}") from None
        if int(status):
            kind, text = (
                getattr(self.api, function)(status)[1].decode()
                for function in ("cudaGetErrorName", "cudaGetErrorString")
            )
            raise ForerunError(f"CUDA: {name}: {kind}: {text}{HINTS.get(kind, '')}")
        return results[0] if results else None


def device_count(api: Any = None) -> int:
    """How many CUDA devices there are; 0 where CUDA is missing or broken."""
    try:
        return int(Cuda(api).call("cudaGetDeviceCount"))
    except ForerunError:
        return 0


def compute_capability(number: int = 0, api: Any = None) -> int:
    """Of the device `number`: 89 is sm_89."""
    facts = Cuda(api).call("cudaGetDeviceProperties", number)
    return int(facts.major) * 10 + int(facts.minor)


@dataclass
class Owned:
    """Something of CUDA's, given back by the function `free` when nobody refers to it any more."""

    cuda: Cuda
    handle: Any
    free: str

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process may be ending
            self.cuda.call(self.free, self.handle)


@dataclass(frozen=True)
class DeviceBuffer:
    """Some device memory with a shape, contiguous."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Owned = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> DeviceBuffer:
        """A part along the first axis."""
        start, stop, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return replace(self, address=self.address + start * row, shape=shape)

    def reshape(self, *shape: int) -> DeviceBuffer:
        """The same memory in another shape of the same size."""
        assert math.prod(shape) == math.prod(self.shape)
        return replace(self, shape=shape)


@dataclass
class Slot:
    """A place of the ring: pinned memory, and when its step began and its result was there."""

    host: Array
    begun: Owned
    done: Owned
    memory: Owned
    number: int = -1
    """Of the result that is or was last on its way here."""


class CudaMemory:
    """Buffers on the device, and one stream on which everything happens in order."""

    def __init__(self, longest: int, cuda: Cuda | None = None) -> None:
        """`longest` numbers of 8 bytes are the longest result that is sent."""
        self.cuda = cuda or Cuda()
        if not self.cuda.call("cudaGetDeviceCount"):
            raise ForerunError("CUDA: no device: see `forerun doctor`")
        api = self.cuda.api
        # A blocking stream: what a library copies by itself, on the legacy one, waits for ours.
        stream = self.cuda.call("cudaStreamCreateWithFlags", api.cudaStreamDefault)
        self.stream, self._stream = stream, Owned(self.cuda, stream, "cudaStreamDestroy")
        self.seconds = 0.0
        self._ring = [self._slot(longest) for _ in range(SLOTS)]
        self._sent = 0

    # --- buffers ----------------------------------------------------------------------------

    def zeros(self, shape: Sequence[int], dtype: Any) -> DeviceBuffer:
        kind = np.dtype(dtype)
        size = max(math.prod(shape) * kind.itemsize, LEAST)
        address = int(self.cuda.call("cudaMalloc", size))
        buffer = DeviceBuffer(address, tuple(shape), kind, Owned(self.cuda, address, "cudaFree"))
        self.clear(buffer)
        return buffer

    def load(self, array: Array) -> DeviceBuffer:
        buffer = self.zeros(array.shape, array.dtype)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: DeviceBuffer, array: Array) -> None:
        # From memory that is not pinned: CUDA has taken it over when the call returns.
        source = np.ascontiguousarray(array)
        assert source.nbytes == buffer.nbytes
        self._copy(buffer.address, source.ctypes.data, buffer.nbytes)

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        assert target.nbytes == source.nbytes
        self._copy(target.address, source.address, source.nbytes)

    def clear(self, buffer: DeviceBuffer) -> None:
        if buffer.nbytes:
            self.cuda.call("cudaMemsetAsync", buffer.address, 0, buffer.nbytes, self.stream)

    def read(self, buffer: DeviceBuffer) -> Array:
        found: Array = np.empty(buffer.shape, buffer.dtype)
        self._copy(found.ctypes.data, buffer.address, buffer.nbytes)
        self.synchronize()
        return found

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self.cuda.call("cudaStreamSynchronize", self.stream)

    # --- results ----------------------------------------------------------------------------

    def begin(self) -> None:
        self.cuda.call("cudaEventRecord", self._ring[self._sent % SLOTS].begun.handle, self.stream)

    def send(self, buffer: DeviceBuffer) -> tuple[int, int]:
        number, slot = self._sent, self._ring[self._sent % SLOTS]
        self._copy(slot.host.ctypes.data, buffer.address, buffer.nbytes)
        self.cuda.call("cudaEventRecord", slot.done.handle, self.stream)
        slot.number, self._sent = number, number + 1
        return number, buffer.nbytes // slot.host.itemsize

    def receive(self, ticket: tuple[int, int]) -> Array:
        number, count = ticket
        slot = self._ring[number % SLOTS]
        assert slot.number == number, "a result was fetched after its place had gone to another"
        begun, done = slot.begun.handle, slot.done.handle
        self.cuda.call("cudaEventSynchronize", done)
        self.seconds += self.cuda.call("cudaEventElapsedTime", begun, done) / 1e3
        return slot.host[:count].copy()

    # --- graphs -----------------------------------------------------------------------------

    def capture(self, launch: Callable[[], None]) -> Owned:
        """What `launch` puts on the stream, as a graph to be replayed; none of it is run."""
        mode = self.cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.cuda.call("cudaStreamBeginCapture", self.stream, mode)
        try:
            launch()
        except BaseException:  # whose words count, not those of the capture that it spoiled
            self.cuda.api.cudaStreamEndCapture(self.stream)
            raise
        graph = self.cuda.call("cudaStreamEndCapture", self.stream)
        replayable = self.cuda.call("cudaGraphInstantiate", graph, 0)
        self.cuda.call("cudaGraphDestroy", graph)
        return Owned(self.cuda, replayable, "cudaGraphExecDestroy")

    def replay(self, graph: Owned) -> None:
        """Launch a captured graph."""
        self.cuda.call("cudaGraphLaunch", graph.handle, self.stream)

    def _copy(self, target: int, source: int, size: int) -> None:
        """By address; CUDA knows which of them is where."""
        if size:
            kind = self.cuda.api.cudaMemcpyKind.cudaMemcpyDefault
            self.cuda.call("cudaMemcpyAsync", target, source, size, kind, self.stream)

    def _slot(self, longest: int) -> Slot:
        address = int(self.cuda.call("cudaHostAlloc", longest * 8, 0))
        numbers = (ctypes.c_int64 * longest).from_address(address)
        begun, done = (
            Owned(self.cuda, self.cuda.call("cudaEventCreateWithFlags", 0), "cudaEventDestroy")
            for _ in range(2)
        )
        pinned = Owned(self.cuda, address, "cudaFreeHost")
        return Slot(np.ctypeslib.as_array(numbers), begun, done, pinned)


def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise MissingDependencyError("cuda-bindings", "cuda", "running on a GPU") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
