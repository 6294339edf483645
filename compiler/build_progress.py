"""A TensorRT build that shows how far it is, and that Ctrl-C ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forerun.progress import progress

WHOLE = 100
"""Units of the bar."""


@dataclass
class Phase:
    """One level of what the builder is doing."""

    name: str
    steps: int
    done: int = 0


class Phases:
    """Nested phases -> how much of the whole is done. A phase fills one step of the one around it.

    Reports may come from several threads, and out of order: the share never falls.
    """

    def __init__(self) -> None:
        self._stack: list[Phase] = []
        self._share = 0.0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """The phase `name` begins inside `parent`."""
        with self._lock:
            while self._stack and self._stack[-1].name != parent:
                self._stack.pop()
            self._stack.append(Phase(name, max(1, steps)))

    def step(self, name: str, number: int) -> None:
        """Step `number` (from 0) of the phase `name` is done."""
        with self._lock:
            for phase in self._stack:
                if phase.name == name:
                    phase.done = min(number + 1, phase.steps)

    @property
    def share(self) -> float:
        """From 0 to 1."""
        with self._lock:
            share, width = 0.0, 1.0
            for phase in self._stack:
                width /= phase.steps
                share += width * phase.done
            self._share = max(self._share, min(share, 1.0))
            return self._share


def build_watched(trt: Any, config: Any, build: Callable[[], Any], title: str) -> Any:
    """What `build()` returns, which builds with `config`; a bar beside it, named `title`.

    The build runs in a thread of its own, so that Ctrl-C arrives: the builder then stops at its
    next step, and KeyboardInterrupt is raised once it has.
    """
    stopped = threading.Event()
    with progress(title, WHOLE) as advance, ThreadPoolExecutor(1) as pool:
        config.progress_monitor = _monitor(trt, Phases(), advance, stopped)
        future = pool.submit(build)
        try:
            return future.result()
        except BaseException:
            stopped.set()
            raise


def _monitor(trt: Any, phases: Phases, advance: Callable[[int], None], stopped: Any) -> Any:
    """What the builder reports to."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shown = 0

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            phases.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            phases.step(name, step)
            reached = int(phases.share * WHOLE)
            if reached > self.shown:
                advance(reached - self.shown)
                self.shown = reached
            return not stopped.is_set()

        def phase_finish(self, name: str) -> None:
            pass  # the next start or step says the same

    return Monitor()
