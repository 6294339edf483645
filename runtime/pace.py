"""Which tree each step drafts: by plan, and less where this request shows that it doesn't pay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.runtime.plan import Plan


class Pace(Protocol):
    """Asked before each launch, told after each step; the device waits for neither."""

    @property
    def largest(self) -> int:
        """Nodes of the largest tree that may be asked for."""

    def begin(self, context: int) -> int:
        """Nodes to draft behind the prefill of a lone request of so many tokens."""

    def nodes(self, context: int, rows: int = 1) -> int:
        """Nodes to draft in a step when the longest of `rows` requests has so many tokens."""

    def saw(self, verified: int, committed: Sequence[int]) -> None:
        """A step verified trees of `verified` nodes: how many tokens each busy row committed."""


@dataclass(frozen=True)
class Fixed:
    """Always the same tree."""

    largest: int

    def begin(self, context: int) -> int:
        return self.largest

    def nodes(self, context: int, rows: int = 1) -> int:
        return self.largest

    def saw(self, verified: int, committed: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class Patience:
    """When planned drafting is given up, in steps."""

    window: int = 24
    """So many drafted steps are looked at together."""
    rest: int = 32
    """Plain steps before drafting is tried again, the first time; then twice as many each time."""
    longest_rest: int = 512
    trial: int = 8
    """Drafted steps of a trial."""
    margin: float = 0.95
    """Drafting is given up below this share of what it must commit to pay: what is seen is noisy,
    and a trial costs too."""


class Planned:
    """The plan's trees, watched: where steps commit less than what pays for them, plain decoding
    takes over, and drafting is tried again later and later."""

    def __init__(self, plan: Plan, patience: Patience | None = None) -> None:
        self.plan, self.largest = plan, plan.sizes[-1]
        self.patience = patience or Patience()
        self.switches = 0
        """How often drafting was given up or taken up again."""
        self._forget()

    def _forget(self) -> None:
        self.seen: deque[float] = deque(maxlen=self.patience.window)
        self.needed, self.resting, self.rest = self.patience.window, 0, self.patience.rest
        self.break_even = 1.0

    def begin(self, context: int) -> int:
        """Afresh. Where drafting only pays later, a tree is drafted even so: the drafter's state is
        kept up from the beginning or not at all."""
        self._forget()
        nodes = self.nodes(context)
        return next((size for size in self.plan.sizes if size > 1), 1) if nodes == 1 else nodes

    def nodes(self, context: int, rows: int = 1) -> int:
        choice = self.plan.choice(context, rows)
        self.break_even = choice.break_even
        return 1 if self.resting > 0 else choice.nodes

    def saw(self, verified: int, committed: Sequence[int]) -> None:
        if self.resting > 0:
            self.resting -= 1
            if self.resting == 0:
                self.switches += 1
                self.seen.clear()
                self.needed = self.patience.trial
            return
        if verified == 1 or not committed:
            return
        self.seen.append(sum(committed) / len(committed))
        if len(self.seen) < self.needed:
            return
        if sum(self.seen) < self.patience.margin * self.break_even * len(self.seen):
            self.switches += 1
            self.resting = self.rest
            self.rest = min(2 * self.rest, self.patience.longest_rest)
        elif self.needed < self.patience.window:  # the trial went well
            self.needed, self.rest = self.patience.window, self.patience.rest


def as_pace(nodes: int | Pace) -> Pace:
    """A pace, or the same tree always."""
    return Fixed(nodes) if isinstance(nodes, int) else nodes
