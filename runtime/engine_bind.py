"""What a step is bound to: its buffers, made once, and a binding for each kind of launch.

Caches are written in place (input and output share an address). All other state ping-pongs between
two sets of buffers: a step reads one and writes the other, so that it has two bindings for each
pair of tree sizes, and may be launched again without harm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.runtime.buffers import TREE, Array, Buffer, Buffers, HostMemory, Layout, Memory
from forerun.runtime.tree import Tree

Named = dict[str, Buffer]


class BoundStep(ABC):
    """A bundle's step over buffers for `rows` requests."""

    ahead = 0
    """Steps that may be launched before the tokens of the one before them are read."""
    skips_empty = False
    """Whether a step for which nothing was proposed costs no more than verifying the root."""
    branches_on_host = False
    """Whether it is the host that reads `remembering` and `drafting`, from its own memory."""

    def __init__(self, layout: Layout, memory: Memory, rows: int, bucket: int) -> None:
        """Cache slots are added in multiples of `bucket`, which may be the whole capacity."""
        self.manifest, self.layout, self.memory, self.rows = layout.manifest, layout, memory, rows
        self.room = max(map(int, self.manifest.trees)) + self.manifest.pending
        self.context = self.manifest.capacity - self.room
        self.turn, self.drafted, self.verified = 0, 1, 1
        self.switches: Memory = HostMemory() if self.branches_on_host else memory
        self.remembering = self.switches.load(np.zeros((), np.bool_))  # bound by address
        self.buffers, self.bucket = Buffers(layout, memory, rows), bucket
        self.alone: dict[int, Buffers] = {}
        self.bindings: dict[tuple[int, int, int, int], Any] = {}
        self._grow(bucket)

    # --- what a subclass does ---------------------------------------------------------------

    @abstractmethod
    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        """A step of these buffers that drafts `nodes` nodes, ready to be launched; `again` and
        again, or just once."""

    @abstractmethod
    def _launch(self, bound: Any) -> None:
        """Launch what `_bind` gave."""

    # --- buffers ------------------------------------------------------------------------------

    def _fix(self, buffers: Buffers, row: int, name: str, value: Any) -> None:
        """Set what a request fixes for one row."""
        kind = np.int64 if name in ("limit", "top_k") else np.float32
        self.memory.write(buffers.fixed[name][row : row + 1], np.asarray([value], kind))

    def _grow(self, slots: int) -> None:
        """Make room for `slots` cache slots; bindings to the old buffers are dropped."""
        if slots > self.buffers.slots:
            self.buffers.grow(-(-slots // self.bucket) * self.bucket)
            self.bindings = {}
            for row, alone in self.alone.items():
                alone.follow(self.buffers, row)

    # --- launches -----------------------------------------------------------------------------

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

    def _place(self, here: Named, start: int, row: int = 0) -> None:
        """The next call writes at `start`, with nothing pending."""
        self.memory.write(here["length"][row : row + 1], np.asarray([start], np.int64))
        self.memory.write(here["pending_count"][row : row + 1], np.zeros(1, np.int64))

    def _binding(self, verified: int, nodes: int, span: int) -> Any:
        """The binding for this turn of a step of the first `span` rows that verifies and drafts
        these many nodes."""
        key = (self.turn, verified, nodes, span)
        if key not in self.bindings:
            first = self.buffers.first(span)
            here, tree = first.sets[self.turn], self.manifest.trees[str(verified)]
            given = {
                "tokens": here[f"tokens_{verified}"],
                "forced": self.memory.load(np.full(span, -1, np.int64)),
            }
            if tree is None:
                given |= {name: here[f"{name}_{verified}"] for name in TREE}
                given["verify"] = self.memory.load(np.arange(verified))
            else:
                given |= self._tree(tree, np.arange(verified), span)
            self.bindings[key] = self._bound(first, self.turn, given, nodes, again=True)
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
