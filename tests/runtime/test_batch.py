"""Many requests side by side: each is answered as it would be alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.batch import BatchDecoding, Job, Rows, decode_batch
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import Block, decode
from forerun.runtime.model import Completion, Model, load
from forerun.runtime.sampling import SamplingParams

BUNDLES = {"ngram": "tiny_bundle", "medusa": "tiny_medusa_bundle", "both": "tiny_combined_bundle"}
SIZES = {"ngram": 8, "medusa": 6, "both": 10}
LOOP = [*range(40, 50)] * 3
"""The tiny target goes on with this for ever, so that prompt lookup is always right."""
REQUESTS = [
    ([3, 4, 5, 6, 3, 4, 0], 60, SamplingParams()),
    (LOOP, 33, SamplingParams()),
    ([9, 8, 9, 8, 9, 8, 200], 5, SamplingParams(0.8, seed=1)),
    (list(range(40)), 47, SamplingParams(1.3, top_k=20, top_p=0.9, seed=2)),
    ([0], 1, SamplingParams()),
    ([7, 7, 7, 7], 70, SamplingParams(1.0, top_p=0.9, seed=3)),
    ([6] * 150, 40, SamplingParams(0.8, seed=4)),
    (LOOP[3:], 20, SamplingParams(0.3, seed=5)),
]
Answers = dict[int, tuple[list[int], str | None]]


@pytest.fixture(scope="module", params=BUNDLES)
def engines(request: pytest.FixtureRequest) -> tuple[Any, Any, Any, int]:
    """One row, three and four of each bundle, and the size of its tree."""
    bundle = load_bundle(request.getfixturevalue(BUNDLES[request.param]))
    one, three, four = (load_engine(bundle, threads=1, rows=rows) for rows in (1, 3, 4))
    return one, three, four, SIZES[request.param]


def jobs(stop_ids: Sequence[int] = ()) -> list[Job]:
    return [
        Job(Request(prompt, len(prompt) + new, params), frozenset(stop_ids))
        for prompt, new, params in REQUESTS
    ]


def alone(engine: Any, job: Job, nodes: int) -> tuple[list[int], str | None]:
    blocks = list(decode(engine, job.request, nodes, job.stop_ids))
    return [token for block in blocks for token in block.tokens], blocks[-1].finish


def collect(decoding: BatchDecoding) -> Answers:
    answers: Answers = {}
    for event in decoding:
        assert isinstance(event.outcome, Block)
        tokens, finish = answers.setdefault(event.number, ([], None))
        assert finish is None  # nothing comes after the end
        answers[event.number] = (tokens + list(event.outcome.tokens), event.outcome.finish)
    return answers


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("stop_ids", [(), (45, 120)])
def test_every_request_is_answered_as_alone(
    engines: tuple[Any, Any, Any, int], rows: int, stop_ids: Sequence[int]
) -> None:
    one, engine, nodes = engines[0], engines[rows - 2], engines[3]
    expected = {number: alone(one, job, nodes) for number, job in enumerate(jobs(stop_ids))}
    plain = {number: alone(one, job, 1) for number, job in enumerate(jobs(stop_ids))}
    assert expected == plain
    decoding = decode_batch(engine, jobs(stop_ids), nodes)
    assert collect(decoding) == expected
    assert collect(decode_batch(engine, jobs(stop_ids), 1)) == expected
    for number, job in enumerate(jobs(stop_ids)):
        apart = decode(one, job.request, nodes, job.stop_ids)
        list(apart)
        assert decoding.stats[number].tokens == apart.stats.tokens
        assert decoding.stats[number].committed == apart.stats.committed


def test_a_row_joins_while_the_others_are_in_the_midst(
    engines: tuple[Any, Any, Any, int],
) -> None:
    """Jobs of very different length, so that rows are refilled between others' steps."""
    one, engine, _, nodes = engines
    lengths = [90, 3, 4, 5, 50, 2, 30]
    work = [
        Job(Request([*range(10 * i, 10 * i + 12)], 12 + new, SamplingParams(0.7, seed=i)))
        for i, new in enumerate(lengths)
    ]
    order: list[int] = []
    answers: Answers = {}
    for event in decode_batch(engine, work, nodes):
        assert isinstance(event.outcome, Block)
        order.append(event.number)
        tokens, _ = answers.setdefault(event.number, ([], None))
        answers[event.number] = (tokens + list(event.outcome.tokens), event.outcome.finish)
    assert answers == {number: alone(one, job, nodes) for number, job in enumerate(work)}
    assert order.index(6) < max(place for place, number in enumerate(order) if number == 0)


def test_the_context_ends_one_row_and_not_the_others(engines: tuple[Any, Any, Any, int]) -> None:
    one, engine, _, nodes = engines
    full = engine.context
    work = [
        Job(Request([5] * (full - 10), full + 1000)),
        Job(Request([3, 4, 5], 63)),
        Job(Request([5] * full, full + 5)),
        Job(Request([8, 9] * 20, 100, SamplingParams(0.9, seed=8))),
    ]
    answers = collect(decode_batch(engine, work, nodes))
    assert answers == {number: alone(one, job, nodes) for number, job in enumerate(work)}
    assert len(answers[0][0]) == 10 and answers[0][1] == "length"
    assert answers[2] == ([], "length")


def test_an_error_in_one_request_leaves_the_others_untouched(
    engines: tuple[Any, Any, Any, int],
) -> None:
    one, engine, _, nodes = engines
    bad = [Job(Request([1] * length, 9999)) for length in (0, engine.context + 1)]
    work = [*jobs()[:2], bad[0], jobs()[2], bad[1], *jobs()[3:]]
    decoding = decode_batch(engine, work, nodes)
    events = list(decoding)
    failed = {e.number: e.outcome for e in events if isinstance(e.outcome, ForerunError)}
    assert set(failed) == {2, 4}
    assert all("this bundle takes 1 to" in str(error) for error in failed.values())
    good = collect_events(event for event in events if event.number not in failed)
    assert good == {
        number: alone(one, job, nodes) for number, job in enumerate(work) if number not in failed
    }
    assert set(decoding.stats) == set(range(len(work)))


def collect_events(events: Iterator[Any]) -> Answers:
    answers: Answers = {}
    for event in events:
        tokens, _ = answers.setdefault(event.number, ([], None))
        answers[event.number] = (tokens + list(event.outcome.tokens), event.outcome.finish)
    return answers


def test_a_cancelled_job_gives_its_row_to_the_next(engines: tuple[Any, Any, Any, int]) -> None:
    one, engine, _, nodes = engines
    decoding = decode_batch(engine, jobs(), nodes)
    answers: Answers = {}
    for event in decoding:
        assert isinstance(event.outcome, Block)
        tokens, _ = answers.setdefault(event.number, ([], None))
        answers[event.number] = (tokens + list(event.outcome.tokens), event.outcome.finish)
        if event.number == 0:
            decoding.cancel(0)
            decoding.cancel(0)  # no harm
    expected = {number: alone(one, job, nodes) for number, job in enumerate(jobs())}
    assert len(answers[0][0]) == 1 and answers[0][0] == expected[0][0][:1]
    assert {n: a for n, a in answers.items() if n} == {n: a for n, a in expected.items() if n}


def test_jobs_are_taken_as_rows_get_free(engines: tuple[Any, Any, Any, int]) -> None:
    one, engine, _, nodes = engines
    taken: list[int] = []

    def stream() -> Iterator[Job]:
        for number, job in enumerate(jobs()):
            taken.append(number)
            yield job

    decoding = decode_batch(engine, stream(), nodes)
    next(decoding)
    assert taken == [*range(engine.rows)]
    decoding.close()
    assert list(decoding) == []
    # Nothing is left of it: the next requests are answered as ever.
    assert collect(decode_batch(engine, jobs(), nodes)) == {
        number: alone(one, job, nodes) for number, job in enumerate(jobs())
    }


# --- prompts read between steps ---------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, seed=3)])
@pytest.mark.parametrize("prompt", [[9] * 16, [*range(40)], [*LOOP, 1], [6, 7] * 70])
def test_a_prompt_read_between_steps_changes_no_token(
    engines: tuple[Any, Any, Any, int], prompt: list[int], params: SamplingParams
) -> None:
    """Two steps of another row after each chunk; the cache grows on the way."""
    one, _, engine, nodes = engines
    loop, late = Request(LOOP, len(LOOP) + 200), Request(prompt, len(prompt) + 30, params)
    expected = [alone(one, Job(request), 1)[0] for request in (loop, late)]
    for size in (1, nodes):
        for row in range(4):
            engine.release(row)
        found = [engine.prefill(loop, size, 0), []]
        reading = engine.begin(late, size > 1, 2)
        while not found[1]:
            for _ in range(2):
                rows = engine.step(size)
                found[0] += rows[0]
                assert rows[1:] == [[], [], []]
            found[1] = engine.read(reading, size) or []
        while any(rows := engine.step(size)):
            found[0] += rows[0]
            found[1] += rows[2]
        assert found[0] == expected[0][: len(found[0])] and len(found[0]) >= 200
        assert found[1] == expected[1]


def test_a_prompt_given_up_half_read_leaves_nothing(engines: tuple[Any, Any, Any, int]) -> None:
    one, engine, _, nodes = engines
    engine.read(engine.begin(Request([9] * 100, 150), True, 1), nodes)
    engine.release(1)
    assert collect(decode_batch(engine, jobs(), nodes)) == {
        number: alone(one, job, nodes) for number, job in enumerate(jobs())
    }


def test_a_step_leaves_out_the_rows_above_the_last_that_is_busy(
    engines: tuple[Any, Any, Any, int],
) -> None:
    _, _, engine, nodes = engines
    for row in range(4):
        engine.release(row)
    spans = []
    for row in (0, 2, 1):
        engine.prefill(Request([3, 4, 5], 60), nodes, row)
        engine.step(nodes)
        spans.append(engine.span)
    engine.release(2)
    assert [*spans, engine.span] == [1, 3, 3, 2]
    sizes = {engine.bindings[key][1]["tokens"].shape[0] for key in engine.bindings if key[3] == 1}
    assert sizes == {1}


def test_trees_may_change_from_step_to_step(
    engines: tuple[Any, Any, Any, int], paced_by_rows: Callable[..., Any]
) -> None:
    one, engine, _, nodes = engines
    rows = Rows(engine, paced_by_rows(nodes, 1, nodes))
    waiting, found = list(enumerate(jobs())), dict[int, list[int]]()
    while waiting or rows.busy:
        while waiting and rows.free:
            rows.join(*waiting.pop(0))
        for event in rows.advance():
            assert isinstance(event.outcome, Block)
            found.setdefault(event.number, []).extend(event.outcome.tokens)
            if event.outcome.finish:
                rows.end(event.number)
    assert found == {number: alone(one, job, 1)[0] for number, job in enumerate(jobs())}


def test_no_jobs_at_all(engines: tuple[Any, Any, Any, int]) -> None:
    assert list(decode_batch(engines[1], [], engines[3])) == []


# --- texts ----------------------------------------------------------------------------------

PROMPTS = ["hello", "ab" * 20, "naïve café — 世界", "IJKLMNOPQR" * 2, "x"]


@pytest.fixture(scope="module")
def models(tiny_combined_bundle: Path) -> tuple[Model, Model]:
    return load(tiny_combined_bundle, threads=1), load(tiny_combined_bundle, threads=1, rows=3)


def facts(completion: Completion | ForerunError) -> tuple[Any, ...]:
    assert isinstance(completion, Completion)
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("stop", [(), ("MNO", "zz"), "R"])
def test_many_texts_are_what_each_is_alone(
    models: tuple[Model, Model], plain: bool, stop: Sequence[str]
) -> None:
    single, many = models
    params = [SamplingParams(1.0, seed=i) if i % 2 else SamplingParams() for i in range(5)]
    limits = [40, 7, 60, 55, 1]
    answers = many.generate_many(PROMPTS, limits, params, plain=plain, stop=stop)
    for prompt, limit, one, answer in zip(PROMPTS, limits, params, answers, strict=True):
        assert facts(answer) == facts(single.generate(prompt, limit, one, stop=stop))
    # One request at a time goes on working on a model of several rows.
    assert facts(many.generate("hello", 40)) == facts(single.generate("hello", 40))


def test_a_prompt_that_fails_has_its_error_in_its_place(models: tuple[Model, Model]) -> None:
    single, many = models
    prompts: list[Any] = ["hello", "a" * 1000, [{"role": "user", "content": "no template"}], "x"]
    answers = many.generate_many(prompts, 20)
    assert facts(answers[0]) == facts(single.generate("hello", 20))
    assert facts(answers[3]) == facts(single.generate("x", 20))
    assert "the prompt has 1001 tokens" in str(answers[1])
    assert "no chat template" in str(answers[2])
    assert many.generate_many([]) == []


def test_a_stream_ends_where_many_begin(models: tuple[Model, Model]) -> None:
    many = models[1]
    stream = many.stream("hello", 40, plain=True)
    next(stream)
    many.generate_many(["x"], 5)
    with pytest.raises(ForerunError, match="another request began on this model"):
        list(stream)


def test_values_one_a_prompt_must_be_as_many(models: tuple[Model, Model]) -> None:
    with pytest.raises(ForerunError, match="max_new_tokens has 2 values for 3 prompts"):
        models[1].generate_many(["a", "b", "c"], [1, 2])
    for answer in models[1].generate_many(["a"], 0):
        assert "max_new_tokens is 0" in str(answer)
