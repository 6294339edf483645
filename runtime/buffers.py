"""The memory that a step reads and writes: allocated once, bound by address, wherever it lies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.runtime.manifest import Manifest

Array = NDArray[Any]
Shape = Sequence[int | str]
Buffer = Any
"""Some memory with a shape: it has `shape`, `reshape`, and slices along its first axis."""
Ticket = Any
"""What a memory gives for a result that is on its way to the host."""

TREE = ("depth", "ancestors", "parents")
"""What describes a tree besides its tokens: a growing drafter's step writes them for the next."""
FIXED = ("uniforms", "temperature", "top_k", "top_p", "limit")
"""What a request fixes."""
RESULT = "result"
"""The block that `pending_count` and `emitted` lie in: one transfer brings both to the host."""
ALIGNED = 32
"""Numbers of 8 bytes that make 256 bytes, the alignment that engines ask for."""


class Memory(Protocol):
    """The host's memory or a device's. What is written, copied, launched and sent happens in that
    order; only `receive` and `read` wait for it."""

    seconds: float
    """Between `begin` and `send`, of all results that were received: the engine's own time."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Buffer:
        """A new buffer of zeros."""

    def load(self, array: Array) -> Buffer:
        """A new buffer with the content of `array`, or `array` itself."""

    def write(self, buffer: Buffer, array: Array) -> None:
        """Put `array`, of the buffer's shape, into it."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Put one buffer's content into another of its shape."""

    def clear(self, buffer: Buffer) -> None:
        """Fill it with zeros."""

    def begin(self) -> None:
        """What is launched from here on until `send` is the engine's own time."""

    def send(self, buffer: Buffer) -> Ticket:
        """Have the content of `buffer`, as it is then, brought to the host."""

    def receive(self, ticket: Ticket) -> Array:
        """What was sent, once it is there."""

    def read(self, buffer: Buffer) -> Array:
        """The content of `buffer`."""


class HostMemory:
    """numpy's arrays: nothing is ever on its way."""

    def __init__(self) -> None:
        self.seconds, self._begun = 0.0, 0.0

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def load(self, array: Array) -> Array:
        return array

    def write(self, buffer: Array, array: Array) -> None:
        buffer[...] = array

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def clear(self, buffer: Array) -> None:
        buffer[...] = 0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def send(self, buffer: Array) -> Array:
        self.seconds += time.perf_counter() - self._begun
        return buffer.copy()

    def receive(self, ticket: Array) -> Array:
        return ticket

    def read(self, buffer: Array) -> Array:
        return buffer


def result_size(rows: int, pending: int) -> tuple[int, int]:
    """(Where `emitted` begins in a `RESULT`, the whole's size), in numbers."""
    lead = -(-rows // ALIGNED) * ALIGNED
    return lead, lead + rows * pending


@dataclass(frozen=True)
class Layout:
    """A step's inputs as it declares them, and which of them are what."""

    manifest: Manifest
    inputs: Mapping[str, tuple[Shape, Any]]
    """Name -> (axes, type as the memory takes it)."""
    caches: tuple[str, ...] = field(init=False)
    """Written in place: the target's caches and the drafter's."""
    states: tuple[str, ...] = field(init=False)
    """The drafter's other state, which ping-pongs."""

    def __post_init__(self) -> None:
        layers, states = range(self.manifest.target.num_layers), self.manifest.drafter.states
        own = [f"{kind}_{layer}" for kind in ("keys", "values") for layer in layers]
        drafter = [state.name for state in states if state.cache]
        object.__setattr__(self, "caches", (*own, *drafter))
        object.__setattr__(self, "states", tuple(s.name for s in states if not s.cache))

    def shape(self, name: str, **sizes: int) -> list[int]:
        """The shape of the input `name`, its symbolic axes replaced by `sizes`."""
        return [sizes[a] if isinstance(a, str) else a for a in self.inputs[name][0]]


class Buffers:
    """All state of B rows: caches, two sets of what ping-pongs, and what a request fixes."""

    def __init__(self, layout: Layout, memory: Memory, rows: int) -> None:
        self.layout, self.memory, self.rows, self.slots = layout, memory, rows, 0
        capacity = layout.manifest.capacity
        self.fixed = {name: self.zeros(name, uniform_positions=capacity) for name in FIXED}
        self.caches: dict[str, Buffer] = {}
        self.sets = [self._set() for _ in range(2)]
        self.prefill: Any = None
        """Of a lone row on an engine that binds its prefill once (`PinnedEngine`)."""

    def zeros(self, name: str, **sizes: int) -> Buffer:
        """A new buffer for the input `name` of all rows."""
        shape = self.layout.shape(name, batch=self.rows, **sizes)
        return self.memory.zeros(shape, self.layout.inputs[name][1])

    def grow(self, slots: int) -> None:
        """Make room for `slots` cache slots; what is there is kept."""
        self.caches = {
            name: self._grown(name, slots, self.caches.get(name)) for name in self.layout.caches
        }
        for state in self.sets:
            for name in self.layout.states:
                state[name] = self._grown(name, slots, state.get(name))
        self.slots = slots

    def row(self, row: int) -> Buffers:
        """One row alone: it shares the row's caches, and has of its own what else there is."""
        alone = Buffers(self.layout, self.memory, 1)
        alone.slots = self.slots
        alone.caches = {name: buffer[row : row + 1] for name, buffer in self.caches.items()}
        for state in alone.sets:
            for name in self.layout.states:
                state[name] = alone.zeros(name, slots=self.slots)
        return alone

    def follow(self, whole: Buffers, row: int) -> None:
        """What `row` gave, after the whole has grown: its caches anew, its own state kept."""
        self.slots, self.prefill = whole.slots, None
        self.caches = {name: buffer[row : row + 1] for name, buffer in whole.caches.items()}
        for state in self.sets:
            for name in self.layout.states:
                state[name] = self._grown(name, self.slots, state[name])

    def first(self, rows: int) -> Buffers:
        """The first rows alone: everything is shared, but for the size."""
        part = copy(self)
        part.rows = rows
        part.fixed, part.caches = (
            {name: buffer[:rows] for name, buffer in named.items()}
            for named in (self.fixed, self.caches)
        )
        part.sets = [
            {name: buffer[:rows] for name, buffer in state.items() if name != RESULT}
            for state in self.sets
        ]
        return part

    def clear(self) -> None:
        """Forget the drafter's state that isn't in caches."""
        for state in self.sets:
            for name in self.layout.states:
                self.memory.clear(state[name])

    def put(self, row: int, turn: int, source: dict[str, Buffer]) -> None:
        """Copy a lone row's set into this row of the set `turn`."""
        for name, buffer in source.items():
            if name != RESULT:
                self.memory.copy(self.sets[turn][name][row : row + 1], buffer)

    def committed(self, result: Array) -> list[list[int]]:
        """Each row's tokens, from the content of a set's `RESULT`."""
        counts = result[: self.rows].tolist()
        emitted = result[-self.rows * self.layout.manifest.pending :].reshape(self.rows, -1)
        return [emitted[row, :count].tolist() for row, count in enumerate(counts)]

    def _set(self) -> dict[str, Buffer]:
        """One side of the ping-pong. A tree's buffers carry its number of nodes in their name."""
        manifest, rows = self.layout.manifest, self.rows
        lead, whole = result_size(rows, manifest.pending)
        result = self.memory.zeros([whole], self.layout.inputs["length"][1])
        found = {
            RESULT: result,
            "pending_count": result[:rows],
            "emitted": result[lead:whole].reshape(rows, manifest.pending),
            "length": self.zeros("length"),
            "pending": self.zeros("pending", pending_in=manifest.pending),
        }
        for key, tree in manifest.trees.items():
            nodes = int(key)
            for name in ("tokens",) if tree is not None else ("tokens", *TREE):
                found[f"{name}_{nodes}"] = self.zeros(name, nodes=nodes, verified=nodes)
        return found

    def _grown(self, name: str, slots: int, old: Buffer | None) -> Buffer:
        new = self.zeros(name, slots=slots)
        if old is not None:
            self.memory.copy(new[tuple(slice(0, size) for size in old.shape)], old)
        return new
