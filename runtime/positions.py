"""Acceptance along an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

FIRST = 16
"""Tokens of the first bucket; each further one ends at twice the tokens."""


def acceptance_by_position(traces: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """tau of the steps that begin `from` up to `to` tokens into their answer.

    A trace is what each step of one answer committed, in order. Buckets without a step are left
    out.
    """
    steps: dict[int, list[int]] = defaultdict(list)
    for trace in traces:
        place = 1  # the prefill gave the first token
        for committed in trace:
            steps[_bucket(place)].append(committed)
            place += committed
    return [
        {
            "from": _edge(bucket),
            "to": _edge(bucket + 1),
            "tau": sum(counts) / len(counts),
            "steps": len(counts),
        }
        for bucket, counts in sorted(steps.items())
    ]


def _bucket(place: int) -> int:
    return (place // FIRST).bit_length()


def _edge(bucket: int) -> int:
    return FIRST << (bucket - 1) if bucket else 0
