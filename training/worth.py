"""What a drafter is worth on this machine: the tokens of a step against what the step costs."""

from __future__ import annotations

from pathlib import Path

from forerun.runtime.costs import Costs, measure_costs


def costs_of(bundle: Path, threads: int | None = None) -> Costs:
    """Measures the bundle here. Raises ForerunError where it cannot run."""
    from forerun.runtime import load  # only here: training itself needs no engine

    model = load(bundle, threads)
    sizes = [*map(int, model.bundle.manifest.trees)]
    return measure_costs(model.engine, sizes, sizes)[0]
