"""What Prometheus reads: each server has a registry of its own."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forerun.runtime.loop import Stats
from forerun.runtime.serve_orders import Observer, Order, Outcome
from forerun.runtime.serve_scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics(Observer):
    """Counts what the scheduler and the routes tell it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "forerun"}
        self._requests = Counter(
            "http_requests", "Requests by route and status.", ["route", "status"], **own
        )
        self._answers = Counter("answers", "Answers by how they ended.", ["outcome"], **own)
        self._tokens = Counter("tokens", "Tokens read and answered.", ["kind"], **own)
        self._steps = Counter("steps", "Steps of single rows, prefills excluded.", **own)
        self._committed = Counter("committed_tokens", "Tokens that those steps committed.", **own)
        self._depths = Counter(
            "accepted_depth", "Steps whose draft was accepted at least so deep.", ["depth"], **own
        )
        self._first = Histogram(
            "first_token_seconds", "From a request to its first token.", buckets=SECONDS, **own
        )
        self._gap = Histogram(
            "inter_token_seconds",
            "Between tokens; those of one step share its time.",
            buckets=TOKEN_SECONDS,
            **own,
        )
        self._queued = Histogram("queue_seconds", "Waiting for a row.", buckets=SECONDS, **own)
        self._wall = Counter("busy_seconds", "Time in which rows were moved on.", **own)
        self._engine = Counter("engine_seconds", "The part of it inside the engine.", **own)
        gauge = Gauge("tau", "Tokens committed a step, since the start.", **own)
        gauge.set_function(lambda: _ratio(self._committed, self._steps))
        gauge = Gauge("host_share", "Busy time outside the engine, since the start.", **own)
        gauge.set_function(lambda: 1 - _ratio(self._engine, self._wall, otherwise=1.0))

    def watch(self, scheduler: Scheduler) -> None:
        """Read the queue and the rows whenever the metrics are read."""
        own: dict[str, Any] = {"registry": self.registry, "namespace": "forerun"}
        rows = scheduler.model.engine.rows
        Gauge("queue_length", "Requests waiting for a row.", **own).set_function(
            lambda: scheduler.waiting
        )
        Gauge("rows_busy", "Rows with a request.", **own).set_function(lambda: scheduler.busy)
        Gauge("rows", "Rows of the engine.", **own).set(rows)

    def request(self, route: str, status: int) -> None:
        """A request was answered."""
        self._requests.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        found: bytes = generate_latest(self.registry)
        return found

    # --- what the scheduler tells -----------------------------------------------------------

    def joined(self, seconds: float) -> None:
        self._queued.observe(seconds)

    def first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def block(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._gap.observe(seconds / tokens)

    def moved(self, wall: float, engine: float) -> None:
        self._wall.inc(wall)
        self._engine.inc(engine)

    def ended(self, outcome: Outcome, order: Order, tokens: int, stats: Stats) -> None:
        self._answers.labels(outcome).inc()
        self._tokens.labels("prompt").inc(len(order.request.prompt))
        self._tokens.labels("answer").inc(tokens)
        self._steps.inc(stats.steps)
        self._committed.inc(sum(n * count for n, count in enumerate(stats.committed, start=1)))
        for depth in range(1, len(stats.committed)):
            self._depths.labels(str(depth)).inc(sum(stats.committed[depth:]))


def _ratio(part: Any, whole: Any, otherwise: float = 0.0) -> float:
    """Of two counters."""
    total: float = whole._value.get()
    return float(part._value.get() / total) if total else otherwise
