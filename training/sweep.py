"""Drafters of several sizes, trained and compiled one after the other, and what each is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from safetensors import safe_open

from forerun.errors import ForerunError
from forerun.models.drafter_folder import write_text
from forerun.runtime.costs import Costs
from forerun.runtime.replay import Played

RESULTS = "sweep.json"
Point = Mapping[str, int]
"""Options by name, such as {"intermediate": 768}."""
Row = dict[str, Any]
"""A drafter and a tree's size: the point, tau, and what a step costs."""


def axes_of(words: Sequence[str], known: Sequence[str]) -> dict[str, list[int]]:
    """`name=1,2,3` each -> values by name; ForerunError for a name that is not `known`."""
    axes: dict[str, list[int]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise ForerunError(f"--sweep {word}: choose one of {', '.join(sorted(known))}")
        try:
            axes[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise ForerunError(f"--sweep {word}: give whole numbers, as in {name}=1,2") from None
    return axes


def points(axes: Mapping[str, Sequence[int]]) -> Iterator[Point]:
    """Every combination of the axes' values."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sweep(
    axes: Mapping[str, Sequence[int]],
    output: Path,
    facts: Mapping[str, Any],
    train: Callable[[Point, Path], Mapping[int, Played]],
    build: Callable[[Path], Costs],
    say: Callable[[str], None],
) -> list[Row]:
    """Makes every point's drafter in a folder of its own, best predicted speedup first.

    `train` writes a drafter and plays it on held-out answers, by the tree's size; `build` compiles
    it and measures the bundle. A point that is finished is not made again; ForerunError where
    `output` holds those of other `facts`.
    """
    output.mkdir(parents=True, exist_ok=True)
    rows = _finished(output / RESULTS, facts)
    for point in points(axes):
        if any(point.items() <= row.items() for row in rows):
            continue
        folder = output / ",".join(f"{name}={value}" for name, value in point.items())
        say(f"sweep: {folder.name}")
        played = train(point, folder)
        if not played:
            raise ForerunError("no greedy answer is held out: a sweep has nothing to compare by")
        costs = build(folder)
        rows += [
            row(point, parameters(folder), nodes, part, costs) for nodes, part in played.items()
        ]
        text = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
        write_text(output / RESULTS, text)
    return sorted(rows, key=lambda row: -row["predicted_speedup"])


def row(point: Point, weights: int, nodes: int, played: Played, costs: Costs) -> Row:
    """A drafter with a tree of `nodes` nodes."""
    return {
        **point,
        "parameters": weights,
        "nodes": nodes,
        "tau": played.tau,
        "acceptance_by_depth": played.acceptance_by_depth,
        "plain_ms": costs.plain,
        "draft_ms": costs.draft(nodes),
        "step_ms": costs.step[nodes],
        "predicted_speedup": costs.speedup(played.tau, nodes),
    }


def table(rows: Sequence[Row], axes: Sequence[str]) -> Iterator[str]:
    """The rows for people."""
    names = [*axes, "M parameters", "nodes", "tau", "by depth", "draft, ms", "step, ms", "speedup"]
    yield " | ".join(names)
    for found in rows:
        cells = [
            *(str(found[name]) for name in axes),
            f"{found['parameters'] / 1e6:.2f}",
            str(found["nodes"]),
            f"{found['tau']:.2f}",
            " ".join(f"{share:.2f}" for share in found["acceptance_by_depth"]),
            f"{found['draft_ms']:.1f}",
            f"{found['step_ms']:.1f}",
            f"{found['predicted_speedup']:.2f}",
        ]
        yield " | ".join(cells)


def parameters(folder: Path) -> int:
    """Floating-point numbers in the folder's weights."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype().startswith(("F", "BF")):
                    count += math.prod(part.get_shape())
    return count


def _finished(path: Path, facts: Mapping[str, Any]) -> list[Row]:
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["facts"] != json.loads(json.dumps(facts)):
        raise ForerunError(f"{path}: a sweep with other settings: choose another folder")
    rows: list[Row] = saved["rows"]
    return rows
