"""Exceptions of the routes and of the framework -> answers in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from forerun.runtime.serve_errors import INVALID, SERVER, ServeError, invalid


async def refused(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    http.state.facts["error"] = error.code
    return JSONResponse(_ascii(error.body()), error.status, error.headers)


async def not_valid(http: HttpRequest, error: Exception) -> Response:
    """What pydantic found, without what the client sent: that may be anything."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return await refused(http, invalid("the body is not JSON"))
    if first["type"] == "extra_forbidden":
        message = f"unrecognized request argument supplied: {'.'.join(where)}"
        return await refused(http, invalid(message[:300], where[0][:100], "unknown_parameter"))
    message = f"{'.'.join(where) or 'the body'}: {first['msg']}"
    return await refused(http, invalid(message[:300], where[0][:100] if where else None))


async def no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = SERVER if error.status_code >= 500 else INVALID
    headers = dict(error.headers or {})
    path = http.url.path[:100]
    message = {404: f"there is no {path}", 405: f"{path} takes another method"}.get(
        error.status_code, "the body is not JSON"
    )
    return await refused(http, ServeError(error.status_code, message, kind, headers=headers))


def _ascii(body: dict[str, Any]) -> dict[str, Any]:
    """Half surrogate pairs, which a client may send, replaced: they can't be encoded."""
    cleaned: dict[str, Any] = json.loads(
        json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    )
    return cleaned
