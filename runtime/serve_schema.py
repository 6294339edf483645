"""What clients send: OpenAI's requests, as far as a bundle can answer them.

A field that OpenAI doesn't know is refused, as OpenAI does. One that it knows and that changes no
token here is ignored. One that would change the answer and isn't offered is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forerun.runtime.sampling import SamplingParams
from forerun.runtime.serve_errors import invalid

COLDEST = 1e-5
"""Below this a temperature leaves the likeliest token alone, and overflows float32."""
SEEDS = 1 << 64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class Strict(BaseModel):
    """No field but those that are named."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(Strict):
    """What both kinds of completion may be asked."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: (
        Annotated[int, Field(ge=0, description="Of the likeliest tokens so many; not OpenAI's.")]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=SEEDS)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None

    # Ignored: they change no token.
    user: str | None = None

    # Known, and not offered unless they ask for what is done anyway.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def params(self, seed: int, vocabulary: int) -> SamplingParams:
        """How the tokens of one answer are chosen."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature < COLDEST or self.top_p == 0:  # either leaves the likeliest token alone
            return SamplingParams()
        return SamplingParams(
            temperature,
            min(self.top_k or 0, vocabulary),
            1.0 if self.top_p is None else self.top_p,
            seed % SEEDS,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """Raises ServeError for what a bundle can't do."""
        for name, allowed in UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and not allowed(value):
                message = f"{name} is not supported by this server with that value: leave it out"
                raise invalid(message, name, "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is for stream: true", "stream_options")


class Part(Strict):
    """A piece of a message's content."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class Message(BaseModel):
    """One turn of a chat; what else it holds is the chat template's to read."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None

    def turn(self) -> dict[str, Any]:
        """As chat templates take it: content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or part.refusal or "" for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content or "", **(self.model_extra or {})}


class ChatRequest(Asked):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None

    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    def check(self) -> None:
        """As for all requests; and one bound is enough."""
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise invalid(
                "max_tokens and max_completion_tokens are the same: give one", "max_tokens"
            )

    def room(self) -> int | None:
        """New tokens; None: as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Asked):
    """`POST /v1/completions`: the target goes on with a raw text."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )

    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """As for all requests; `best_of` would have to choose."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of is not supported: leave it out", "best_of")

    def room(self) -> int | None:
        """New tokens: 16 where the client doesn't say, as at OpenAI."""
        return self.max_tokens or 16

    def prompts(self) -> list[str | list[int]]:
        """One or more texts, or texts as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return [*self.prompt]


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "logit_bias": lambda value: not value,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "response_format": lambda value: value.get("type") == "text",
    "tools": lambda value: not value,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: not value,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": lambda value: False,
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: value == "medium",
    "web_search_options": lambda value: False,
    "echo": lambda value: value is False,
    "suffix": lambda value: not value,
}
"""Fields that would change the answer -> the values that change nothing."""
