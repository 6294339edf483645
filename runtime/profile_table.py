"""A profile for people, as a rich table."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> Any:
    """Parts, the waterfall, acceptance and costs, in that order."""
    from rich.table import Table

    grid = Table("", "plain, ms", "speculative, ms", "", title=f"{report['prompts']} prompts")
    grid.add_row("a step", *(f"{report[side]['step_ms']:.2f}" for side in _SIDES), "")
    whole = report["speculative"]["step_ms"]
    for name, ms in report["parts"].items():
        share = f"{ms / whole:.1%}" if whole else ""
        grid.add_row(f"  {name}", f"{report['plain_parts'][name]:.2f}", f"{ms:.2f}", share)
    grid.add_section()
    grid.add_row("a token", f"{_token(report, 'plain'):.2f}", "", "1.00x")
    for level in report["waterfall"]:
        grid.add_row(f"  {level['name']}", "", f"{level['ms']:.2f}", f"{level['speedup']:.2f}x")
    grid.add_section()
    for name, ms in report["latency"].items():
        if ms is not None:
            grid.add_row(f"an answer: {name}", "", f"{ms:.1f}", "")
    grid.add_section()
    depths = " ".join(f"{share:.2f}" for share in report["acceptance_by_depth"])
    grid.add_row("accepted to depth 1, 2, ...", "", depths, f"tau {report['tau']:.2f}")
    for part in report["acceptance_by_position"]:
        name = f"  tokens {part['from']} to {part['to']}"
        grid.add_row(name, "", f"{part['steps']} steps", f"tau {part['tau']:.2f}")
    for name, part in report["categories"].items():
        words = f"{part['speedup']:.2f}x", f"tau {part['tau']:.2f}"
        grid.add_row(f"  {name}, {part['prompts']} prompts", "", *words)
    grid.add_section()
    for context, costs in report["verify_curve"].items():
        line = ", ".join(f"{n}: {ms:.1f}" for n, ms in costs.items())
        grid.add_row(f"verify(n), {context} tokens before", "", line, "")
    return grid


_SIDES = ("plain", "speculative")


def _token(report: dict[str, Any], side: str) -> float:
    rate = float(report[side]["tokens_per_s"])
    return 1e3 / rate if rate else 0.0
