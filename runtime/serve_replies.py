"""What clients are sent: OpenAI's answers, whole and in chunks, with what speculation did."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from forerun.runtime.loop import FinishReason, Stats


class Speculation(BaseModel):
    """How the answer was decoded: forerun's own part of `usage`."""

    steps: int
    """After the prompts were read; of all answers together."""
    tau: float
    """Tokens committed a step, the bonus token included."""
    accepted: int
    """Drafted tokens that were accepted."""


class Usage(BaseModel):
    """What the answer took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: Speculation


class Said(BaseModel):
    """A message, or what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class Choice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    message: Said | None = None
    delta: Said | None = None
    text: str | None = None
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None


class Reply(BaseModel):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | None = None

    def json_text(self) -> str:
        """As it is sent."""
        return self.model_dump_json(exclude_unset=True)


class ModelCard(BaseModel):
    """One of `/v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forerun"


class ModelList(BaseModel):
    """`/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorFacts(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """An answer that is no success."""

    error: ErrorFacts


@dataclass(frozen=True)
class Shape:
    """How the answers to one request are written."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool

    @classmethod
    def new(cls, model: str, fingerprint: str, chat: bool) -> Shape:
        """Of a request that just came."""
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return cls(name, int(time.time()), model, fingerprint, chat)

    def whole(self, texts: Sequence[tuple[str, FinishReason]], usage: Usage) -> Reply:
        """All answers at once."""
        choices = []
        for index, (text, finish) in enumerate(texts):
            said = {"message": Said(role="assistant", content=text, refusal=None)}
            choices.append(self._choice(index, finish, said if self.chat else {"text": text}))
        return self._reply("chat.completion", choices, usage=usage)

    def begin(self, index: int) -> Reply | None:
        """What comes before an answer's first text."""
        if not self.chat:
            return None
        said = {"delta": Said(role="assistant", content="", refusal=None)}
        return self._reply("chat.completion.chunk", [self._choice(index, None, said)])

    def text(self, index: int, text: str) -> Reply:
        """What is new of an answer."""
        said: dict[str, Any] = {"delta": Said(content=text)} if self.chat else {"text": text}
        return self._reply("chat.completion.chunk", [self._choice(index, None, said)])

    def end(self, index: int, finish: FinishReason) -> Reply:
        """An answer is complete."""
        said: dict[str, Any] = {"delta": Said()} if self.chat else {"text": ""}
        return self._reply("chat.completion.chunk", [self._choice(index, finish, said)])

    def usage(self, usage: Usage) -> Reply:
        """What all answers took."""
        return self._reply("chat.completion.chunk", [], usage=usage)

    def _choice(self, index: int, finish: FinishReason | None, said: dict[str, Any]) -> Choice:
        return Choice(index=index, logprobs=None, finish_reason=finish, **said)  # type: ignore[arg-type]

    def _reply(self, kind: str, choices: list[Choice], **more: Any) -> Reply:
        return Reply(
            id=self.id,
            object=kind if self.chat else "text_completion",  # type: ignore[arg-type]
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            **more,
        )


def usage(prompt_tokens: int, tokens: int, stats: Stats) -> Usage:
    """What answers took that were decoded with `stats` all together."""
    accepted = sum(extra * count for extra, count in enumerate(stats.committed))
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        total_tokens=prompt_tokens + tokens,
        speculation=Speculation(steps=stats.steps, tau=round(stats.tau, 4), accepted=accepted),
    )
