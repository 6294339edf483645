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
from forerun.runtime.sampling import SamplingParams, uniforms
from forerun.runtime.tree import Tree

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingDependencyError("onnxruntime", "cpu", "running an ort bundle") from error

BUCKET = 64
"""Cache slots are added in multiples of this. A multiple of every vector and block length in use,
so that unused slots change no bit of a result."""

Array = NDArray[Any]

NUMPY_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}


class OrtEngine:
    """A bundle's step, loaded; one row (B = 1)."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.manifest = bundle.manifest
        self.session = _open_session(bundle, threads)
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        layers = self.manifest.target.num_layers
        self.cache_names = [
            f"{kind}_{layer}" for kind in ("keys", "values") for layer in range(layers)
        ]
        known = {*self.cache_names, *_STEP_INPUTS}
        self.state_names = [name for name in self.inputs if name not in known]
        self.room = max(tree.nodes for tree in self.manifest.trees.values()) + self.manifest.pending
        self.context = self.manifest.capacity - self.room
        self.seconds = 0.0
        self.slots, self.limit = 0, 0
        self.turn, self.drafted = 0, 1
        self.caches: dict[str, Array] = {}
        self._request_buffers()
        static = self.inputs[self.cache_names[0]].shape[2]  # a number in a graph made for TensorRT
        self.bucket = static if isinstance(static, int) else BUCKET
        self._grow(self.bucket)

    # --- the loop's three calls -------------------------------------------------------------

    def prefill(self, request: Request, nodes: int) -> list[int]:
        """The prompt's first token; the tree of `nodes` nodes is drafted on the way."""
        prompt = np.asarray(request.prompt, np.int64)
        self._begin(prompt.size, request)
        for start in range(0, prompt.size, self.manifest.chunk):
            chunk = prompt[start : start + self.manifest.chunk]
            last = start + chunk.size == prompt.size
            self._read_chunk(chunk, start, [chunk.size - 1], nodes if last else 1)
        return self._committed()

    def step(self, nodes: int) -> list[int]:
        """One launch. Where the drafter proposed nothing, only the root is verified."""
        here = self.sets[self.turn]
        position = int(here["length"][0] + here["pending_count"][0])
        if position + 1 >= self.limit:  # the root's own position: a step commits what follows it
            return []
        self._grow(position + self.room)
        verified = self.drafted if self.drafted > 1 and self._has_draft(here) else 1
        self._launch(self._binding(verified, nodes))
        self.drafted = nodes
        return self._committed()

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits `[n, V]` after each token, read in pieces of `chunk` tokens (None: prefill's)."""
        ids, size = np.asarray(tokens, np.int64), chunk or self.manifest.chunk
        self._begin(ids.size, Request(tokens, ids.size + 1))
        parts = []
        for start in range(0, ids.size, size):
            piece = ids[start : start + size]
            parts.append(self._read_chunk(piece, start, range(piece.size), 1, logits=True))
        return np.concatenate(parts)

    def launch_ms(self, verified: int, nodes: int, launches: int = 20) -> float:
        """Median milliseconds of a step that verifies and drafts these many nodes, context short.

        The same step is launched again and again: it reads one set of buffers and writes the other.
        """
        self.prefill(Request([0] * 32, self.context), 1)
        turn = self.turn
        self.sets[turn]["tokens"][:] = 0
        binding = self._binding(verified, nodes)
        times = []
        for _ in range(launches):
            self.turn, before = turn, self.seconds
            self._launch(binding)
            times.append(self.seconds - before)
        return 1e3 * statistics.median(times)

    # --- buffers ----------------------------------------------------------------------------

    def _request_buffers(self) -> None:
        """What one request fixes, and the two sets of ping-pong state, but for slots."""
        pending, widest = self.manifest.pending, max(map(int, self.manifest.trees))
        self.fixed: dict[str, Array] = {
            "uniforms": np.zeros((1, self.manifest.capacity), np.float32),
            "temperature": np.zeros(1, np.float32),
            "top_k": np.zeros(1, np.int64),
            "top_p": np.ones(1, np.float32),
            "limit": np.zeros(1, np.int64),
        }
        shape = [
            axis if isinstance(axis, int) else {0: 1, 2: pending}[place]
            for place, axis in enumerate(self.inputs["pending"].shape)
        ]
        real = NUMPY_TYPES[self.inputs["pending"].type]
        self.sets: list[dict[str, Array]] = [
            {
                "tokens": np.zeros((1, widest), np.int64),
                "length": np.zeros(1, np.int64),
                "pending_count": np.zeros(1, np.int64),
                "pending": np.zeros(shape, real),
            }
            for _ in range(2)
        ]
        self.emitted = np.zeros((1, pending), np.int64)

    def _grow(self, slots: int) -> None:
        """Make room for `slots` cache slots; what is cached is kept."""
        if slots <= self.slots:
            return
        old, kept = self.caches, self.slots
        self.slots = -(-slots // self.bucket) * self.bucket
        facts = self.manifest.target
        shape = (1, facts.num_kv_heads, self.slots, facts.head_dim)
        self.caches = {
            name: np.zeros(shape, NUMPY_TYPES[self.inputs[name].type]) for name in self.cache_names
        }
        for name, cache in old.items():
            self.caches[name][:, :, :kept] = cache
        for state in self.sets:
            for name in self.state_names:
                value = self.inputs[name]
                sizes = [axis if isinstance(axis, int) else self.slots for axis in value.shape]
                sizes[0] = 1
                grown: Array = np.zeros(sizes, NUMPY_TYPES[value.type])
                if kept:
                    grown[tuple(slice(0, size) for size in state[name].shape)] = state[name]
                state[name] = grown
        self.bindings: dict[tuple[int, int, int], Any] = {}

    def _begin(self, length: int, request: Request) -> None:
        """Check the request against the context, set its parameters, forget the one before."""
        if not 0 < length <= self.context:
            raise ForerunError(
                f"the prompt has {length} tokens; this bundle takes 1 to {self.context}: "
                "shorten it, or compile with a larger --capacity"
            )
        self.limit = min(request.limit, self.context)
        params: SamplingParams = request.params
        self.fixed["limit"][0] = self.limit
        self.fixed["temperature"][0] = params.temperature
        self.fixed["top_k"][0] = params.top_k
        self.fixed["top_p"][0] = params.top_p
        if not params.greedy:
            self.fixed["uniforms"][0] = uniforms(params.seed, self.manifest.capacity)
        for state in self.sets:
            for name in ("length", "pending_count", *self.state_names):
                state[name].fill(0)
        self._grow(length + self.room)

    # --- launching --------------------------------------------------------------------------

    def _read_chunk(
        self, chunk: Array, start: int, verify: Sequence[int], nodes: int, logits: bool = False
    ) -> NDArray[np.float32]:
        """Prefill `chunk` at slot `start`: a chain, of which `verify` is verified."""
        here = self.sets[self.turn]
        here["length"][0], here["pending_count"][0] = start, 0
        shape = list(here["pending"].shape)
        shape[2] = 0
        verified = np.asarray(verify, np.int64)
        inputs = {
            "tokens": chunk[None],
            "pending": np.zeros(shape, here["pending"].dtype),
            **_tree_inputs(Tree.chain(chunk.size), verified),
        }
        binding = self._bind(inputs, nodes, logits=(verified.size if logits else 0))
        self._launch(binding)
        self.drafted = nodes
        scores: NDArray[np.float32] = self.logits[0] if logits else np.zeros((0, 0), np.float32)
        return scores

    def _binding(self, verified: int, nodes: int) -> Any:
        """The binding for this turn of a step that verifies and drafts these many nodes."""
        key = (self.turn, verified, nodes)
        if key not in self.bindings:
            tree = self.manifest.trees[str(verified)]
            tokens = self.sets[self.turn]["tokens"][:, :verified]
            inputs = {"tokens": tokens, **_tree_inputs(tree, np.arange(verified))}
            self.bindings[key] = self._bind(inputs, nodes)
        return self.bindings[key]

    def _bind(self, given: dict[str, Array], nodes: int, logits: int = 0) -> Any:
        """Bind every input and output by address, and keep alive what the binding points to."""
        here, there = self.sets[self.turn], self.sets[1 - self.turn]
        tree = self.manifest.trees[str(nodes)]
        inputs = {
            **self.fixed,
            **here,
            **self.caches,
            **given,
            "slots": np.asarray(tree.slots, np.int64),
            "drafting": np.asarray(nodes > 1),
        }
        outputs = {
            "emitted": self.emitted,
            "count": there["pending_count"],
            "next_tokens": there["tokens"][:, :nodes],
            "next_length": there["length"],
            "next_pending": there["pending"],
            **{f"new_{name}": cache for name, cache in self.caches.items()},
            **{f"new_{name}": there[name] for name in self.state_names},
        }
        if logits:
            self.logits = np.zeros((1, logits, self.manifest.target.vocab_size), np.float32)
            outputs["logits"] = self.logits
        binding = self.session.io_binding()
        for name in self.inputs:
            array = inputs[name]
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding, inputs

    def _launch(self, bound: Any) -> None:
        start = time.perf_counter()
        self.session.run_with_iobinding(bound[0])
        self.seconds += time.perf_counter() - start
        self.turn = 1 - self.turn

    def _has_draft(self, state: dict[str, Array]) -> bool:
        return bool((state["tokens"][0, 1 : self.drafted] >= 0).any())

    def _committed(self) -> list[int]:
        count = int(self.sets[self.turn]["pending_count"][0])
        tokens: list[int] = self.emitted[0, :count].tolist()
        return tokens


_STEP_INPUTS = (
    *("tokens", "length", "pending_count", "pending", "depth", "ancestors", "verify", "parents"),
    *("slots", "drafting", "uniforms", "temperature", "top_k", "top_p", "limit"),
)


def _tree_inputs(tree: Tree, verify: NDArray[np.int64]) -> dict[str, Array]:
    """The step's inputs that describe a tree of which the nodes `verify` `[R]` are verified."""
    parents = np.maximum(tree.parents, 0)[: verify.size]
    return {
        "depth": tree.depths[None],
        "ancestors": tree.ancestors[None],
        "verify": verify,
        "parents": np.ascontiguousarray(parents[None]),
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
