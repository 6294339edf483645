"""What all engines share: requests, rows, chunks and turns, over any memory.

A subclass says where buffers lie (`Memory`), how a step is bound to them once, and how it is
launched. Caches are written in place (input and output share an address). All other state
ping-pongs between two sets of buffers: a step reads one and writes the other, so that it has two
bindings for each pair of tree sizes, and may be launched again without harm.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError
from forerun.runtime.buffers import (
    RESULT,
    TREE,
    Array,
    Buffer,
    Buffers,
    HostMemory,
    Layout,
    Memory,
    Ticket,
)
from forerun.runtime.engine import GREEDY, Request
from forerun.runtime.sampling import SamplingParams, uniform_tables
from forerun.runtime.tree import Tree

Named = dict[str, Buffer]


class StepEngine(ABC):
    """A bundle's step, loaded, for `rows` requests side by side."""

    ahead = 0
    """Steps that may be launched before the tokens of the one before them are read."""
    branches_on_host = False
    """Whether it is the host that reads `remembering` and `drafting`, from its own memory."""

    def __init__(self, layout: Layout, memory: Memory, rows: int, bucket: int) -> None:
        """Cache slots are added in multiples of `bucket`, which may be the whole capacity."""
        self.manifest, self.layout, self.memory, self.rows = layout.manifest, layout, memory, rows
        self.room = max(map(int, self.manifest.trees)) + self.manifest.pending
        self.context = self.manifest.capacity - self.room
        self.turn, self.drafted = 0, 1
        self.params: list[SamplingParams] = [GREEDY] * rows
        self.remembers = False
        self.switches: Memory = HostMemory() if self.branches_on_host else memory
        self.remembering = self.switches.load(np.zeros((), np.bool_))  # bound by address
        self.buffers, self.bucket = Buffers(layout, memory, rows), bucket
        self.alone: dict[int, Buffers] = {}
        self.bindings: dict[tuple[int, int, int], Any] = {}
        self._grow(bucket)

    @property
    def seconds(self) -> float:
        """Time spent inside the engine so far."""
        return self.memory.seconds

    # --- what a subclass does ---------------------------------------------------------------

    @abstractmethod
    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        """A step of these buffers that drafts `nodes` nodes, ready to be launched; `again` and
        again, or just once."""

    @abstractmethod
    def _launch(self, bound: Any) -> None:
        """Launch what `_bind` gave."""

    # --- the loop's calls -------------------------------------------------------------------

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        """The prompt's first token; the tree of `nodes` nodes is drafted on the way.

        Rows that are being decoded draft trees of one size, so `nodes` must be theirs.
        """
        prompt = np.asarray(request.prompt, np.int64)
        alone = self._begin(prompt.size, request, row)
        self._remember(self.remembers or nodes > 1)
        self.memory.begin()
        turn, size = 0, self.manifest.chunk
        for start in range(0, prompt.size, size):
            chunk = prompt[start : start + size]
            after = prompt[start + chunk.size : start + chunk.size + 1]
            drafts = nodes if after.size == 0 else 1
            self._launch(self._chunk(alone, turn, chunk, start, [chunk.size - 1], drafts, after))
            turn = 1 - turn
        self.buffers.put(row, self.turn, alone.sets[turn])
        self.drafted = nodes
        result = self.memory.receive(self.memory.send(alone.sets[turn][RESULT]))
        return alone.committed(result)[0]

    def step(self, nodes: int) -> list[list[int]]:
        """One launch for all rows, and its tokens."""
        return self.wait(self.launch(nodes))

    def launch(self, nodes: int) -> Ticket:
        """Launch a step: its tokens are there later."""
        bound = self._binding(self.drafted, nodes)
        self.memory.begin()
        self._launch(bound)
        self.turn, self.drafted = 1 - self.turn, nodes
        return self.memory.send(self.buffers.sets[self.turn][RESULT])

    def wait(self, ticket: Ticket) -> list[list[int]]:
        """The tokens of a launched step, once they are there."""
        return self.buffers.committed(self.memory.receive(ticket))

    def release(self, row: int) -> None:
        """The row commits nothing more until its next prefill."""
        self.params[row] = GREEDY
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

    def launch_ms(self, verified: int, nodes: int, launches: int = 20) -> float:
        """Median milliseconds of a step that verifies and drafts these many nodes, context short.

        The same step is launched again and again: it reads one set of buffers and writes the other.
        """
        for row in range(self.rows):
            self.prefill(Request([0] * 32, self.context), verified, row)
        bound = self._binding(verified, nodes)
        times = []
        for _ in range(launches):
            before = self.seconds
            self.memory.begin()
            self._launch(bound)
            self.memory.receive(self.memory.send(self.buffers.sets[1 - self.turn][RESULT]))
            times.append(self.seconds - before)
        return 1e3 * statistics.median(times)

    # --- requests and buffers ---------------------------------------------------------------

    def _begin(self, length: int, request: Request, row: int) -> Buffers:
        """Check the request against the context, set its parameters, forget the one before."""
        if not 0 < length <= self.context:
            raise ForerunError(
                f"the prompt has {length} tokens; this bundle takes 1 to {self.context}: "
                "shorten it, or compile with a larger --capacity"
            )
        params = request.params
        self._grow(length + self.room)
        alone = self.alone.get(row) or self.alone.setdefault(row, self.buffers.row(row))
        alone.clear()
        values: dict[str, Any] = {
            "limit": min(request.limit, self.context),
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

    def _fix(self, buffers: Buffers, row: int, name: str, value: Any) -> None:
        """Set what a request fixes for one row."""
        kind = np.int64 if name in ("limit", "top_k") else np.float32
        self.memory.write(buffers.fixed[name][row : row + 1], np.asarray([value], kind))

    def _remember(self, remembers: bool) -> None:
        if remembers != self.remembers:
            self.remembers = remembers
            self.switches.write(self.remembering, np.asarray(remembers))

    def _grow(self, slots: int) -> None:
        """Make room for `slots` cache slots; bindings to the old buffers are dropped."""
        if slots > self.buffers.slots:
            self.buffers.grow(-(-slots // self.bucket) * self.bucket)
            self.bindings, self.alone = {}, {}

    # --- launching --------------------------------------------------------------------------

    def _chunk(
        self,
        alone: Buffers,
        turn: int,
        chunk: Array,
        start: int,
        verify: Sequence[int],
        nodes: int,
        following: Sequence[int] | Array = (),
        logits: Buffer | None = None,
    ) -> Any:
        """Bind a prefill of `chunk` at slot `start`: a chain, of which `verify` is verified.

        `following` is the prompt's next token, where there is one.
        """
        here, load = alone.sets[turn], self.memory.load
        self._place(here, start)
        given = {
            "tokens": load(chunk[None]),
            "pending": alone.zeros("pending", pending_in=0),
            "forced": load(np.asarray([*following, -1][:1], np.int64)),
            **self._tree(Tree.chain(chunk.size), np.asarray(verify, np.int64), 1),
        }
        return self._bound(alone, turn, given, nodes, logits)

    def _logits(
        self, alone: Buffers, turn: int, piece: Array, start: int, verify: Sequence[int]
    ) -> NDArray[np.float32]:
        """`[n, V]`: the logits of the nodes `verify` of one chunk."""
        shape = (1, len(verify), self.manifest.target.vocab_size)
        logits = self.memory.load(np.zeros(shape, np.float32))
        self._launch(self._chunk(alone, turn, piece, start, verify, 1, logits=logits))
        found: NDArray[np.float32] = self.memory.read(logits)[0]
        return found

    def _place(self, here: Named, start: int) -> None:
        """A prefill's chunk begins at `start`, with nothing pending."""
        self.memory.write(here["length"], np.asarray([start], np.int64))
        self.memory.write(here["pending_count"], np.zeros(1, np.int64))

    def _binding(self, verified: int, nodes: int) -> Any:
        """The binding for this turn of a step that verifies and drafts these many nodes."""
        key = (self.turn, verified, nodes)
        if key not in self.bindings:
            here, tree = self.buffers.sets[self.turn], self.manifest.trees[str(verified)]
            given = {
                "tokens": here[f"tokens_{verified}"],
                "forced": self.memory.load(np.full(self.rows, -1, np.int64)),
            }
            if tree is None:
                given |= {name: here[f"{name}_{verified}"] for name in TREE}
                given["verify"] = self.memory.load(np.arange(verified))
            else:
                given |= self._tree(tree, np.arange(verified), self.rows)
            self.bindings[key] = self._bound(self.buffers, self.turn, given, nodes, again=True)
        return self.bindings[key]

    def _tree(self, tree: Tree, verify: NDArray[np.int64], rows: int) -> Named:
        """The step's inputs that describe a tree whose nodes `verify` `[R]` are verified."""
        load, parents = self.memory.load, np.maximum(tree.parents, 0)[: verify.size]
        return {
            "depth": load(np.tile(tree.depths[None], (rows, 1))),
            "ancestors": load(np.tile(tree.ancestors[None], (rows, 1, 1))),
            "verify": load(verify),
            "parents": load(np.tile(parents[None], (rows, 1))),
        }

    def _bound(
        self,
        buffers: Buffers,
        turn: int,
        given: Named,
        nodes: int,
        logits: Buffer | None = None,
        again: bool = False,
    ) -> Any:
        """A step of `buffers` that drafts `nodes` nodes, bound to every input and output by name.

        Only the inputs of the layout are among them.
        """
        here, there = buffers.sets[turn], buffers.sets[1 - turn]
        tree = self.manifest.trees[str(nodes)]
        slots = np.asarray(range(nodes) if tree is None else tree.slots, np.int64)
        inputs = {
            **buffers.fixed,
            **here,
            **buffers.caches,
            **given,
            "slots": self.memory.load(slots),
            "remembering": self.remembering,
            "drafting": self.switches.load(np.asarray(nodes > 1)),
        }
        outputs = {
            "emitted": there["emitted"],
            "count": there["pending_count"],
            "next_tokens": there[f"tokens_{nodes}"],
            "next_length": there["length"],
            "next_pending": there["pending"],
            **{f"new_{name}": cache for name, cache in buffers.caches.items()},
            **{f"new_{name}": there[name] for name in self.layout.states},
        }
        if tree is None:
            outputs |= {f"next_{name}": there[f"{name}_{nodes}"] for name in TREE}
        if logits is not None:
            outputs["logits"] = logits
        taken = {name: inputs[name] for name in self.layout.inputs}
        return self._bind(taken, outputs, nodes, again)
