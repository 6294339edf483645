"""A function call to be made: what function-calling prompts are written from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A question and the functions that may answer it: (name, arguments) each."""

    category: str
    question: str
    functions: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.functions)
