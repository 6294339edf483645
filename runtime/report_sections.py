"""A report's JSON -> what its page shows: one function a section."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from forerun.runtime.plot import Plot, bar_plot, line_plot, nice_ticks
from forerun.runtime.report_tree import tree_picture

Report = Mapping[str, Any]

SETTINGS = {
    "nodes": "draft tree, nodes",
    "max_new_tokens": "new tokens, at most",
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "seed": "seed",
    "threads": "threads",
    "prompts": "prompts",
    "skipped": "prompts left out, too long",
}
"""Keys of a report that are settings of its command, and their names."""
TRIED_ROWS = 12
"""Settings that a table shows at once, the best of them."""


@dataclass(frozen=True)
class Section:
    """Shown where the report has one of `keys`; `build` gives what the template draws."""

    title: str
    keys: tuple[str, ...]
    build: Callable[[Report], Any]


def headline(report: Report) -> dict[str, Any]:
    """The verdict and the numbers behind it, each None where the report lacks it."""
    bundle = report.get("bundle") or {}
    rates = [(report.get(side) or {}).get("tokens_per_s") for side in ("plain", "speculative")]
    names = ("target", "drafter", "engine", "precision")
    speedup, interval = report.get("speedup"), report.get("speedup_interval")
    return {
        "verdict": _verdict(speedup, interval),
        "speedup": speedup,
        "interval": interval,
        "scale": _interval_scale(speedup, interval) if speedup else None,
        "rates": None if None in rates else rates,
        "tau": report.get("tau"),
        "identical": report.get("identical"),
        "prompts": report.get("prompts"),
        "nodes": report.get("nodes"),
        "bundle": {name: bundle[name] for name in names if bundle.get(name)},
    }


def _verdict(speedup: float | None, interval: Sequence[float] | None) -> str | None:
    if not speedup:
        return None
    low, high = interval or (speedup, speedup)
    if low > 1:
        return "faster than plain decoding"
    return "slower than plain decoding" if high < 1 else "no clear difference from plain decoding"


def _interval_scale(speedup: float, interval: Sequence[float] | None) -> dict[str, float]:
    """Places in percent, on an axis from 0 past the interval and past 1."""
    low, high = interval or (speedup, speedup)
    end = 1.12 * max(high, 1.0)
    places = {"low": low, "high": high, "at": speedup, "one": 1.0}
    return {name: 100 * value / end for name, value in places.items()}


def waterfall(report: Report) -> dict[str, Any]:
    """Stages from the ideal to what was measured: level, change and bar of each."""
    stages = report["waterfall"]
    rate = (report.get("plain") or {}).get("tokens_per_s")
    plain = 1e3 / rate if rate else stages[0]["ms"] * stages[0]["speedup"]
    scale = 100 / (1.03 * max(plain, *(stage["ms"] for stage in stages)))
    rows = []
    for place, stage in enumerate(stages):
        before = stages[place - 1]["ms"] if place else 0.0
        total = place in (0, len(stages) - 1)
        low, high = (0.0, stage["ms"]) if total else sorted((before, stage["ms"]))
        rows.append(
            {
                **stage,
                "change": round(stage["ms"] - before, 2) if place else 0.0,
                "left": scale * low,
                "width": scale * (high - low),
                "kind": "total" if total else "more" if stage["ms"] >= before else "less",
            }
        )
    return {"rows": rows, "plain": plain, "plain_at": scale * plain}


def cost(report: Report) -> dict[str, Any]:
    """verify(n) over n: a line for each context length."""
    curve = report.get("verify_curve")
    if curve:
        contexts = sorted(curve, key=int)
        series = {str(context): _by_size(curve[context]) for context in contexts}
    else:
        series = {"short": _by_size(report["verify_cost"])}
    plot = line_plot(
        series,
        ("tokens verified in one step, n", "ms", "context"),
        lambda name, n, ms: f"context {name}: {n} in {ms:.1f} ms",
    )
    sizes = sorted({n for values in series.values() for n in values})
    rows = [{"n": n, "cells": [_cost_cell(values, n) for values in series.values()]} for n in sizes]
    return {
        "plot": plot,
        "draft": report.get("draft_cost"),
        "contexts": list(series),
        "rows": rows,
    }


def _by_size(costs: Mapping[str, float]) -> dict[int, float]:
    return {int(n): ms for n, ms in sorted(costs.items(), key=lambda item: int(item[0]))}


def _cost_cell(values: Mapping[int, float], n: int) -> dict[str, float | None]:
    one, ms = values.get(1), values.get(n)
    return {"ms": ms, "relative": ms / one if ms is not None and one else None}


def depth(report: Report) -> Plot:
    """The share of steps that got at least so deep."""
    shares = report["acceptance_by_depth"]
    named = [(str(place), share) for place, share in enumerate(shares, start=1)]
    return bar_plot(named, ("depth", "share of steps"), lambda share: f"{100 * share:.0f}%", True)


def position(report: Report) -> Plot:
    """tau along the answers."""
    parts = report["acceptance_by_position"]
    named = [(f"{part['from']}–{part['to']}", part["tau"]) for part in parts]
    return bar_plot(named, ("tokens of the answer", "tau"), lambda tau: f"{tau:.2f}")


def tree(report: Report) -> Any:
    """The draft tree, coloured by acceptance."""
    facts = report["tree"]
    by_depth = report.get("acceptance_by_depth") or ()
    return tree_picture(facts["parents"], facts.get("accepted"), by_depth)


def categories(report: Report) -> dict[str, Any]:
    """Each category's summary, its speedup and interval on one axis for all."""
    parts = report["categories"]
    bounds = [part.get("speedup_interval") or [part["speedup"]] * 2 for part in parts.values()]
    end = nice_ticks(max([1.0, *(high for _, high in bounds)]))[-1]
    rows = [
        {
            "name": name,
            **part,
            "interval": part.get("speedup_interval"),
            "low": 100 * low / end,
            "high": 100 * high / end,
            "at": 100 * part["speedup"] / end,
        }
        for (name, part), (low, high) in zip(parts.items(), bounds, strict=True)
    ]
    return {"rows": rows, "one": 100 / end}


def tuning(report: Report) -> dict[str, Any]:
    """The plan, and the settings that were weighed, best first."""
    tried = sorted(report.get("tried") or (), key=lambda item: -item["predicted"])
    best: dict[str, dict[int, float]] = {}
    measured: dict[str, dict[int, float]] = {}
    for item in sorted(tried, key=lambda item: item["context"]):
        name, nodes = str(item["context"]), item["nodes"]
        line = best.setdefault(name, {})
        line[nodes] = max(item["predicted"], line.get(nodes, 0.0))
        if item.get("measured") is not None:
            measured.setdefault(name, {})[nodes] = item["measured"]
    plot = line_plot(
        best,
        ("nodes of the draft tree", "predicted speedup", "context"),
        lambda name, nodes, speedup: f"context {name}, {nodes} nodes: {speedup:.2f}×",
        measured,
        (1.0, "plain"),
    )
    return {
        "plan": grid(report["plan"]) if report.get("plan") else None,
        "plot": plot if tried else None,
        "measured": bool(measured),
        "best": tried[:TRIED_ROWS],
        "others": tried[TRIED_ROWS:],
    }


def answers(report: Report) -> list[dict[str, Any]]:
    """Answers as steps, each a group of tokens that came together."""
    shown = []
    for answer in report["answers"]:
        tokens = answer["tokens"]
        # A step ends with the target's own token; a drafted one always has its step's before it.
        ends = (token["state"] != "drafted" for token in tokens[:-1])
        places = accumulate(ends, initial=0) if tokens else ()
        steps: list[list[dict[str, str]]] = []
        for token, place in zip(tokens, places, strict=True):
            if place == len(steps):
                steps.append([])
            steps[-1].append({**token, "text": token["text"].replace("\n", "↵\n")})
        drafted = sum(token["state"] == "drafted" for token in tokens)
        share = drafted / len(tokens) if tokens else 0.0
        shown.append({**answer, "steps": steps, "drafted": share, "count": len(tokens)})
    return shown


def worst(report: Report) -> list[dict[str, Any]]:
    """The prompts that gained least."""
    return [{"category": None, **item} for item in report["worst"]]


def setup(report: Report) -> dict[str, list[tuple[str, str]]]:
    """What was measured, where, with what."""
    settings = [(name, report[key]) for key, name in SETTINGS.items() if key in report]
    groups: dict[str, Any] = {
        "Bundle": (report.get("bundle") or {}).items(),
        "Settings": settings,
        "Machine": (report.get("machine") or {}).items(),
        "Versions": (report.get("versions") or {}).items(),
    }
    return {
        title: [(name, cell(value)) for name, value in facts]
        for title, facts in groups.items()
        if facts
    }


def grid(value: Any) -> dict[str, list[Any]]:
    """Any JSON as a table: objects of a list as its rows, an object's items elsewhere."""
    if isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()):
        value = [{"": name, **item} for name, item in value.items()]
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        columns = list(dict.fromkeys(key for item in value for key in item))
        rows = [[cell(item.get(column)) for column in columns] for item in value]
        return {"columns": [column.replace("_", " ") for column in columns], "rows": rows}
    facts = value.items() if isinstance(value, Mapping) else [("", value)]
    return {
        "columns": [],
        "rows": [[name.replace("_", " "), cell(item)] for name, item in facts],
    }


def cell(value: Any) -> str:
    """A value of JSON in few words."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


SECTIONS = {
    "waterfall": Section("Where the speedup went", ("waterfall",), waterfall),
    "cost": Section("What verifying costs", ("verify_curve", "verify_cost"), cost),
    "depth": Section("Acceptance by depth", ("acceptance_by_depth",), depth),
    "position": Section("Acceptance along the answer", ("acceptance_by_position",), position),
    "tree": Section("The draft tree", ("tree",), tree),
    "tuning": Section("Settings weighed", ("plan", "tried"), tuning),
    "categories": Section("By category", ("categories",), categories),
    "answers": Section("Token by token", ("answers",), answers),
    "worst": Section("Prompts that gained least", ("worst",), worst),
    "setup": Section("Setup", ("bundle", "machine", "versions"), setup),
}
"""The sections in the page's order, by the name of their macro in the templates."""
