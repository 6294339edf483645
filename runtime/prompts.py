"""Prompt files: JSON lines, each with `prompt`, or `messages` (chat), or `turns`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages, or plain text; exactly one of the two is set."""

    messages: tuple[dict[str, Any], ...] | None
    text: str | None
    category: str | None
    later: tuple[str, ...] = ()
    """What the user says after the first answer, the second, ...: synthesis answers these too."""
    tools: tuple[Any, ...] = ()
    """Functions offered to the target, as its chat template takes them (synthesis only)."""

    @property
    def content(self) -> str | tuple[dict[str, Any], ...]:
        """What `encode_prompt` takes."""
        if self.messages is not None:
            return self.messages
        assert self.text is not None
        return self.text


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file of JSON lines; blank lines are skipped.

    Of `turns` the first becomes a user message, the others are `later`. Raises ForerunError naming
    the file and the line for a line that is none of these, and for a file without prompts.
    """
    if limit is not None and limit < 1:
        raise ForerunError(f"limit is {limit}: read at least one prompt")
    prompts: list[Prompt] = []
    try:
        with Path(path).open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    prompts.append(_parse(line, f"{path}, line {number}"))
                if len(prompts) == limit:
                    break
    except OSError as error:
        raise ForerunError(f"{path}: can't read the prompts: {error.strerror}") from None
    if not prompts:
        raise ForerunError(f"{path}: no prompts in it: write one JSON object a line")
    return prompts


def _parse(line: bytes, where: str) -> Prompt:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ForerunError(f"{where}: not JSON: {error}") from None
    present = [key for key in _READERS if isinstance(data, dict) and key in data]
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise ForerunError(f"{where}: one of prompt, messages or turns is needed, found {found}")
    category = data.get("category")
    if not isinstance(category, str | None):
        raise ForerunError(f"{where}: category must be text")
    tools = data.get("tools") or []
    if not isinstance(tools, list):
        raise ForerunError(f"{where}: tools must be a list")
    messages, text, later = _READERS[present[0]](data[present[0]], where)
    return Prompt(messages, text, category or None, later, tuple(tools))


_Content = tuple[tuple[dict[str, Any], ...] | None, str | None, tuple[str, ...]]


def _from_prompt(value: Any, where: str) -> _Content:
    if not isinstance(value, str):
        raise ForerunError(f"{where}: prompt must be text")
    return None, value, ()


def _from_messages(value: Any, where: str) -> _Content:
    valid = isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item
        for item in value
    )
    if not valid or not value:
        raise ForerunError(f"{where}: messages must be a list of objects with role and content")
    return tuple(value), None, ()


def _from_turns(value: Any, where: str) -> _Content:
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not texts or not value:
        raise ForerunError(f"{where}: turns must be a list of texts, all of them the user's")
    return ({"role": "user", "content": value[0]},), None, tuple(value[1:])


_READERS: dict[str, Callable[[Any, str], _Content]] = {
    "prompt": _from_prompt,
    "messages": _from_messages,
    "turns": _from_turns,
}
