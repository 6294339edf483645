"""Many requests through the rows of one engine: a row that is done takes the next request."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.runtime.engine import Engine, Request
from forerun.runtime.loop import Answering, Block, Stats
from forerun.runtime.pace import Pace, as_pace
from forerun.runtime.pipeline import Steps


@dataclass(frozen=True)
class Job:
    """One request of a batch, and the tokens that end its answer."""

    request: Request
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Event:
    """What happened to one job: it got a block, or it failed and the others go on."""

    number: int
    """Which job, counted from 0."""
    outcome: Block | ForerunError


class BatchDecoding(Iterator[Event]):
    """The jobs' blocks, in the order in which the engine's rows give them.

    A job joins as soon as a row is free, also while other rows are in the midst of their answers:
    what a row says does not depend on its neighbours. `stats[number]` is there once a job ended;
    its seconds are those of all rows together, the prefills of others included.
    """

    def __init__(self, engine: Engine, jobs: Iterable[Job], pace: Pace) -> None:
        self.stats: dict[int, Stats] = {}
        self._engine, self._pace = engine, pace
        self._steps = Steps(engine, pace)
        self._rows: dict[int, tuple[int, Answering]] = {}
        self._events = self._run(enumerate(jobs))

    def __next__(self) -> Event:
        return next(self._events)

    def cancel(self, number: int) -> None:
        """Ends a job where it is: its row takes the next one, and it has no more events."""
        for row, (job, _) in list(self._rows.items()):
            if job == number:
                self._end(row)

    def close(self) -> None:
        """Ends all jobs where they are."""
        self._events.close()

    def _run(self, jobs: Iterator[tuple[int, Job]]) -> Generator[Event]:
        for row in range(self._engine.rows):
            self._engine.release(row)
        try:
            yield from self._fill(jobs)
            while self._rows:
                longest = max(answering.context for _, answering in self._rows.values())
                committed = self._steps.next(longest, len(self._rows))
                for row in list(self._rows):
                    tokens = committed[row]
                    if row in self._rows and tokens is not None:  # neither cancelled nor just begun
                        number, answering = self._rows[row]
                        yield self._given(row, number, answering.take(tokens))
                yield from self._fill(jobs)
        finally:
            for row in list(self._rows):
                self._end(row)

    def _fill(self, jobs: Iterator[tuple[int, Job]]) -> Generator[Event]:
        """Begin a job in every free row, as long as there are any."""
        for row in range(self._engine.rows):
            while row not in self._rows:
                number, job = next(jobs, (-1, None))
                if job is None:
                    return
                try:
                    answering = self._answering(job, row)
                except ForerunError as error:
                    self.stats[number] = Stats()
                    yield Event(number, error)
                    continue
                self._rows[row] = (number, answering)
                self._steps.joined(row)
                yield self._given(row, number, answering.first)

    def _answering(self, job: Job, row: int) -> Answering:
        busy = len(self._rows) + 1
        return Answering(self._engine, job.request, self._pace, job.stop_ids, row, busy)

    def _given(self, row: int, number: int, block: Block) -> Event:
        if block.finish is not None:
            self._end(row)
        return Event(number, block)

    def _end(self, row: int) -> None:
        number, answering = self._rows.pop(row)
        self.stats[number] = answering.stats
        self._engine.release(row)


def decode_batch(engine: Engine, jobs: Iterable[Job], nodes: int | Pace) -> BatchDecoding:
    """Answers `jobs` on all rows of `engine` with draft trees of `nodes` nodes, or at a pace.

    As `forerun.runtime.loop.decode` does one by one; jobs are taken from the iterable as rows get
    free. A ForerunError that the engine raises for one job is that job's outcome.
    """
    return BatchDecoding(engine, jobs, as_pace(nodes))
