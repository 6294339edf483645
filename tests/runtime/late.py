"""CUDA's calls over the host's memory, done as late as a device may: when somebody waits.

What is read before it was waited for is not there yet, and what is captured is not run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Work = Callable[[], object]


class LateApi:
    """The functions of `cuda.bindings.runtime` that `forerun.runtime.cuda` calls."""

    cudaStreamDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.queue: deque[Work] = deque()
        self.captured: list[Work] | None = None
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.kept = 0  # streams, events and graphs
        self.fails: dict[str, int] = {}
        self.waits = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and name in object.__getattribute__(self, "fails"):
            status = self.fails[name]
            return lambda *_: (status,)
        return object.__getattribute__(self, name)

    def enqueue(self, work: Work) -> None:
        """Put something on the stream, or into the graph that is being captured."""
        (self.queue if self.captured is None else self.captured).append(work)

    def drain(self) -> None:
        """Do all that is on the stream."""
        while self.queue:
            self.queue.popleft()()

    # --- the calls --------------------------------------------------------------------------

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, self.devices

    def cudaGetErrorName(self, status: int) -> tuple[int, bytes]:
        return 0, {2: b"cudaErrorMemoryAllocation", 100: b"cudaErrorNoDevice"}[status]

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, {2: b"out of memory", 100: b"no CUDA-capable device is detected"}[status]

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.kept += 1
        return 0, 7

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        memory = ctypes.create_string_buffer(b"\xa5" * (size + 256), size + 256)
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.device[address] = (memory, size)
        return 0, address

    def cudaFree(self, address: int) -> tuple[int]:
        self.drain()  # as CUDA does, before memory goes
        del self.device[address]
        return (0,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[int, int]:
        memory = ctypes.create_string_buffer(size)
        self.pinned[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        self.drain()
        del self.pinned[address]
        return (0,)

    def _gone(self, handle: Any) -> tuple[int]:
        self.kept -= 1
        return (0,)

    cudaStreamDestroy = cudaEventDestroy = cudaGraphExecDestroy = _gone

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:
        self._inside(address, size)
        self.enqueue(lambda: ctypes.memset(address, value, size))
        return (0,)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        assert self.captured is None
        if self._is_device(source):
            self._inside(source, size)
            self.enqueue(lambda: ctypes.memmove(target, source, size))
        else:  # taken over at once, written later
            taken = ctypes.string_at(source, size)
            self._inside(target, size)
            self.enqueue(lambda: ctypes.memmove(target, taken, size))
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, Any]:
        self.kept += 1
        return 0, SimpleNamespace(recorded=0, reached=0)

    def cudaEventRecord(self, event: Any, stream: int) -> tuple[int]:
        event.recorded += 1
        mark = event.recorded
        self.enqueue(lambda: setattr(event, "reached", mark))
        return (0,)

    def cudaEventSynchronize(self, event: Any) -> tuple[int]:
        self.waits += 1
        while event.reached < event.recorded:  # no further than that
            self.queue.popleft()()
        return (0,)

    def cudaEventElapsedTime(self, begun: Any, done: Any) -> tuple[int, float]:
        assert begun.reached == done.reached == done.recorded
        return 0, 2.0

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.drain()
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.captured = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        work, self.captured = self.captured, None
        return 0, work

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        self.kept += 1
        return 0, graph

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (0,)

    def cudaGraphLaunch(self, graph: list[Work], stream: int) -> tuple[int]:
        self.queue.extend(graph)
        return (0,)

    def _is_device(self, address: int) -> bool:
        return any(base <= address < base + max(s, 1) for base, (_, s) in self.device.items())

    def _inside(self, address: int, size: int) -> None:
        """Nothing is written or read beyond an allocation."""
        assert any(
            base <= address and address + size <= base + length
            for base, (_, length) in self.device.items()
        )
