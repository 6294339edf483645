"""Steps launched ahead: token for token what a loop that waits for each of them gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.runtime.batch import Job, decode_batch
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import Block, Stats, decode
from forerun.runtime.pace import Fixed
from forerun.runtime.pipeline import Pipelined, Steps
from forerun.runtime.sampling import SamplingParams

LOOP = [*range(40, 50)] * 3
"""The tiny target goes on with this for ever, so that prompt lookup is always right."""
PROMPTS = [[3, 4, 5, 6, 3, 4, 0], [0], LOOP, [*range(40)]]
PARAMS = [SamplingParams(), SamplingParams(1.1, top_k=30, top_p=0.9, seed=2)]
Answer = tuple[list[int], str | None, Stats]


class Device:
    """An engine whose steps are in flight until they are waited for: its calls, in order.

    A result is computed at the launch, as on a device whose work is done in the order of launches.
    """

    def __init__(self, engine: Any, ahead: int) -> None:
        self.engine, self.ahead = engine, ahead
        self.rows, self.context = engine.rows, engine.context
        self.calls: list[tuple[str, int]] = []
        self.launched, self.waited = 0, 0

    @property
    def seconds(self) -> float:
        seconds: float = self.engine.seconds
        return seconds

    @property
    def verified(self) -> int:
        verified: int = self.engine.verified
        return verified

    @property
    def drafted(self) -> int:
        drafted: int = self.engine.drafted
        return drafted

    def prefill(self, request: Request, nodes: int, row: int = 0) -> list[int]:
        self.calls.append(("prefill", row))
        tokens: list[int] = self.engine.prefill(request, nodes, row)
        return tokens

    def begin(self, request: Request, remembers: bool, row: int = 0) -> Any:
        self.calls.append(("begin", row))
        return self.engine.begin(request, remembers, row)

    def read(self, reading: Any, nodes: int) -> list[int] | None:
        self.calls.append(("read", reading.row))
        tokens: list[int] | None = self.engine.read(reading, nodes)
        return tokens

    def release(self, row: int) -> None:
        self.engine.release(row)

    def step(self, nodes: int) -> list[list[int]]:
        raise AssertionError("a pipelined engine is launched and waited for")

    def launch(self, nodes: int) -> tuple[int, Any]:
        self.launched += 1
        self.calls.append(("launch", self.launched))
        return self.launched, self.engine.launch(nodes)

    def wait(self, ticket: tuple[int, Any]) -> list[list[int]]:
        number, inner = ticket
        assert number > self.waited, "tickets come back in order, each once"
        self.waited = number
        self.calls.append(("wait", number))
        rows: list[list[int]] = self.engine.wait(inner)
        return rows


@pytest.fixture(scope="module", params=["tiny_bundle", "tiny_combined_bundle"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, int]:
    """A waiting engine and another one to be run ahead, and their tree's size."""
    bundle = load_bundle(request.getfixturevalue(request.param))
    one, two = (load_engine(bundle, threads=1) for _ in range(2))
    return one, two, int(bundle.manifest.default_tree)


def run(
    engine: Any,
    prompt: Sequence[int],
    new: int,
    nodes: int,
    params: SamplingParams = PARAMS[0],
    stop_ids: Sequence[int] = (),
) -> Answer:
    decoding = decode(engine, Request(prompt, len(prompt) + new, params), nodes, stop_ids)
    blocks = list(decoding)
    tokens = [token for block in blocks for token in block.tokens]
    return tokens, blocks[-1].finish, decoding.stats


def same(found: Answer, expected: Answer) -> None:
    assert found[:2] == expected[:2]
    # What was launched beyond the end counts for nothing.
    assert found[2].committed == expected[2].committed
    assert (found[2].tokens, found[2].tau) == (expected[2].tokens, expected[2].tau)


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_tokens_and_counts_are_those_of_a_loop_that_waits(
    pair: tuple[Any, Any, int], ahead: int, params: SamplingParams
) -> None:
    waiting, other, nodes = pair
    for prompt in PROMPTS:  # each of them the second request after the one before
        for size in (1, nodes):
            for new in (1, 2, 9, 40):
                found = run(Device(other, ahead), prompt, new, size, params)
                same(found, run(waiting, prompt, new, size, params))


def test_a_stop_token_ends_an_answer_though_more_is_in_flight(pair: tuple[Any, Any, int]) -> None:
    waiting, other, nodes = pair
    plain = run(waiting, LOOP, 40, 1)[0]
    for token in dict.fromkeys(plain):
        for size in (1, nodes):
            found = run(Device(other, 2), LOOP, 40, size, stop_ids=(token,))
            same(found, run(waiting, LOOP, 40, size, stop_ids=(token,)))
            assert found[:2] == (plain[: plain.index(token)], "stop")


def test_the_context_ends_an_answer(pair: tuple[Any, Any, int]) -> None:
    waiting, other, nodes = pair
    for size in (1, nodes):
        found = run(Device(other, 2), LOOP, 10_000, size)
        same(found, run(waiting, LOOP, 10_000, size))
        assert len(LOOP) + len(found[0]) == waiting.context and found[1] == "length"


def test_a_cancelled_answer_leaves_nothing_behind(pair: tuple[Any, Any, int]) -> None:
    waiting, other, nodes = pair
    device = Device(other, 2)
    for blocks in (1, 2, 5):
        decoding = decode(device, Request(LOOP, 200), nodes)
        for _ in range(blocks):
            next(decoding)
        decoding.close()
        assert decoding.stats.steps == blocks - 1
        same(run(device, PROMPTS[0], 30, nodes), run(waiting, PROMPTS[0], 30, nodes))


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_read(
    pair: tuple[Any, Any, int],
) -> None:
    device = Device(pair[1], 1)
    _, _, stats = run(device, LOOP, 40, 1)
    steps = stats.steps
    expected = [("prefill", 0), ("launch", 1)]
    for number in range(1, steps + 1):
        expected += [("launch", number + 1), ("wait", number)]
    assert device.calls == expected  # one read a step, and one step too many


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("stop_ids", [(), (45, 120)])
def test_rows_are_refilled_while_steps_are_in_flight(
    tiny_combined_bundle: Path, ahead: int, stop_ids: Sequence[int]
) -> None:
    """Very different lengths: a row's new request must not take the tokens of the one before."""
    bundle = load_bundle(tiny_combined_bundle)
    one, three = load_engine(bundle, threads=1), load_engine(bundle, threads=1, rows=3)
    lengths = [60, 3, 4, 1, 50, 2, 30, 1, 1, 20]
    work = [
        Job(
            Request(
                LOOP[i:] if i % 3 == 0 else [*range(10 * i, 10 * i + 12)],
                (len(LOOP) - i if i % 3 == 0 else 12) + new,
                SamplingParams(0.7 * (i % 2), seed=i),
            ),
            frozenset(stop_ids),
        )
        for i, new in enumerate(lengths)
    ]
    device = Device(three, ahead)
    decoding = decode_batch(device, work, 6)
    found: dict[int, list[int]] = {number: [] for number in range(len(work))}
    finish: dict[int, str | None] = {}
    for event in decoding:
        assert isinstance(event.outcome, Block) and finish.get(event.number) is None
        found[event.number] += event.outcome.tokens
        finish[event.number] = event.outcome.finish
    for number, job in enumerate(work):
        alone = decode(one, job.request, 6, job.stop_ids)
        blocks = list(alone)
        assert found[number] == [token for block in blocks for token in block.tokens]
        assert finish[number] == blocks[-1].finish
        assert decoding.stats[number].committed == alone.stats.committed
    assert device.launched - device.waited <= ahead


def test_a_cancelled_job_gives_its_row_to_the_next(tiny_combined_bundle: Path) -> None:
    bundle = load_bundle(tiny_combined_bundle)
    one, two = load_engine(bundle, threads=1), load_engine(bundle, threads=1, rows=2)
    work = [Job(Request(prompt, len(prompt) + 40)) for prompt in PROMPTS]
    decoding = decode_batch(Device(two, 2), work, 6)
    found: dict[int, list[int]] = {number: [] for number in range(len(work))}
    for event in decoding:
        assert isinstance(event.outcome, Block)
        found[event.number] += event.outcome.tokens
        if event.number == 1:
            decoding.cancel(1)
    assert len(found[1]) == 1
    for number in (0, 2, 3):
        assert found[number] == run(one, PROMPTS[number], 40, 6)[0]


def test_an_engine_that_gains_nothing_by_it_is_stepped(tiny_bundle: Path) -> None:
    engine = load_engine(load_bundle(tiny_bundle), threads=1)
    assert isinstance(engine, Pipelined) and engine.ahead == 0
    calls: list[int] = []
    step: Callable[[int], list[list[int]]] = engine.step
    engine.step = lambda nodes: calls.append(nodes) or step(nodes)  # type: ignore[method-assign, func-returns-value]
    engine.prefill(Request(LOOP, 60), 4)
    assert Steps(engine, Fixed(4)).next(len(LOOP))[0] and calls == [4]
