"""Which tree is best on this machine: recorded answers replayed, times what steps cost here.

The drafter's proposals are recorded once; every tree is then played offline, its tau divided by its
measured cost, and the winner measured for real on prompts that took no part in the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.errors import ForerunError
from forerun.runtime.bench import shorter_prompts
from forerun.runtime.bundle import Bundle
from forerun.runtime.costs import SHORT, Costs, measure_costs, with_trees
from forerun.runtime.engine import BUILT, Engine, load_engine
from forerun.runtime.manifest import Manifest
from forerun.runtime.plan import Choice
from forerun.runtime.prompts import Prompt
from forerun.runtime.record import Recording, record, widest
from forerun.runtime.replay import FixedTree, GrownTree, Played, Rule, best_fixed_tree, replay
from forerun.runtime.tree import Tree

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
CONTEXTS = (SHORT, 256, 512, 1024, 2048, 4096, 8192)
Advance = Callable[[], object]


@dataclass(frozen=True)
class TuneConfig:
    """What is tried."""

    max_new_tokens: int = 96
    sizes: tuple[int, ...] = SIZES
    """Nodes of the trees that are compared; those that the drafter can't fill are left out."""
    contexts: tuple[int, ...] = CONTEXTS
    """Committed tokens at which steps are timed; those that the bundle can't hold are left out."""
    rows: tuple[int, ...] = (1,)
    """Requests side by side."""
    threads: int | None = None
    launches: int = 6
    """Of each step that is timed, in each of some rounds."""


@dataclass(frozen=True)
class Candidate:
    """One tree size: the shape that is best for it, and what the recorded answers say."""

    tree: Tree | None
    """None: grown by the drafter each step."""
    played: Played

    def speedup(self, cost: Costs, nodes: int) -> float:
        """What it should gain where steps cost so much."""
        return cost.speedup(self.played.tau, nodes, self.played.empty_share)


def split(
    bundle: Bundle, prompts: Sequence[Prompt], longest: int
) -> tuple[list[tuple[Prompt, list[int]]], list[tuple[Prompt, list[int]]]]:
    """Every other prompt to record, the rest to measure on, each with its tokens.

    Raises ForerunError where fewer than two prompts are shorter than `longest` tokens.
    """
    fitting = shorter_prompts(bundle, prompts, longest)
    if len(fitting) < 2:
        raise ForerunError(
            f"tuning records one half of the prompts and measures on the other, and only "
            f"{len(fitting)} of {len(prompts)} have less than {longest} tokens: give more"
        )
    return fitting[::2], fitting[1::2]


def record_answers(
    bundle: Bundle,
    prompts: Sequence[tuple[Prompt, list[int]]],
    config: TuneConfig,
    advance: Advance = lambda: None,
) -> list[Recording]:
    """The greedy answers to `prompts`, with what the drafter proposed at each place."""
    manifest = bundle.manifest
    wide = widest(manifest)
    nodes = wide if isinstance(wide, int) else wide.nodes
    trees = {str(nodes): None if isinstance(wide, int) else wide}
    engine = load_engine(with_trees(bundle, trees), config.threads)
    found = []
    for prompt, ids in prompts:
        room = min(config.max_new_tokens, engine.context - len(ids) - manifest.pending - 1)
        if room > 1:
            stop_ids = manifest.target.stop_ids
            beyond = manifest.pending
            found.append(record(engine, ids, room, nodes, stop_ids, beyond, prompt.category))
        advance()
    if not found:
        raise ForerunError("no prompt leaves room for an answer: compile with a larger --capacity")
    return found


def candidates(
    manifest: Manifest, answers: Sequence[Recording], sizes: Sequence[int]
) -> dict[int, Candidate]:
    """The best tree of each of `sizes` that this drafter can fill, replayed.

    For fixed trees that is exact (`best_fixed_tree`); a grown tree's shape is the drafter's, and
    the one of n nodes is the n - 1 best of what it proposed. A size of the bundle's keeps the shape
    it has where that is as good.
    """
    found = {}
    width = answers[0].proposed.shape[1] + 1
    offered = (int(key) for key in manifest.trees)
    wanted = offered if manifest.engine.kind in BUILT else {*sizes, *offered}
    for nodes in sorted(wanted):
        if 1 < nodes <= width:
            best = max(
                ((rule, replay(answers, rule)) for rule in _rules(manifest, answers, nodes)),
                key=lambda one: one[1].tau,
                default=None,
            )
            if best is not None:
                rule, played = best
                found[nodes] = Candidate(getattr(rule, "tree", None), played)
    return found


def _rules(manifest: Manifest, answers: Sequence[Recording], nodes: int) -> Iterator[Rule]:
    if answers[0].parents is not None:
        yield GrownTree(nodes)
        return
    own = manifest.trees.get(str(nodes))
    if own is not None:
        yield FixedTree(own)
    best = best_fixed_tree(answers, nodes, manifest.drafter.per_depth, manifest.pending - 1)
    if best is not None:
        yield FixedTree(best)


def time_steps(
    bundle: Bundle,
    trees: Mapping[int, Tree | None],
    config: TuneConfig,
    advance: Advance = lambda: None,
) -> list[Costs]:
    """What steps with these trees cost, at each context and batch size."""
    found = []
    named = {str(nodes): tree for nodes, tree in trees.items()}
    for rows in config.rows:
        engine = load_engine(with_trees(bundle, named), config.threads, rows)
        found += measure_costs(
            engine, [], [*trees], fitting(engine, config), config.launches, advance
        )
    return found


def fitting(engine: Engine, config: TuneConfig) -> list[int]:
    """Those of the contexts that leave room for steps."""
    room = engine.context - max(config.sizes, default=0)
    return [context for context in config.contexts if context == SHORT or context < room]


def choose(costs: Sequence[Costs], tried: Mapping[int, Candidate]) -> list[Choice]:
    """For each context and batch size the size that is fastest by prediction, or plain decoding."""
    found = []
    for cost in costs:
        speedups = {nodes: one.speedup(cost, nodes) for nodes, one in tried.items()}
        best = max(speedups, key=lambda nodes: speedups[nodes], default=1)
        if best == 1 or speedups[best] <= 1.0:
            found.append(Choice(cost.rows, cost.context, 1, 1.0, 1.0))
            continue
        tau, even = tried[best].played.tau, cost.step[best] / cost.plain
        found.append(Choice(cost.rows, cost.context, best, tau, even))
    return found


def tuned_trees(
    manifest: Manifest, tried: Mapping[int, Candidate], sizes: Collection[int]
) -> Manifest:
    """The manifest with the best trees of `sizes`, besides those it has."""
    trees = {str(nodes): tried[nodes].tree for nodes in sizes if nodes > 1}
    ordered = sorted({**manifest.trees, **trees}.items(), key=lambda item: int(item[0]))
    return replace(manifest, trees=dict(ordered))
