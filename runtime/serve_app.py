"""The routes: OpenAI's API over a scheduler."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import CapacityLimiter, to_thread

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.chat import Messages, encode_prompt, encode_text
from forerun.runtime.engine import Request
from forerun.runtime.model import continuing
from forerun.runtime.serve_auth import ApiKeys
from forerun.runtime.serve_errors import SERVER, ServeError, invalid
from forerun.runtime.serve_guard import Guard
from forerun.runtime.serve_log import Capture
from forerun.runtime.serve_metrics import Metrics
from forerun.runtime.serve_pending import Pending, Texts, unless_gone
from forerun.runtime.serve_replies import ErrorReply, ModelCard, ModelList, Reply, Shape, usage
from forerun.runtime.serve_scheduler import Scheduler
from forerun.runtime.serve_schema import Asked, ChatRequest, CompletionRequest

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ImportError as error:
    raise MissingDependencyError("fastapi", "serve", "forerun serve") from error

READERS = 2
"""Prompts that are rendered and tokenised at a time: that needs a core each."""
UNLIMITED = 1 << 31
"""New tokens where the client names no number: the context ends the answer."""


@dataclass(frozen=True)
class Service:
    """What the routes work with."""

    name: str
    """The model's, as clients ask for it."""
    scheduler: Scheduler
    metrics: Metrics
    keys: ApiKeys
    max_prompt: int
    """Tokens of a prompt."""
    max_body: int = 1 << 20
    """Bytes of a request."""
    capture: Capture | None = None
    created: int = 0
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(READERS))

    @property
    def fingerprint(self) -> str:
        """Changes when the bundle does."""
        return f"fp_{self.scheduler.model.bundle.manifest.recipe[:12]}"


def create_app(service: Service) -> FastAPI:
    """The ASGI application. Its scheduler is to be started, and closed, by the caller."""
    errors: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorReply} for code in (400, 401, 404, 413, 415, 429, 500, 503, 504)
    }
    app = FastAPI(title="forerun", docs_url=None, redoc_url=None, responses=errors)
    app.add_middleware(
        Guard,  # type: ignore[arg-type]
        keys=service.keys,
        max_body=service.max_body,
        counted=service.metrics.request,
    )
    app.add_exception_handler(ServeError, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _no_route)
    routes = Routes(service)
    post, get = app.post, app.get
    post("/v1/chat/completions", response_model=Reply)(routes.chat)
    post("/v1/completions", response_model=Reply)(routes.completions)
    get("/v1/models", response_model=ModelList)(routes.models)
    get("/v1/models/{model:path}", response_model=ModelCard)(routes.model)
    for path in ("/health", "/health/ready"):
        get(path)(routes.ready)
    get("/health/live")(routes.live)
    get("/metrics")(routes.metrics)
    return app


class Routes:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service, self._scheduler = service, service.scheduler
        self._bundle = self._scheduler.model.bundle

    async def chat(self, asked: ChatRequest, http: HttpRequest) -> Response:
        """Answers chat messages."""
        self._check(asked)
        messages = [message.turn() for message in asked.messages]
        prompts = [await self._encoded(messages, "messages")]
        return await self._answer(asked, prompts, asked.room(), http, chat=True)

    async def completions(self, asked: CompletionRequest, http: HttpRequest) -> Response:
        """Goes on with one or more texts."""
        self._check(asked)
        given = asked.prompts()
        if len(given) * (asked.n or 1) > self._scheduler.most:
            raise invalid("more prompts than this server holds at a time: send fewer", "prompt")
        prompts = [await self._encoded(prompt, "prompt") for prompt in given]
        return await self._answer(asked, prompts, asked.room(), http, chat=False)

    async def models(self) -> ModelList:
        """The one model that is served."""
        return ModelList(data=[self._card()])

    async def model(self, model: str) -> ModelCard:
        """The same by its name."""
        self._check_name(model)
        return self._card()

    async def ready(self) -> Response:
        """Whether requests are welcome."""
        ready = self._scheduler.healthy and not self._scheduler.draining
        word = "ok" if ready else "draining" if self._scheduler.draining else "failing"
        return JSONResponse({"status": word}, 200 if ready else 503)

    async def live(self) -> Response:
        """Whether the process had better be started again."""
        live = self._scheduler.healthy
        return JSONResponse({"status": "ok" if live else "failing"}, 200 if live else 503)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    # --- answering --------------------------------------------------------------------------

    async def _answer(
        self,
        asked: Asked,
        prompts: Sequence[list[int]],
        room: int | None,
        http: HttpRequest,
        chat: bool,
    ) -> Response:
        requests = self._requests(asked, prompts, room or UNLIMITED)
        pending = Pending(self._scheduler, requests, asked.stops)
        shape = Shape.new(self._service.name, self._service.fingerprint, chat)
        read = sum(map(len, prompts))
        http.state.facts |= {"id": shape.id, "stream": asked.stream, "prompt_tokens": read}
        if asked.stream:
            options = asked.stream_options
            stream = _Stream(pending, shape, read, bool(options and options.include_usage))
            return await stream.response(http)
        try:
            texts = await unless_gone(http, Texts.of(pending))
        finally:
            pending.cancel()
        found = usage(read, sum(pending.tokens), pending.stats)
        http.state.facts |= _facts(pending)
        finishes = [finish or "length" for finish in pending.finish]
        reply = shape.whole(list(zip(texts.joined(), finishes, strict=True)), found)
        return Response(reply.json_text(), media_type="application/json")

    def _requests(self, asked: Asked, prompts: Sequence[list[int]], room: int) -> list[Request]:
        """One for each answer: the answers to one prompt differ by their seeds."""
        vocabulary = self._bundle.manifest.target.vocab_size
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        params = [asked.params(seed + index, vocabulary) for index in range(asked.n or 1)]
        return [continuing(prompt, room, one) for prompt in prompts for one in params]

    async def _encoded(self, prompt: str | list[int] | Messages, param: str) -> list[int]:
        """A prompt's ids, computed where they hold up nobody else."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            ids = self._checked_ids([*map(int, prompt)])  # type: ignore[call-overload]
        else:
            try:
                ids = await to_thread.run_sync(self._encode, prompt, limiter=self._service.readers)
            except ForerunError as error:
                raise invalid(str(error), param) from None
        if len(ids) > self._service.max_prompt:
            raise invalid(
                f"the prompt has {len(ids)} tokens; this server takes {self._service.max_prompt}",
                param,
                "context_length_exceeded",
            )
        return ids

    def _encode(self, prompt: str | Messages) -> list[int]:
        """Chat through the template, a text as it is; captured where that is asked for."""
        is_text = isinstance(prompt, str)
        if not is_text and self._bundle.chat_template is None:
            raise ForerunError("this model has no chat template: use /v1/completions")
        ids = encode_text(self._bundle, prompt) if is_text else encode_prompt(self._bundle, prompt)
        if self._service.capture is not None and len(ids) <= self._service.max_prompt:
            self._service.capture.write(prompt)
        return ids

    def _checked_ids(self, ids: list[int]) -> list[int]:
        if max(ids) >= self._bundle.manifest.target.vocab_size:
            raise invalid(f"token id {max(ids)} is beyond the vocabulary", "prompt")
        return ids

    def _check(self, asked: Asked) -> None:
        self._check_name(asked.model)
        asked.check()
        if (asked.n or 1) > self._scheduler.most:
            raise invalid("n is more than this server holds at a time: ask for fewer", "n")

    def _check_name(self, name: str) -> None:
        if name != self._service.name:
            raise ServeError(
                404,
                f"there is no model {name!r} here: this server has {self._service.name!r}",
                param="model",
                code="model_not_found",
            )

    def _card(self) -> ModelCard:
        return ModelCard(id=self._service.name, created=self._service.created)


class _Stream:
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
        http.state.facts |= _facts(pending)
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


def _facts(pending: Pending) -> dict[str, Any]:
    """For the log."""
    stats = pending.stats
    finish = ",".join(str(finish) for finish in pending.finish)
    tau = round(stats.tau, 4)
    return {"completion_tokens": sum(pending.tokens), "finish": finish, "tau": tau}


# --- what is wrong --------------------------------------------------------------------------


async def _refused(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    http.state.facts["error"] = error.code
    return JSONResponse(_ascii(error.body()), error.status, error.headers)


async def _not_valid(http: HttpRequest, error: Exception) -> Response:
    """What pydantic found, without what the client sent: that may be anything."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return await _refused(http, invalid("the body is not JSON"))
    if first["type"] == "extra_forbidden":
        message = f"unrecognized request argument supplied: {'.'.join(where)}"
        return await _refused(http, invalid(message[:300], where[0][:100], "unknown_parameter"))
    message = f"{'.'.join(where) or 'the body'}: {first['msg']}"
    return await _refused(http, invalid(message[:300], where[0][:100] if where else None))


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = SERVER if error.status_code >= 500 else "invalid_request_error"
    headers = dict(error.headers or {})
    path = http.url.path[:100]
    message = {404: f"there is no {path}", 405: f"{path} takes another method"}.get(
        error.status_code, "the body is not JSON"
    )
    return await _refused(http, ServeError(error.status_code, message, kind, headers=headers))


def _ascii(body: dict[str, Any]) -> dict[str, Any]:
    """Half surrogate pairs, which a client may send, replaced: they can't be encoded."""
    cleaned: dict[str, Any] = json.loads(
        json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    )
    return cleaned
