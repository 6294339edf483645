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


class Profiled(Engine, Protocol):
    """An engine whose launches are timed node by node; slower than without."""

    def timed(self) -> dict[str, Timed]:
        """End the timing: all launches so far, by `PREFILL` and `STEP`."""


class Labelled:
    """Beside a `StepEngine`: knows of each launch whether it is a prefill's."""

    def __init__(self, *arguments: Any) -> None:
        self.labels: list[str] = []
        self._now = STEP
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
        self.labels.append(self._now)
        super()._launch(bound)  # type: ignore[misc]

    def _sorted(self, launches: Iterable[tuple[float, Nodes]]) -> dict[str, Timed]:
        """(clock, nodes) of each launch, in order, added up by kind."""
        found: dict[str, Timed] = defaultdict(Timed)
        for label, launch in zip(self.labels, launches, strict=False):
            found[label].add(*launch)
        return found


PROFILERS: dict[str, str] = {
    "ort": "forerun.runtime.profile_ort:ProfiledOrt",
    "tensorrt": "forerun.runtime.profile_tensorrt:ProfiledTensorRt",
    "tensorrt-rtx": "forerun.runtime.profile_tensorrt:ProfiledTensorRt",
}
"""Engine kind -> the engine with its profiler on."""


def load_profiled(bundle: Bundle, like: Engine, threads: int | None = None) -> Profiled | None:
    """An engine as `like` with its own profiler on, for one request of `bundle`.

    None where there is none that goes node by node.
    """
    module, _, name = PROFILERS.get(bundle.manifest.engine.kind, "").partition(":")
    kind = getattr(importlib.import_module(module), name) if module else None
    if kind is None or not issubclass(kind, type(like)):
        return None
    engine: Profiled = kind(bundle, threads, 1)
    return engine
