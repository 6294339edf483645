"""What a client is told when something is wrong, in the shape that OpenAI's clients expect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INVALID, SERVER = "invalid_request_error", "server_error"


@dataclass(eq=False)
class ServeError(Exception):
    """An answer with an HTTP status that is no success."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    """The field of the request that is to blame."""
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """What is sent."""
        facts = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": facts}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ServeError:
    """The request can't be answered as it is."""
    return ServeError(400, message, param=param, code=code)


def queue_is_full(seconds: int) -> ServeError:
    """Too many requests wait already."""
    return ServeError(
        429,
        f"the queue is full: try again in {seconds} s",
        "rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(seconds)},
    )


def draining(seconds: int) -> ServeError:
    """The server is about to end."""
    return ServeError(
        503,
        "the server is shutting down: try again elsewhere, or later",
        SERVER,
        code="draining",
        headers={"retry-after": str(seconds)},
    )


FAILURES: dict[str, ServeError] = {
    "queue_timeout": ServeError(
        503,
        "no row became free in time: try again later",
        SERVER,
        code="queue_timeout",
        headers={"retry-after": "5"},
    ),
    "timeout": ServeError(
        504,
        "the answer took longer than this server allows: ask for fewer tokens",
        SERVER,
        code="timeout",
        headers={"x-should-retry": "false"},  # it would take as long again
    ),
    "closed": draining(5),
    "engine": ServeError(
        500, "the engine failed on this batch: try again", SERVER, code="engine_failed"
    ),
}
"""Why the scheduler gave up a request -> what its client is told."""
