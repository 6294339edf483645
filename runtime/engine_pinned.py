"""An engine that takes only the shapes it was built for.

They are one prefill (a chunk of full length, of which one node is verified, that drafts the default
tree) and a step for each tree size, which drafts as many nodes as it verifies. Everything is bound
once, by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.runtime.buffers import Array, Buffer, Buffers, Layout, Memory, Ticket
from forerun.runtime.engine_step import Named, Reading, StepEngine
from forerun.runtime.tree import Tree

NO_TOKEN = -1


@dataclass
class Prefill:
    """One row's prefill: what is written for each chunk, and its bindings by turn."""

    given: Named
    logits: Buffer
    bindings: dict[int, Any] = field(default_factory=dict)


class PinnedEngine(StepEngine):
    """`StepEngine` where shapes are fixed; `logits_type` is what the step's logits are in."""

    logits_type: Any = np.float32

    def __init__(self, layout: Layout, memory: Memory, rows: int) -> None:
        super().__init__(layout, memory, rows, layout.manifest.capacity)
        # A prompt's last chunk is padded, and must end inside the cache.
        capacity, chunk = self.manifest.capacity, self.manifest.chunk
        self.context = min(self.context, capacity // chunk * chunk)

    @property
    def span(self) -> int:
        """All rows, whoever has a request."""
        return self.rows

    def _joined(self, reading: Reading, nodes: int, committed: list[int]) -> list[int]:
        """As any engine's. It drafted the default tree; where another is asked for, the first step
        verifies one that has nothing but its root."""
        first = super()._joined(reading, nodes, committed)
        if nodes != int(self.manifest.default_tree) and first:
            self._bare_tree(nodes, first[0], reading.row)
        return first

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """As any engine's; each token is a launch, since a prefill verifies one node."""
        return super().score(tokens, min(chunk or self.manifest.chunk, self.manifest.chunk))

    def launch(self, nodes: int) -> Ticket:
        """As any engine's; another size than the last begins with trees of nothing but roots, since
        a step drafts as many nodes as it verifies."""
        if nodes != self.drafted:
            self._leave_roots(nodes)
        return super().launch(nodes)

    def drop_draft(self) -> None:
        """As any engine's; the next step verifies trees that have nothing but their roots."""
        if self.drafted > 1:
            self._leave_roots(self.drafted)

    def _leave_roots(self, nodes: int) -> None:
        """Trees of `nodes` nodes in the place of those that were drafted."""
        tokens = self.memory.read(self.buffers.sets[self.turn][f"tokens_{self.drafted}"])
        for row, root in enumerate(tokens[:, 0].tolist()):
            self._bare_tree(nodes, root, row)
        self.drafted = nodes

    def launch_ms(self, verified: int, nodes: int, launches: int = 20, context: int = 32) -> float:
        """Of a step that verifies, and drafts, `verified` nodes: there is no other."""
        return super().launch_ms(verified, verified, launches, context)

    def _bare_tree(self, nodes: int, root: int, row: int) -> None:
        """Put a tree into `row` in which no node but the root has a token."""
        here = self.buffers.sets[self.turn]
        tokens = np.full((1, nodes), NO_TOKEN)
        tokens[0, 0] = root
        values: dict[str, Array] = {"tokens": tokens}
        if self.manifest.trees[str(nodes)] is None:  # the drafter grows it: all hang from the root
            kin = np.eye(nodes, dtype=np.bool_)
            kin[:, 0] = True
            values |= {
                "depth": np.minimum(np.arange(nodes), 1)[None],
                "ancestors": kin[None],
                "parents": np.zeros((1, nodes), np.int64),
            }
        for name, value in values.items():
            self.memory.write(here[f"{name}_{nodes}"][row : row + 1], value)

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
        """The row's one prefill, its inputs written anew; what is short of a chunk is no token."""
        prefill = self._prefill_of(alone)
        self._place(alone.sets[turn], start)
        tokens = np.full((1, self.manifest.chunk), NO_TOKEN)
        tokens[0, : chunk.size] = chunk
        written = {
            "tokens": tokens,
            "verify": np.asarray(verify, np.int64),
            "forced": np.asarray([*following, NO_TOKEN][:1], np.int64),
        }
        for name, value in written.items():
            self.memory.write(prefill.given[name], value)
        if turn not in prefill.bindings:
            prefill.bindings[turn] = self._bound(
                alone,
                turn,
                prefill.given,
                int(self.manifest.default_tree),
                prefill.logits,
            )
        return prefill.bindings[turn]

    def _logits(
        self, alone: Buffers, turn: int, piece: Array, start: int, verify: Sequence[int]
    ) -> NDArray[np.float32]:
        rows = []
        for node in verify:
            self._launch(self._chunk(alone, turn, piece, start, [node], 1))
            rows.append(self._as_float32(self.memory.read(self._prefill_of(alone).logits)[0]))
        return np.concatenate(rows)

    def _as_float32(self, logits: Array) -> NDArray[np.float32]:
        return logits.astype(np.float32)

    def _prefill_of(self, alone: Buffers) -> Prefill:
        if alone.prefill is None:
            given = {
                "tokens": self.memory.load(np.full((1, self.manifest.chunk), NO_TOKEN)),
                "pending": alone.zeros("pending", pending_in=0),
                "forced": self.memory.load(np.full(1, NO_TOKEN)),
                **self._tree(Tree.chain(self.manifest.chunk), np.zeros(1, np.int64), 1),
            }
            shape = (1, 1, self.manifest.target.vocab_size)
            alone.prefill = Prefill(given, self.memory.zeros(shape, self.logits_type))
        prefill: Prefill = alone.prefill
        return prefill

    def _binding(self, verified: int, nodes: int, span: int) -> Any:
        assert verified == nodes, "a step drafts as many nodes as it verifies"
        return super()._binding(verified, nodes, span)
