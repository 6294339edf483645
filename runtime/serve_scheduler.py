"""Continuous batching: one thread moves the engine, requests join and leave between its steps.

It knows nothing of HTTP: what is asked comes as `Order`s from any thread, what is answered goes to
each order's `deliver`, which is called in the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.runtime.batch import Event, Job, Rows
from forerun.runtime.loop import Stats
from forerun.runtime.model import Answer, Model
from forerun.runtime.pace import Pace
from forerun.runtime.serve_orders import (
    Closing,
    Failure,
    Limits,
    Observer,
    Order,
    Outcome,
    Piece,
    QueueFull,
)

LOG = logging.getLogger("forerun.serve")
FAILURES = 3
"""So many failures of the engine in a row, and the server calls itself ill."""
STALL_SECONDS = 120.0
"""So long in one call of the engine, and it does so too."""


@dataclass
class _Held:
    number: int
    order: Order
    answer: Answer
    since: float
    last: float = 0.0
    """When its last token came."""


class Scheduler:
    """Answers orders on all rows of a model's engine."""

    def __init__(
        self, model: Model, pace: Pace, limits: Limits, observer: Observer | None = None
    ) -> None:
        self.model, self.limits, self.observer = model, limits, observer or Observer()
        self._pace = pace
        self._stop_ids = frozenset(model.bundle.manifest.target.stop_ids)
        self._rows = Rows(model.engine, pace)
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._waiting: deque[_Held] = deque()
        self._running: dict[int, _Held] = {}
        self._cancelled: set[int] = set()
        self._draining = self._closed = False
        self._failures, self._beat = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)

    # --- any thread's calls -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, orders: Sequence[Order]) -> list[int]:
        """Take all of the orders, or none; -> their numbers.

        Raises QueueFull and Closing.
        """
        # A bad stop string is the caller's to see, not the engine's thread.
        answers = [Answer(self.model.bundle.tokenizer, order.stop) for order in orders]
        now = time.monotonic()
        with self._change:
            if self._draining or self._closed:
                raise Closing("the server is shutting down")
            free = self.model.engine.rows - len(self._running)
            if len(self._waiting) + len(orders) > self.limits.queue + free:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already")
            held = [
                _Held(next(self._numbers), order, answer, now)
                for order, answer in zip(orders, answers, strict=True)
            ]
            self._waiting += held
            self._change.notify()
        return [one.number for one in held]

    def cancel(self, numbers: Collection[int]) -> None:
        """End orders where they are: rows are free at the next step. Others are passed over."""
        with self._change:
            alive = {held.number for held in self._waiting} | set(self._running)
            self._cancelled |= alive & set(numbers)
            self._change.notify()

    def drain(self) -> None:
        """Take no more orders; those that are there are answered."""
        self._draining = True

    def close(self, seconds: float = 10.0) -> None:
        """End all orders where they are, and the thread."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def most(self) -> int:
        """Orders that may be submitted together, were nothing else to do."""
        return self.limits.queue + self.model.engine.rows

    @property
    def draining(self) -> bool:
        """Whether orders are refused because the server is about to end."""
        return self._draining or self._closed

    @property
    def waiting(self) -> int:
        """Orders without a row."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Orders that have a row."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        with self._change:
            return not self._waiting and not self._running

    @property
    def healthy(self) -> bool:
        """Whether answers can be expected."""
        stalled = self.busy and time.monotonic() - self._beat > STALL_SECONDS
        return self._thread.is_alive() and self._failures < FAILURES and not stalled

    # --- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._move()
                except Exception:  # whatever an engine raises: those who wait are told
                    self._failed()
            for held in list(self._running.values()):
                self._end(held, "closed")
        finally:
            with self._change:
                self._closed = True
                left = [*self._running.values(), *self._waiting]
            for held in left:
                self._deliver(held, Failure("closed"))

    def _wait(self) -> bool:
        """Until there is something to do; false at the end."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _move(self) -> None:
        """One turn: those go who must, those come who can, all others get a step's tokens."""
        start, inside = time.monotonic(), self.model.engine.seconds
        self._beat = start
        for held, outcome in self._leaving(start):
            self._end(held, outcome)
        self._join()
        if self._running:
            for event in self._rows.advance():
                self._give(event)
            self._failures = 0
            engine = self.model.engine.seconds - inside
            self.observer.moved(time.monotonic() - start, engine)

    def _leaving(self, now: float) -> list[tuple[_Held, Outcome]]:
        with self._change:
            cancelled, self._cancelled = self._cancelled, set()
            waiting, running = list(self._waiting), list(self._running.values())
        found: list[tuple[_Held, Outcome]] = []
        for held in [*waiting, *running]:
            age = now - held.since
            if held.number in cancelled:
                found.append((held, "cancelled"))
            elif age > self.limits.seconds:
                found.append((held, "timeout"))
            elif held.number not in self._running and age > self.limits.queue_seconds:
                found.append((held, "queue_timeout"))
        return found

    def _join(self) -> None:
        while self._rows.free:
            with self._change:
                if not self._waiting:
                    return
                held = self._waiting.popleft()
                self._running[held.number] = held
            try:
                self._rows.join(held.number, Job(held.order.request, self._stop_ids))
            except ForerunError as error:
                self._end(held, "engine", str(error))
                continue
            self.observer.joined(time.monotonic() - held.since)

    def _give(self, event: Event) -> None:
        held = self._running[event.number]
        if isinstance(event.outcome, ForerunError):
            self._end(held, "engine", str(event.outcome))
            return
        now, before = time.monotonic(), held.answer.tokens
        text = held.answer.push(event.outcome)
        tokens = held.answer.tokens
        begins = not held.last
        if begins:
            self.observer.first(now - held.since)
        elif tokens > before:
            self.observer.block(now - held.last, tokens - before)
        held.last = now
        if held.answer.finish is None:
            if text or begins:  # a client may want to know that it begins
                self._deliver(held, Piece(text, tokens))
            return
        self._end(held, held.answer.finish, text)

    def _end(self, held: _Held, outcome: Outcome, text: str = "") -> None:
        with self._change:
            running = self._running.pop(held.number, None)
            if running is None:
                self._waiting.remove(held)
        stats = self._rows.end(held.number) if running else Stats()
        tokens = held.answer.tokens
        self.observer.ended(outcome, held.order, tokens, stats)
        if outcome in ("stop", "length"):
            self._deliver(held, Piece(text, tokens, outcome, stats))
        else:
            self._deliver(held, Failure(outcome, text))

    def _deliver(self, held: _Held, what: Piece | Failure) -> None:
        try:
            held.order.deliver(what)
        except Exception:  # who asked is gone
            LOG.exception("an answer could not be delivered")

    def _failed(self) -> None:
        """The engine raised: its requests are over, and their rows are begun anew."""
        LOG.exception("the engine failed")
        self._failures += 1
        failed, self._running = self._running, {}
        self._rows = Rows(self.model.engine, self._pace)
        for held in failed.values():
            self.observer.ended("engine", held.order, held.answer.tokens, Stats())
            self._deliver(held, Failure("engine"))
