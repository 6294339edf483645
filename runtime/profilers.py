"""Engines that say how long each node of a step took, and what that comes to by part."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Engine, Request
from forerun.runtime.parts import part_of

PREFILL, STEP = "prefill", "step"


@dataclass(frozen=True)
class Launch:
    """What one launch took, by part: its nodes' milliseconds, and how many nodes those were."""

    ms: Mapping[str, float]
    nodes: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Iterable[tuple[str, float]]) -> Launch:
        """From (name, milliseconds) of each node."""
        ms: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for name, spent in nodes:
            part = part_of(name)
            ms[part] += spent  # type: ignore[assignment]
            count[part] += 1
        return cls(dict(ms), dict(count))


@dataclass
class Timed:
    """The launches of one kind, added up."""

    launches: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)

    def add(self, launch: Launch) -> None:
        """One launch more."""
        self.launches += 1
        for part, ms in launch.ms.items():
            self.ms[part] = self.ms.get(part, 0.0) + ms
            self.nodes[part] = self.nodes.get(part, 0) + launch.nodes[part]

    def price(self, engine_ms: float) -> float:
        """What timing a node costs, in milliseconds, where a launch takes `engine_ms` untimed.

        A profiler lengthens what it measures by about the same for each node, which is more than
        a small node itself takes.
        """
        count = sum(self.nodes.values())
        return (sum(self.ms.values()) - engine_ms * self.launches) / count if count else 0.0

    def parts(self, price: float) -> dict[str, float]:
        """Milliseconds a launch by part, less what timing them cost."""
        return {
            part: (ms - price * self.nodes[part]) / self.launches for part, ms in self.ms.items()
        }


class Profiled(Engine, Protocol):
    """An engine whose launches are timed node by node; slower than without."""

    def timed(self) -> list[tuple[str, Launch]]:
        """End the timing: `PREFILL` or `STEP`, and the times, of each launch so far in order."""


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

    @abstractmethod
    def timed(self) -> list[tuple[str, Launch]]:
        """As `Profiled` says."""


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
