"""What all engines share: requests, rows and the chunks of their prompts, over any memory.

A subclass says where buffers lie (`Memory`), how a step is bound to them once, and how it is
launched; `forerun.runtime.engine_bind` says what it is bound to.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError
from forerun.runtime.buffers import RESULT, Buffers, Layout, Memory, Ticket
from forerun.runtime.engine import GREEDY, Request
from forerun.runtime.engine_bind import BoundStep, Named
from forerun.runtime.sampling import SamplingParams, uniform_tables
from forerun.runtime.tree import Tree

__all__ = ["Named", "Reading", "StepEngine"]


@dataclass
class Reading:
    """A prompt on its way into a row, chunk by chunk."""

    row: int
    request: Request
    prompt: NDArray[np.int64]
    start: int = 0
    """Tokens that were read."""
    turn: int = 0

    @property
    def done(self) -> bool:
        """Whether all of it was read."""
        return self.start >= self.prompt.size


class StepEngine(BoundStep):
    """A bundle's step, loaded, for `rows` requests side by side."""

    def __init__(self, layout: Layout, memory: Memory, rows: int, bucket: int) -> None:
        """Cache slots are added in multiples of `bucket`, which may be the whole capacity."""
        super().__init__(layout, memory, rows, bucket)
        self.params: list[SamplingParams] = [GREEDY] * rows
        self.live: set[int] = set()
        self.remembers = False

    @property
    def seconds(self) -> float:
        """Time spent inside the engine so far."""
        return self.memory.seconds

    # --- the loop's calls -------------------------------------------------------------------

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        """The prompt's first token; the tree of `nodes` nodes is drafted on the way.

        Rows that are being decoded draft trees of one size, so `nodes` must be theirs.
        """
        reading = self.begin(request, nodes > 1, row, nodes)
        self.memory.begin()
        while not reading.done:
            self._read(reading, nodes)
        return self._joined(reading, nodes, self._received(reading))

    def begin(self, request: Request, remembers: bool, row: int = 0, nodes: int = 1) -> Reading:
        """As `prefill`, but nothing is read yet: `read` does that chunk by chunk.

        The other rows may be stepped in between. The drafter `remembers` what is read if the
        request may be decoded with drafts later.
        """
        prompt = np.asarray(request.prompt, np.int64)
        self._begin(prompt.size, request, row, nodes)
        self._remember(self.remembers or remembers)
        reading = Reading(row, request, prompt)
        self._clear_of(reading)
        return reading

    def read(self, reading: Reading, nodes: int) -> list[int] | None:
        """Read the next chunk; -> after the last one what `prefill` gives, else None.

        `nodes` is the size of the tree that the other rows have drafted.
        """
        self.memory.begin()
        self._read(reading, nodes)
        committed = self._received(reading)
        return self._joined(reading, nodes, committed) if reading.done else None

    def step(self, nodes: int) -> list[list[int]]:
        """One launch for all rows, and its tokens."""
        return self.wait(self.launch(nodes))

    def launch(self, nodes: int) -> Ticket:
        """Launch a step: its tokens are there later.

        Rows above the last one that has a request are left out of it.
        """
        span = self.span
        bound = self._binding(self.drafted, nodes, span)
        self.memory.begin()
        self._launch(bound)
        self.turn, self.verified, self.drafted = 1 - self.turn, self.drafted, nodes
        return span, self.memory.send(self.buffers.sets[self.turn][RESULT])

    def wait(self, ticket: Ticket) -> list[list[int]]:
        """The tokens of a launched step, once they are there."""
        span, result = ticket
        rows = self.buffers.committed(self.memory.receive(result))
        return [tokens if row < span else [] for row, tokens in enumerate(rows)]

    @property
    def span(self) -> int:
        """The rows that a step computes: the first ones, up to the last that has a request."""
        return max(self.live, default=0) + 1

    def release(self, row: int) -> None:
        """The row commits nothing more until its next prefill."""
        self.params[row] = GREEDY
        self.live.discard(row)
        self._fix(self.buffers, row, "limit", 0)

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits `[n, V]` after each token, read in pieces of `chunk` tokens (None: prefill's)."""
        ids, size = np.asarray(tokens, np.int64), chunk or self.manifest.chunk
        alone = self._begin(ids.size, Request(tokens, ids.size + 1), 0)
        parts = []
        for turn, start in enumerate(range(0, ids.size, size)):
            piece = ids[start : start + size]
            parts.append(self._logits(alone, turn % 2, piece, start, range(piece.size)))
        return np.concatenate(parts)

    def draft(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The trees that the last launch drafted: tokens and, where they are grown, parents."""
        here, read = self.buffers.sets[self.turn], self.memory.read
        tokens = read(here[f"tokens_{self.drafted}"]).astype(np.int64)
        if self.manifest.trees[str(self.drafted)] is not None:
            return tokens, None
        return tokens, read(here[f"parents_{self.drafted}"]).astype(np.int64)

    def drop_draft(self) -> None:
        """The next step verifies nothing but the roots."""
        if self.drafted > 1:
            here = self.buffers.sets[self.turn]
            tokens = self.memory.read(here[f"tokens_{self.drafted}"])
            self.memory.write(here["tokens_1"], tokens[:, :1])
            self.drafted = 1

    def launch_ms(self, verified: int, nodes: int, launches: int = 20, context: int = 32) -> float:
        """Median milliseconds of a step that verifies and drafts these many nodes.

        The same step is launched again and again: it reads one set of buffers and writes the other.
        What is verified are tokens 0, so that any size will do, also one that is never drafted.
        """
        for row in range(self.rows):
            self.prefill(Request([0] * min(context, 32), self.context), 1, row)
        self._remember(max(verified, nodes) > 1)
        self._grow(context + verified + self.manifest.pending)
        here = self.buffers.sets[self.turn]
        # As if so many tokens were in the caches: it is their number that costs.
        self.memory.write(here["length"], np.full(self.rows, context, np.int64))
        bound = self._binding(verified, nodes, self.rows)
        times = []
        for _ in range(launches):
            before = self.seconds
            self.memory.begin()
            self._launch(bound)
            self.memory.receive(self.memory.send(self.buffers.sets[1 - self.turn][RESULT]))
            times.append(self.seconds - before)
        return 1e3 * statistics.median(times)

    def take_trees(self, trees: Mapping[str, Tree | None]) -> None:
        """Other shapes for the trees there are, by the same sizes."""
        self.manifest = replace(self.manifest, trees=dict(trees))
        self.bindings, self.alone = {}, {}

    # --- requests and buffers ---------------------------------------------------------------

    def _begin(self, length: int, request: Request, row: int, nodes: int = 1) -> Buffers:
        """Check the request against the context, set its parameters, forget the one before.

        Steps leave the row alone until it has joined them: its limit there stays 0.
        """
        if not 0 < length <= self.context:
            raise ForerunError(
                f"the prompt has {length} tokens; this bundle takes 1 to {self.context}: "
                "shorten it, or compile with a larger --capacity"
            )
        params = request.params
        slots = length + nodes + self.manifest.pending
        if self.rows == 1 and self.buffers.slots > 2 * max(slots, self.bucket):
            # A long request is over: what comes after it needn't attend to so many slots.
            self.buffers, self.alone = Buffers(self.layout, self.memory, 1), {}
        self.release(row)
        self._grow(slots)
        alone = self.alone.get(row) or self.alone.setdefault(row, self.buffers.row(row))
        alone.clear()
        self._fix(alone, 0, "limit", min(request.limit, self.context))
        values: dict[str, Any] = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
        if not params.greedy:
            tables = self.manifest.drafter.tables
            values["uniforms"] = uniform_tables(params.seed, self.manifest.capacity, tables)
        for name, value in values.items():
            self._fix(self.buffers, row, name, value)
            self._fix(alone, 0, name, value)
        self.params[row] = params
        if self.rows == 1:
            self._remember(False)
        return alone

    def _read(self, reading: Reading, nodes: int) -> None:
        """Launch the next chunk of a prompt."""
        size, start, alone = self.manifest.chunk, reading.start, self.alone[reading.row]
        chunk = reading.prompt[start : start + size]
        after = reading.prompt[start + chunk.size : start + chunk.size + 1]
        drafts = nodes if after.size == 0 else 1
        last = [chunk.size - 1]
        self._launch(self._chunk(alone, reading.turn, chunk, start, last, drafts, after))
        reading.start, reading.turn = start + chunk.size, 1 - reading.turn
        self._clear_of(reading)

    def _received(self, reading: Reading) -> list[int]:
        """What the last launch for `reading` committed."""
        alone = self.alone[reading.row]
        ticket = self.memory.send(alone.sets[reading.turn][RESULT])
        return alone.committed(self.memory.receive(ticket))[0]

    def _joined(self, reading: Reading, nodes: int, committed: list[int]) -> list[int]:
        """From here on the row takes part in steps."""
        row = reading.row
        self.buffers.put(row, self.turn, self.alone[row].sets[reading.turn])
        self._fix(self.buffers, row, "limit", min(reading.request.limit, self.context))
        self.drafted = nodes
        self.live.add(row)
        return committed

    def _clear_of(self, reading: Reading) -> None:
        """Steps of other rows write into this one's caches too: behind what was read."""
        for here in self.buffers.sets:
            self._place(here, reading.start, reading.row)

    def _remember(self, remembers: bool) -> None:
        if remembers != self.remembers:
            self.remembers = remembers
            self.switches.write(self.remembering, np.asarray(remembers))
