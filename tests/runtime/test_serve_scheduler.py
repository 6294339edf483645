"""The scheduler alone: rows are given and taken between steps, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.engine import Request
from forerun.runtime.model import Model, load
from forerun.runtime.sampling import SamplingParams
from forerun.runtime.serve_orders import Closing, Failure, Limits, Order, Piece, QueueFull
from forerun.runtime.serve_scheduler import FAILURES, Scheduler

PROMPTS = [[3, 4, 5, 6, 3, 4, 0], [*range(40, 50)] * 3, [9, 8, 9, 8, 9, 8, 200], [7] * 120]


class Heard:
    """What one order was told."""

    def __init__(self, prompt: list[int], new: int, params: SamplingParams, stop: str = "") -> None:
        self.pieces: list[Piece | Failure] = []
        request = Request(prompt, len(prompt) + new, params)
        self.order = Order(request, (stop,) if stop else (), self.pieces.append)

    @property
    def last(self) -> Any:
        return self.pieces[-1] if self.pieces else None

    @property
    def over(self) -> bool:
        return isinstance(self.last, Failure) or bool(self.last and self.last.finish)

    @property
    def text(self) -> str:
        assert all(isinstance(piece, Piece) for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces)  # type: ignore[union-attr]


def heard(number: int = 0, new: int = 60, stop: str = "") -> Heard:
    params = SamplingParams(0.9, seed=number) if number % 2 else SamplingParams()
    return Heard(PROMPTS[number % 4], new, params, stop)


def expected(model: Model, asked: Heard) -> Any:
    request = asked.order.request
    new = request.limit - len(request.prompt)
    return model.stream_ids(request.prompt, new, request.params, stop=asked.order.stop).completion


@contextmanager
def started(model: Model, limits: Limits | None = None, pace: Any = None) -> Iterator[Scheduler]:
    scheduler = Scheduler(model, pace or model.pace(), limits or Limits())
    scheduler.start()
    try:
        yield scheduler
    finally:
        if hasattr(model.engine, "open"):
            model.engine.open()
        scheduler.close()


@pytest.fixture(scope="module")
def alone(tiny_combined_bundle: Path) -> Model:
    return load(tiny_combined_bundle, threads=1)


@pytest.mark.parametrize("sizes", [None, (10, 1), (1, 10, 6)])
def test_answers_are_those_of_plain_decoding(
    tiny_combined_bundle: Path,
    alone: Model,
    serving: Any,
    paced_by_rows: Callable[..., Any],
    sizes: tuple[int, ...] | None,
) -> None:
    """Whatever trees are drafted, and they may change from step to step."""
    asked = [heard(number, 20 + 7 * number, "R" if number % 3 == 0 else "") for number in range(12)]
    pace = paced_by_rows(*sizes) if sizes else None
    with started(load(tiny_combined_bundle, threads=1, rows=3), pace=pace) as scheduler:
        scheduler.submit([one.order for one in asked])
        serving.soon(lambda: all(one.over for one in asked))
        assert scheduler.idle
    for one in asked:
        completion = expected(alone, one)
        assert one.text == completion.text
        assert (one.last.finish, one.last.tokens) == (
            completion.finish_reason,
            len(completion.token_ids),
        )


def test_a_cancelled_order_frees_its_row_within_a_step(
    tiny_combined_bundle: Path, alone: Model, serving: Any
) -> None:
    model = serving.gated(tiny_combined_bundle)
    first, second, third = heard(0), heard(1), heard(2)
    with started(model) as scheduler:
        numbers = scheduler.submit([first.order, second.order, third.order])
        model.engine.let(3)
        for _ in range(4):
            model.engine.asked.acquire()
        assert (scheduler.busy, scheduler.waiting) == (1, 2)
        scheduler.cancel(numbers[:1] + numbers[2:])
        model.engine.let(1)  # the step that it is in
        model.engine.asked.acquire()  # this one is the second's
        assert first.last == third.last == Failure("cancelled")
        assert scheduler.waiting == 0 and second.pieces
        model.engine.open()
        serving.soon(lambda: second.over)
        scheduler.cancel(numbers)  # no harm
    assert second.text == expected(alone, second).text
    assert len(first.pieces) <= 6 and third.pieces == [Failure("cancelled")]


def test_the_queue_is_bounded_and_takes_all_or_nothing(
    tiny_combined_bundle: Path, serving: Any
) -> None:
    model = serving.gated(tiny_combined_bundle)
    with started(model, Limits(queue=2)) as scheduler:
        scheduler.submit([heard().order])
        model.engine.asked.acquire()
        scheduler.submit([heard().order])
        with pytest.raises(QueueFull):
            scheduler.submit([heard().order, heard().order])
        scheduler.submit([heard().order])
        with pytest.raises(QueueFull):
            scheduler.submit([heard().order])
        assert (scheduler.busy, scheduler.waiting) == (1, 2)


def test_nobody_waits_or_is_answered_longer_than_allowed(
    tiny_combined_bundle: Path, serving: Any
) -> None:
    model = serving.gated(tiny_combined_bundle)
    with started(model, Limits(queue_seconds=0.01)) as scheduler:
        first, second = heard(), heard()
        scheduler.submit([first.order, second.order])
        model.engine.asked.acquire()
        time.sleep(0.02)
        model.engine.let(1)
        serving.soon(lambda: second.over)
        assert second.pieces == [Failure("queue_timeout")] and not first.over
    model = serving.gated(tiny_combined_bundle)
    with started(model, Limits(seconds=0.01)) as scheduler:
        scheduler.submit([first.order])
        model.engine.asked.acquire()
        time.sleep(0.02)
        model.engine.let(1)
        serving.soon(lambda: first.last == Failure("timeout"))
        serving.soon(lambda: scheduler.idle)


def test_an_engine_that_fails_costs_only_those_it_was_answering(
    tiny_combined_bundle: Path, alone: Model, serving: Any
) -> None:
    broken = [True]
    model = serving.gated(tiny_combined_bundle, 2, lambda: broken[0])
    with started(model) as scheduler:
        orders = [heard(number) for number in range(3)]
        model.engine.let(1)
        scheduler.submit([one.order for one in orders])
        serving.soon(lambda: orders[0].over)
        assert orders[0].last == Failure("engine") and scheduler.healthy
        broken[0] = False
        model.engine.open()
        serving.soon(lambda: all(one.over for one in orders))
        assert orders[2].text == expected(alone, orders[2]).text
        broken[0] = True
        for _ in range(FAILURES):
            assert scheduler.healthy
            one = heard()
            scheduler.submit([one.order])
            serving.soon(lambda one=one: one.over)
        serving.soon(lambda: not scheduler.healthy)


def test_a_prompt_that_the_engine_refuses_is_one_orders_failure(
    tiny_combined_bundle: Path, alone: Model, serving: Any
) -> None:
    with started(load(tiny_combined_bundle, threads=1, rows=2)) as scheduler:
        bad = Heard([5] * 1000, 5, SamplingParams())
        good = heard(1)
        scheduler.submit([bad.order, good.order])
        serving.soon(lambda: bad.over and good.over)
        assert bad.last.why == "engine" and "the prompt has 1000 tokens" in bad.last.message
        assert good.text == expected(alone, good).text
        with pytest.raises(ForerunError, match="a stop string is empty"):
            scheduler.submit([Order(good.order.request, ("",), print)])


def test_draining_finishes_what_was_taken_and_closing_does_not(
    tiny_combined_bundle: Path, alone: Model, serving: Any
) -> None:
    model = serving.gated(tiny_combined_bundle)
    first, second, third = heard(0), heard(1), heard(2)
    with started(model) as scheduler:
        scheduler.submit([first.order, second.order])
        model.engine.asked.acquire()
        scheduler.drain()
        with pytest.raises(Closing):
            scheduler.submit([third.order])
        model.engine.open()
        serving.soon(lambda: scheduler.idle)
    assert first.text == expected(alone, first).text
    assert second.text == expected(alone, second).text
    model = serving.gated(tiny_combined_bundle)
    with started(model) as scheduler:
        scheduler.submit([first.order, second.order])
        model.engine.asked.acquire()
        scheduler.close(0)
        model.engine.open()
        serving.soon(lambda: first.over and second.over)
        assert first.last == second.last == Failure("closed")
