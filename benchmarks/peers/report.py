"""What the rounds say: tokens a second, ratios round by round, and what each variant repeated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .compare import Measured, settings_text, tokens_per_s
from .exchange import Outcome
from .registry import OURS, OURS_PLAIN, VARIANTS


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and range; None of nothing."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(ours: Sequence[float], others: Sequence[float]) -> dict[str, float] | None:
    """Our speed over another's, round by round, in the rounds that both have."""
    return spread([own / other for own, other in zip(ours, others, strict=False) if other])


def best_peer(rates: Mapping[str, Sequence[float]]) -> str | None:
    """The fastest variant that is not this project; None where no peer ran."""
    peers = {
        name: statistics.median(values)
        for name, values in rates.items()
        if values and not VARIANTS[name].ours
    }
    return max(peers, key=lambda name: peers[name]) if peers else None


def identical(outcome: Outcome, plain: Outcome) -> int:
    """How many prompts got the same tokens."""
    pairs = zip(outcome.answers, plain.answers, strict=True)
    return sum(one.tokens == other.tokens for one, other in pairs)


def summary(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Every variant's figures, the best peer, and our ratios to it."""
    rates = {name: [tokens_per_s(o) for o in found.outcomes] for name, found in measured.items()}
    best = best_peer(rates)
    ratios = {
        label: ratio(rates[ours], rates[other])
        for label, ours, other in (
            ("speculative_to_plain", OURS, OURS_PLAIN),
            ("speculative_to_best_peer", OURS, best),
            ("plain_to_best_peer", OURS_PLAIN, best),
        )
        if ours in rates and other in rates
    }
    variants = {name: _variant(name, measured, rates) for name in measured}
    return {"best_peer": best, "ratios": ratios, "variants": variants}


def _variant(
    name: str, measured: Mapping[str, Measured], rates: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    found, plain = measured[name], VARIANTS[name].plain
    first = found.outcomes[0]
    read = sum(map(len, found.job.prompts))
    steps = sum(answer.steps for answer in first.answers)
    decoded = sum(answer.decoded for answer in first.answers)
    prefill = [sum(answer.prefill_seconds for answer in o.answers) for o in found.outcomes]
    return {
        "threads": found.job.threads,
        "options": dict(found.job.options),
        "probes": [
            {"threads": threads, "options": options, "tokens_per_s": rate}
            for threads, options, rate in found.probes
        ],
        "tokens_per_s": spread(rates[name]),
        "rounds": [*rates[name]],
        "prefill_tokens_per_s": spread([read / seconds for seconds in prefill if seconds]),
        "tokens": decoded,
        "tokens_per_step": decoded / steps if steps else 0.0,
        "identical_to_plain": identical(first, measured[plain].outcomes[0])
        if plain is not None and plain in measured
        else None,
        "forerun_to_this": ratio(rates[OURS], rates[name]) if OURS in rates else None,
        "versions": first.versions,
    }


def table(report: Mapping[str, Any]) -> Any:
    """The report for people, as a rich table."""
    from rich.table import Table

    grid = Table(
        *("", "tokens/s", "prefill tokens/s", "tokens", "a step", "as plain"),
        *("forerun over it", "setting"),
        title=f"{report['prompts']} prompts, {report['max_new_tokens']} tokens, medians of rounds",
    )
    for name, found in report["variants"].items():
        same = found["identical_to_plain"]
        grid.add_row(
            name,
            _spread_text(found["tokens_per_s"], ".1f"),
            _spread_text(found["prefill_tokens_per_s"], ".0f"),
            str(found["tokens"]),
            f"{found['tokens_per_step']:.2f}",
            "" if same is None else f"{same} of {report['prompts']}",
            _spread_text(found["forerun_to_this"], ".2f"),
            settings_text(found["threads"], found["options"]),
        )
    grid.add_section()
    for name, reason in report["skipped"].items():
        grid.add_row(name, "left out", "", "", "", "", "", reason)
    return grid


def headline(report: Mapping[str, Any]) -> str:
    """The ratios, a line each."""
    lines = [
        f"{label.replace('_', ' ')}: {_spread_text(found, '.2f')}"
        for label, found in report["ratios"].items()
    ]
    return "\n".join([f"best peer: {report['best_peer'] or 'none ran'}", *lines])


def _spread_text(found: Mapping[str, float] | None, form: str) -> str:
    """`median (low to high)`, or the median alone where there was one round."""
    if found is None:
        return ""
    text = format(found["median"], form)
    if found["low"] == found["high"]:
        return text
    return f"{text} ({found['low']:{form}} to {found['high']:{form}})"
