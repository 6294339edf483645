"""A drafter's form: all that the exported graph takes from it besides the content of its weights.

Two drafters of one form give the same graph, so one's weights may stand in the other's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from forerun.models.drafter import Drafter

WEIGHTS_ONLY = ("accuracy", "rope", "max_positions")
"""Attributes that only trees and the content of weights come from (rotary tables)."""


def form(drafter: Drafter) -> dict[str, str]:
    """The class and plain attributes of every module, the type and shape of every weight, by place.

    Whatever a drafter's class adds is in it, so that a constant is never forgotten.
    """
    facts: dict[str, str] = {}
    for place, module in drafter.named_modules():
        facts[place or "drafter"] = type(module).__name__
        facts |= {f"{place}.{name}".lstrip("."): text for name, text in _attributes(module)}
    for name, weight in drafter.state_dict().items():
        kind = str(weight.dtype).removeprefix("torch.")
        facts[name] = f"{kind} {list(weight.shape)}"
    return facts


def difference(found: dict[str, str], wanted: dict[str, str]) -> str | None:
    """The first place where two forms differ, in words; None where they are the same."""
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            return f"{name} is {found.get(name, 'absent')}, not {wanted.get(name, 'absent')}"
    return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            yield from _plain(name, value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if name.rpartition(".")[2] in WEIGHTS_ONLY:
        return
    if is_dataclass(value):
        for field in fields(value):
            yield from _plain(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, repr(value)
