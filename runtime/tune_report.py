"""What `forerun tune` tells: the plan, what was tried and predicted, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from forerun.runtime.bench import bundle_facts, machine, versions
from forerun.runtime.bundle import Bundle
from forerun.runtime.costs import Costs, at_context
from forerun.runtime.plan import Plan
from forerun.runtime.race import Result
from forerun.runtime.record import Recording
from forerun.runtime.replay import FixedTree, node_shares
from forerun.runtime.tune import Candidate, TuneConfig

PLAIN, DEFAULT, FIRST, SECOND = "plain", "default", "predicted best", "predicted second"
"""What is measured side by side."""


@dataclass(frozen=True)
class Outcome:
    """All that was found."""

    bundle: Bundle
    config: TuneConfig
    answers: Sequence[Recording]
    tried: Mapping[int, Candidate]
    costs: Sequence[Costs]
    first: int
    """Nodes of the predicted best at a short context, and of the second."""
    second: int
    result: Result
    prompts: Sequence[Sequence[int]]
    """Measured on."""

    def here(self) -> Costs:
        """What steps cost in the middle of the measured answers, for one batch size."""
        tokens = self.result.stats(PLAIN).tokens / len(self.prompts)
        context = mean(map(len, self.prompts)) + tokens / 2
        return at_context([c for c in self.costs if c.rows == self.costs[0].rows], context)


def report(found: Outcome, plan: Plan, best: str) -> dict[str, Any]:
    """What `forerun tune --json` writes; `best` is what `plan` follows, among what was measured."""
    result, chosen = found.result, plan.choices[0].nodes
    speedup, interval = result.ratio(best, PLAIN)
    gain, gain_interval = result.ratio(best, DEFAULT)
    tree = found.tried[chosen].tree if chosen > 1 else None
    return {
        "plan": asdict(plan),
        "exact_search": found.answers[0].parents is None,
        "prompts": len(found.prompts),
        "identical": min(result.identical(name, PLAIN) for name in result.answers),
        "speedup": speedup,
        "speedup_interval": interval,
        "tau": result.stats(best).tau,
        "acceptance_by_depth": result.stats(best).acceptance_by_depth,
        "gain": gain,
        "gain_interval": gain_interval,
        "measured": _measured(found),
        "chosen": best,
        "tried": [
            _tried(cost, nodes, one) for cost in found.costs for nodes, one in found.tried.items()
        ],
        "verify_curve": {
            str(cost.context): cost.curve
            for cost in found.costs
            if cost.rows == found.costs[0].rows
        },
        **({} if tree is None else {"tree": _tree(found, FixedTree(tree))}),
        "nodes": chosen,
        "max_new_tokens": found.config.max_new_tokens,
        "threads": found.config.threads,
        "bundle": bundle_facts(found.bundle),
        "machine": machine(),
        "versions": versions(),
    }


def _tree(found: Outcome, rule: FixedTree) -> dict[str, Any]:
    return {"parents": [*rule.tree.parents], "accepted": node_shares(found.answers, rule)}


def _tried(cost: Costs, nodes: int, one: Candidate) -> dict[str, Any]:
    return {
        "rows": cost.rows,
        "context": cost.context,
        "nodes": nodes,
        "tau": one.played.tau,
        "plain_ms": cost.plain,
        "verify_ms": cost.verify[nodes],
        "step_ms": cost.step[nodes],
        "predicted": one.speedup(cost, nodes),
    }


def _measured(found: Outcome) -> dict[str, Any]:
    """Each runner, its speedup predicted from the other half of the prompts beside it."""
    here, default = found.here(), int(found.bundle.manifest.default_tree)
    sizes = {PLAIN: 1, DEFAULT: default, FIRST: found.first, SECOND: found.second}
    sides = {}
    for name, nodes in sizes.items():
        stats = found.result.stats(name)
        speedup, interval = found.result.ratio(name, PLAIN)
        sides[name] = {
            "nodes": nodes,
            "tokens_per_s": stats.tokens_per_s,
            "tau": stats.tau,
            "speedup": speedup,
            "speedup_interval": interval,
            "predicted": found.tried[nodes].speedup(here, nodes) if nodes > 1 else 1.0,
        }
    return sides


def table(report: dict[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    title = f"{report['prompts']} prompts that were not recorded"
    grid = Table("", "nodes", "tokens/s", "tau", "speedup", "predicted", title=title)
    for name, side in report["measured"].items():
        bounds = side["speedup_interval"]
        interval = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
        cells = (str(side["nodes"]), f"{side['tokens_per_s']:.1f}", f"{side['tau']:.2f}")
        grid.add_row(name, *cells, f"{side['speedup']:.2f}{interval}", f"{side['predicted']:.2f}")
    grid.add_section()
    bounds = report["gain_interval"]
    interval = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    grid.add_row(f"{report['chosen']} over default", "", "", "", f"{report['gain']:.2f}{interval}")
    for choice in report["plan"]["choices"]:
        where = f"plan, from {choice['context']} tokens"
        if choice["rows"] > 1:
            where += f", {choice['rows']} rows"
        even = f"pays above tau {choice['break_even']:.2f}" if choice["nodes"] > 1 else ""
        grid.add_row(where, str(choice["nodes"]), "", f"{choice['tau']:.2f}", even)
    return grid
