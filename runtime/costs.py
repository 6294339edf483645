"""What steps cost on this machine: the curve verify(n), and drafting, by context length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import BUILT, Engine, load_engine
from forerun.runtime.manifest import Manifest
from forerun.runtime.tree import Tree

ROUNDS = 3
CURVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LONGER = (512, 1536)
SHORT = 32
"""Tokens of a short context."""


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of a bundle's steps with so many tokens committed.

    In the literature's words verify(n) is `verify[n] / plain`, and c is `draft(n) / plain`.
    """

    plain: float
    """One token verified, nothing drafted."""
    verify: Mapping[int, float]
    """Nodes -> so many verified, nothing drafted."""
    step: Mapping[int, float]
    """Nodes -> so many verified, and as many drafted."""
    context: int = SHORT
    rows: int = 1
    """Requests side by side; a step moves each of them on."""
    skips_empty: bool = False
    """Whether a step for which nothing was proposed verifies the root alone."""

    @property
    def curve(self) -> dict[str, float]:
        """verify(n) in milliseconds by n as text, 1 included: as reports have it."""
        return {"1": self.plain, **{str(nodes): ms for nodes, ms in self.verify.items()}}

    def draft(self, nodes: int) -> float:
        """Milliseconds that drafting takes."""
        return max(self.step[nodes] - self.verify[nodes], 0.0)

    def speedup(self, tau: float, nodes: int, empty: float = 0.0) -> float:
        """Plain time a token over speculative time a token, the host's share left out.

        `empty` is the share of steps for which nothing was proposed.

        That is tau / (verify(n) + c) in the words of Leviathan et al. (arXiv:2211.17192, theorem
        3.8), whose verify(n) is 1 and whose tau is a chain's. 1 node is plain decoding.
        """
        if nodes == 1:
            return 1.0
        empty = empty if self.skips_empty else 0.0
        alone = self.plain + self.draft(nodes)
        return tau * self.plain / (empty * alone + (1 - empty) * self.step[nodes])


def measure_costs(
    engine: Engine,
    sizes: Sequence[int],
    drafted: Sequence[int],
    contexts: Sequence[int] = (SHORT,),
    launches: int = 8,
    advance: Callable[[], object] = lambda: None,
) -> list[Costs]:
    """Verifying each of `sizes` and drafting each of `drafted`, at each of `contexts`, short first.

    All of them are among the bundle's trees (`with_trees`). They take turns, and each is compared
    with a plain step of the same round: a machine that slows down meanwhile spoils no ratio.
    `advance` is called after each size of each round.
    """
    wanted = [(nodes, 1) for nodes in sorted({*sizes, *drafted} - {1})]
    wanted += [(nodes, nodes) for nodes in sorted({*drafted} - {1})]
    found = []
    for context in sorted(contexts):
        plain: list[float] = []
        over: dict[tuple[int, int], list[float]] = {what: [] for what in wanted}
        for _ in range(ROUNDS):
            plain.append(engine.launch_ms(1, 1, launches, context))
            for what in wanted:
                over[what].append(engine.launch_ms(*what, launches, context) / plain[-1])
                advance()
        base = median(plain)
        cost = {what: base * median(ratios) for what, ratios in over.items()}
        verify = {nodes: ms for (nodes, drafts), ms in cost.items() if drafts == 1}
        step = {nodes: ms for (nodes, drafts), ms in cost.items() if drafts > 1}
        found.append(Costs(base, verify, step, context, engine.rows, engine.skips_empty))
    return found


def at_context(costs: Sequence[Costs], context: float) -> Costs:
    """Costs between those that were measured, on straight lines; at the ends the nearest."""
    ordered = sorted(costs, key=lambda cost: cost.context)
    lower = max((c for c in ordered if c.context <= context), key=_context, default=ordered[0])
    upper = min((c for c in ordered if c.context >= context), key=_context, default=ordered[-1])
    span = upper.context - lower.context
    share = (context - lower.context) / span if span else 0.0

    def between(low: float, high: float) -> float:
        return low + share * (high - low)

    return replace(
        lower,
        plain=between(lower.plain, upper.plain),
        verify={n: between(ms, upper.verify[n]) for n, ms in lower.verify.items()},
        step={n: between(ms, upper.step[n]) for n, ms in lower.step.items()},
        context=round(context),
    )


def _context(cost: Costs) -> int:
    return cost.context


def verify_costs(
    bundle: Bundle, drafted: Sequence[int] = (), threads: int | None = None
) -> list[Costs]:
    """verify(n) for n from 1 to 128 at contexts from short to long, or for the sizes there are;
    and drafting for each of `drafted`."""
    manifest = bundle.manifest
    sizes = [*map(int, manifest.trees)]
    if manifest.engine.kind not in BUILT:
        sizes += [nodes for nodes in CURVE if nodes <= manifest.capacity // 4]
    engine = load_engine(with_trees(bundle, stars(manifest, sizes)), threads)
    contexts = [SHORT, *(context for context in LONGER if context + max(sizes) < engine.context)]
    return measure_costs(engine, sizes, drafted, contexts, launches=4)


def with_trees(bundle: Bundle, trees: Mapping[str, Tree | None]) -> Bundle:
    """`bundle` as if it had been compiled for these trees besides, in memory alone.

    Trees are inputs of a step, so a graph whose sizes are open takes any; an engine that was built
    for fixed sizes gets none.
    """
    if bundle.manifest.engine.kind in BUILT:
        return bundle
    manifest = bundle.manifest
    return replace(bundle, manifest=replace(manifest, trees={**manifest.trees, **trees}))


def stars(manifest: Manifest, sizes: Sequence[int]) -> dict[str, Tree | None]:
    """Trees of these sizes that are only verified, never drafted, where there are none yet."""
    return {str(n): Tree.star(n) for n in sizes if str(n) not in manifest.trees}
