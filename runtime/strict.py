"""JSON read strictly into frozen dataclasses: every field there, of its type, and none besides."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from forerun.errors import ForerunError


def parse(text: str) -> Any:
    """JSON, without NaN and without a key twice in one object; raises ForerunError."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ForerunError(f"not JSON: {error}") from None


def decode(kind: Any, value: Any, at: str = "") -> Any:
    """`value`, as parsed from JSON, checked against the annotation `kind`; `at` is its field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        # By exact type, so that a bool is no int and an int stays one where a float would do.
        if any(type(value) is option for option in arguments):
            return value
        if len(arguments) == 2 and type(None) in arguments:
            return decode(arguments[0], value, at)
    elif origin is tuple and isinstance(value, list):
        return tuple(decode(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: decode(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    elif is_dataclass(kind) and isinstance(value, dict):
        return _decode_fields(kind, value, at)
    elif type(value) is kind:
        return value
    raise ForerunError(f"{at or 'the whole'}: expected {_name(kind)}, found {_brief(value)}")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _decode_fields(kind: Any, value: dict[str, Any], at: str) -> Any:
    prefix = f"{at}." if at else ""
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    for name in names:
        if name not in value:
            raise ForerunError(f"{prefix}{name}: missing")
    for name in value:
        if name not in names:
            raise ForerunError(f"{prefix}{_brief(name)}: unknown field")
    decoded = {name: decode(hints[name], value[name], f"{prefix}{name}") for name in names}
    try:
        return kind(**decoded)
    except ForerunError as error:
        raise ForerunError(f"{prefix}{error}" if at else str(error)) from None


def _name(kind: Any) -> str:
    if is_dataclass(kind) or get_origin(kind) is dict:
        return "an object"
    return "a list" if get_origin(kind) is tuple else getattr(kind, "__name__", str(kind))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
