"""The routes: OpenAI's API over a scheduler."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle
from forerun.runtime.chat import Messages, encode_prompt, encode_text
from forerun.runtime.engine import Request
from forerun.runtime.model import continuing
from forerun.runtime.serve_auth import ApiKeys
from forerun.runtime.serve_errors import ServeError, invalid
from forerun.runtime.serve_guard import Guard
from forerun.runtime.serve_log import Capture
from forerun.runtime.serve_metrics import Metrics
from forerun.runtime.serve_pending import Pending, Texts, unless_gone
from forerun.runtime.serve_refusals import no_route, not_valid, refused
from forerun.runtime.serve_replies import ErrorReply, ModelCard, ModelList, Reply, Shape, usage
from forerun.runtime.serve_scheduler import Scheduler
from forerun.runtime.serve_schema import Asked, ChatRequest, CompletionRequest
from forerun.runtime.serve_stream import Stream, facts_of

Prompt = TypeVar("Prompt", str, Messages)
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
        Guard,
        keys=service.keys,
        max_body=service.max_body,
        counted=service.metrics.request,
    )
    app.add_exception_handler(ServeError, refused)
    app.add_exception_handler(RequestValidationError, not_valid)
    app.add_exception_handler(HTTPException, no_route)
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
        prompts = [await self._chat_ids(messages)]
        return await self._answer(asked, prompts, asked.room(), http, chat=True)

    async def completions(self, asked: CompletionRequest, http: HttpRequest) -> Response:
        """Goes on with one or more texts."""
        self._check(asked)
        given = asked.prompts()
        if len(given) * (asked.n or 1) > self._scheduler.most:
            raise invalid("more prompts than this server holds at a time: send fewer", "prompt")
        prompts = [await self._text_ids(prompt) for prompt in given]
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
            stream = Stream(pending, shape, read, bool(options and options.include_usage))
            return await stream.response(http)
        try:
            texts = await unless_gone(http, Texts.of(pending))
        finally:
            pending.cancel()
        found = usage(read, sum(pending.tokens), pending.stats)
        http.state.facts |= facts_of(pending)
        finishes = [finish or "length" for finish in pending.finish]
        reply = shape.whole(list(zip(texts.joined(), finishes, strict=True)), found)
        return Response(reply.json_text(), media_type="application/json")

    def _requests(self, asked: Asked, prompts: Sequence[list[int]], room: int) -> list[Request]:
        """One for each answer: the answers to one prompt differ by their seeds."""
        vocabulary = self._bundle.manifest.target.vocab_size
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        params = [asked.params(seed + index, vocabulary) for index in range(asked.n or 1)]
        return [continuing(prompt, room, one) for prompt in prompts for one in params]

    async def _chat_ids(self, messages: Messages) -> list[int]:
        if self._bundle.chat_template is None:
            raise invalid("this model has no chat template: use /v1/completions", "messages")
        return await self._encoded(encode_prompt, messages, "messages")

    async def _text_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._encoded(encode_text, prompt, "prompt")
        if max(prompt) >= self._bundle.manifest.target.vocab_size:
            raise invalid(f"token id {max(prompt)} is beyond the vocabulary", "prompt")
        return self._fitting(prompt, "prompt")

    async def _encoded(
        self, encode: Callable[[Bundle, Prompt], list[int]], prompt: Prompt, param: str
    ) -> list[int]:
        """A prompt's ids, computed where they hold up nobody else; captured if that is asked."""

        def read() -> list[int]:
            ids = self._fitting(encode(self._bundle, prompt), param)
            if self._service.capture is not None:
                self._service.capture.write(prompt)
            return ids

        try:
            return await to_thread.run_sync(read, limiter=self._service.readers)
        except ForerunError as error:
            raise invalid(str(error), param) from None

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        if len(ids) > self._service.max_prompt:
            raise invalid(
                f"the prompt has {len(ids)} tokens; this server takes {self._service.max_prompt}",
                param,
                "context_length_exceeded",
            )
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
