"""`forerun tune` as a whole: record, time, choose, measure, write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.bench import machine
from forerun.runtime.bundle import Bundle
from forerun.runtime.costs import Costs, with_trees
from forerun.runtime.engine import load_engine
from forerun.runtime.manifest import Manifest
from forerun.runtime.model import Model
from forerun.runtime.pace import Fixed, Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.prompts import Prompt
from forerun.runtime.race import Result, Runner, race
from forerun.runtime.tune import (
    Advance,
    Candidate,
    TuneConfig,
    candidates,
    choose,
    record_answers,
    split,
    time_steps,
    tuned_trees,
)
from forerun.runtime.tune_report import DEFAULT, FIRST, PLAIN, SECOND, Outcome, report

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """What came out: the manifest with its plan, and the report that `--json` writes."""

    manifest: Manifest
    report: dict[str, Any]


def tune(
    bundle: Bundle,
    prompts: Sequence[Prompt],
    config: TuneConfig,
    say: Say = lambda line: None,
    advance: Advance = lambda: None,
) -> Tuned:
    """Choose a tree for each context and batch size, and confirm the choice by measuring.

    Nothing is written. Raises ForerunError for a drafter that drafts nothing, and where too few
    prompts are short enough.
    """
    manifest = bundle.manifest
    if manifest.drafter.candidates == 0:
        raise ForerunError(
            f"{bundle.path}: its drafter {manifest.drafter.kind} drafts nothing: there is nothing "
            "to tune; compile with --drafter"
        )
    learned, measured = split(bundle, prompts, manifest.capacity // 2)
    say(f"recording {len(learned)} answers")
    answers = record_answers(bundle, learned, config, advance)
    tried = candidates(manifest, answers, config.sizes)
    say(f"timing steps of {', '.join(map(str, tried))} nodes")
    costs = time_steps(bundle, {nodes: one.tree for nodes, one in tried.items()}, config, advance)
    choices = choose(costs, tried)
    plan = Plan(
        str(machine()["cpu"]),
        config.threads,
        len(answers),
        sum(answer.length for answer in answers),
        tuple(choices),
    )
    second = runner_up(costs[0], tried, choices[0].nodes)
    say(f"measuring on {len(measured)} other prompts")
    ids = [ids for _, ids in measured]
    result = confirm(bundle, tried, plan, second, ids, config, advance)
    best = max(result.answers, key=lambda name: result.stats(name).tokens_per_s)
    plan = corrected(plan, best, costs, tried, second, int(manifest.default_tree))
    # The default keeps its shape where it was the fastest.
    kept = {int(manifest.default_tree)} if best == DEFAULT else set()
    written = replace(tuned_trees(manifest, tried, {*plan.sizes} - kept), plan=plan)
    outcome = Outcome(bundle, config, answers, tried, costs, choices[0].nodes, second, result, ids)
    return Tuned(written, report(outcome, plan, best))


def runner_up(cost: Costs, tried: Mapping[int, Candidate], winner: int) -> int:
    """The second best size by prediction, plain decoding included."""
    speedups = {1: 1.0} | {n: one.speedup(cost, n) for n, one in tried.items()}
    others = {nodes: speedup for nodes, speedup in speedups.items() if nodes != winner}
    return max(others, key=lambda nodes: others[nodes])


def confirm(
    bundle: Bundle,
    tried: Mapping[int, Candidate],
    plan: Plan,
    second: int,
    prompts: Sequence[Sequence[int]],
    config: TuneConfig,
    advance: Advance,
) -> Result:
    """Plain, default, and the two best by prediction on prompts that were not recorded."""
    own = bundle.manifest.trees
    new = {str(nodes): tried[nodes].tree for nodes in (second, *plan.sizes) if nodes > 1}
    wide = with_trees(bundle, new)
    model = Model(wide, load_engine(wide, config.threads))
    runners = {
        PLAIN: Runner(Fixed(1), {**new, **own}),
        DEFAULT: Runner(Fixed(int(bundle.manifest.default_tree)), {**new, **own}),
        FIRST: Runner(Planned(plan), {**own, **new}),
        SECOND: Runner(Fixed(second), {**own, **new}),
    }
    return race(model, prompts, runners, config.max_new_tokens, advance)


def corrected(
    plan: Plan,
    best: str,
    costs: Sequence[Costs],
    tried: Mapping[int, Candidate],
    second: int,
    default: int,
) -> Plan:
    """The plan with what was really the fastest in the place of the predicted winner, wherever that
    was chosen."""
    if best == FIRST:
        return plan
    winner, nodes = plan.choices[0].nodes, {PLAIN: 1, DEFAULT: default, SECOND: second}[best]

    def other(choice: Choice, cost: Costs) -> Choice:
        if choice.nodes != winner:
            return choice
        if nodes == 1:
            return replace(choice, nodes=1, tau=1.0, break_even=1.0)
        even = cost.step[nodes] / cost.plain
        return replace(choice, nodes=nodes, tau=tried[nodes].played.tau, break_even=even)

    pairs = zip(plan.choices, costs, strict=True)
    return replace(plan, choices=tuple(other(choice, cost) for choice, cost in pairs))
