"""Between the engine's thread and the event loop: the answers to one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from forerun.runtime.engine import Request
from forerun.runtime.loop import FinishReason, Stats
from forerun.runtime.serve_errors import FAILURES, ServeError, draining, queue_is_full
from forerun.runtime.serve_orders import Closing, Failure, Order, Piece, QueueFull
from forerun.runtime.serve_scheduler import Scheduler

RETRY_SECONDS = 2
Result = TypeVar("Result")


class Pending:
    """The answers to some requests of the engine, as they come."""

    def __init__(
        self, scheduler: Scheduler, requests: Sequence[Request], stop: tuple[str, ...]
    ) -> None:
        """Raises ServeError where the scheduler doesn't take them."""
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece | Failure]] = asyncio.Queue()
        self.tokens, self.stats = [0] * len(requests), Stats()
        self.finish: list[FinishReason | None] = [None] * len(requests)
        orders = [self._order(index, request, stop) for index, request in enumerate(requests)]
        try:
            self._numbers = scheduler.submit(orders)
        except QueueFull:
            raise queue_is_full(RETRY_SECONDS) from None
        except Closing:
            raise draining(RETRY_SECONDS) from None

    async def next(self) -> tuple[int, Piece] | None:
        """The next piece of any answer, and which; None once all are complete.

        Raises ServeError where one of them failed.
        """
        if None not in self.finish:
            return None
        index, piece = await self._queue.get()
        if isinstance(piece, Failure):
            # A new one each time: tracebacks gather on an exception that is raised again.
            raise replace(FAILURES.get(piece.why, FAILURES["engine"]))
        self.tokens[index] = piece.tokens
        if piece.finish is not None:
            self.finish[index] = piece.finish
            self.stats += piece.stats
        return index, piece

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._scheduler.cancel(self._numbers)

    def _order(self, index: int, request: Request, stop: tuple[str, ...]) -> Order:
        def deliver(piece: Piece | Failure) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

        return Order(request, stop, deliver)


@dataclass
class Texts:
    """Answers put together."""

    parts: list[list[str]] = field(default_factory=list)

    @classmethod
    async def of(cls, pending: Pending) -> Texts:
        """All that comes."""
        texts = cls([[] for _ in pending.tokens])
        while (found := await pending.next()) is not None:
            index, piece = found
            texts.parts[index].append(piece.text)
        return texts

    def joined(self) -> list[str]:
        """The whole answers."""
        return ["".join(parts) for parts in self.parts]


async def unless_gone(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """What `work` gives, unless the client hangs up before: ServeError then, for nobody to read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ServeError(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
