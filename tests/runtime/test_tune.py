"""Tuning: the best tree by replay and cost, confirmed by measuring, written as a plan."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forerun.cli import main
from forerun.errors import ForerunError
from forerun.runtime.bundle import load_bundle
from forerun.runtime.costs import Costs, measure_costs, stars, verify_costs, with_trees
from forerun.runtime.engine import load_engine
from forerun.runtime.model import load
from forerun.runtime.pace import Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.prompts import Prompt, read_prompts
from forerun.runtime.replay import Played
from forerun.runtime.tree import Tree
from forerun.runtime.tune import Candidate, TuneConfig, candidates, choose, record_answers, split
from forerun.runtime.tune_report import DEFAULT, FIRST, PLAIN, SECOND
from forerun.runtime.tune_run import corrected, runner_up, tune

CONFIG = TuneConfig(max_new_tokens=24, sizes=(2, 3, 5, 8), contexts=(32, 100), launches=1)
TRIED = {
    nodes: Candidate(Tree.chain(nodes), Played(100, round(100 * tau), ()))
    for nodes, tau in ((2, 1.6), (4, 2.2), (8, 2.6))
}


def costs(slope: float, context: int = 32) -> Costs:
    """A machine where every further node costs `slope` of a plain step of 10 ms."""
    verify = {nodes: 10.0 * (1 + slope * (nodes - 1)) for nodes in TRIED}
    return Costs(10.0, verify, {nodes: ms + 1.0 for nodes, ms in verify.items()}, context)


@pytest.mark.parametrize(("slope", "nodes"), [(0.0, 8), (0.05, 8), (0.15, 4), (0.4, 2), (0.7, 1)])
def test_the_steeper_verify_is_the_smaller_the_tree_and_at_last_none(
    slope: float, nodes: int
) -> None:
    (choice,) = choose([costs(slope)], TRIED)
    speedups = {n: TRIED[n].played.tau * 10.0 / costs(slope).step[n] for n in TRIED} | {1: 1.0}
    assert choice.nodes == nodes == max(speedups, key=lambda n: speedups[n])
    if nodes > 1:
        assert choice.break_even == pytest.approx(costs(slope).step[nodes] / 10.0)
        assert choice.tau > choice.break_even


def test_each_context_has_its_own_choice() -> None:
    found = choose([costs(0.05), costs(0.4, 512), costs(0.9, 2048)], TRIED)
    assert [(choice.context, choice.nodes) for choice in found] == [(32, 8), (512, 2), (2048, 1)]


def test_the_second_best_may_be_plain_decoding() -> None:
    assert runner_up(costs(0.15), TRIED, 4) in (2, 8)
    assert runner_up(costs(0.5), {2: TRIED[2]}, 2) == 1


@pytest.mark.parametrize(
    ("best", "sizes"), [(FIRST, (8, 4)), (PLAIN, (1, 4)), (DEFAULT, (2, 4)), (SECOND, (4, 4))]
)
def test_what_was_really_faster_takes_the_winners_place(best: str, sizes: tuple[int, int]) -> None:
    choices = (Choice(1, 32, 8, 2.6, 1.5), Choice(1, 512, 4, 2.2, 1.9))
    plan = Plan("", None, 1, 1, choices)
    found = corrected(plan, best, [costs(0.05), costs(0.2, 512)], TRIED, second=4, default=2)
    assert tuple(choice.nodes for choice in found.choices) == sizes


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_medusa_bundle", "tiny_combined_bundle"])
def test_every_size_that_the_drafter_fills_is_played(
    request: pytest.FixtureRequest, name: str
) -> None:
    bundle = load_bundle(request.getfixturevalue(name))
    prompts = [Prompt(None, text, None) for text in ("abab abab", "xyz", "hello hello", "a b a b")]
    learned, held = split(bundle, prompts, 128)
    assert [prompt.text for prompt, _ in learned + held] == [
        *("abab abab", "hello hello", "xyz", "a b a b")
    ]
    found = candidates(bundle.manifest, record_answers(bundle, learned, CONFIG), CONFIG.sizes)
    own = {int(key) for key in bundle.manifest.trees if key != "1"}
    assert own <= set(found) <= own | {*CONFIG.sizes}
    for nodes, candidate in found.items():
        grown = name == "tiny_combined_bundle"
        assert (candidate.tree is None) if grown else candidate.tree.nodes == nodes  # type: ignore[union-attr]


def test_a_tuned_bundle_follows_its_plan_and_says_the_same(
    tiny_combined_bundle: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_combined_bundle, folder)
    before = (folder / "manifest.json").read_text()
    report = tmp_path / "report.json"
    arguments = ["tune", str(folder), "--limit", "6", "--max-new-tokens", "16", "--context", "32"]
    arguments += ["--threads", "1", "--json", str(report)]
    result = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert (folder / "manifest.json").read_text() == before
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, [*arguments, "--report", str(page)])
    assert result.exit_code == 0, result.output
    assert "<html" in page.read_text(encoding="utf-8")
    facts = json.loads(report.read_text())
    assert facts["prompts"] == facts["identical"] == 3
    assert set(facts["measured"]) == {PLAIN, DEFAULT, FIRST, SECOND}
    best = max(facts["measured"], key=lambda name: facts["measured"][name]["tokens_per_s"])
    assert facts["chosen"] == best
    assert facts["speedup"] == facts["measured"][best]["speedup"] >= 1.0
    assert {row["nodes"] for row in facts["tried"]} >= {6, 10}
    model = load(folder, threads=1)
    plan = model.bundle.manifest.plan
    assert plan is not None and isinstance(model.pace(), Planned)
    prompt = "abab abab"
    assert model.generate(prompt, 30).token_ids == model.generate(prompt, 30, plain=True).token_ids


def test_what_can_not_be_tuned_is_refused_in_one_line(
    tiny_bundle: Path, make_bundle: Any, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    with pytest.raises(ForerunError, match="give more"):
        tune(bundle, [Prompt(None, "a", None)], CONFIG)
    with pytest.raises(ForerunError, match="give more"):
        tune(bundle, [Prompt(None, "x" * 900, None)] * 4, CONFIG)
    nothing = replace(bundle.manifest.drafter, kind="plain", candidates=0)
    silent = replace(bundle, manifest=replace(bundle.manifest, drafter=nothing))
    with pytest.raises(ForerunError, match="nothing to tune"):
        tune(silent, read_prompts(bundle.file("prompts.jsonl"), 4), CONFIG)


def test_costs_are_measured_for_trees_that_the_bundle_lacks(tiny_combined_bundle: Path) -> None:
    bundle = load_bundle(tiny_combined_bundle)
    wide = with_trees(bundle, {"4": None, **stars(bundle.manifest, [20])})
    found = measure_costs(load_engine(wide, 1), [20], [4, 6], (100, 32), launches=1)
    assert [cost.context for cost in found] == [32, 100]
    for cost in found:
        assert set(cost.verify) == {4, 6, 20} and set(cost.step) == {4, 6}
        assert all(ms > 0 for ms in (cost.plain, *cost.verify.values(), *cost.step.values()))
    curve = verify_costs(bundle, threads=1)
    assert {1, 6, 10} <= {1, *curve[0].verify} and max(curve[0].verify) <= 256 // 4


@pytest.mark.slow  # compiles twice
def test_sizes_that_a_bundle_lacks_are_compiled(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    from forerun.compiler.options import CompileOptions
    from forerun.compiler.pipeline import compile_bundle
    from forerun.compiler.retree import compile_sizes

    folder, target = tmp_path / "bundle", str(tiny_checkpoint_folder)
    options = CompileOptions(target, folder, precision="fp32", capacity=512, trees=(6, 4))
    bundle = load_bundle(compile_bundle(options).path)
    with pytest.raises(ForerunError, match="--target"):
        compile_sizes(bundle, [7], None, None)
    found = compile_sizes(bundle, [7], target, None)
    assert [*found.manifest.trees] == ["1", "4", "6", "7"]
    assert found.manifest.default_tree == "4"
