"""The plots' geometry, against the values that it stands for."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ForerunError
from forerun.runtime.plot import (
    CROWDED,
    HEIGHT,
    LABEL_GAP,
    axis_label,
    bar_plot,
    line_plot,
    nice_ticks,
)
from forerun.runtime.report_tree import ROW, tree_picture

AXES = ("n", "ms")
LINES = (*AXES, "context")


def words(name: str, n: int, value: float) -> str:
    return f"{name} {n} {value}"


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_even_and_reach_the_top(top: float) -> None:
    ticks = nice_ticks(top)
    steps = [after - before for before, after in pairwise(ticks)]
    assert ticks[0] == 0 and 2 <= len(ticks) <= 7
    assert ticks[-1] >= top * (1 - 1e-6) > ticks[-2] * (1 - 1e-3)
    assert max(steps) == pytest.approx(min(steps))
    leading = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(leading - round_one) for round_one in (1, 2, 2.5, 5)) < 1e-6
    labels = [axis_label(tick, steps[0]) for tick in ticks]
    assert [float(label) for label in labels] == pytest.approx(ticks, rel=1e-9)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("top", [0.0, -1.0, math.inf, math.nan])
def test_ticks_of_nothing(top: float) -> None:
    assert nice_ticks(top) == [0.0, 1.0]


def test_lines_stand_where_their_values_say() -> None:
    plot = line_plot({"a": {1: 10.0, 2: 20.0, 4: 40.0}}, LINES, words, rule=(20.0, "twice"))
    (line,) = plot.lines
    assert [point.x for point in line.points] == pytest.approx([0, 50, 100])
    assert [point.y for point in line.points] == pytest.approx([HEIGHT * f for f in (0.75, 0.5, 0)])
    assert [point.label for point in line.points] == ["a 1 10.0", "a 2 20.0", "a 4 40.0"]
    assert [tick.label for tick in plot.x] == ["1", "2", "4"]
    assert [(tick.at, tick.label) for tick in plot.y][::4] == [(HEIGHT, "0"), (0, "40")]
    assert plot.rule is not None and plot.rule.at == pytest.approx(HEIGHT / 2)


def test_a_single_point_and_marks_alone() -> None:
    plot = line_plot({"a": {6: 3.0}}, LINES, words, {"a": {12: 4.0}})
    (line,) = plot.lines
    assert (line.points[0].x, line.marks[0].x) == pytest.approx((0, 100))
    assert line.marks[0].y == 0
    assert line_plot({"a": {6: 3.0}}, LINES, words).lines[0].points[0].x == 50


@given(st.sets(st.integers(1, 300), min_size=1, max_size=40))
def test_labels_below_have_room_and_name_both_ends(sizes: set[int]) -> None:
    plot = line_plot({"a": dict.fromkeys(sizes, 1.0)}, LINES, words)
    places = [tick.at for tick in plot.x]
    assert all(b - a >= CROWDED for a, b in pairwise(places))
    labels = {int(tick.label) for tick in plot.x}
    assert {min(sizes), max(sizes)} <= labels <= sizes


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_line_ends_have_room_for_their_names(values: list[float]) -> None:
    series = {str(place): {1: 1.0, 2: value} for place, value in enumerate(values)}
    plot = line_plot(series, LINES, words)
    heights = sorted(line.label_y for line in plot.lines)
    assert heights[-1] <= HEIGHT + 1e-9
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in pairwise(heights))


def test_columns() -> None:
    plot = bar_plot([("1", 0.5), ("2", 0.25)], AXES, lambda share: f"{share:.2f}", True)
    assert [bar.y for bar in plot.bars] == pytest.approx([HEIGHT * 0.5, HEIGHT * 0.75])
    assert [bar.value for bar in plot.bars] == ["0.50", "0.25"]
    assert [tick.at for tick in plot.x] == [25, 75]
    many = bar_plot([(f"{n}–{n + 32}", 1.0) for n in range(0, 960, 32)], AXES, str)
    assert len(many.bars) == 30 and 2 <= len(many.x) <= 8
    assert {bar.value for bar in many.bars} == {""}


def test_a_tree_has_a_column_a_depth_and_a_row_a_leaf() -> None:
    #     0
    #    / \
    #   1   2
    #  / \   \
    # 3   4   5
    picture = tree_picture([-1, 0, 0, 1, 1, 2], [1, 0.6, 0.2, 0.4, 0.1, 0.1], ())
    assert [node.x for node in picture.nodes] == [0, 50, 50, 100, 100, 100]
    rows = [node.y / ROW - 0.5 for node in picture.nodes]
    assert rows == [1.25, 0.5, 2, 0, 1, 2]
    assert [node.share for node in picture.nodes] == [1, 0.6, 0.2, 0.4, 0.1, 0.1]
    assert (picture.height, picture.depths, picture.by_node) == (3 * ROW, (0, 50, 100), True)
    assert "depth 2: accepted in 40.0%" in picture.nodes[3].label
    by_depth = tree_picture([-1, 0, 0, 1, 1, 2], None, [0.8])
    assert [node.share for node in by_depth.nodes] == [1, 0.8, 0.8, 0, 0, 0]
    assert not by_depth.by_node


def test_leaves_never_share_a_row() -> None:
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 12, 14]
    picture = tree_picture(parents, None, ())
    leaves = [picture.nodes[n].y for n in range(len(parents)) if n not in parents]
    assert len(set(leaves)) == len(leaves)
    places = {(node.x, node.y) for node in picture.nodes}
    assert len(places) == len(parents)


@pytest.mark.parametrize(
    ("parents", "accepted"), [([], None), ([-1, 1], None), ([-1, 0], [1.0]), ([-1, -1], None)]
)
def test_what_is_no_tree(parents: list[int], accepted: list[float] | None) -> None:
    with pytest.raises(ForerunError, match="tree: "):
        tree_picture(parents, accepted, ())
