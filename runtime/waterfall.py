"""From the ideal speedup to the measured one: what takes how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.runtime.parts import ACCEPT, COMMIT, DRAFT, VERIFY

HOST, WAITING = "host", "waiting"
IDEAL, MEASURED = "ideal, from acceptance alone", "measured"
UNEXPLAINED = "unexplained"
LOSSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("drafter", (DRAFT,)),
    ("verify(n) > 1", (VERIFY,)),
    ("acceptance, sampling, commit", (ACCEPT, COMMIT)),
    ("host", (HOST, WAITING)),
)
"""What a speculative step pays for beyond a plain one, and the parts that are in it."""
END = "committed beyond the end"


@dataclass(frozen=True)
class Side:
    """Decoding one way, plain or speculative: means over its steps."""

    step: float
    """Milliseconds a step, on the clock."""
    parts: Mapping[str, float]
    """Milliseconds a step that are accounted for, by part."""
    tau: float = 1.0
    delivered: float = 1.0
    """Tokens of the answers over tokens committed, of which some lie beyond an answer's end."""

    @property
    def token(self) -> float:
        """Milliseconds a token of the answers."""
        return self.step / (self.tau * self.delivered)


@dataclass(frozen=True)
class Level:
    """Where decoding stands once `name` is paid for: milliseconds a token, and over plain."""

    name: str
    ms: float
    speedup: float


def waterfall(plain: Side, speculative: Side) -> list[Level]:
    """The levels from the ideal down to what was measured.

    Ideal is a step that commits tau tokens in the time of a plain step. Each loss is what the
    speculative step spends on some parts beyond what the plain one does, shared by its tokens. The
    last but one is what no part accounts for: with it the levels end at the measured time exactly.
    """
    ms = plain.token / speculative.tau
    levels = [(IDEAL, ms)]
    for name, parts in LOSSES:
        extra = sum(speculative.parts.get(p, 0.0) - plain.parts.get(p, 0.0) for p in parts)
        ms += extra / speculative.tau
        levels.append((name, ms))
    ms /= speculative.delivered
    levels += [(END, ms), (UNEXPLAINED, speculative.token), (MEASURED, speculative.token)]
    return [Level(name, ms, plain.token / ms if ms else 0.0) for name, ms in levels]


def unexplained(levels: list[Level]) -> float:
    """The speedup that no part accounts for, as a share of what was measured."""
    before, after = levels[-3].speedup, levels[-1].speedup
    return (before - after) / after if after else 0.0
