"""Which trees a plan asks for, and when it gives up on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import decode
from forerun.runtime.manifest import Manifest
from forerun.runtime.model import Model
from forerun.runtime.pace import Fixed, Patience, Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.sampling import SamplingParams

PATIENCE = Patience(window=6, rest=4, longest_rest=16, trial=2)


def plan(*choices: tuple[int, int, int, float]) -> Plan:
    """Of (rows, context, nodes, break-even)."""
    return Plan(
        "a machine", None, 1, 1, tuple(Choice(r, c, n, 2.0, even) for r, c, n, even in choices)
    )


def test_the_largest_measured_batch_and_context_below_decide() -> None:
    chosen = plan((1, 32, 8, 1.5), (1, 512, 4, 1.4), (4, 32, 2, 1.2), (4, 512, 1, 1.0))
    pace = Planned(chosen)
    for rows, context, nodes in (
        *((1, 1, 8), (1, 32, 8), (1, 511, 8), (1, 512, 4), (1, 9999, 4)),
        *((3, 600, 4), (4, 40, 2), (9, 512, 1)),
    ):
        assert pace.nodes(context, rows) == nodes
    assert pace.largest == 8


def test_drift_is_told_against_the_recorded_tau() -> None:
    chosen = plan((1, 32, 8, 1.5))  # whose tau is 2.0
    assert (chosen.drift(1.5), chosen.drift(2.0), chosen.drift(2.2)) == (
        -0.25,
        0.0,
        pytest.approx(0.1),
    )
    assert replace(chosen, choices=(Choice(1, 32, 1, 1.0, 1.0),)).drift(1.0) == 0.0


def test_a_drafter_that_pays_later_is_kept_up_from_the_beginning() -> None:
    pace = Planned(plan((1, 32, 1, 1.0), (1, 512, 6, 1.4)))
    assert (pace.begin(40), pace.nodes(40)) == (6, 1)
    assert Planned(plan((1, 32, 1, 1.0))).begin(40) == 1


def walk(pace: Planned, committed: list[int]) -> list[int]:
    """The sizes that are drafted while drafted steps commit these numbers of tokens."""
    sizes, waiting = [pace.begin(40)], [*committed]
    while waiting:
        verified = sizes[-1]
        sizes.append(pace.nodes(40))
        pace.saw(verified, [waiting.pop(0) if verified > 1 else 1])
    return sizes


def test_drafting_that_pays_goes_on() -> None:
    pace = Planned(plan((1, 32, 8, 1.5)), PATIENCE)
    assert set(walk(pace, [1, 2] * 50)) == {8}
    assert pace.switches == 0


def test_drafting_that_does_not_pay_is_given_up_and_tried_again_ever_later() -> None:
    pace = Planned(plan((1, 32, 8, 1.5)), PATIENCE)
    sizes = walk(pace, [1] * 12)
    plain, runs = 0, []
    for size in sizes:
        if size == 1:
            plain += 1
        elif plain:
            runs.append(plain)
            plain = 0
    assert sizes[:6] == [8] * 6
    assert runs == sorted(runs) and len(runs) >= 2  # 4, 8, 16, 16, ...
    assert runs[0] < runs[1]


def test_a_trial_that_goes_well_brings_drafting_back() -> None:
    pace = Planned(plan((1, 32, 8, 1.5)), PATIENCE)
    walk(pace, [1] * 6)
    assert pace.nodes(40) == 1
    pace.begin(40)
    assert pace.nodes(40) == 8  # the next request begins afresh
    for _ in range(6):
        pace.saw(8, [1])
    while pace.nodes(40) == 1:
        pace.saw(1, [1])
    for _ in range(20):
        pace.saw(8, [3])
        assert pace.nodes(40) == 8
    assert pace.rest == PATIENCE.rest


def test_the_rows_of_a_batch_are_judged_together() -> None:
    pace = Planned(plan((2, 32, 8, 1.5)), PATIENCE)
    pace.nodes(40, 2)
    for _ in range(10):
        pace.saw(8, [1, 3])
    assert pace.nodes(40, 2) == 8
    for _ in range(10):
        pace.saw(8, [1, 1])
    assert pace.nodes(40, 2) == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=5)])
@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_medusa_bundle", "tiny_combined_bundle"])
def test_a_watched_plan_changes_no_token(
    request: pytest.FixtureRequest, name: str, params: SamplingParams
) -> None:
    """Trees of different sizes alternate with plain steps, and with none drafted."""
    bundle = load_bundle(request.getfixturevalue(name))
    engine = load_engine(bundle, threads=1)
    small, large = sorted(map(int, bundle.manifest.trees))[1:]
    for even in (0.0, 1.2, 9.0):
        pace = Planned(plan((1, 1, small, even), (1, 60, large, even), (1, 80, 1, 1.0)), PATIENCE)
        for prompt in ([3, 4, 5, 6, 3, 4, 0], [*range(40, 50)] * 3):
            wanted = Request(prompt, len(prompt) + 90, params)
            found = [t for block in decode(engine, wanted, pace) for t in block.tokens]
            assert found == [t for block in decode(engine, wanted, 1) for t in block.tokens]
    assert pace.switches > 0


def test_rows_that_join_take_the_size_of_the_others(tiny_combined_bundle: Path) -> None:
    bundle = load_bundle(tiny_combined_bundle)
    pair = plan((1, 1, 10, 9.0), (2, 1, 6, 1.0), (2, 60, 1, 1.0), (3, 1, 10, 1.2))
    bundle = replace(bundle, manifest=replace(bundle.manifest, plan=pair))
    model = Model(bundle, load_engine(bundle, threads=1, rows=3))
    prompts = [f"say {word} {word}" for word in ["abc", "abc", "xyz", "hello", "hello", "abab"]]
    together = model.generate_many(prompts, [9, 60, 33, 80, 5, 40])
    alone = Model(bundle, load_engine(bundle, threads=1))
    for prompt, new, answer in zip(prompts, [9, 60, 33, 80, 5, 40], together, strict=True):
        expected = alone.generate(prompt, new, plain=True)
        assert not isinstance(answer, ForerunError)
        assert answer.token_ids == expected.token_ids


def test_a_model_follows_its_bundles_plan(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    assert Model(bundle, load_engine(bundle, 1)).pace() == Fixed(8)
    bundle = replace(bundle, manifest=replace(bundle.manifest, plan=plan((1, 1, 4, 1.1))))
    model = Model(bundle, load_engine(bundle, threads=1))
    assert model.pace().largest == 4
    assert model.pace(plain=True) == Fixed(1) and model.pace(nodes=8) == Fixed(8)


def test_a_plan_is_written_into_the_manifest_and_read_strictly(tiny_bundle: Path) -> None:
    manifest = replace(load_bundle(tiny_bundle).manifest, plan=plan((1, 32, 8, 1.5)))
    assert Manifest.from_json(manifest.to_json()) == manifest
    hostile: Any
    for hostile in ('"nodes": 9', '"nodes": "8"', '"nodes": 8, "more": 1'):
        with pytest.raises(ForerunError, match="plan"):
            Manifest.from_json(manifest.to_json().replace('"nodes": 8', hostile))
