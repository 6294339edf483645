"""What a drafter is worth on this machine: the tokens of a step against what the step costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of a bundle's steps, at a short context."""

    plain: float
    """One token verified, nothing drafted."""
    verify: Mapping[int, float]
    """Nodes -> so many verified, nothing drafted."""
    step: Mapping[int, float]
    """Nodes -> so many verified, and as many drafted."""

    @classmethod
    def of(cls, bundle: Path, threads: int | None = None) -> Costs:
        """Measures the bundle here. Raises ForerunError where it cannot run."""
        from forerun.runtime import load  # only here: training itself needs no engine

        model = load(bundle, threads)
        sizes = sorted(nodes for nodes in map(int, model.bundle.manifest.trees) if nodes > 1)
        launch = model.engine.launch_ms
        return cls(
            launch(1, 1),
            {nodes: launch(nodes, 1) for nodes in sizes},
            {nodes: launch(nodes, nodes) for nodes in sizes},
        )

    def draft(self, nodes: int) -> float:
        """Milliseconds that drafting takes."""
        return max(self.step[nodes] - self.verify[nodes], 0.0)

    def speedup(self, tau: float, nodes: int) -> float:
        """Plain time a token over speculative time a token, the host's share left out.

        That is tau / (verify(n) + c) in the words of Leviathan et al. (arXiv:2211.17192, theorem
        3.8), whose verify(n) is 1 and whose tau is a chain's.
        """
        return tau * self.plain / self.step[nodes]
