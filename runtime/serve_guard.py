"""What every HTTP request passes first: its id, its key, its size; and a line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from forerun.runtime.serve_auth import ApiKeys
from forerun.runtime.serve_errors import SERVER, ServeError
from forerun.runtime.serve_log import LOG, say

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
BODY_SECONDS = 30.0
"""A body that takes longer to arrive is given up."""
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


class Guard:
    """ASGI middleware. `/v1` asks for a key; bodies are read here, up to `max_body` bytes."""

    def __init__(
        self, app: App, keys: ApiKeys, max_body: int, counted: Callable[[str, int], None]
    ) -> None:
        self._app, self._keys, self._max_body, self._counted = app, keys, max_body, counted

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._authorise(scope["path"], exchange)
            body = await self._body(exchange, receive)
            await self._app(scope, _replay(body, receive), exchange.send)
        except ServeError as error:
            await exchange.refuse(error)
        except Exception:  # a bug of ours: the client gets no part of it, the log gets all
            LOG.exception("a request failed")
            await exchange.refuse(ServeError(500, "the server failed on this request", SERVER))
        finally:
            self._counted(exchange.route, exchange.status)
            exchange.log()

    def _authorise(self, path: str, exchange: _Exchange) -> None:
        if path.startswith("/v1") and not self._keys.allow(exchange.header(b"authorization")):
            raise ServeError(
                401,
                "no valid API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, exchange: _Exchange, receive: Receive) -> bytes:
        """The request's body, refused as soon as it is too long."""
        length = exchange.header(b"content-length") or b""
        if length.isdigit() and int(length[:20]) > self._max_body:
            raise self._too_long()
        kind = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if exchange.method == "POST" and kind != b"application/json":
            raise ServeError(415, "send JSON, as content-type: application/json")
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ServeError(499, "the client has gone")
                    parts.append(message.get("body", b""))
                    size, more = size + len(parts[-1]), message.get("more_body", False)
                    if size > self._max_body:
                        raise self._too_long()
        except TimeoutError:
            raise ServeError(408, "the request's body did not arrive in time") from None
        return b"".join(parts)

    def _too_long(self) -> ServeError:
        message = f"the body is longer than {self._max_body} bytes, which this server takes"
        return ServeError(413, message, code="body_too_large", headers={"connection": "close"})


class _Exchange:
    """One request and its answer, for the log."""

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        self._headers = dict(scope["headers"])
        self._send, self._begin = send, time.perf_counter()
        self.method: str = scope["method"]
        self.route = next((route for route in ROUTES if scope["path"].startswith(route)), "other")
        given = self.header(b"x-request-id") or b""
        self.id = given if ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.facts: dict[str, Any] = scope.setdefault("state", {}).setdefault("facts", {})
        self.status = 499  # until something was sent
        self._started = False

    def header(self, name: bytes) -> bytes | None:
        found: bytes | None = self._headers.get(name)
        return found

    async def send(self, message: Message) -> None:
        """Send on, with the request's id."""
        if message["type"] == "http.response.start":
            self._started, self.status = True, message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id)]
        await self._send(message)

    async def refuse(self, error: ServeError) -> None:
        """Answer with what is wrong, if nothing was answered yet."""
        if self._started:
            return
        content = json.dumps(error.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **error.headers,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": content})

    def log(self) -> None:
        """Probes are not worth a line."""
        if self.route in ("/health", "/metrics"):
            return
        say(
            "request",
            logging.ERROR if self.status >= 500 else logging.INFO,
            request_id=self.id.decode(),
            method=self.method,
            route=self.route,
            status=self.status,
            seconds=round(time.perf_counter() - self._begin, 4),
            **self.facts,
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body that was read, and then what else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
