"""Sizes compared: what a sweep makes, keeps and refuses, and what a drafter is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from forerun.cli import main  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.runtime.costs import Costs  # noqa: E402
from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.runtime.replay import Played  # noqa: E402
from forerun.training.sweep import RESULTS, axes_of, parameters, points, sweep, table  # noqa: E402
from forerun.training.synthesize import SynthesizeConfig, synthesize  # noqa: E402

COSTS = Costs(plain=10.0, verify={4: 12.0, 8: 16.0}, step={4: 15.0, 8: 25.0})


def test_a_drafter_is_worth_its_tokens_over_what_its_step_costs() -> None:
    assert COSTS.speedup(3.0, 4) == pytest.approx(3.0 / (1.2 + 0.3))  # tau / (verify(n) + c)
    assert COSTS.draft(8) == pytest.approx(9.0)
    assert Costs(10.0, {4: 15.0}, {4: 14.0}).draft(4) == 0  # noise is no negative cost


def test_every_combination_of_the_axes() -> None:
    axes = axes_of(["width=16,32", "draft-vocabulary=64"], ["width", "draft_vocabulary"])
    assert axes == {"width": [16, 32], "draft_vocabulary": [64]}
    wanted = [{"width": width, "draft_vocabulary": 64} for width in (16, 32)]
    assert [*points(axes)] == wanted
    for word in ("height=3", "width", "width=2,many", "width="):
        with pytest.raises(ForerunError, match="--sweep"):
            axes_of([word], ["width"])


def test_a_killed_sweep_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """And lists the smaller drafter first where it is worth more."""
    made: list[str] = []

    def train(point: Any, folder: Path) -> dict[int, Played]:
        if len(made) == 1 and "killed" not in made:
            made.append("killed")
            raise KeyboardInterrupt
        made.append(folder.name)
        folder.mkdir()
        save_file({"w": torch.zeros(point["width"], 10), "ids": torch.zeros(3, dtype=torch.int32)},
                  folder / "model.safetensors")  # fmt: skip
        return {4: Played(10, 20 + point["width"] // 16, (5,))}

    def build(folder: Path) -> Costs:
        return Costs(10.0, {4: 12.0}, {4: 40.0 if "32" in folder.name else 20.0})

    def run() -> Any:
        return sweep({"width": [32, 16]}, tmp_path, {"kind": "x"}, train, build, lambda line: None)

    with pytest.raises(KeyboardInterrupt):
        run()
    rows = run()
    assert made == ["width=32", "killed", "width=16"]
    assert [row["width"] for row in rows] == [16, 32]
    assert rows[0]["predicted_speedup"] == pytest.approx(2.1 * 10 / 20)
    assert rows[0]["parameters"] == parameters(tmp_path / "width=16") == 160
    assert run() == rows
    assert [*table(rows, ["width"])][1].startswith("16 | 0.00 | 4 | 2.10 | 0.50 | 8.0 | 20.0 | ")
    with pytest.raises(ForerunError, match="other settings"):
        sweep({"width": [16]}, tmp_path, {"kind": "y"}, train, build, lambda line: None)


@pytest.mark.slow
def test_the_command_trains_compiles_and_compares(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    from forerun.models.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(str(tiny_checkpoint_folder))
    data, output = tmp_path / "data", tmp_path / "drafters"
    asked = [Prompt(None, f"{i} IJKLM", f"chat/{i % 3}") for i in range(64)]
    synthesize(checkpoint, asked, data, SynthesizeConfig(12, shard=16, dtype="float32"))
    words = ["train", "draft", str(tiny_checkpoint_folder), "--data", str(data), "-o", str(output),
             "--epochs", "1", "--depth", "1", "--heads", "2",
             "--sweep", "width=16,32"]  # fmt: skip
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = json.loads((output / RESULTS).read_text())["rows"]
    assert {(row["width"], row["nodes"]) for row in rows} == {
        (width, nodes) for width in (16, 32) for nodes in (4, 6, 8)
    }
    assert all(row["tau"] >= 1 and row["step_ms"] > 0 for row in rows)
    assert rows[0]["parameters"] < rows[-1]["parameters"]
    bundle = output / "width=16" / "bundle"
    plain = CliRunner().invoke(
        main,
        ["train", "draft", str(tiny_checkpoint_folder), "--data", str(data), "-o",
         str(tmp_path / "again"), "--epochs", "1", "--depth", "1", "--heads", "2", "--width", "16",
         "--bundle", str(bundle)],
        catch_exceptions=False,
    )  # fmt: skip
    assert "predicted speedup" in plain.output
