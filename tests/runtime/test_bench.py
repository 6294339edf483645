"""The measurement: what it counts, and that both ways get the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.bench import BenchConfig, Pair, bench, speedup_interval, summary, table
from forerun.runtime.loop import Stats
from forerun.runtime.model import Completion, Model, load
from forerun.runtime.pace import Fixed
from forerun.runtime.prompts import Prompt, read_prompts
from forerun.runtime.sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Model:
    return load(tiny_bundle, threads=1)


@pytest.fixture(scope="module")
def report(model: Model, tiny_bundle: Path) -> dict[str, Any]:
    prompts = read_prompts(tiny_bundle / "prompts.jsonl", 6)
    return bench(model, [*prompts, Prompt(None, "x" * 999, None)], BenchConfig(Fixed(8), 24))


def test_the_report_has_all_that_a_program_reads(report: dict[str, Any]) -> None:
    assert report["prompts"] == report["identical"] == 6
    assert report["skipped"] == 1
    assert report["plain"]["tokens"] == report["speculative"]["tokens"] <= 6 * 23
    assert report["plain"]["tokens_per_s"] > 0 and report["speculative"]["tokens_per_s"] > 0
    ratio = report["speculative"]["tokens_per_s"] / report["plain"]["tokens_per_s"]
    assert report["speedup"] == pytest.approx(ratio)
    low, high = report["speedup_interval"]
    assert low <= report["speedup"] <= high
    assert 1 <= report["tau"] <= 8
    assert all(0 <= share <= 1 for share in report["acceptance_by_depth"])
    assert report["tau"] == pytest.approx(1 + sum(report["acceptance_by_depth"]))
    assert 0 < report["host_share"] < 1
    assert list(report["verify_cost"]) == ["1", "4", "8"]
    assert all(cost > 0 for cost in report["verify_cost"].values())
    assert report["bundle"]["hash"] == "tiny"
    assert {"python", "numpy", "onnxruntime", "forerun"} <= set(report["versions"])
    assert report["machine"]["cpu"] and report["machine"]["cores"] >= 1


def test_categories_add_up(report: dict[str, Any]) -> None:
    assert list(report["categories"]) == ["p0", "p1"]
    parts = report["categories"].values()
    assert sum(part["prompts"] for part in parts) == 6
    for side in ("plain", "speculative"):
        assert sum(part[side]["tokens"] for part in parts) == report[side]["tokens"]


def test_the_table_says_it_to_people(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table(report))
    text = console.export_text()
    for word in ("speedup", "tau", "6 of 6", "verify cost", "left out", "p1"):
        assert word in text


def test_plain_and_speculative_take_turns_in_going_first(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[Any] = []
    original = Model.stream_ids

    def spy(self: Model, ids: Any, new: int, *rest: Any, **named: Any) -> Any:
        sizes.append(named["nodes"] if named else rest[1])
        return original(self, ids, new, *rest, **named)

    monkeypatch.setattr(Model, "stream_ids", spy)
    prompts = [Prompt(None, text, None) for text in "abc"]
    ticks: list[None] = []
    bench(model, prompts, BenchConfig(Fixed(4), 4), lambda: ticks.append(None))
    assert [pace.largest for pace in sizes] == [1, 4, 1, 4, 4, 1, 1, 4] and len(ticks) == 3


def test_sampling_is_measured_too(model: Model) -> None:
    config = BenchConfig(Fixed(8), 16, SamplingParams(0.9, seed=4))
    report = bench(model, [Prompt(None, "abab", None)], config)
    assert report["identical"] == 1 and report["temperature"] == 0.9
    assert report["speedup_interval"] is None


def test_no_prompt_that_fits(model: Model) -> None:
    with pytest.raises(ForerunError, match="no prompt is shorter than this bundle's context"):
        bench(model, [Prompt(None, "x" * 999, None)], BenchConfig(Fixed(8)))


def completion(tokens: tuple[int, ...], seconds: float, steps: tuple[int, ...]) -> Completion:
    stats = Stats(0.25, seconds, seconds / 2, len(tokens) - 1, steps)
    return Completion("", tokens, "length", stats)


def test_the_arithmetic() -> None:
    plain = completion((1, 2, 3, 4, 5), 4.0, (4,))
    fast = completion((1, 2, 3, 4, 5), 1.0, (0, 2))
    pairs = [Pair(None, plain, fast), Pair("x", plain, replace(fast, token_ids=(9,)))]
    found = summary(pairs)
    assert (found["prompts"], found["identical"], found["speedup"]) == (2, 1, 4.0)
    assert found["speedup_interval"] == speedup_interval(pairs) == [4.0, 4.0]
    assert (found["tau"], found["acceptance_by_depth"]) == (2.0, [1.0])
    assert found["plain"] == {
        "tokens_per_s": 1.0,
        "tokens": 8,
        "steps": 8,
        "seconds": 8.0,
        "step_ms": 1000.0,
        "prefill_ms": 250.0,
        "host_share": 0.5,
    }
    stopped = replace(plain, finish_reason="stop")
    assert not Pair(None, plain, stopped).identical


def test_answers_that_end_at_once() -> None:
    nothing = completion((1,), 0.0, ())
    found = summary([Pair(None, nothing, nothing)] * 2)
    assert (found["speedup"], found["tau"], found["speedup_interval"]) == (0.0, 0.0, None)
