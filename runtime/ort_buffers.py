"""The memory that a step on ONNX Runtime reads and writes, allocated once and bound by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.runtime.manifest import Manifest

Array = NDArray[Any]
Shape = Sequence[int | str]

TREE = ("depth", "ancestors", "parents")
"""What describes a tree besides its tokens: a growing drafter's step writes them for the next."""
COUNTS = ("length", "pending_count")


@dataclass(frozen=True)
class Layout:
    """A step's inputs as the graph declares them, and which of them are what."""

    manifest: Manifest
    inputs: Mapping[str, tuple[Shape, Any]]
    """Name -> (axes, numpy type)."""
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

    def zeros(self, name: str, **sizes: int) -> Array:
        """The input `name`, its symbolic axes replaced by `sizes`."""
        axes, dtype = self.inputs[name]
        return np.zeros([sizes[a] if isinstance(a, str) else a for a in axes], dtype)


class Buffers:
    """All state of B rows: caches, two sets of what ping-pongs, and what a request fixes."""

    def __init__(self, layout: Layout, rows: int) -> None:
        self.layout, self.rows, self.slots = layout, rows, 0
        manifest = layout.manifest
        sizes = {"batch": rows, "uniform_positions": manifest.capacity}
        names = ("uniforms", "temperature", "top_k", "top_p", "limit")
        self.fixed = {name: layout.zeros(name, **sizes) for name in names}
        self.caches: dict[str, Array] = {}
        self.sets = [self._set() for _ in range(2)]
        self.emitted = np.zeros((rows, manifest.pending), np.int64)

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
        """One row alone: it shares caches and what is fixed, and has ping-pong sets of its own."""
        part = slice(row, row + 1)
        alone = object.__new__(Buffers)
        alone.layout, alone.rows, alone.slots = self.layout, 1, self.slots
        alone.fixed = {name: array[part] for name, array in self.fixed.items()}
        alone.caches = {name: array[part] for name, array in self.caches.items()}
        alone.sets = [alone._set() for _ in range(2)]
        for state in alone.sets:
            for name in self.layout.states:
                state[name] = self.layout.zeros(name, batch=1, slots=self.slots)
        alone.emitted = self.emitted[part]
        return alone

    def put(self, row: int, turn: int, source: dict[str, Array]) -> None:
        """Copy a lone row's set into this row of the set `turn`."""
        for name, array in source.items():
            self.sets[turn][name][row] = array[0]

    def _set(self) -> dict[str, Array]:
        """One side of the ping-pong. A tree's buffers carry its number of nodes in their name."""
        layout, manifest = self.layout, self.layout.manifest
        found = {name: np.zeros(self.rows, np.int64) for name in COUNTS}
        found["pending"] = layout.zeros("pending", batch=self.rows, pending_in=manifest.pending)
        for key, tree in manifest.trees.items():
            nodes = int(key)
            names = ("tokens",) if tree is not None else ("tokens", *TREE)
            for name in names:
                found[f"{name}_{nodes}"] = layout.zeros(
                    name, batch=self.rows, nodes=nodes, verified=nodes
                )
        return found

    def _grown(self, name: str, slots: int, old: Array | None) -> Array:
        new = self.layout.zeros(name, batch=self.rows, slots=slots)
        if old is not None:
            new[tuple(slice(0, size) for size in old.shape)] = old
        return new
