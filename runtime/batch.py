"""Many requests through the rows of one engine: they join and leave between steps."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.engine import Engine, Request
from forerun.runtime.loop import Answering, Block, Stats, ample
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


@dataclass
class _Row:
    """A job in its row: its prompt is being read, and then it is being answered."""

    number: int
    job: Job
    reading: Any
    since: float = field(default_factory=time.perf_counter)
    answering: Answering | None = None


class Rows:
    """The engine's rows and their jobs, moved on a little at a time.

    A job joins as soon as a row is free, also while other rows are in the midst of their answers:
    what a row says depends neither on its neighbours nor on when it joined them. A long prompt is
    read chunk by chunk between the others' steps.
    """

    def __init__(self, engine: Engine, pace: Pace) -> None:
        """`pace` is asked before each step for the size of the trees to draft."""
        self._engine, self._pace, self._steps = engine, pace, Steps(engine, pace)
        self._rows: dict[int, _Row] = {}
        self._ended: dict[int, Stats] = {}
        for row in range(engine.rows):
            engine.release(row)

    @property
    def busy(self) -> int:
        """Rows that have a job."""
        return len(self._rows)

    @property
    def free(self) -> bool:
        """Whether another job can join."""
        return self.busy < self._engine.rows

    def join(self, number: int, job: Job) -> None:
        """Begin a job in the first free row; raises ForerunError where the engine refuses it."""
        row = next(row for row in range(self._engine.rows) if row not in self._rows)
        request = ample(job.request, self._pace.largest)
        reading = self._engine.begin(request, self._pace.largest > 1, row)
        self._rows[row] = _Row(number, job, reading)

    def advance(self) -> Iterator[Event]:
        """Read one chunk of the prompt that joined first, then move all answers on by a step.

        What the first gives is there before the second begins.
        """
        yield from self._read()
        yield from self._step()

    def end(self, number: int) -> Stats:
        """End a job where it is, if it hasn't ended by itself; -> what it took.

        To be called once for every job, or its statistics are kept.
        """
        for row, held in self._rows.items():
            if held.number == number:
                self._leave(row)
                break
        return self._ended.pop(number, Stats())

    def _read(self) -> list[Event]:
        waiting = [row for row, held in self._rows.items() if held.answering is None]
        if not waiting:
            return []
        row, held = waiting[0], self._rows[waiting[0]]
        # All rows draft trees of one size: where others are being answered, that of their last.
        first = len(waiting) == self.busy
        prompt = len(held.job.request.prompt)
        nodes = self._pace.begin(prompt) if first else self._engine.drafted
        try:
            committed = self._engine.read(held.reading, nodes)
        except ForerunError as error:
            self._leave(row)
            return [Event(held.number, error)]
        if committed is None:
            return []
        seconds, job = time.perf_counter() - held.since, held.job
        held.answering = Answering(self._engine, job.request, job.stop_ids, committed, seconds)
        self._steps.joined(row)
        return [self._given(row, held.answering.first)]

    def _step(self) -> list[Event]:
        answering = {row: held.answering for row, held in self._rows.items() if held.answering}
        if not answering:
            return []
        longest = max(answer.context for answer in answering.values())
        committed = self._steps.next(longest, len(answering))
        return [
            self._given(row, answer.take(tokens))
            for row, answer in answering.items()
            if (tokens := committed[row]) is not None  # else the row's job is younger than the step
        ]

    def _given(self, row: int, block: Block) -> Event:
        number = self._rows[row].number
        if block.finish is not None:
            self._leave(row)
        return Event(number, block)

    def _leave(self, row: int) -> None:
        held = self._rows.pop(row)
        self._ended[held.number] = held.answering.stats if held.answering else Stats()
        self._engine.release(row)


class BatchDecoding(Iterator[Event]):
    """The jobs' blocks, in the order in which the engine's rows give them.

    `stats[number]` is there once a job ended; its seconds are those of all rows together, the
    prefills of others included.
    """

    def __init__(self, engine: Engine, jobs: Iterable[Job], pace: Pace) -> None:
        self.stats: dict[int, Stats] = {}
        self._rows = Rows(engine, pace)
        self._running: set[int] = set()
        self._events = self._run(enumerate(jobs))

    def __next__(self) -> Event:
        return next(self._events)

    def cancel(self, number: int) -> None:
        """Ends a job where it is: its row takes the next one, and it has no more events."""
        if number in self._running:
            self._end(number)

    def close(self) -> None:
        """Ends all jobs where they are."""
        self._events.close()

    def _run(self, jobs: Iterator[tuple[int, Job]]) -> Generator[Event]:
        try:
            yield from self._fill(jobs)
            while self._running:
                for event in self._rows.advance():
                    if event.number not in self._running:  # cancelled
                        continue
                    if isinstance(event.outcome, ForerunError) or event.outcome.finish is not None:
                        self._end(event.number)
                    yield event
                yield from self._fill(jobs)
        finally:
            for number in list(self._running):
                self._end(number)

    def _fill(self, jobs: Iterator[tuple[int, Job]]) -> Generator[Event]:
        """Begin a job in every free row, as long as there are any."""
        while self._rows.free:
            number, job = next(jobs, (-1, None))
            if job is None:
                return
            try:
                self._rows.join(number, job)
            except ForerunError as error:
                self.stats[number] = Stats()
                yield Event(number, error)
                continue
            self._running.add(number)

    def _end(self, number: int) -> None:
        self._running.discard(number)
        self.stats[number] = self._rows.end(number)


def decode_batch(engine: Engine, jobs: Iterable[Job], nodes: int | Pace) -> BatchDecoding:
    """Answers `jobs` on all rows of `engine` with draft trees of `nodes` nodes, or at a pace.

    As `forerun.runtime.loop.decode` does one by one; jobs are taken from the iterable as rows get
    free. A ForerunError that the engine raises for one job is that job's outcome.
    """
    return BatchDecoding(engine, jobs, as_pace(nodes))
