"""What `forerun tune` found out for a machine, in the bundle's manifest: which tree pays where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.errors import ForerunError

PLAN = "plan.json"
VERSION = 1


@dataclass(frozen=True)
class Choice:
    """What to draft from so many committed tokens on, with so many requests side by side."""

    rows: int
    context: int
    nodes: int
    """1: nothing."""
    tau: float
    """Expected tokens a step, from the recorded answers."""
    break_even: float
    """The tau above which drafting beats plain decoding: step over plain step, in time."""


@dataclass(frozen=True)
class Plan:
    """All choices, and where they come from."""

    machine: str
    """Its processor, or its GPU."""
    threads: int | None
    prompts: int
    tokens: int
    """Recorded."""
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ForerunError("choices: a plan chooses at least once: run `forerun tune` again")

    def choice(self, context: int, rows: int = 1) -> Choice:
        """Of the largest measured batch and context that are no larger than these."""
        batches = _at_most(rows, (choice.rows for choice in self.choices))
        known = [choice for choice in self.choices if choice.rows == batches]
        length = _at_most(context, (choice.context for choice in known))
        return next(choice for choice in known if choice.context == length)

    def drift(self, tau: float) -> float:
        """How far a measured tau lies from the recorded one of short contexts: -0.2 is a fifth
        below. Where little is drafted there is none."""
        expected = self.choices[0].tau
        return tau / expected - 1 if expected > 1 else 0.0

    @property
    def sizes(self) -> list[int]:
        """Nodes of the trees that it drafts, small ones first; 1 where it drafts none somewhere."""
        return sorted({choice.nodes for choice in self.choices})


def _at_most(value: int, known: Iterable[int]) -> int:
    """The largest of `known` that is no larger than `value`, or else the smallest."""
    ordered = sorted(set(known))
    return max((one for one in ordered if one <= value), default=ordered[0])
