"""The comparison with other engines: what is timed, chosen, repeated and divided by what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import exchange
from benchmarks.peers.compare import Plan, WorkerError, compare, tokens_per_s
from benchmarks.peers.environment import CONSTRAINTS, GROUPS, Environment
from benchmarks.peers.exchange import Answer, Job, Outcome, Recorder
from benchmarks.peers.registry import OURS, OURS_PLAIN, VARIANTS, missing
from benchmarks.peers.report import headline, summary, table

LLAMA, LOOKUP, GENAI = "llama.cpp", "llama.cpp-lookup", "ort-genai"
SLOW = "transformers"
STOP = 9


def answer(tokens: tuple[int, ...], seconds: float, steps: int | None = None) -> Answer:
    """One whose first token took a second."""
    return Answer(tokens, 1, 1.0, seconds, len(tokens) - 1 if steps is None else steps)


def job(variant: str, **changes: Any) -> Job:
    return replace(Job(variant, "model", ((1, 2, 3), (4, 5)), 60, (STOP,), 1), **changes)


# --- the clock that all share ---------------------------------------------------------------


def recorded(
    monkeypatch: pytest.MonkeyPatch, limit: int, times: list[float], blocks: list[list[int]]
) -> tuple[Answer, list[bool]]:
    """What a recorder makes of blocks that come at these times, after a start at the first."""
    clock = iter(times)
    monkeypatch.setattr(exchange.time, "perf_counter", lambda: next(clock))
    recorder = Recorder(limit, [STOP])
    done = [recorder.push(block) for block in blocks]
    return recorder.answer(), done


def test_prefill_ends_with_the_first_token_and_decoding_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, done = recorded(monkeypatch, 5, [10, 12, 13, 15], [[1], [2, 3], [4, 5]])
    assert found == Answer((1, 2, 3, 4, 5), first=1, prefill_seconds=2, seconds=3, steps=2)
    assert found.decoded == 4 and done == [False, False, True]


def test_a_block_is_cut_at_the_limit_and_later_ones_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, done = recorded(monkeypatch, 3, [0, 1, 2, 50], [[1], [2, 3, 4], [5]])
    assert (found.tokens, found.seconds, found.steps, done) == (
        (1, 2, 3),
        1,
        1,
        [False, True, True],
    )


def test_a_stop_token_ends_the_answer_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found, done = recorded(monkeypatch, 30, [0, 1, 2], [[0], [7, STOP, 8]])
    assert (found.tokens, found.decoded, done[-1]) == ((0, 7, STOP), 2, True)


def test_an_empty_block_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = recorded(monkeypatch, 30, [0, 1, 2, 3], [[], [1], [2]])
    assert (found.prefill_seconds, found.first, found.steps) == (2, 1, 1)


def test_an_engine_that_hands_over_single_tokens_may_say_how_many_steps_it_took() -> None:
    recorder = Recorder(30, [STOP])
    for token in (1, 2, 3, 4):
        recorder.push([token])
    recorder.steps = 2
    assert recorder.answer().steps == 2


def test_jobs_and_outcomes_survive_their_files(tmp_path: Path) -> None:
    given = job(LLAMA, options={"lookup": 2}, threads=2)
    exchange.write_json(tmp_path / "job", given)
    assert exchange.read_job(tmp_path / "job") == given
    outcome = Outcome((answer((1, 2), 0.5),), {"llama-cpp-python": "1"})
    exchange.write_json(tmp_path / "outcome", outcome)
    assert exchange.read_outcome(tmp_path / "outcome") == outcome
    assert given.slots == 63


# --- who takes part -------------------------------------------------------------------------


def test_every_variant_has_its_adapter_and_a_plain_one_to_repeat() -> None:
    folder = Path(exchange.__file__).parent
    for variant in VARIANTS.values():
        assert (folder / f"{variant.adapter}.py").is_file()
        if variant.plain is not None:
            plain = VARIANTS[variant.plain]
            assert (plain.adapter, plain.source) == (variant.adapter, variant.source)
            assert plain.plain is None


def test_every_package_is_installed_by_name_and_torch_is_the_pinned_one() -> None:
    named = [package for packages in GROUPS.values() for package in packages]
    assert {name for variant in VARIANTS.values() for name in variant.packages} <= {*named}
    assert all("/" not in name and "=" not in name for name in named)
    assert "torch==" in CONSTRAINTS.read_text()


def test_a_probe_tries_every_setting() -> None:
    found = VARIANTS["openvino-lookup"].settings((1, 2))
    kinds = [{"attention": "PA", "lookup": count} for count in (2, 5)]
    assert found == [(threads, kind) for threads in (1, 2) for kind in kinds]
    assert VARIANTS[OURS_PLAIN].settings((1, 2)) == [(1, {"nodes": 1}), (2, {"nodes": 1})]


def test_what_is_not_installed_is_named() -> None:
    assert missing(VARIANTS[OURS], {}) is None
    assert missing(VARIANTS[SLOW], {"torch": "2", "transformers": "5"}) is None
    reason = missing(VARIANTS[SLOW], {"torch": "2"})
    assert reason is not None and "transformers" in reason and "torch" not in reason
    assert "--install" in reason


def test_an_environment_says_what_it_holds(tmp_path: Path) -> None:
    assert Environment.at(tmp_path / "none").installed() == {}
    found = Environment(Path(sys.executable)).installed()
    assert found["pytest"] == pytest.__version__
    assert "typing-extensions" in found  # its own metadata says typing_extensions


# --- rounds ---------------------------------------------------------------------------------

SPEEDS = {OURS_PLAIN: 50.0, OURS: 120.0, LLAMA: 60.0, LOOKUP: 40.0, GENAI: 55.0, SLOW: 9.0}


class Machine:
    """Answers jobs at fixed speeds, two threads a tenth faster; keeps the order of the rounds."""

    def __init__(self, broken: Callable[[Job], bool] = lambda given: False) -> None:
        self.broken, self.probed, self.ran = broken, [], []
        self.said: list[str] = []

    def __call__(self, given: Job) -> Outcome:
        probed = given.max_new_tokens < 60
        (self.probed if probed else self.ran).append(given)
        if self.broken(given):
            raise WorkerError("out of memory")
        speed = SPEEDS[given.variant] * (1.1 if given.threads == 2 else 1)
        tokens = (1, *range(20, 19 + given.max_new_tokens))
        each = answer(tokens, (len(tokens) - 1) / speed)
        return Outcome(tuple(each for _ in given.prompts))

    def compared(self, rounds: int, names: list[str]) -> tuple[Any, Any]:
        plan = Plan(rounds, (1, 2), probe_prompts=1, probe_tokens=10)
        return compare({name: job(name) for name in names}, plan, self, self.said.append)


def test_the_fastest_setting_of_the_probe_is_measured_and_the_rounds_alternate() -> None:
    machine = Machine()
    measured, failed = machine.compared(3, [OURS, LLAMA, GENAI])
    assert not failed
    assert all(len(given.prompts) == 1 for given in machine.probed) and len(machine.probed) == 6
    assert {given.threads for given in machine.ran} == {2}
    order = [given.variant for given in machine.ran]
    assert order == [OURS, LLAMA, GENAI, GENAI, LLAMA, OURS, OURS, LLAMA, GENAI]
    assert tokens_per_s(measured[LLAMA].outcomes[0]) == pytest.approx(66)


def test_lookup_takes_over_what_was_chosen_for_its_plain_variant() -> None:
    """Another type would change the tokens that it is compared with."""
    plan = Plan(1, (1,), probe_tokens=10)
    speeds = {"float32": 3.0, "bfloat16": 4.0, None: 5.0}
    ran: list[Job] = []

    def run(given: Job) -> Outcome:
        ran.append(given)
        return Outcome((answer((1, 2), 1 / speeds[given.options.get("dtype")]),) * 2)

    jobs = {name: job(name) for name in (OURS_PLAIN, OURS, SLOW, "transformers-lookup")}
    measured, _ = compare(jobs, plan, run, lambda line: None)
    assert measured["transformers-lookup"].job.options["dtype"] == "bfloat16"
    assert "nodes" not in measured[OURS].job.options
    assert {given.options["dtype"] for given in ran if "lookup" in given.options} == {"bfloat16"}


def test_one_that_fails_is_named_and_the_others_go_on() -> None:
    everything, fails = [OURS, LLAMA, GENAI], lambda given: given.variant == LLAMA
    measured, failed = Machine(fails).compared(2, everything)
    assert failed == {LLAMA: "out of memory"} and {*measured} == {OURS, GENAI}
    rounds = Machine(lambda given: given.variant == LLAMA and given.max_new_tokens == 60)
    measured, failed = rounds.compared(2, everything)
    assert failed == {LLAMA: "out of memory"} and {*measured} == {OURS, GENAI}
    assert len(measured[OURS].outcomes) == 2


def test_one_that_fails_late_keeps_its_rounds_and_is_not_run_again() -> None:
    machine = Machine(lambda given: given.variant == LLAMA and len(machine.ran) > 4)
    measured, failed = machine.compared(3, [OURS, LLAMA, GENAI])
    assert failed == {LLAMA: "out of memory"}
    runs = {name: len(found.outcomes) for name, found in measured.items()}
    assert runs == {OURS: 3, LLAMA: 1, GENAI: 3}
    ratios = summary(measured)["variants"][LLAMA]["forerun_to_this"]
    assert ratios["low"] == ratios["high"] == pytest.approx(2)


def test_a_setting_that_does_not_work_is_not_chosen() -> None:
    measured, failed = Machine(lambda given: given.threads == 2).compared(1, [LLAMA])
    assert not failed and measured[LLAMA].job.threads == 1


def test_a_hopeless_peer_runs_once_and_we_always_run() -> None:
    measured, _ = Machine().compared(3, [OURS_PLAIN, OURS, LLAMA, SLOW])
    runs = {name: len(found.outcomes) for name, found in measured.items()}
    assert runs == {OURS_PLAIN: 3, OURS: 3, LLAMA: 3, SLOW: 1}


# --- figures --------------------------------------------------------------------------------


def measured_at(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """A summary of rounds in which every variant decoded 100 tokens at these speeds."""
    plan = Plan(len(next(iter(speeds.values()))), (1,), probe_tokens=10)
    left = {name: iter(values) for name, values in speeds.items()}

    def run(given: Job) -> Outcome:
        speed = 1.0 if given.max_new_tokens == 10 else next(left[given.variant])
        answers = (answer((0, *range(100)), 60 / speed), answer((0, *range(40)), 80 / speed))
        return Outcome(answers)

    jobs = {name: job(name) for name in speeds}
    return summary(compare(jobs, plan, run, lambda line: None)[0])


def test_ratios_are_taken_round_by_round_against_the_best_peer() -> None:
    """The machine halves its speed in the second round: the ratios don't notice."""
    found = measured_at(
        {OURS_PLAIN: [50, 25, 50], OURS: [120, 60, 132], LLAMA: [60, 30, 60], GENAI: [58, 29, 58]}
    )
    assert found["best_peer"] == LLAMA
    best = found["ratios"]["speculative_to_best_peer"]
    assert best == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.2})
    assert found["ratios"]["plain_to_best_peer"]["median"] == pytest.approx(50 / 60)
    assert found["ratios"]["speculative_to_plain"]["high"] == pytest.approx(2.64)
    # 140 tokens in 140 / speed seconds, though one prompt was faster than the other
    assert found["variants"][LLAMA]["tokens_per_s"]["median"] == pytest.approx(60)
    # five prompt tokens, a second each prompt
    assert found["variants"][LLAMA]["prefill_tokens_per_s"]["median"] == pytest.approx(2.5)


def test_without_peers_there_is_no_best_one() -> None:
    found = measured_at({OURS_PLAIN: [50], OURS: [100]})
    assert found["best_peer"] is None and {*found["ratios"]} == {"speculative_to_plain"}


def test_identical_counts_prompts_with_the_plain_variants_tokens() -> None:
    def run(given: Job) -> Outcome:
        odd = 7 if given.variant == LOOKUP else 2
        answers = answer((1, 2, 3), 1.0), answer((1, odd, 3), 1.0, steps=1)
        return Outcome(answers[: len(given.prompts)])

    jobs = {name: job(name) for name in (LLAMA, LOOKUP)}
    found = summary(compare(jobs, Plan(1, (1,)), run, lambda line: None)[0])["variants"]
    assert found[LLAMA]["identical_to_plain"] is None
    assert found[LOOKUP]["identical_to_plain"] == 1
    assert found[LOOKUP]["tokens_per_step"] == pytest.approx(4 / 3)


def test_the_report_is_shown_whole() -> None:
    from rich.console import Console

    found = measured_at({OURS_PLAIN: [50, 40], OURS: [100, 100], LLAMA: [50, 50]})
    found |= {"prompts": 2, "max_new_tokens": 60, "skipped": {GENAI: "not installed: x"}}
    text = StringIO()
    Console(width=200, file=text).print(table(found))
    assert "45.0 (40.0 to 50.0)" in text.getvalue() and "not installed: x" in text.getvalue()
    assert "speculative to best peer: 2.00" in headline(found)
