"""The waterfall's arithmetic, and acceptance along an answer, by hand and for any numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.runtime.positions import acceptance_by_position
from forerun.runtime.profilers import Timed
from forerun.runtime.waterfall import LOSSES, MEASURED, UNEXPLAINED, Side, unexplained, waterfall

Timing = tuple[str, float]
MS = st.floats(0.01, 100)
PARTS = ("draft", "verify", "accept", "commit", "host", "waiting")
SIDES = st.builds(
    Side,
    MS,
    st.fixed_dictionaries(dict.fromkeys(PARTS, MS)),
    st.floats(1, 9),
    st.floats(0.5, 1),
)


def test_by_hand() -> None:
    plain = Side(20.0, {"verify": 17.0, "accept": 1.0, "commit": 1.0, "host": 0.5, "draft": 0.5})
    parts = {"verify": 22.0, "accept": 2.0, "commit": 1.5, "host": 0.9, "draft": 4.1}
    speculative = Side(31.0, parts, tau=2.5, delivered=0.8)
    levels = waterfall(plain, speculative)
    assert [level.ms for level in levels] == pytest.approx(
        [
            8.0,  # 20 / 2.5
            9.44,  # + (4.1 - 0.5) / 2.5
            11.44,  # + (22 - 17) / 2.5
            12.04,  # + (3.5 - 2) / 2.5
            12.2,  # + (0.9 - 0.5) / 2.5
            15.25,  # / 0.8
            15.5,  # 31 / (2.5 * 0.8), measured
            15.5,
        ]
    )
    assert levels[0].speedup == 2.5 and levels[-1].speedup == pytest.approx(20 / 15.5)
    assert unexplained(levels) == pytest.approx(15.5 / 15.25 - 1)


@given(SIDES, SIDES)
def test_the_losses_add_up_to_what_was_measured(plain: Side, speculative: Side) -> None:
    levels = waterfall(plain, speculative)
    assert [levels[-2].name, levels[-1].name] == [UNEXPLAINED, MEASURED]
    assert levels[-1].ms == pytest.approx(speculative.token)
    assert levels[-1].speedup == pytest.approx(plain.token / speculative.token)
    assert levels[0].speedup == pytest.approx(speculative.tau)
    steps = [b.ms - a.ms for a, b in pairwise(levels)]
    assert levels[0].ms + sum(steps) == pytest.approx(levels[-1].ms)
    for (_, parts), change in zip(LOSSES, steps, strict=False):
        extra = sum(speculative.parts[part] - plain.parts[part] for part in parts)
        assert change * speculative.tau == pytest.approx(extra, abs=1e-9)


@given(SIDES)
def test_where_all_is_accounted_for_nothing_is_unexplained(side: Side) -> None:
    def whole(side: Side) -> Side:
        return Side(sum(side.parts.values()), side.parts, side.tau, side.delivered)

    plain = whole(Side(0.0, side.parts))
    assert unexplained(waterfall(plain, whole(side))) == pytest.approx(0, abs=1e-9)
    assert waterfall(plain, plain)[0].speedup == 1


def nodes(ms: dict[str, float], count: dict[str, int], price: float) -> list[Timing]:
    """As many nodes of each part, which take so much together, and `price` more each."""
    return [
        (f"{part}/node_{place}", ms[part] / count[part] + price)
        for part in ms
        for place in range(count[part])
    ]


def test_the_price_of_timing_a_node_comes_off_again() -> None:
    true, count, price = {"verify": 15.0, "draft": 2.0}, {"verify": 900, "draft": 100}, 0.008
    plain, speculative = Timed(), Timed()
    for slower in (1.0, 1.5, 2.0):  # a machine that slows down, timer and all
        ms = {part: value * slower for part, value in true.items()}
        plain.add(17.0 * slower, nodes(ms, count, price * slower))
    more = {"verify": 30.0, "draft": 10.0}
    speculative.add(60.0, nodes({k: 1.5 * v for k, v in more.items()}, count, price * 1.5))
    assert plain.price == pytest.approx(price * 1.5)
    assert plain.shares(plain.price) == pytest.approx({"verify": 15 / 17, "draft": 2 / 17})
    assert sum(plain.shares(plain.price).values()) == pytest.approx(1)
    assert speculative.shares(plain.price) == pytest.approx({"verify": 0.75, "draft": 0.25})
    both = Timed()
    both.join(plain)
    both.join(speculative)
    assert (both.launches, both.clock) == (4, pytest.approx(17 * 4.5 + 60))
    assert both.ms["draft"] == pytest.approx(plain.ms["draft"] + speculative.ms["draft"])
    assert Timed().price == 0 and Timed().shares(1.0) == {}


def test_acceptance_along_the_answers() -> None:
    # Places: the first step begins after one token, the second after 1 + 15, ...
    traces = [[15, 1, 2, 20], [3], []]
    assert acceptance_by_position(traces) == [
        {"from": 0, "to": 16, "tau": 9.0, "steps": 2},
        {"from": 16, "to": 32, "tau": 23 / 3, "steps": 3},
    ]
    assert acceptance_by_position([[1] * 40])[-1] == {"from": 32, "to": 64, "tau": 1, "steps": 9}


@given(st.lists(st.lists(st.integers(1, 9), max_size=60), max_size=4))
def test_buckets_hold_each_step_once(traces: list[list[int]]) -> None:
    found = acceptance_by_position(traces)
    assert sum(part["steps"] for part in found) == sum(map(len, traces))
    assert sum(part["steps"] * part["tau"] for part in found) == pytest.approx(
        sum(map(sum, traces))
    )
