"""Drafters of several sizes, trained and compiled one after the other, and what each is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from forerun.training.simulate import Played
from forerun.training.worth import Costs

Point = Mapping[str, int]
"""Options by name, such as {"intermediate": 768}."""


@dataclass(frozen=True)
class Sized:
    """A trained drafter, played on held-out answers, and its bundle's costs."""

    point: Point
    parameters: int
    played: Mapping[int, Played]
    """Nodes -> all held-out answers."""
    costs: Costs

    def speedup(self, nodes: int) -> float:
        """What is to be expected of `forerun bench`."""
        return self.costs.speedup(self.played[nodes].tau, nodes)


def points(axes: Mapping[str, Sequence[int]]) -> Iterator[Point]:
    """Every combination of the axes' values."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def place(output: Path, point: Point) -> Path:
    """The folder of a point's drafter."""
    return output / ",".join(f"{name}={value}" for name, value in point.items())


def sweep(
    axes: Mapping[str, Sequence[int]],
    output: Path,
    train: Callable[[Point, Path], Sized],
    say: Callable[[str], None],
) -> list[Sized]:
    """Trains every point into a folder of its own; reports the table, best speedup first."""
    found = []
    for point in points(axes):
        folder = place(output, point)
        say(f"sweep: {folder.name}")
        found.append(train(point, folder))
    for line in table(found):
        say(line)
    write(output / "sweep.json", found)
    return found


def table(found: Sequence[Sized]) -> Iterator[str]:
    """One line a drafter and tree, best predicted speedup first."""
    yield "size | M parameters | nodes | tau | accepted to depth | draft, ms | step, ms | speedup"
    rows = [(sized, nodes) for sized in found for nodes in sized.played]
    for sized, nodes in sorted(rows, key=lambda row: -row[0].speedup(row[1])):
        name = ", ".join(f"{key} {value}" for key, value in sized.point.items())
        depths = " ".join(f"{share:.2f}" for share in sized.played[nodes].acceptance_by_depth)
        yield (
            f"{name} | {sized.parameters / 1e6:.1f} | {nodes} | {sized.played[nodes].tau:.2f} | "
            f"{depths} | {sized.costs.draft(nodes):.1f} | {sized.costs.step[nodes]:.1f} | "
            f"{sized.speedup(nodes):.2f}"
        )


def write(path: Path, found: Sequence[Sized]) -> None:
    """The same for programs."""
    rows: list[dict[str, Any]] = [
        {
            **sized.point,
            "parameters": sized.parameters,
            "nodes": nodes,
            "tau": played.tau,
            "acceptance_by_depth": played.acceptance_by_depth,
            "plain_ms": sized.costs.plain,
            "draft_ms": sized.costs.draft(nodes),
            "step_ms": sized.costs.step[nodes],
            "predicted_speedup": sized.speedup(nodes),
        }
        for sized in found
        for nodes, played in sized.played.items()
    ]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
