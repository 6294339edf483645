"""The loop: prefill, then steps, cut exactly where the text ends, and what that took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forerun.runtime.engine import Engine, Request
from forerun.runtime.pace import Pace, as_pace
from forerun.runtime.pipeline import Steps

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Block:
    """What one step adds to the answer."""

    tokens: tuple[int, ...]
    """Never a stop token, and nothing after it."""
    finish: FinishReason | None
    """Why this is the last block; None where more follow."""
    drafted: int = 0
    """So many of `tokens`, the first ones, are accepted draft tokens; one after them is not."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What one request's decoding took, or, added up, that of several."""

    prefill_seconds: float = 0.0
    wall_seconds: float = 0.0
    """Decoding alone: from the prefill's end, the caller's own work between blocks included."""
    engine_seconds: float = 0.0
    """The part of `wall_seconds` inside engine calls."""
    tokens: int = 0
    """Decoded after the prefill's token: a stop token counts, what was cut after it doesn't."""
    committed: tuple[int, ...] = ()
    """`committed[k]` steps committed k + 1 tokens, before any cut."""
    trace: tuple[int, ...] = ()
    """What each step committed, in order; of several requests one after the other."""

    def __add__(self, other: Stats) -> Stats:
        depth = max(len(self.committed), len(other.committed))
        rows = [(*stats.committed, *[0] * depth)[:depth] for stats in (self, other)]
        return Stats(
            self.prefill_seconds + other.prefill_seconds,
            self.wall_seconds + other.wall_seconds,
            self.engine_seconds + other.engine_seconds,
            self.tokens + other.tokens,
            tuple(map(sum, zip(*rows, strict=True))),
            self.trace + other.trace,
        )

    @property
    def steps(self) -> int:
        """Steps after the prefill."""
        return sum(self.committed)

    @property
    def tau(self) -> float:
        """Tokens committed a step, the bonus token included; 0 without a step."""
        tokens = sum(count * (extra + 1) for extra, count in enumerate(self.committed))
        return tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For depth 1, 2, ...: the share of steps whose draft was accepted at least that deep."""
        return [sum(self.committed[d:]) / self.steps for d in range(1, len(self.committed))]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second, prefill excluded; 0 without a step."""
        return self.tokens / self.wall_seconds if self.wall_seconds and self.steps else 0.0

    @property
    def host_share(self) -> float:
        """The share of the decoding time outside engine calls."""
        return 1 - self.engine_seconds / self.wall_seconds if self.wall_seconds else 0.0


class Answering:
    """One request in a row of `engine`, once its prompt was read: cuts what the row commits, and
    counts."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        stop_ids: Collection[int],
        committed: Sequence[int],
        prefill_seconds: float,
    ) -> None:
        """`committed` is what the prefill gave."""
        self._engine, self._stop_ids = engine, frozenset(stop_ids)
        self._room = request.limit - len(request.prompt)
        self._tokens = 0
        self.context = len(request.prompt)
        """Tokens of the prompt and of the answer until now."""
        self._trace: list[int] = []
        self._begin, self._inside = time.perf_counter(), engine.seconds
        self._prefill_seconds = prefill_seconds
        self.first = self._cut(committed)
        """What the prefill gave."""

    def take(self, committed: Sequence[int]) -> Block:
        """The block that one step's tokens give."""
        block = self._cut(committed)
        self.context += len(committed)
        if committed:
            self._trace.append(len(committed))
            self._tokens += len(block.tokens) + (block.finish == "stop")
        return block

    @property
    def stats(self) -> Stats:
        """What it took until now."""
        counts = Counter(self._trace)
        return Stats(
            self._prefill_seconds,
            time.perf_counter() - self._begin,
            self._engine.seconds - self._inside,
            self._tokens,
            tuple(counts[n] for n in range(1, max(counts, default=0) + 1)),
            tuple(self._trace),
        )

    def _cut(self, committed: Sequence[int]) -> Block:
        block = cut(committed, self._room, self._stop_ids)
        self._room -= len(block.tokens)
        return block


class Decoding(Iterator[Block]):
    """One request's blocks, computed as they are asked for; `stats` is complete after the last."""

    def __init__(
        self, engine: Engine, request: Request, pace: Pace, stop_ids: Collection[int]
    ) -> None:
        self.stats = Stats()
        self._blocks = self._run(engine, request, pace, stop_ids)

    def __next__(self) -> Block:
        return next(self._blocks)

    def close(self) -> None:
        """Ends the request where it is."""
        self._blocks.close()

    def _run(
        self, engine: Engine, request: Request, pace: Pace, stop_ids: Collection[int]
    ) -> Generator[Block]:
        start, first = time.perf_counter(), pace.begin(len(request.prompt))
        committed = engine.prefill(ample(request, pace.largest), first, 0)
        seconds = time.perf_counter() - start
        answering = Answering(engine, request, stop_ids, committed, seconds)
        try:
            block, steps = answering.first, Steps(engine, pace)
            yield block
            while block.finish is None:
                block = answering.take(steps.next(answering.context)[0] or ())
                yield block
        finally:
            self.stats = answering.stats


def decode(
    engine: Engine, request: Request, nodes: int | Pace, stop_ids: Collection[int] = ()
) -> Decoding:
    """Answers `request` with draft trees of `nodes` nodes (1: plain) or at a pace, a block a step.

    Ends before the first of `stop_ids` ("stop"), at the request's limit or where the engine's
    context is full ("length"). What the engine raises for a request comes with the first block.
    """
    return Decoding(engine, request, as_pace(nodes), stop_ids)


def ample(request: Request, nodes: int) -> Request:
    """The request with room for a step's block beyond its limit: cut on the device, a block would
    lower tau."""
    return replace(request, limit=request.limit + nodes)


def cut(committed: Sequence[int], room: int, stop_ids: Collection[int]) -> Block:
    """The block that a step's tokens give where `room` more tokens are wanted."""
    accepted = max(len(committed) - 1, 0)  # the last is the target's own
    for place, token in enumerate(committed[:room]):
        if token in stop_ids:
            return Block(tuple(committed[:place]), "stop", min(place, accepted))
    full = not committed or len(committed) >= room
    tokens = tuple(committed[:room])
    return Block(tokens, "length" if full else None, min(len(tokens), accepted))
