"""Steps launched before the tokens of the ones before them are read, so that nothing waits.

While the host cuts, detokenises and sends what a step gave, the device computes the next one. A
request's end is seen a step late: what was launched beyond it is dropped, neither emitted nor
counted.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, runtime_checkable

from forerun.runtime.engine import Engine


@runtime_checkable
class Pipelined(Protocol):
    """An engine whose steps are launched and waited for apart, in the same order."""

    ahead: int
    """Steps that may be in flight while the tokens of one are read; 0: nothing is gained by it."""

    def launch(self, nodes: int) -> Any:
        """Launch a step; -> its ticket."""

    def wait(self, ticket: Any) -> list[list[int]]:
        """Each row's tokens, once they are there."""


class Steps:
    """The steps of all rows of `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pipelined = engine if isinstance(engine, Pipelined) and engine.ahead else None
        self._flying: deque[Any] = deque()
        self._launched = 0
        self._since: dict[int, int] = {}

    def joined(self, row: int) -> None:
        """A prefill began another request in `row`: steps in flight are not that request's."""
        self._since[row] = self._launched

    def next(self, nodes: int) -> list[list[int] | None]:
        """Each row's new tokens; None for a row whose request is younger than the step.

        What is launched for it drafts trees of `nodes` nodes.
        """
        if self._pipelined is None:
            return [*self._engine.step(nodes)]
        while len(self._flying) <= self._pipelined.ahead:
            self._flying.append(self._pipelined.launch(nodes))
            self._launched += 1
        step = self._launched - len(self._flying)
        rows = self._pipelined.wait(self._flying.popleft())
        return [
            tokens if self._since.get(row, 0) <= step else None for row, tokens in enumerate(rows)
        ]
