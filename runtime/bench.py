"""Plain and speculative decoding measured side by side: prompt by prompt, in one process."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib import metadata
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from forerun import __version__
from forerun.errors import ForerunError
from forerun.runtime.answers import shown_tree, singled_out, words_of
from forerun.runtime.bundle import Bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.costs import Costs, measure_costs
from forerun.runtime.engine import GREEDY
from forerun.runtime.loop import Stats
from forerun.runtime.model import Completion, Model
from forerun.runtime.pace import Fixed, Pace
from forerun.runtime.prompts import Prompt
from forerun.runtime.sampling import SamplingParams

PACKAGES = (
    *("numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu"),
    *("torch", "tensorrt", "tensorrt-rtx", "cuda-bindings"),
)
"""What a step may be run by."""
RESAMPLES = 2000
"""Bootstrap resamples of the prompts behind an interval."""


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    pace: Pace
    """What is drafted, which is compared with plain decoding."""
    max_new_tokens: int = 128
    params: SamplingParams = GREEDY
    threads: int | None = None
    answers: int = 0
    """Answers that are shown token by token: those that gained least and most."""

    @property
    def nodes(self) -> int:
        """Of the largest tree that is drafted."""
        return self.pace.largest


@dataclass(frozen=True)
class Pair:
    """One prompt, answered both ways."""

    category: str | None
    plain: Completion
    speculative: Completion
    prompt: str = ""

    @property
    def speedup(self) -> float:
        """Of this prompt alone; 0 where an answer ended before its first step."""
        return _ratio(self.speculative.stats.tokens_per_s, self.plain.stats.tokens_per_s)

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens and the same end."""
        plain, speculative = self.plain, self.speculative
        return (plain.token_ids, plain.finish_reason) == (
            speculative.token_ids,
            speculative.finish_reason,
        )


def bench(
    model: Model,
    prompts: Sequence[Prompt],
    config: BenchConfig,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The report that `forerun bench --json` writes; `advance` is called after each prompt.

    Prompts that don't fit the bundle's context are left out and counted as `skipped`. Raises
    ForerunError where none is left.
    """
    fitting = fitting_prompts(model, prompts)
    warm_up(model, fitting[0][1], config)
    pairs = []
    for number, (prompt, ids) in enumerate(fitting):
        pairs.append(answer_both_ways(model, prompt, ids, config, plain_first=number % 2 == 0))
        advance()
    summed = summary(pairs)
    return {
        **summed,
        "categories": categories(pairs),
        "skipped": len(prompts) - len(fitting),
        **_drift(model, summed["tau"]),
        **costs(model, config.nodes),
        **singled_out(pairs, model.bundle.tokenizer, config.answers),
        **shown_tree(model.bundle.manifest.trees[str(config.nodes)], summed["acceptance_by_depth"]),
        "nodes": config.nodes,
        "max_new_tokens": config.max_new_tokens,
        **asdict(config.params),
        "threads": config.threads,
        "bundle": bundle_facts(model.bundle),
        "machine": machine(),
        "versions": versions(),
    }


def _drift(model: Model, tau: float) -> dict[str, float]:
    plan = model.bundle.manifest.plan
    return {"drift": plan.drift(tau)} if plan else {}


def shorter_prompts(
    bundle: Bundle, prompts: Sequence[Prompt], longest: int
) -> list[tuple[Prompt, list[int]]]:
    """The prompts of less than `longest` tokens, with their ids."""
    encoded = [(prompt, encode_prompt(bundle, prompt.content)) for prompt in prompts]
    return [(prompt, ids) for prompt, ids in encoded if len(ids) < longest]


def fitting_prompts(model: Model, prompts: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
    """The prompts that the model's context holds, with their ids; ForerunError where none is."""
    fitting = shorter_prompts(model.bundle, prompts, model.engine.context)
    if not fitting:
        raise ForerunError(
            f"no prompt is shorter than this bundle's context of {model.engine.context} tokens: "
            "compile with a larger --capacity"
        )
    return fitting


def warm_up(model: Model, ids: Sequence[int], config: BenchConfig) -> None:
    """The first run of anything pays for its set-up."""
    for pace in (Fixed(1), config.pace):
        model.stream_ids(ids, min(16, config.max_new_tokens), nodes=pace).completion  # noqa: B018


def answer_both_ways(
    model: Model, prompt: Prompt, ids: Sequence[int], config: BenchConfig, plain_first: bool
) -> Pair:
    """One prompt's pair.

    Who goes first should alternate: a machine that slows down or speeds up favours neither then.
    """
    runs: dict[bool, Completion] = {}
    for plain in (plain_first, not plain_first):
        pace = Fixed(1) if plain else config.pace
        stream = model.stream_ids(ids, config.max_new_tokens, config.params, pace)
        runs[plain] = stream.completion
    return Pair(prompt.category, runs[True], runs[False], words_of(prompt))


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the pairs say together.

    `speedup` is the ratio of tokens a second, which for the same tokens is the ratio of the times;
    `speedup_interval` its 95% bootstrap interval over prompts.
    """
    plain = reduce(add, (pair.plain.stats for pair in pairs), Stats())
    speculative = reduce(add, (pair.speculative.stats for pair in pairs), Stats())
    return {
        "prompts": len(pairs),
        "identical": sum(pair.identical for pair in pairs),
        "speedup": _ratio(speculative.tokens_per_s, plain.tokens_per_s),
        "speedup_interval": speedup_interval(pairs),
        "tau": speculative.tau,
        "acceptance_by_depth": speculative.acceptance_by_depth,
        "host_share": speculative.host_share,
        "plain": _side(plain, len(pairs)),
        "speculative": _side(speculative, len(pairs)),
    }


def speedup_interval(pairs: Sequence[Pair]) -> list[float] | None:
    """95% bootstrap interval of the speedup over prompts; None for one prompt."""
    return ratio_interval([p.plain.stats for p in pairs], [p.speculative.stats for p in pairs])


def ratio_interval(one: Sequence[Stats], other: Sequence[Stats]) -> list[float] | None:
    """2.5th and 97.5th percentile of `other`'s tokens a second over `one`'s, prompts resampled."""
    if len(one) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(one), size=(RESAMPLES, len(one)))
    rates = []
    for side in (one, other):
        tokens = np.array([stats.tokens for stats in side])[draws].sum(1)
        seconds = np.array([stats.wall_seconds for stats in side])[draws].sum(1)
        rates.append(tokens / np.maximum(seconds, 1e-12))
    usable = rates[0] > 0
    if not usable.any():
        return None
    ratios = rates[1][usable] / rates[0][usable]
    return [float(bound) for bound in np.percentile(ratios, [2.5, 97.5])]


def costs(model: Model, nodes: int) -> dict[str, Any]:
    """Milliseconds of a launch at a short context: verifying n nodes, and drafting besides."""
    trees = model.bundle.manifest.trees
    return cost_facts(measure_costs(model.engine, [*map(int, trees)], [nodes])[0], trees, nodes)


def cost_facts(found: Costs, sizes: Iterable[str], nodes: int) -> dict[str, Any]:
    """Of what was measured the part that says what a bundle's trees cost."""
    return {
        "verify_cost": {size: found.curve[size] for size in sorted(sizes, key=int)},
        "draft_cost": found.draft(nodes) if nodes > 1 else 0.0,
    }


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """What was measured."""
    manifest = bundle.manifest
    return {
        "path": os.fspath(bundle.path),
        "hash": manifest.recipe,
        "target": manifest.target.name,
        "drafter": manifest.drafter.name,
        "engine": manifest.engine.kind,
        "precision": manifest.precision,
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    names = [platform.processor() or platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        names = [*found, *names]
    return {"cpu": names[0], "cores": os.cpu_count(), "platform": platform.platform()}


def versions() -> dict[str, str]:
    """Of everything that takes part in a step."""
    known = {"forerun": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


def table(report: dict[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    bounds = report["speedup_interval"]
    interval = f" (95%: {bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    depths = " ".join(f"{share:.2f}" for share in report["acceptance_by_depth"])
    cost = ", ".join(f"{n}: {ms:.1f} ms" for n, ms in report["verify_cost"].items())
    grid = Table("", "plain", "speculative", title=f"{report['prompts']} prompts")
    for name, key, form in _ROWS:
        grid.add_row(name, *(form.format(report[side][key]) for side in ("plain", "speculative")))
    grid.add_section()
    for name, value in (
        ("speedup", f"{report['speedup']:.2f}{interval}"),
        ("tau", f"{report['tau']:.2f}"),
        *([("tau against the plan's", f"{report['drift']:+.0%}")] if "drift" in report else []),
        ("accepted to depth 1, 2, ...", depths),
        ("identical", f"{report['identical']} of {report['prompts']}"),
        ("verify cost", cost),
        ("draft cost", f"{report['draft_cost']:.1f} ms"),
        *([("left out, too long", str(report["skipped"]))] if report["skipped"] else []),
    ):
        grid.add_row(name, "", value)
    for category, part in report["categories"].items():
        line = f"{part['speedup']:.2f}, tau {part['tau']:.2f}, {part['prompts']} prompts"
        grid.add_row(f"  {category}", "", line)
    return grid


_ROWS = (
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("ms a step", "step_ms", "{:.1f}"),
    ("prefill, ms", "prefill_ms", "{:.0f}"),
    ("host share", "host_share", "{:.2%}"),
    ("tokens", "tokens", "{}"),
)


def _side(stats: Stats, prompts: int) -> dict[str, Any]:
    return {
        "tokens_per_s": stats.tokens_per_s,
        "tokens": stats.tokens,
        "steps": stats.steps,
        "seconds": stats.wall_seconds,
        "step_ms": 1e3 * _ratio(stats.wall_seconds, stats.steps),
        "prefill_ms": 1e3 * stats.prefill_seconds / prompts,
        "host_share": stats.host_share,
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def categories(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The summary of each category of prompts."""
    names = dict.fromkeys(pair.category for pair in pairs if pair.category)
    return {name: summary([pair for pair in pairs if pair.category == name]) for name in names}
