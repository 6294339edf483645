"""Geometry of the report's plots: across in percent of the width, down in pixels.

So a plot fits any width and its text keeps its size. The templates draw what is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

HEIGHT = 220
"""Pixels of a plot, without its axes' labels."""
LABEL_GAP = 16
"""Pixels between the labels at the ends of neighbouring lines."""
CROWDED = 10.0
"""Percent between two ticks below which one of them has no label."""
NAME_ROOM = 26
"""Characters that fit below the columns of a plot on a phone."""


@dataclass(frozen=True)
class Tick:
    """A place on an axis: percent across, pixels down."""

    at: float
    label: str


@dataclass(frozen=True)
class Point:
    """A measured value, and what to say of it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Line:
    """A series: its points from left to right, where its name stands, its place among all."""

    name: str
    points: tuple[Point, ...]
    label_y: float
    shade: float
    """0 for the first series to 1 for the last."""
    marks: tuple[Point, ...] = ()
    """Points drawn as rings, for values of another origin."""


@dataclass(frozen=True)
class Bar:
    """A column: centre and width in percent, top in pixels."""

    x: float
    width: float
    y: float
    value: str
    label: str


@dataclass(frozen=True)
class Plot:
    """Lines or columns over two axes; `rule` is a height worth comparing with."""

    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    x_title: str
    y_title: str
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    rule: Tick | None = None
    name_title: str = ""
    """What the lines' names are."""
    height: int = HEIGHT


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """0 and round steps up to the first at or above `top`; about `count` of them."""
    if not 0 < top < math.inf:
        return [0.0, 1.0]
    rough = top / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def axis_label(value: float, step: float) -> str:
    """The value with as many decimals as `step` needs."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    if round(step * 10**digits, 9) != round(step * 10**digits):
        digits += 1  # a step of 2.5, of 0.25
    return f"{value:.{digits}f}"


def line_plot(
    series: Mapping[str, Mapping[int, float]],
    titles: tuple[str, str, str],
    form: Callable[[str, int, float], str],
    marks: Mapping[str, Mapping[int, float]] | None = None,
    rule: tuple[float, str] | None = None,
) -> Plot:
    """Lines over a logarithmic axis, since sizes double; `form` says a point in words.

    `titles` are of the axis across, of the one up, and of the lines' names.
    """
    marks = marks or {}
    everything = [*series.values(), *marks.values()]
    across = _logarithmic(sorted({n for values in everything for n in values}))
    highest = max((value for values in everything for value in values.values()), default=0.0)
    ticks = nice_ticks(max(highest, rule[0] if rule else 0.0))

    def down(value: float) -> float:
        return HEIGHT * (1 - value / ticks[-1])

    def points(name: str, values: Mapping[int, float]) -> tuple[Point, ...]:
        ordered = sorted(values.items())
        return tuple(Point(across[n], down(ms), form(name, n, ms)) for n, ms in ordered)

    drawn = {name: points(name, values) for name, values in series.items() if values}
    heights = _spread([shape[-1].y for shape in drawn.values()])
    last = max(len(drawn) - 1, 1)
    lines = tuple(
        Line(name, shape, heights[place], place / last, points(name, marks.get(name, {})))
        for place, (name, shape) in enumerate(drawn.items())
    )
    return Plot(
        _labelled(across),
        _down_ticks(ticks, down),
        *titles[:2],
        lines=lines,
        rule=Tick(down(rule[0]), rule[1]) if rule else None,
        name_title=titles[2],
    )


def bar_plot(
    values: Sequence[tuple[str, float]],
    titles: tuple[str, str],
    form: Callable[[float], str],
    shares: bool = False,
) -> Plot:
    """Columns side by side, each with its name below and its value above; shares up to 1."""
    ticks = nice_ticks(1.0 if shares else max((value for _, value in values), default=0.0))
    slot = 100 / max(len(values), 1)
    # Every second or third name, where all of them would run together.
    stride = math.ceil(len(values) * max((len(name) for name, _ in values), default=1) / NAME_ROOM)

    def down(value: float) -> float:
        return HEIGHT * (1 - value / ticks[-1])

    bars = tuple(
        Bar(
            (place + 0.5) * slot,
            min(0.62 * slot, 14),
            down(value),
            form(value) if len(values) <= 12 else "",
            f"{titles[0]} {name}: {form(value)}",
        )
        for place, (name, value) in enumerate(values)
    )
    names = tuple(
        Tick(bar.x, name)
        for place, (bar, (name, _)) in enumerate(zip(bars, values, strict=True))
        if place % stride == 0
    )
    return Plot(names, _down_ticks(ticks, down, form if shares else None), *titles, bars=bars)


def _down_ticks(
    ticks: Sequence[float],
    down: Callable[[float], float],
    form: Callable[[float], str] | None = None,
) -> tuple[Tick, ...]:
    step = ticks[1] - ticks[0]
    return tuple(Tick(down(at), form(at) if form else axis_label(at, step)) for at in ticks)


def _logarithmic(sizes: Sequence[int]) -> dict[int, float]:
    if len(sizes) < 2:
        return dict.fromkeys(sizes, 50.0)
    low, high = math.log(max(sizes[0], 1)), math.log(max(sizes[-1], 2))
    return {n: 100 * (math.log(max(n, 1)) - low) / (high - low) for n in sizes}


def _labelled(across: Mapping[int, float]) -> tuple[Tick, ...]:
    """A label for each size, powers of two first, as far as they have room."""
    chosen: list[int] = []
    by_worth = sorted(across, key=lambda n: (n not in (min(across), max(across)), n & (n - 1), n))
    for n in by_worth:
        if all(abs(across[n] - across[other]) >= CROWDED for other in chosen):
            chosen.append(n)
    return tuple(Tick(across[n], str(n)) for n in sorted(chosen))


def _spread(heights: Sequence[float]) -> list[float]:
    """The heights, moved apart so that labels don't overlap, and kept above the axis."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    spread = list(heights)
    for above, place in pairwise(order):
        spread[place] = max(spread[place], spread[above] + LABEL_GAP)
    limit = float(HEIGHT)
    for place in reversed(order):
        spread[place] = min(spread[place], limit)
        limit = spread[place] - LABEL_GAP
    return spread
