"""Engines that say how long each node of a step took, and what that comes to by part."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Engine, Request
from forerun.runtime.parts import part_of

PREFILL, STEP = "prefill", "step"
Label = tuple[str, str]
"""What an engine is called, and `PREFILL` or `STEP`."""
Nodes = Iterable[tuple[str, float]]
"""Name and milliseconds of each."""


@dataclass
class Timed:
    """Launches of one kind, added up."""

    launches: int = 0
    clock: float = 0.0
    """Milliseconds that the same launches take when no node is timed."""
    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Milliseconds of the nodes by part, each of them timed."""
    nodes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many nodes those are."""

    def add(self, clock: float, nodes: Nodes) -> None:
        """One launch more."""
        self.launches += 1
        self.clock += clock
        for name, ms in nodes:
            part = part_of(name)
            self.ms[part] += ms
            self.nodes[part] += 1

    def join(self, other: Timed) -> None:
        """Those launches too."""
        self.launches += other.launches
        self.clock += other.clock
        for part, ms in other.ms.items():
            self.ms[part] += ms
            self.nodes[part] += other.nodes[part]

    @property
    def price(self) -> float:
        """What timing a node costs, in milliseconds, where it is the same for all.

        A profiler lengthens what it measures, by more than a small node itself takes.
        """
        nodes = sum(self.nodes.values())
        return (sum(self.ms.values()) - self.clock) / nodes if nodes else 0.0

    def shares(self, price: float) -> dict[str, float]:
        """Of the clock by part, less what timing them cost: 1 in all where `price` is right."""
        return {part: (ms - price * self.nodes[part]) / self.clock for part, ms in self.ms.items()}


class Profiler(Protocol):
    """Opens engines whose launches are timed node by node, which makes them slower."""

    def engine(self, name: str) -> Engine:
        """One for one request at a time; several may take turns."""

    def timed(self) -> dict[Label, Timed]:
        """End the timing: all launches so far, by the engine's name and `PREFILL` or `STEP`."""


class Labelled:
    """Beside a `StepEngine`: notes for each launch whose it is, and whether a prefill's."""

    def __init__(self, name: str, notes: list[Label], *arguments: Any) -> None:
        self._name, self._now, self._notes = name, STEP, notes
        super().__init__(*arguments)

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        """As the engine's."""
        self._now = PREFILL
        try:
            first: list[int] = super().prefill(request, nodes, row)  # type: ignore[misc]
        finally:
            self._now = STEP
        return first

    def _launch(self, bound: Any) -> None:
        self._notes.append((self._name, self._now))
        super()._launch(bound)  # type: ignore[misc]


def by_label(notes: Iterable[Label], launches: Iterable[tuple[float, Nodes]]) -> dict[Label, Timed]:
    """(clock, nodes) of each launch, in the order of the notes, added up."""
    found: dict[Label, Timed] = defaultdict(Timed)
    for label, launch in zip(notes, launches, strict=False):
        found[label].add(*launch)
    return found


PROFILERS: dict[str, str] = {
    "ort": "forerun.runtime.profile_ort:open_profiler",
    "tensorrt": "forerun.runtime.profile_tensorrt:open_profiler",
    "tensorrt-rtx": "forerun.runtime.profile_tensorrt:open_profiler",
}
"""Engine kind -> what makes a profiler of an engine, or None where it can't."""


def load_profiler(bundle: Bundle, like: Engine) -> Profiler | None:
    """A profiler for engines of `bundle` as `like` is; None where there is none."""
    module, _, name = PROFILERS.get(bundle.manifest.engine.kind, "").partition(":")
    if not module:
        return None
    found: Profiler | None = getattr(importlib.import_module(module), name)(bundle, like)
    return found
