"""What runs a bundle's step, and the registry of those that can."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle
from forerun.runtime.sampling import SamplingParams
from forerun.runtime.tree import Tree

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it."""

    prompt: Sequence[int]
    limit: int
    """Prompt and new tokens together: no token is committed at this position or later."""
    params: SamplingParams = GREEDY


class Engine(Protocol):
    """A loaded step for `rows` requests side by side: `prefill` begins one, `step` moves all on."""

    rows: int
    context: int
    """The longest that prompt and new tokens together may get."""
    verified: int
    """Nodes of the trees that the step launched last verifies."""
    skips_empty: bool
    """Whether a step for which nothing was proposed costs no more than verifying the root."""
    drafted: int
    """Nodes of the trees that it drafts, or that the last prefill drafted."""

    @property
    def seconds(self) -> float:
        """Time spent inside the engine so far: what is not in here is the host's."""

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        """Forget the row's request, read the prompt in chunks, return the first token.

        `nodes` is the size of the tree to draft (1: none).
        """

    def begin(self, request: Request, remembers: bool, row: int = 0) -> Any:
        """As `prefill`, but nothing is read yet: -> what `read` takes.

        The drafter `remembers` what is read where the request may be decoded with drafts.
        """

    def read(self, reading: Any, nodes: int) -> list[int] | None:
        """Read the next chunk of a prompt; -> after the last what `prefill` gives, else None.

        Steps of the other rows may lie between chunks. A prompt is given up by `release`.
        """

    def step(self, nodes: int) -> list[list[int]]:
        """Verify the drafted trees, draft others of `nodes` nodes, return each row's new tokens.

        Empty for a row whose limit is reached.
        """

    def release(self, row: int) -> None:
        """End a row's request: it commits nothing until its next prefill."""

    def score(self, tokens: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits `[n, V]` float32 after each of `tokens`, read in pieces of `chunk` (None: any)."""

    def draft(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """What each row's next step will verify: tokens `[B, N]`, and the nodes' parents `[B, N]`
        where the drafter grows its trees."""

    def drop_draft(self) -> None:
        """Forget it: the next step verifies nothing but the roots."""

    def take_trees(self, trees: Mapping[str, Tree | None]) -> None:
        """Draft trees of other shapes than the bundle's, whose sizes are the same."""

    def launch_ms(self, verified: int, nodes: int, launches: int = 20, context: int = 32) -> float:
        """Median milliseconds of a step that verifies and drafts these many nodes, `context` tokens
        being committed."""


ENGINES: dict[str, str] = {
    "ort": "forerun.runtime.engine_ort:open_engine",
    "tensorrt": "forerun.runtime.engine_tensorrt:TensorRtEngine",
    "tensorrt-rtx": "forerun.runtime.engine_tensorrt:TensorRtEngine",
    "torch": "forerun.models.engine_torch:TorchEngine",
}
"""Engine kind -> what opens it; imported only when a bundle asks for it."""

BUILT = ("tensorrt", "tensorrt-rtx")
"""Kinds whose engine is built from the bundle's ONNX graph, for one device."""


def load_engine(bundle: Bundle, threads: int | None = None, rows: int = 1) -> Engine:
    """The engine of `bundle` for `rows` requests; `threads` bounds the CPU threads of one there.

    Raises ForerunError where this machine can't run it or its package is missing.
    """
    kind = bundle.manifest.engine.kind
    if kind not in ENGINES:
        raise ForerunError(
            f"{bundle.path}: unknown engine {kind!r}: this version runs {', '.join(ENGINES)}"
        )
    module, _, name = ENGINES[kind].partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)(bundle, threads, rows)
    return engine
