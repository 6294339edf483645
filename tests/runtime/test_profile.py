"""Profiles of tiny bundles: whatever they measure, it has to add up."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun.errors import ForerunError
from forerun.runtime import profilers
from forerun.runtime.bench import BenchConfig
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import load_engine
from forerun.runtime.model import Model, load
from forerun.runtime.pace import Fixed
from forerun.runtime.parts import OTHER, PARTS
from forerun.runtime.profile import profile
from forerun.runtime.profile_ort import OrtProfiler, _innermost, _launches
from forerun.runtime.profilers import PREFILL, STEP, load_profiler
from forerun.runtime.prompts import Prompt, read_prompts
from forerun.runtime.waterfall import MEASURED, UNEXPLAINED


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def report(tiny_combined_bundle: Path) -> dict[str, Any]:
    model = load(tiny_combined_bundle, threads=1)
    prompts = read_prompts(tiny_combined_bundle / "prompts.jsonl", 4)
    return profile(model, [*prompts, Prompt(None, "x" * 999, None)], BenchConfig(Fixed(10), 24))


def test_parts_sum_up_to_the_step(report: dict[str, Any]) -> None:
    for side, key in (("speculative", "parts"), ("plain", "plain_parts")):
        assert sum(report[key].values()) == pytest.approx(report[side]["step_ms"])
        assert set(PARTS) < set(report[key])
    # The price of timing a node is the one that makes plain decoding's parts sum up.
    assert report["plain_parts"][UNEXPLAINED] == pytest.approx(0, abs=1e-9)


def test_the_waterfall_ends_at_what_bench_would_say(report: dict[str, Any]) -> None:
    levels = report["waterfall"]
    assert levels[0]["speedup"] == pytest.approx(report["tau"])
    assert levels[-1]["name"] == MEASURED
    assert levels[-1]["speedup"] == pytest.approx(report["speedup"])
    assert levels[-1]["ms"] == pytest.approx(1e3 / report["speculative"]["tokens_per_s"])
    assert set(levels[0]) == {"name", "ms", "speedup"}


def test_acceptance_adds_up(report: dict[str, Any]) -> None:
    assert report["prompts"] == report["identical"] == 4 and report["skipped"] == 1
    along = report["acceptance_by_position"]
    assert sum(part["steps"] for part in along) == report["speculative"]["steps"]
    mean = sum(part["steps"] * part["tau"] for part in along) / report["speculative"]["steps"]
    assert mean == pytest.approx(report["tau"])
    assert list(report["categories"]) == ["p0", "p1"]
    assert all(part["tau"] >= 1 for part in report["categories"].values())


def test_the_rest_that_a_program_reads(report: dict[str, Any]) -> None:
    latency, answers = report["latency"], report["prompts"]
    assert latency["network"] is None
    decoding = (latency["host"] + latency["decode"]) * answers
    assert decoding == pytest.approx(1e3 * report["speculative"]["seconds"])
    assert latency["prefill"] == pytest.approx(report["speculative"]["prefill_ms"])
    for costs in report["verify_curve"].values():
        assert set(costs) >= {"1", "8"} and all(ms > 0 for ms in costs.values())
    assert report["bundle"]["hash"] == "tiny" and report["machine"]["cpu"]
    assert report["profiler"]["launches"] == report["speculative"]["steps"]
    json.dumps(report)


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_medusa_bundle", "tiny_combined_bundle"])
def test_nodes_that_onnx_runtime_ran_have_a_part(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    opened = load_bundle(request.getfixturevalue(bundle))
    profiler = load_profiler(opened, load_engine(opened, threads=1))
    assert isinstance(profiler, OrtProfiler)
    nodes = int(opened.manifest.default_tree)
    stream = Model(opened, profiler.engine("me")).stream("abab abab" * 4, 20, nodes=nodes)
    stats = stream.completion.stats
    timed = profiler.timed()
    assert timed["me", PREFILL].launches == 3  # chunks of 16
    assert timed["me", STEP].launches == stats.steps
    assert not Path(profiler.folder.name).exists()
    for kind in timed.values():
        assert set(kind.ms) >= set(PARTS) and all(ms > 0 for ms in kind.ms.values())
        # What ONNX Runtime put in by itself.
        assert kind.nodes.get(OTHER, 0) <= 0.01 * sum(kind.nodes.values())
        assert kind.clock > 0


def test_engines_take_turns(tiny_combined_bundle: Path) -> None:
    """Two requests side by side on one profiler: each has its own tokens and its own launches."""
    opened = load_bundle(tiny_combined_bundle)
    model = load(tiny_combined_bundle, threads=1)
    profiler = load_profiler(opened, model.engine)
    assert profiler is not None
    ids = opened.tokenizer.encode("abab IJKL").ids
    streams = {
        nodes: Model(opened, profiler.engine(str(nodes))).stream_ids(ids, 16, nodes=nodes)
        for nodes in (1, 10)
    }
    for _ in zip_longest(*streams.values()):
        pass
    timed, expected = profiler.timed(), model.stream_ids(ids, 16).completion.token_ids
    counts = {}
    for nodes, stream in streams.items():
        found = stream.completion
        assert found.token_ids == expected
        steps = timed[str(nodes), STEP]
        assert steps.launches == found.stats.steps == len(found.stats.trace)
        counts[nodes] = steps.nodes["draft"] / steps.launches
    assert counts[10] > 2 * counts[1]  # what is in the branch that plain decoding doesn't take


def event(name: str, ts: int, dur: int, cat: str = "Node") -> dict[str, Any]:
    args = {"op_name": "If" if name == "draft/if" else "Mul"}
    return {"name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def test_what_runs_inside_a_branch_is_counted_once() -> None:
    events = [  # in the order of ONNX Runtime's file: as they end
        event("verify/a", 10, 100),
        event("draft/b", 130, 20),
        event("draft/c", 150, 50),
        event("draft/if", 120, 100),
        event("accept/d", 220, 0),
        event("accept/e", 220, 5),
        event("draft/skipped", 230, 7),
        event("model_run", 0, 250, "Session"),
        event("verify/cut off", 300, 9),
    ]
    [launch] = _launches(events)
    assert sorted(_innermost(launch)) == [
        ("accept/d", 0.0),
        ("accept/e", 0.005),
        ("draft/b", 0.02),
        ("draft/c", 0.05),
        ("draft/skipped", 0.007),
        ("verify/a", 0.1),
    ]


def test_the_command(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    size = ("--limit", 2, "--max-new-tokens", 12, "--threads", 1)
    result = run("profile", tiny_bundle, *size, "--json", path)
    assert result.exit_code == 0, result.output
    for word in ("verify(n) > 1", "unexplained", "measured", "host", "tokens 0 to 16", "p1"):
        assert word in result.stdout
    report = json.loads(path.read_text())
    assert report["nodes"] == 8 and report["prompts"] == 2


def test_what_cannot_be_profiled(tiny_bundle: Path) -> None:
    model = load(tiny_bundle)
    with pytest.raises(ForerunError, match="it only decodes plainly"):
        profile(model, [Prompt(None, "a", None)], BenchConfig(Fixed(1)))
    with pytest.raises(ForerunError, match="no prompt is shorter"):
        profile(model, [Prompt(None, "x" * 999, None)], BenchConfig(Fixed(8)))
    result = run("profile", tiny_bundle, "--nodes", 5)
    assert result.exit_code == 1 and "no tree of 5 nodes" in result.stderr


def test_an_engine_without_a_profiler(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "PROFILERS", {})
    report = profile(load(tiny_bundle), [Prompt(None, "abab", None)], BenchConfig(Fixed(8), 12))
    known = {name for name, ms in report["parts"].items() if ms}
    assert known == {"host", UNEXPLAINED} and report["profiler"]["unattributed"] == 1
    assert sum(report["parts"].values()) == pytest.approx(report["speculative"]["step_ms"])
