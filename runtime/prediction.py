"""One setting's prediction, from numbers or from what `forerun bench` measured, as a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.predict import (
    VerifyCurve,
    best_chain,
    break_even_alpha,
    chain_alpha,
    chain_speedup,
    chain_tokens,
    check_cost,
    check_gamma,
    speedup,
    tree_tokens,
)

TEXTBOOK = "Leviathan et al. 2023: verifying costs one step"
VERIFYING = "MagicDec 2024: verifying costs verify(n)"
BY_DEPTH = "verify(n), and acceptance by depth"


@dataclass(frozen=True)
class Setting:
    """What is predicted. Costs are in plain target steps.

    Raises ForerunError for values out of their range.
    """

    gamma: int
    """Drafted tokens of a chain; of a tree its depth."""
    c: float
    """Drafting one of them: of a tree, one depth of it."""
    alpha: float | None = None
    """None: estimated from `acceptance`."""
    acceptance: tuple[float, ...] = ()
    """Shares of the steps whose draft is accepted to depth 1, 2, ..."""
    verify: VerifyCurve | None = None
    nodes: int | None = None
    """Tokens that are verified, the root among them; None: gamma + 1, a chain."""

    def __post_init__(self) -> None:
        check_gamma(self.gamma, least=1)
        check_cost(self.c)
        if self.alpha is None and not self.acceptance:
            raise ForerunError("neither alpha nor the acceptance by depth is known: give one")
        if len(self.acceptance) > self.gamma:
            raise ForerunError(
                f"acceptance to depth {len(self.acceptance)} of {self.gamma} drafted tokens: "
                "give at most one share for each"
            )

    @property
    def likeliest_alpha(self) -> float:
        """As given, or as `acceptance` makes it likeliest."""
        return chain_alpha(self.acceptance, self.gamma) if self.alpha is None else self.alpha

    @property
    def verified(self) -> int:
        """n of verify(n)."""
        return self.nodes or self.gamma + 1


def predict(setting: Setting) -> dict[str, Any]:
    """The report that `forerun predict --json` prints."""
    alpha, gamma, c, curve = setting.likeliest_alpha, setting.gamma, setting.c, setting.verify
    verify = curve.at(setting.verified) if curve else 1.0
    tau = chain_tokens(alpha, gamma)
    models = [_model(TEXTBOOK, tau, chain_speedup(alpha, gamma, c))]
    if curve:
        models.append(_model(VERIFYING, tau, speedup(tau, gamma * c, verify)))
    if setting.acceptance:
        tau = tree_tokens(setting.acceptance)
        models.append(_model(BY_DEPTH, tau, speedup(tau, gamma * c, verify)))
    return {
        "alpha": alpha,
        "alpha_estimated": setting.alpha is None,
        "gamma": gamma,
        "c": c,
        "verified": setting.verified,
        "verify": verify,
        "models": models,
        "best_chain": asdict(best_chain(alpha, c, curve)),
        "break_even_alpha": break_even_alpha(gamma, c, curve),
        "measured": None,
    }


def predict_bench(path: Path) -> dict[str, Any]:
    """The same from the file that `forerun bench --json` wrote, beside what it measured.

    Raises ForerunError where the file is none.
    """
    report = _read(path)
    try:
        nodes, costs = int(report["nodes"]), report["verify_cost"]
        measured = {"tau": float(report["tau"]), "speedup": float(report["speedup"])}
        acceptance = tuple(map(float, report["acceptance_by_depth"]))
        curve = VerifyCurve.of({int(n): float(ms) for n, ms in costs.items()})
        draft = float(report["draft_cost"]) / float(costs["1"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ForerunError(
            f"{path}: no report of forerun bench: {error!r}: write one with forerun bench --json"
        ) from None
    if nodes < 2 or not acceptance:
        raise ForerunError(f"{path}: no draft was accepted in it: there is nothing to predict from")
    gamma = len(acceptance)
    setting = Setting(gamma, draft / gamma, None, acceptance, curve, nodes)
    return {**predict(setting), "measured": measured}


def _model(name: str, tau: float, gain: float) -> dict[str, Any]:
    return {"name": name, "tau": tau, "speedup": gain}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForerunError(f"{path}: can't read the report: {error.strerror}") from None
    except ValueError as error:
        raise ForerunError(f"{path}: not JSON: {error}") from None
    if not isinstance(report, dict):
        raise ForerunError(f"{path}: no report of forerun bench: not an object")
    return report


def table(report: Mapping[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    measured, best = report["measured"], report["best_chain"]
    how = " (estimated from the acceptance)" if report["alpha_estimated"] else ""
    title = f"alpha {report['alpha']:.3f}{how}, gamma {report['gamma']}, c {report['c']:.3f}, "
    grid = Table(
        "model",
        "tau",
        "speedup",
        title=title + f"verify({report['verified']}) {report['verify']:.2f}",
    )
    for model in report["models"]:
        known = measured and measured["speedup"]
        off = f" ({model['speedup'] / known - 1:+.0%})" if known else ""
        grid.add_row(model["name"], f"{model['tau']:.2f}", f"{model['speedup']:.2f}{off}")
    if measured:
        grid.add_row("measured", f"{measured['tau']:.2f}", f"{measured['speedup']:.2f}")
    grid.add_section()
    even = report["break_even_alpha"]
    chain = f"gamma {best['gamma']}" if best["gamma"] else "don't speculate"
    grid.add_row("best chain of this alpha and c", chain, f"{best['speedup']:.2f}")
    grid.add_row("break-even alpha", "", "never" if even is None else f"{even:.3f}")
    return grid
