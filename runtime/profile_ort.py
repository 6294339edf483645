"""ONNX Runtime's profiler: a file with an event for each node of each launch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine_ort import OrtEngine
from forerun.runtime.profilers import Labelled, Launch

LAUNCH = "model_run"
"""The event that ends a launch's."""
Event = dict[str, Any]


class ProfiledOrt(Labelled, OrtEngine):
    """`OrtEngine` with the profiler on.

    It keeps a million events, some hundred steps: what comes after them is not timed.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="forerun-profile-")
        super().__init__(bundle, threads, rows)

    def timed(self) -> list[tuple[str, Launch]]:
        """As `Profiled` says."""
        path = Path(self.session.end_profiling())
        with path.open(encoding="utf-8") as stream:
            launches = [Launch.of(_innermost(nodes)) for nodes in _launches(_events(stream))]
        self.folder.cleanup()
        return list(zip(self.labels, launches, strict=False))

    def _options(self, threads: int | None) -> Any:
        options = super()._options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self.folder.name) / "events")
        # Threads that wait for work would take time from the engine that is measured in turns.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return options


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
            nodes.append({key: event[key] for key in ("name", "ts", "dur")})
        elif event["name"] == LAUNCH:
            yield nodes
            nodes = []


def _innermost(events: list[Event]) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of each node that runs no others inside it.

    A branch or a loop is timed as a whole, and what it runs once more by itself; the difference is
    mostly the profiler's own work between the inner nodes.
    """
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    for event, following in zip_longest(events, events[1:]):
        if following is None or following["ts"] >= event["ts"] + event["dur"] or not event["dur"]:
            yield event["name"], event["dur"] / 1e3
