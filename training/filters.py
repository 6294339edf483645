"""What prompts have in common: which are the same, which are held out, which others forbid."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.runtime.prompts import Prompt

HELD_OUT_PERCENT = 5
FUNCTION = re.compile(r"^Function:\s*([^\s(]+)\(", re.MULTILINE)
"""A function that a message names, as our own function-calling prompts write it."""
SCHEMA = frozenset(("parameters", "arguments", "input_schema", "inputSchema"))
"""A JSON object with a name and one of these is a function's schema, or a call of it."""
SAME_QUESTION, SAME_FUNCTION = "same_question", "same_function"


@dataclass(frozen=True)
class Excluded:
    """Questions (normalised) and names of functions that no training prompt may contain."""

    questions: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> Excluded:
        """What `prompts` ask: their last message and all further turns.

        Solved examples in front of it are not asked: training prompts may show the same ones.
        """
        held: list[Prompt] = [*prompts]
        questions = {_question(text) for prompt in held for text in _asked(prompt)}
        functions = {
            name
            for prompt in held
            for said in (*_asked(prompt), *prompt.tools)
            for name in functions_of(said)
        }
        return cls(frozenset(questions - {""}), frozenset(functions))

    def why(self, questions: Iterable[str], functions: Iterable[str]) -> str | None:
        """The reason to drop a prompt of these normalised questions and functions, if any."""
        if self.questions.intersection(questions):
            return SAME_QUESTION
        return SAME_FUNCTION if self.functions.intersection(functions) else None

    def why_not(self, prompt: Prompt) -> str | None:
        """The reason to drop `prompt`: anything that it holds counts, solved examples too."""
        said = [*(prompt.messages or ()), *prompt.tools]
        asked = [*_texts(prompt), *prompt.later]
        functions = (name for value in (*said, *asked) for name in functions_of(value))
        return self.why(map(_question, asked), functions)


def distinct(prompts: Iterable[tuple[int, Prompt]]) -> Iterator[tuple[int, Prompt]]:
    """The first of each group of prompts that differ in case and white space alone."""
    seen: set[str] = set()
    for index, prompt in prompts:
        key = conversation(prompt)
        if key not in seen:
            seen.add(key)
            yield index, prompt


def allowed(
    prompts: Iterable[tuple[int, Prompt]], excluded: Excluded, dropped: Counter[str]
) -> Iterator[tuple[int, Prompt]]:
    """Those that nothing excludes; counts the others by reason."""
    for index, prompt in prompts:
        reason = excluded.why_not(prompt)
        if reason is None:
            yield index, prompt
        else:
            dropped[reason] += 1


def conversation(prompt: Prompt) -> str:
    """Everything that a prompt says, case and white space aside, as a key."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return json.dumps(_even([messages, prompt.later, prompt.tools]), sort_keys=True)


def is_held_out(prompt: Prompt) -> bool:
    """Whether a prompt belongs to the held-out part: by its last message, whatever precedes it.

    Of a prompt of several turns the first one decides, for all of them.
    """
    text = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    digest = hashlib.sha256(_plain(str(text)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def normalised(question: str) -> str:
    """A question's words in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", question.lower()))


def functions_of(value: Any) -> Iterator[str]:
    """The names of functions in a text (`Function: name(` or JSON inside it), or in JSON."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield from FUNCTION.findall(part)
            left += _json_in(part)
        elif isinstance(part, Mapping):
            name = part.get("name")
            if isinstance(name, str) and SCHEMA & part.keys():
                yield name
            left += part.values()
        elif isinstance(part, Sequence):
            left += part


def _json_in(text: str) -> Iterator[Any]:
    """The JSON objects that stand in a text."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        end = at + 1
        try:
            value, end = decoder.raw_decode(text, at)
            yield value
        except (ValueError, RecursionError):
            pass
        at = text.find("{", end)


def _texts(prompt: Prompt) -> Iterator[str]:
    """What the user says before the first answer."""
    if prompt.text is not None:
        yield prompt.text
    for message in prompt.messages or ():
        if message["role"] == "user":
            yield _text(message)


def _asked(prompt: Prompt) -> tuple[str, ...]:
    """What the target is to answer."""
    last = prompt.text if prompt.messages is None else _text(prompt.messages[-1])
    return (str(last), *prompt.later)


def _text(message: Mapping[str, Any]) -> str:
    """A message's content as text; of parts only those that are text."""
    content = message["content"]
    if isinstance(content, list):
        found = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(text for text in found if isinstance(text, str))
    return str(content)


def _question(text: str) -> str:
    """A message without the functions in front of it, normalised; symbols alone stay as they are"""
    lines = [line for line in text.splitlines() if not FUNCTION.match(line)]
    question = "\n".join(lines)
    return normalised(question) or _plain(question)


def _even(value: Any) -> Any:
    """JSON whose texts differ in more than case and white space."""
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, Mapping):
        return {key: _even(part) for key, part in value.items()}
    return [_even(part) for part in value] if isinstance(value, Sequence) else value


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
