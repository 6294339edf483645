"""Prompts -> token ids: a checkpoint's chat template, rendered in a sandbox with bounded work."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle

MAX_STEPS = 1_000_000
"""Loop turns and calls that one rendering may take: nested loops pass the sandbox's own limit."""

MAX_SIZE = 1 << 24
"""Longest string or list, in items, and number, in bits, that one * or ** may make."""

Messages = Sequence[Mapping[str, Any]]


def encode_prompt(bundle: Bundle, prompt: str | Messages) -> list[int]:
    """The ids of a prompt: through the chat template where there is one, as raw text elsewhere.

    A plain string becomes one user turn of the template. Raw text starts with the target's
    beginning-of-text token if it asks for one and the text doesn't have it already. Raises
    ForerunError for messages without a template, and for a prompt of no tokens.
    """
    target = bundle.manifest.target
    if bundle.chat_template is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = render_chat(bundle.chat_template, messages, target.bos_token, target.eos_token)
        return _encode(bundle, text, None)
    if isinstance(prompt, str):
        return encode_text(bundle, prompt)
    raise ForerunError(f"{bundle.path}: no chat template in the bundle: give a plain prompt")


def encode_text(bundle: Bundle, text: str) -> list[int]:
    """The ids of a raw text that the target is to go on with, whether or not there is a template.

    Raises ForerunError for a text of no tokens.
    """
    target = bundle.manifest.target
    return _encode(bundle, text, target.bos_token if target.add_bos else None)


def _encode(bundle: Bundle, text: str, bos: str | None) -> list[int]:
    try:
        ids: list[int] = bundle.tokenizer.encode(text, add_special_tokens=False).ids
    except (UnicodeError, TypeError):
        raise ForerunError("the prompt holds half a surrogate pair: give valid Unicode") from None
    if bos is not None:
        first = bundle.tokenizer.token_to_id(bos)
        if first is None:
            raise ForerunError(f"{bundle.path}: the tokenizer lacks the target's bos token {bos!r}")
        ids = ids if ids[:1] == [first] else [first, *ids]
    if not ids:
        raise ForerunError(
            "the prompt is empty, and this target starts a text with no token: say something"
        )
    return ids


def render_chat(
    template: str,
    messages: Messages,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt text for `messages`, as Hugging Face's `apply_chat_template` renders it.

    Raises ForerunError where the template is wrong, refuses the messages, or reaches for anything
    that a template has no business with.
    """
    environment = _Environment()
    # A missing token must be undefined rather than None, which would print as "None".
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    try:
        return environment.from_string(template).render(
            messages=list(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{name: token for name, token in tokens.items() if token is not None},
        )
    except TemplateSyntaxError as error:
        raise ForerunError(f"chat template, line {error.lineno}: {error.message}") from None
    except Exception as error:  # a template can raise whatever the values' own methods raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ForerunError(f"the chat template fails on these messages: {reason}") from None


class _Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for one rendering, which counts its loop turns and calls."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters[_COUNTED] = self._counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]  # any amount of work in one call
        self._steps = 0

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Jinja's hook for every call in a template."""
        self._step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Jinja's hook for the intercepted operators: refuses what would fill the memory."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        else:
            lengths = [len(side) for side in (left, right) if isinstance(side, Sized)]
            times = [side for side in (left, right) if isinstance(side, int)]
            size = math.prod(lengths + times) if lengths else 0
        if size > MAX_SIZE:
            raise SecurityError(f"{operator!r} would make a value of size {size}")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja's hook for a forbidden attribute: an error, where Jinja would print nothing."""
        raise SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )


_COUNTED = "forerun_counted"


class _Generation(Extension):
    """`{% generation %}`: marks what the model says, for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The body between the two tags, which keeps the variables that it sets to itself."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As JSON in plain text: Jinja's own filter would escape <, > and &."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
