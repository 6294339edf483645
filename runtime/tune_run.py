"""`forerun tune` as a whole: record, time, choose, measure, write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.bench import bundle_facts, machine, versions
from forerun.runtime.bundle import Bundle, replace_manifest
from forerun.runtime.costs import Costs, with_trees
from forerun.runtime.engine import load_engine
from forerun.runtime.manifest import Manifest
from forerun.runtime.model import Model
from forerun.runtime.pace import Fixed, Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.prompts import Prompt
from forerun.runtime.race import Result, Runner, race
from forerun.runtime.record import Recording
from forerun.runtime.replay import FixedTree, node_shares
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

PLAIN, DEFAULT, FIRST, SECOND = "plain", "default", "predicted best", "predicted second"
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
    sizes = {choice.nodes for choice in plan.choices}
    shapes = manifest if best == DEFAULT else tuned_trees(manifest, tried, [*sizes])
    written = replace(shapes, plan=plan)
    return Tuned(written, _report(bundle, config, answers, tried, costs, plan, best, result))


def runner_up(cost: Costs, tried: Mapping[int, Candidate], winner: int) -> int:
    """The second best size by prediction, plain decoding included."""
    speedups = {1: 1.0} | {n: cost.speedup(one.played.tau, n) for n, one in tried.items()}
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
    new = {str(nodes): tried[nodes].tree for nodes in (second, *_sizes(plan)) if nodes > 1}
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


def write(bundle: Bundle, manifest: Manifest) -> None:
    """Put the tuned manifest in the place of the bundle's; no file changes."""
    replace_manifest(bundle.path, manifest)


def _sizes(plan: Plan) -> list[int]:
    return sorted({choice.nodes for choice in plan.choices})


def _report(
    bundle: Bundle,
    config: TuneConfig,
    answers: Sequence[Recording],
    tried: Mapping[int, Candidate],
    costs: Sequence[Costs],
    plan: Plan,
    best: str,
    result: Result,
) -> dict[str, Any]:
    chosen = plan.choices[0].nodes
    tree = tried[chosen].tree if chosen > 1 else None
    speedup, interval = result.ratio(best, PLAIN)
    gain, gain_interval = result.ratio(best, DEFAULT)
    report = {
        "plan": asdict(plan),
        "exact_search": answers[0].parents is None,
        "prompts": len(result.answers[PLAIN]),
        "identical": min(result.identical(name, PLAIN) for name in result.answers),
        "speedup": speedup,
        "speedup_interval": interval,
        "tau": result.stats(best).tau,
        "acceptance_by_depth": result.stats(best).acceptance_by_depth,
        "gain": gain,
        "gain_interval": gain_interval,
        "measured": {name: _measured(result, name) for name in result.answers},
        "chosen": best,
        "tried": [
            {
                "rows": cost.rows,
                "context": cost.context,
                "nodes": nodes,
                "tau": one.played.tau,
                "plain_ms": cost.plain,
                "verify_ms": cost.verify.get(nodes, cost.step[nodes]),
                "step_ms": cost.step[nodes],
                "predicted": cost.speedup(one.played.tau, nodes),
            }
            for cost in costs
            for nodes, one in tried.items()
        ],
        "verify_curve": {
            str(cost.context): {"1": cost.plain, **{str(n): ms for n, ms in cost.verify.items()}}
            for cost in costs
            if cost.rows == costs[0].rows
        },
        "nodes": chosen,
        "max_new_tokens": config.max_new_tokens,
        "threads": config.threads,
        "bundle": bundle_facts(bundle),
        "machine": machine(),
        "versions": versions(),
    }
    if tree is not None:
        shares = node_shares(answers, FixedTree(tree))
        report["tree"] = {"parents": [*tree.parents], "accepted": shares}
    return report


def _measured(result: Result, name: str) -> dict[str, Any]:
    stats = result.stats(name)
    speedup, interval = result.ratio(name, PLAIN)
    return {
        "tokens_per_s": stats.tokens_per_s,
        "tau": stats.tau,
        "speedup": speedup,
        "speedup_interval": interval,
    }


def table(report: dict[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    title = f"{report['prompts']} prompts that were not recorded"
    grid = Table("", "tokens/s", "tau", "speedup", title=title)
    for name, side in report["measured"].items():
        bounds = side["speedup_interval"]
        interval = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
        cells = (f"{side['tokens_per_s']:.1f}", f"{side['tau']:.2f}")
        grid.add_row(name, *cells, f"{side['speedup']:.2f}{interval}")
    grid.add_section()
    bounds = report["gain_interval"]
    interval = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    grid.add_row(f"{report['chosen']} over default", "", "", f"{report['gain']:.2f}{interval}")
    for choice in report["plan"]["choices"]:
        what = "plain" if choice["nodes"] == 1 else f"{choice['nodes']} nodes"
        where = f"plan, from {choice['context']} tokens"
        if choice["rows"] > 1:
            where += f", {choice['rows']} rows"
        even = f"pays above tau {choice['break_even']:.2f}" if choice["nodes"] > 1 else ""
        grid.add_row(where, what, f"{choice['tau']:.2f}", even)
    return grid
