"""ONNX Runtime's profiler: a file with an event for each node of each launch."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Engine
from forerun.runtime.engine_ort import OrtEngine, bind, open_session, session_options
from forerun.runtime.engine_step import Named
from forerun.runtime.profilers import Label, Labelled, Timed, by_label

LAUNCH = "model_run"
"""The event that ends a launch's."""
CONTROL = ("If", "Loop", "Scan")
"""Operators that run nodes inside them."""
Event = dict[str, Any]


class OrtProfiler:
    """Launches each step twice: on a session by the clock, and at once again on one whose profiler
    is on. A step that is launched again does the same to its buffers.

    The profiler keeps a million events, some hundred steps: what comes after them is not timed.
    """

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.bundle = bundle
        self.folder = tempfile.TemporaryDirectory(prefix="forerun-profile-")
        options = [session_options(threads) for _ in range(2)]
        for each in options:
            # Threads that wait for work would take time from the other session.
            each.add_session_config_entry("session.force_spinning_stop", "1")
        options[1].enable_profiling = True
        options[1].profile_file_prefix = str(Path(self.folder.name) / "events")
        self.clocked, self.watched = (open_session(bundle, each) for each in options)
        self.notes: list[Label] = []
        self.clocks: list[float] = []

    def engine(self, name: str) -> Engine:
        """As `Profiler` says."""
        return WatchedOrt(name, self)

    def timed(self) -> dict[Label, Timed]:
        """As `Profiler` says."""
        path = Path(self.watched.end_profiling())
        with path.open(encoding="utf-8") as stream:
            nodes = (list(_innermost(events)) for events in _launches(_events(stream)))
            found = by_label(self.notes, zip(self.clocks, nodes, strict=False))
        self.folder.cleanup()
        return found


class WatchedOrt(Labelled, OrtEngine):
    """An engine whose sessions are a profiler's."""

    def __init__(self, name: str, profiler: OrtProfiler) -> None:
        self.profiler = profiler
        super().__init__(name, profiler.notes, profiler.bundle)

    def _open(self, bundle: Bundle, threads: int | None) -> Any:
        return self.profiler.clocked

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        sessions = self.profiler.clocked, self.profiler.watched
        return [bind(session, inputs, outputs) for session in sessions]

    def _launch(self, bound: Any) -> None:
        start = time.perf_counter()
        super()._launch(bound[0])
        self.profiler.clocks.append(1e3 * (time.perf_counter() - start))
        self.profiler.watched.run_with_iobinding(bound[1][0])


def open_profiler(bundle: Bundle, like: Engine) -> OrtProfiler | None:
    """For an engine on the CPU; none for one on a GPU, whose nodes the profiler sees launched."""
    if not isinstance(like, OrtEngine):
        return None
    return OrtProfiler(bundle, like.session.get_session_options().intra_op_num_threads)


def _events(lines: Iterable[str]) -> Iterator[Event]:
    """The file's events, an object a line; read line by line, for it may be larger than memory."""
    for line in lines:
        text = line.strip().rstrip(",")
        if text.startswith("{"):
            yield json.loads(text)


def _launches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """The node events of each launch; those of one that was cut off at the end are dropped."""
    nodes: list[Event] = []
    for event in events:
        if event["cat"] == "Node":
            nodes.append({key: event[key] for key in ("name", "ts", "dur", "args")})
        elif event["name"] == LAUNCH:
            yield nodes
            nodes = []


def _innermost(events: list[Event]) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of the nodes that run no others inside them.

    A branch or a loop is timed as a whole, and what it runs once more by itself; the difference is
    mostly the profiler's own work between the inner nodes.
    """
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    for event, following in zip_longest(events, events[1:]):
        inside = following is not None and following["ts"] < event["ts"] + event["dur"]
        if not (inside and event["args"]["op_name"] in CONTROL):
            yield event["name"], event["dur"] / 1e3
