"""What the scheduler is asked, what it answers, and whom it tells what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from forerun.errors import ForerunError
from forerun.runtime.engine import Request
from forerun.runtime.loop import FinishReason, Stats

Outcome = Literal["stop", "length", "cancelled", "timeout", "queue_timeout", "closed", "engine"]


@dataclass(frozen=True)
class Limits:
    """What one server takes on."""

    queue: int = 64
    """Requests that may wait for a row."""
    queue_seconds: float = 60.0
    seconds: float = 600.0
    """From a request's coming to its last token."""


@dataclass(frozen=True)
class Piece:
    """What is new of an answer."""

    text: str
    tokens: int
    """Of the whole answer so far."""
    finish: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    """Complete with the last piece."""


@dataclass(frozen=True)
class Failure:
    """There will be no more of an answer."""

    why: Outcome
    message: str = ""


@dataclass(frozen=True)
class Order:
    """One answer that somebody waits for."""

    request: Request
    stop: tuple[str, ...]
    deliver: Callable[[Piece | Failure], None]


class QueueFull(ForerunError):
    """As many requests wait as may."""


class Closing(ForerunError):
    """No more requests are taken."""


class Observer:
    """Told what happens; the metrics are one."""

    def joined(self, seconds: float) -> None:
        """An order got its row after waiting so long."""

    def first(self, seconds: float) -> None:
        """An order's first token came so long after the order."""

    def block(self, seconds: float, tokens: int) -> None:
        """Then so many tokens came so long after those before them."""

    def moved(self, wall: float, engine: float) -> None:
        """The rows were moved on, which took so long, the engine's own time among it."""

    def ended(self, outcome: Outcome, order: Order, tokens: int, stats: Stats) -> None:
        """An order ended."""
