"""Answers as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from forerun.runtime.serve_errors import ServeError
from forerun.runtime.serve_pending import Pending, unless_gone
from forerun.runtime.serve_replies import Reply, Shape, usage


class Stream:
    """Answers as server-sent events."""

    def __init__(self, pending: Pending, shape: Shape, read: int, with_usage: bool) -> None:
        self._pending, self._shape = pending, shape
        self._read, self._with_usage = read, with_usage

    async def response(self, http: HttpRequest) -> Response:
        """Once there is a first piece: what goes wrong before that has its own status."""
        try:
            first = await unless_gone(http, self._pending.next())
        except BaseException:
            self._pending.cancel()
            raise
        events = self._events(first, http)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return _Streaming(events, self._pending, media_type="text/event-stream", headers=headers)

    async def _events(self, found: Any, http: HttpRequest) -> AsyncIterator[str]:
        pending, shape = self._pending, self._shape
        begun: set[int] = set()
        try:
            while found is not None:
                index, piece = found
                if index not in begun:
                    begun.add(index)
                    if (reply := shape.begin(index)) is not None:
                        yield _event(reply)
                if piece.text:
                    yield _event(shape.text(index, piece.text))
                if piece.finish is not None:
                    yield _event(shape.end(index, piece.finish))
                found = await pending.next()
        except ServeError as error:
            http.state.facts["error"] = error.code
            yield f"data: {json.dumps(error.body())}\n\n"
            return
        if self._with_usage:
            yield _event(shape.usage(usage(self._read, sum(pending.tokens), pending.stats)))
        http.state.facts |= facts_of(pending)
        yield "data: [DONE]\n\n"


class _Streaming(StreamingResponse):
    """Cancels what is not waited for any more, however the stream ends."""

    def __init__(self, events: AsyncIterator[str], pending: Pending, **more: Any) -> None:
        super().__init__(events, **more)
        self._pending = pending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pending.cancel()


def _event(reply: Reply) -> str:
    return f"data: {reply.json_text()}\n\n"


def facts_of(pending: Pending) -> dict[str, Any]:
    """For the log."""
    stats = pending.stats
    finish = ",".join(str(finish) for finish in pending.finish)
    tau = round(stats.tau, 4)
    return {"completion_tokens": sum(pending.tokens), "finish": finish, "tau": tau}
