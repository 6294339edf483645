"""What speculation should gain, by two published formulas, before anything is run.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023 (arXiv
2211.17192), theorem 3.8: a chain of gamma drafted tokens, each accepted with probability alpha on
its own, each drafted at c times the cost of a target step, verified at the cost of one:

    speedup = (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))

Chen et al., "MagicDec", 2024 (arXiv 2408.11049), with what verifying really costs:

    T_SD / T_target = (gamma T_draft / T_target + T_verify(gamma) / T_target) / Omega(gamma, alpha)

Omega is the first formula's numerator over (1 - alpha): the tokens that a step commits, the bonus
token included. Both follow from one line, `speedup`: tokens a step over what the step costs. A tree
commits 1 + the sum over depths of the chance that its draft is accepted at least that deep; that is
the definition of tau, and holds for chains of any acceptance as well.

Costs are relative to a plain target step. A step that verifies gamma drafted tokens runs the
target over n = gamma + 1 tokens, the last committed one first: `VerifyCurve` counts n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.errors import ForerunError

LONGEST = 64
"""Chains up to this length are compared where no measurement bounds them."""
HALVINGS = 60
"""Of the interval 0 to 1: past the last bit of a double."""


@dataclass(frozen=True)
class VerifyCurve:
    """verify(n), relative to n = 1; straight lines between the points that are known.

    Beyond the last point the last line goes on: reckoned, not measured. Raises ForerunError for
    points that are no cost curve.
    """

    points: tuple[tuple[int, float], ...]
    flat: bool = False
    """Whether the last cost holds for every larger n, by assumption."""

    def __post_init__(self) -> None:
        sizes = [n for n, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ForerunError(
                f"a verify curve with n = {sizes}: give each n once, from 1 on, in rising order"
            )
        if any(not 0 < cost < math.inf for _, cost in self.points):
            raise ForerunError("a verify curve has a cost that is not above 0: give positive costs")

    @classmethod
    def constant(cls, cost: float) -> VerifyCurve:
        """The same cost for every n above 1; a cost of 1 is what the first formula assumes."""
        return cls(((1, 1.0), (2, cost)), flat=True)

    @classmethod
    def of(cls, costs: Mapping[int, float]) -> VerifyCurve:
        """From costs in any unit, taken relative to that of n = 1 where it is among them."""
        if not costs:
            raise ForerunError("a verify curve without points: give at least one n:cost")
        points = {1: 1.0, **{n: cost / _unit(costs) for n, cost in costs.items()}}
        return cls(tuple(sorted(points.items())))

    @property
    def longest(self) -> int:
        """The longest chain whose cost is known."""
        return LONGEST if self.flat else self.points[-1][0] - 1

    def at(self, n: int) -> float:
        """The cost of verifying n tokens."""
        sizes, costs = zip(*self.points, strict=True)
        if n <= sizes[-1] or self.flat or len(sizes) == 1:
            return float(np.interp(n, sizes, costs))
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
        return float(costs[-1] + max(slope, 0.0) * (n - sizes[-1]))


@dataclass(frozen=True)
class Chain:
    """A best chain: gamma 0 says not to speculate."""

    gamma: int
    speedup: float


def chain_tokens(alpha: float, gamma: int) -> float:
    """Omega: tokens that a step commits where each of gamma is accepted with probability alpha.

    At alpha = 1 that is gamma + 1, the limit of the closed form, which would divide by zero.
    """
    check_alpha(alpha)
    check_gamma(gamma)
    # Summed: the closed form loses its digits near alpha = 1.
    return math.fsum(alpha**depth for depth in range(gamma + 1))


def tree_tokens(acceptance: Sequence[float]) -> float:
    """tau of a tree (or a chain) whose draft is accepted to depth 1, 2, ... with these chances."""
    for depth, chance in enumerate(acceptance, start=1):
        if not 0 <= chance <= 1:
            raise ForerunError(f"acceptance to depth {depth} is {chance}: give shares from 0 to 1")
    if any(deep > above for above, deep in pairwise(acceptance)):
        raise ForerunError(
            "acceptance rises with depth: give the share of steps accepted at least that deep"
        )
    return 1 + math.fsum(acceptance)


def speedup(tokens: float, draft: float, verify: float = 1.0) -> float:
    """Over plain decoding, of steps that commit `tokens` at these costs in plain steps."""
    if not draft >= 0 or not verify > 0:
        raise ForerunError(
            f"costs of {draft} for drafting and {verify} for verifying: "
            "give 0 or more, and more than 0"
        )
    return tokens / (draft + verify)


def chain_speedup(alpha: float, gamma: int, c: float, verify: VerifyCurve | None = None) -> float:
    """Of a chain: the first formula, or with a curve the second.

    gamma 0 is plain decoding: 1.
    """
    check_cost(c)
    cost = verify.at(gamma + 1) if verify and gamma else 1.0
    return speedup(chain_tokens(alpha, gamma), gamma * c, cost)


def best_chain(alpha: float, c: float, verify: VerifyCurve | None = None) -> Chain:
    """The fastest chain whose cost is known; of equally fast ones the shortest."""
    longest = verify.longest if verify else LONGEST
    rates = [chain_speedup(alpha, gamma, c, verify) for gamma in range(longest + 1)]
    best = int(np.argmax(rates))
    return Chain(best, rates[best])


def break_even_alpha(gamma: int, c: float, verify: VerifyCurve | None = None) -> float | None:
    """The alpha above which a chain of gamma is faster than plain decoding.

    None where it never is; 0 where it always is. Omega rises with alpha, so it is found by halving.
    """
    check_gamma(gamma, least=1)
    return _root(lambda alpha: chain_speedup(alpha, gamma, c, verify) - 1)


def chain_alpha(acceptance: Sequence[float], gamma: int | None = None) -> float:
    """The alpha that makes the acceptance of a chain, by depth, the likeliest.

    A step accepts k tokens with probability alpha^k (1 - alpha) below gamma, and alpha^gamma at
    gamma: a geometric distribution with a cut. Its likelihood is greatest at the accepted tokens
    over those that were tried, a step's tries being what it accepted and, below gamma, the one that
    was refused. `gamma` (None: as deep as `acceptance` goes) says where the cut is.
    """
    tree_tokens(acceptance)  # which checks them
    accepted = math.fsum(acceptance)
    cut = len(acceptance) if gamma is None else gamma
    whole = acceptance[cut - 1] if 0 < cut <= len(acceptance) else 0.0
    tried = accepted + 1 - whole
    return accepted / tried if tried else 0.0


def check_alpha(alpha: float) -> None:
    """alpha is a probability."""
    if not 0 <= alpha <= 1:
        raise ForerunError(f"alpha is {alpha}: give a probability, from 0 to 1")


def check_gamma(gamma: int, least: int = 0) -> None:
    """gamma counts drafted tokens."""
    if gamma < least:
        raise ForerunError(f"gamma is {gamma}: give at least {least} drafted tokens a step")


def check_cost(c: float) -> None:
    """c is a cost in target steps."""
    if not 0 <= c < math.inf:
        raise ForerunError(f"c is {c}: give the drafter's cost in target steps, 0 or more")


def _root(rising: Callable[[float], float]) -> float | None:
    """Where a rising function of 0 to 1 passes 0: 0 where it is above it at once, None if never."""
    if rising(1.0) <= 0:
        return None
    if rising(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high


def _unit(costs: Mapping[int, float]) -> float:
    """The cost of n = 1."""
    unit = costs.get(1, 1.0)
    if not 0 < unit < math.inf:
        raise ForerunError(f"verify(1) is {unit}: give a positive cost")
    return unit
