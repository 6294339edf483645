"""The step on ONNX Runtime's CPU provider: one session, every buffer bound once.

The caches are written in place (input and output share an address). All other state ping-pongs
between two sets of buffers: a step reads one and writes the other, so it has two bindings for each
tree size. Caches grow by buckets, since the provider's attention computes over every slot it has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import Request
from forerun.runtime.ort_buffers import TREE, Array, Buffers, Layout
from forerun.runtime.sampling import uniform_tables
from forerun.runtime.tree import Tree

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingDependencyError("onnxruntime", "cpu", "running an ort bundle") from error

BUCKET = 64
"""Cache slots are added in multiples of this. A multiple of every vector and block length in use,
so that unused slots change no bit of a result."""

NUMPY_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}


class OrtEngine:
    """A bundle's step, loaded, for `rows` requests side by side."""

    def __init__(self, bundle: Bundle, threads: int | None = None, rows: int = 1) -> None:
        self.manifest = bundle.manifest
        self.session = _open_session(bundle, threads)
        self.layout = Layout(
            self.manifest,
            {v.name: (v.shape, NUMPY_TYPES[v.type]) for v in self.session.get_inputs()},
        )
        self.rows = rows
        self.room = max(map(int, self.manifest.trees)) + self.manifest.pending
        self.context = self.manifest.capacity - self.room
        self.seconds = 0.0
        self.turn, self.drafted = 0, 1
        self.remembering = np.zeros((), np.bool_)  # bound by address
        self.buffers = Buffers(self.layout, rows)
        static = self.layout.inputs["keys_0"][0][2]  # a number in a graph made for TensorRT
        self.bucket = static if isinstance(static, int) else BUCKET
        self.bindings: dict[tuple[int, int, int], Any] = {}
        self._grow(self.bucket)

    # --- the loop's calls -------------------------------------------------------------------

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        """The prompt's first token; the tree of `nodes` nodes is drafted on the way.

        Rows that are being decoded draft trees of one size, so `nodes` must be theirs.
        """
        prompt = np.asarray(request.prompt, np.int64)
        alone = self._begin(prompt.size, request, row)
        self.remembering[...] |= nodes > 1
        turn = 0
        for start in range(0, prompt.size, self.manifest.chunk):
            chunk = prompt[start : start + self.manifest.chunk]
            after = prompt[start + chunk.size : start + chunk.size + 1]
            last = after.size == 0
            binding = self._chunk_binding(
                alone, turn, chunk, start, [chunk.size - 1], nodes if last else 1, after
            )
            self._launch(binding)
            turn = 1 - turn
        self.buffers.put(row, self.turn, alone.sets[turn])
        self.drafted = nodes
        return self._committed(row)

    def step(self, nodes: int) -> list[list[int]]:
        """One launch for all rows. Where the drafter proposed nothing, only roots are verified."""
        here = self.buffers.sets[self.turn]
        positions = here["length"] + here["pending_count"]
        # A root's own position: a step commits what follows it.
        live = positions + 1 < self.buffers.fixed["limit"]
        if not live.any():
            return [[] for _ in range(self.rows)]
        self._grow(int(positions.max()) + self.room)
        verified = self.drafted
        if verified > 1 and not self._has_draft(here, live):
            verified, here["tokens_1"][:] = 1, here[f"tokens_{self.drafted}"][:, :1]
        self._launch(self._binding(verified, nodes))
        self.turn = 1 - self.turn
        self.drafted = nodes
        return [self._committed(row) for row in range(self.rows)]

    def release(self, row: int) -> None:
        """The row commits nothing more until its next prefill."""
        self.buffers.fixed["limit"][row] = 0

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits `[n, V]` after each token, read in pieces of `chunk` tokens (None: prefill's)."""
        ids, size = np.asarray(tokens, np.int64), chunk or self.manifest.chunk
        alone = self._begin(ids.size, Request(tokens, ids.size + 1), 0)
        parts = []
        for turn, start in enumerate(range(0, ids.size, size)):
            piece = ids[start : start + size]
            verify = range(piece.size)
            logits = np.zeros((1, piece.size, self.manifest.target.vocab_size), np.float32)
            binding = self._chunk_binding(alone, turn % 2, piece, start, verify, 1, logits=logits)
            self._launch(binding)
            parts.append(logits[0])
        return np.concatenate(parts)

    def launch_ms(self, verified: int, nodes: int, launches: int = 20) -> float:
        """Median milliseconds of a step that verifies and drafts these many nodes, context short.

        The same step is launched again and again: it reads one set of buffers and writes the other.
        """
        for row in range(self.rows):
            self.prefill(Request([0] * 32, self.context), verified, row)
        binding = self._binding(verified, nodes)
        times = []
        for _ in range(launches):
            before = self.seconds
            self._launch(binding)
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
        fixed, params = self.buffers.fixed, request.params
        fixed["limit"][row] = min(request.limit, self.context)
        fixed["temperature"][row] = params.temperature
        fixed["top_k"][row] = params.top_k
        fixed["top_p"][row] = params.top_p
        if not params.greedy:
            tables = self.manifest.drafter.tables
            fixed["uniforms"][row] = uniform_tables(params.seed, self.manifest.capacity, tables)
        if self.rows == 1:
            self.remembering[...] = False
        self._grow(length + self.room)
        return self.buffers.row(row)

    def _grow(self, slots: int) -> None:
        """Make room for `slots` cache slots; bindings to the old buffers are dropped."""
        if slots > self.buffers.slots:
            self.buffers.grow(-(-slots // self.bucket) * self.bucket)
            self.bindings = {}

    def _has_draft(self, state: dict[str, Array], live: Array) -> bool:
        return bool((state[f"tokens_{self.drafted}"][live, 1:] >= 0).any())

    def _committed(self, row: int) -> list[int]:
        count = int(self.buffers.sets[self.turn]["pending_count"][row])
        tokens: list[int] = self.buffers.emitted[row, :count].tolist()
        return tokens

    # --- launching --------------------------------------------------------------------------

    def _chunk_binding(
        self,
        alone: Buffers,
        turn: int,
        chunk: Array,
        start: int,
        verify: Sequence[int],
        nodes: int,
        following: Sequence[int] | Array = (),
        logits: Array | None = None,
    ) -> Any:
        """Prefill `chunk` at slot `start`: a chain, of which `verify` is verified.

        `following` is the prompt's next token, where there is one.
        """
        here = alone.sets[turn]
        here["length"][0], here["pending_count"][0] = start, 0
        given = {
            "tokens": chunk[None],
            "pending": self.layout.zeros("pending", batch=1, pending_in=0),
            "forced": np.asarray([*following, -1][:1], np.int64),
            **_tree_inputs(Tree.chain(chunk.size), np.asarray(verify, np.int64), 1),
        }
        return self._bind(alone, turn, given, nodes, logits)

    def _binding(self, verified: int, nodes: int) -> Any:
        """The binding for this turn of a step that verifies and drafts these many nodes."""
        key = (self.turn, verified, nodes)
        if key not in self.bindings:
            here, tree = self.buffers.sets[self.turn], self.manifest.trees[str(verified)]
            given = {
                "tokens": here[f"tokens_{verified}"],
                "forced": np.full(self.rows, -1, np.int64),
            }
            if tree is None:
                given |= {name: here[f"{name}_{verified}"] for name in TREE}
                given["verify"] = np.arange(verified)
            else:
                given |= _tree_inputs(tree, np.arange(verified), self.rows)
            self.bindings[key] = self._bind(self.buffers, self.turn, given, nodes)
        return self.bindings[key]

    def _bind(
        self,
        buffers: Buffers,
        turn: int,
        given: dict[str, Array],
        nodes: int,
        logits: Array | None = None,
    ) -> Any:
        """Bind every input and output by address, and keep alive what the binding points to."""
        here, there = buffers.sets[turn], buffers.sets[1 - turn]
        tree = self.manifest.trees[str(nodes)]
        inputs = {
            **buffers.fixed,
            **here,
            **buffers.caches,
            **given,
            "slots": np.asarray(range(nodes) if tree is None else tree.slots, np.int64),
            "remembering": self.remembering,
            "drafting": np.asarray(nodes > 1),
        }
        outputs = {
            "emitted": buffers.emitted,
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
        binding = self.session.io_binding()
        for name in self.layout.inputs:
            array = inputs[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding, inputs, outputs

    def _launch(self, bound: Any) -> None:
        start = time.perf_counter()
        self.session.run_with_iobinding(bound[0])
        self.seconds += time.perf_counter() - start


def _tree_inputs(tree: Tree, verify: NDArray[np.int64], rows: int) -> dict[str, Array]:
    """The step's inputs that describe a tree of which the nodes `verify` `[R]` are verified."""
    parents = np.maximum(tree.parents, 0)[: verify.size]
    return {
        "depth": np.tile(tree.depths[None], (rows, 1)),
        "ancestors": np.tile(tree.ancestors[None], (rows, 1, 1)),
        "verify": verify,
        "parents": np.tile(parents[None], (rows, 1)),
    }


def _open_session(bundle: Bundle, threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    path = bundle.file(bundle.manifest.engine.file)
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen classes, RuntimeError the only base
        reason = str(error).splitlines()[0]
        raise ForerunError(f"{path}: ONNX Runtime can't load it: {reason}") from None
