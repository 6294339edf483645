"""What goes to a worker process and what comes back, as JSON, and the clock that all share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What one worker process is to answer, and with what."""

    variant: str
    """A name in the registry."""
    model: str
    """File or folder that the engine loads."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, the same for every engine."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own settings."""

    @property
    def slots(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(map(len, self.prompts)) + self.max_new_tokens


@dataclass(frozen=True)
class Answer:
    """One prompt's answer and what it took."""

    tokens: tuple[int, ...]
    """With the stop token that ended it."""
    first: int
    """How many of `tokens` the prefill gave."""
    prefill_seconds: float
    """From the request to its first token."""
    seconds: float
    """From the first token to the last."""
    steps: int
    """How often the target was run after the prefill."""

    @property
    def decoded(self) -> int:
        """Tokens after the prefill's."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Outcome:
    """What a worker process sends back."""

    answers: tuple[Answer, ...]
    versions: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Takes one answer's tokens as they come, cuts it where it ends, and keeps the time.

    The same for every engine, so that all are measured alike. The clock starts with the object.
    """

    def __init__(self, max_new_tokens: int, stop_ids: Collection[int]) -> None:
        self.max_new_tokens, self.stop_ids = max_new_tokens, frozenset(stop_ids)
        self.done = False
        self.steps: int | None = None
        """Set by an engine that hands over a step's tokens one by one."""
        self._tokens: list[int] = []
        self._first, self._pushes = 0, 0
        self._start = self._begin = self._end = time.perf_counter()

    def push(self, tokens: Sequence[int]) -> bool:
        """Takes what one step gave, the prefill first; True once the answer is complete."""
        now = time.perf_counter()
        if self.done or not tokens:
            return self.done
        for token in tokens[: self.max_new_tokens - len(self._tokens)]:
            self._tokens.append(token)
            if token in self.stop_ids:
                self.done = True
                break
        self.done |= len(self._tokens) >= self.max_new_tokens
        self._end = now
        if self._first:
            self._pushes += 1
        else:
            self._first, self._begin = len(self._tokens), now
        return self.done

    def answer(self) -> Answer:
        """What came."""
        return Answer(
            tuple(self._tokens),
            self._first,
            self._begin - self._start,
            self._end - self._begin,
            self._pushes if self.steps is None else self.steps,
        )


Generate = Callable[[Sequence[int], Recorder], None]
"""Answers a prompt of token ids into a recorder, and returns once that is done."""


def write_json(path: Path, value: Job | Outcome) -> None:
    """`value` in a file, seen only when complete."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(asdict(value)), encoding="utf-8")
    part.replace(path)


def read_job(path: Path) -> Job:
    """What `write_json` wrote of a job."""
    data = json.loads(path.read_text(encoding="utf-8"))
    prompts = tuple(map(tuple, data.pop("prompts")))
    return Job(prompts=prompts, stop_ids=tuple(data.pop("stop_ids")), **data)


def read_outcome(path: Path) -> Outcome:
    """What `write_json` wrote of an outcome."""
    data = json.loads(path.read_text(encoding="utf-8"))
    answers = [Answer(tokens=tuple(part.pop("tokens")), **part) for part in data["answers"]]
    return Outcome(tuple(answers), data["versions"])
