"""Where a step's time goes, and what became of the ideal speedup.

Each prompt is answered four times: plainly and speculatively as `forerun bench` does, and both ways
again on an engine that times each node of a step. The clock of the first two says what a step
takes; the others say how that is shared out. Timing a node costs something: that price is found
from plain decoding, whose parts are made to sum up to its clock, and is taken off the speculative
step's. What its parts then miss of its own clock is shown as unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import zip_longest
from operator import add
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.bench import (
    BenchConfig,
    Pair,
    answer_both_ways,
    bundle_facts,
    categories,
    cost_facts,
    fitting_prompts,
    machine,
    summary,
    versions,
    warm_up,
)
from forerun.runtime.costs import verify_costs
from forerun.runtime.loop import Stats
from forerun.runtime.model import Model
from forerun.runtime.pace import Fixed
from forerun.runtime.parts import OTHER, PARTS
from forerun.runtime.positions import acceptance_by_position
from forerun.runtime.profilers import PREFILL, STEP, Label, Timed, load_profiler
from forerun.runtime.prompts import Prompt
from forerun.runtime.waterfall import HOST, UNEXPLAINED, WAITING, Side, unexplained, waterfall

PLAIN, SPECULATIVE = WAYS = ("plain", "speculative")


@dataclass
class Profile:
    """What was found so far: answers, and their launches timed, by kind of decoding."""

    pairs: list[Pair] = field(default_factory=list)
    timed: dict[Label, Timed] = field(default_factory=dict)

    def of(self, way: str, kind: str = STEP) -> Timed:
        """The launches of that kind."""
        return self.timed.setdefault((way, kind), Timed())

    def stats(self, way: str) -> Stats:
        """Of all answers given that way."""
        sides = (pair.plain if way == PLAIN else pair.speculative for pair in self.pairs)
        return reduce(add, (side.stats for side in sides), Stats())


def profile(
    model: Model,
    prompts: Sequence[Prompt],
    config: BenchConfig,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The report that `forerun profile --json` writes; `advance` is called after each prompt.

    Raises ForerunError where the bundle drafts nothing, or no prompt fits its context.
    """
    if config.nodes < 2:
        raise ForerunError(
            f"{model.bundle.path}: it only decodes plainly: compile it with a drafter to profile"
        )
    fitting = fitting_prompts(model, prompts)
    found = Profile()
    warm_up(model, fitting[0][1], config)
    for number, (prompt, ids) in enumerate(fitting):
        plain_first = number % 2 == 0
        found.pairs.append(answer_both_ways(model, prompt, ids, config, plain_first))
        _time(model, ids, config, found)
        advance()
    return {
        **_report(found),
        "skipped": len(prompts) - len(fitting),
        **_costs(model, config),
        "nodes": config.nodes,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.params.temperature,
        "threads": config.threads,
        "bundle": bundle_facts(model.bundle),
        "machine": machine(),
        "versions": versions(),
    }


def _time(model: Model, ids: Sequence[int], config: BenchConfig, found: Profile) -> None:
    """Answer both ways with a profiler on, and add up the launches."""
    # One for each prompt: profilers keep a bounded number of events, and end only once.
    profiler = load_profiler(model.bundle, model.engine)
    if profiler is None:
        return
    streams = [
        Model(model.bundle, profiler.engine(way)).stream_ids(
            ids, config.max_new_tokens, config.params, pace
        )
        for way, pace in ((PLAIN, Fixed(1)), (SPECULATIVE, config.pace))
    ]
    # Step by step in turns: what slows the machine down for a while slows down both.
    for _ in zip_longest(*streams):
        pass
    for label, timed in profiler.timed().items():
        found.of(*label).join(timed)


def _report(found: Profile) -> dict[str, Any]:
    """What the profile says, without what was profiled."""
    plain, speculative = found.stats(PLAIN), found.stats(SPECULATIVE)
    if not plain.steps or not speculative.steps:
        raise ForerunError("every answer ends at its first token: give other prompts")
    price = found.of(PLAIN).price
    sides = {way: _side(found, way, price) for way in WAYS}
    levels = waterfall(sides[PLAIN], sides[SPECULATIVE])
    shares = found.of(SPECULATIVE).shares(price)
    return {
        **summary(found.pairs),
        "waterfall": [asdict(level) for level in levels],
        "unexplained": unexplained(levels),
        "parts": _parts(sides[SPECULATIVE]),
        "plain_parts": _parts(sides[PLAIN]),
        "latency": _latency(speculative, len(found.pairs)),
        "prefill_shares": found.of(SPECULATIVE, PREFILL).shares(price),
        "acceptance_by_position": acceptance_by_position(
            pair.speculative.stats.trace for pair in found.pairs
        ),
        "categories": categories(found.pairs),
        "profiler": {
            "launches": found.of(SPECULATIVE).launches,
            "ms_a_node": price,
            "unattributed": shares.get(OTHER, 0.0) if shares else 1.0,
        },
    }


def _side(found: Profile, way: str, price: float) -> Side:
    """One way of decoding: its clock, and the parts that it is made of.

    The profiler says what shares of the engine's time they have: a machine that was slower while
    it timed changes nothing.
    """
    stats = found.stats(way)
    committed = stats.tau * stats.steps
    engine, wall = (1e3 * s / stats.steps for s in (stats.engine_seconds, stats.wall_seconds))
    shares = found.of(way).shares(price)
    return Side(
        wall,
        {**{part: engine * n for part, n in shares.items()}, HOST: wall - engine, WAITING: 0.0},
        stats.tau,
        stats.tokens / committed,
    )


def _parts(side: Side) -> dict[str, float]:
    """Milliseconds a step, all parts: they sum up to the step's."""
    names = (*PARTS, OTHER, HOST, WAITING)
    known = {name: side.parts.get(name, 0.0) for name in names}
    return {**known, UNEXPLAINED: side.step - sum(known.values())}


def _latency(stats: Stats, answers: int) -> dict[str, float | None]:
    """Milliseconds an answer: what is on the way, the host's, the prefill's and decoding's."""
    return {
        "network": None,  # where it is served
        "host": 1e3 * (stats.wall_seconds - stats.engine_seconds) / answers,
        "prefill": 1e3 * stats.prefill_seconds / answers,
        "decode": 1e3 * stats.engine_seconds / answers,
    }


def _costs(model: Model, config: BenchConfig) -> dict[str, Any]:
    found = verify_costs(model.bundle, [config.nodes], config.threads)
    short = cost_facts(found[0], model.bundle.manifest.trees, config.nodes)
    return {**short, "verify_curve": {str(cost.context): cost.curve for cost in found}}
