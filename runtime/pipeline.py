"""Steps launched before the tokens of the ones before them are read, so that nothing waits.

While the host cuts, detokenises and sends what a step gave, the device computes the next one. A
request's end is seen a step late: what was launched beyond it is dropped, neither emitted nor
counted.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, runtime_checkable

from forerun.runtime.engine import Engine
from forerun.runtime.pace import Pace


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
    """The steps of all rows of `engine`, each of them drafting what `pace` says."""

    def __init__(self, engine: Engine, pace: Pace) -> None:
        self._engine, self._pace = engine, pace
        self._pipelined = engine if isinstance(engine, Pipelined) and engine.ahead else None
        self._flying: deque[tuple[Any, int]] = deque()  # ticket, nodes verified
        self._launched = 0
        self._since: dict[int, int] = {}

    def joined(self, row: int) -> None:
        """A prefill began another request in `row`: steps in flight are not that request's."""
        self._since[row] = self._launched

    def next(self, context: int, busy: int = 1) -> list[list[int] | None]:
        """Each row's new tokens; None for a row whose request is younger than the step.

        `context` is how many tokens the longest of `busy` requests has, as far as is known.
        """
        nodes = self._pace.nodes(context, busy)
        if self._pipelined is None:
            rows, verified = self._engine.step(nodes), self._engine.verified
            young = set[int]()
        else:
            while len(self._flying) <= self._pipelined.ahead:
                ticket = self._pipelined.launch(nodes)
                self._flying.append((ticket, self._engine.verified))
                self._launched += 1
            step = self._launched - len(self._flying)
            ticket, verified = self._flying.popleft()
            rows = self._pipelined.wait(ticket)
            young = {row for row, since in self._since.items() if since > step}
        given = [None if row in young else tokens for row, tokens in enumerate(rows)]
        self._pace.saw(verified, [len(tokens) for tokens in given if tokens])
        return given
