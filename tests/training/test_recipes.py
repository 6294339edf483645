"""The recipes, run as they lie there on a tiny target and prompts of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

RECIPES = Path(__file__).parents[2] / "recipes"
TOOL = {"type": "function", "function": {"name": "sum_of", "parameters": {"type": "object"}}}
LINES = {
    "tool-calls": {"messages": [{"role": "user", "content": "add {n} and 2"}], "tools": [TOOL]},
    "chat": {"turns": ["what is {n}?", "and why?"]},
}
SMALL = {
    "DATA_FLAGS": "--max-new-tokens 12 --batch 8 --shard 16",
    "COMPILE_FLAGS": "--capacity 256 --chunk 32 --tree 6",
    "BENCH_FLAGS": "--max-new-tokens 8",
}


TRAIN = {
    "tool-calls": "--epochs 1 --intermediate 24 --unroll 2 --batch 400",
    "chat": "--epochs 2 --heads 2 --layers 1 --batch 32",
}


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPES.iterdir()} == set(LINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_prompts_become_a_measured_bundle(
    name: str, deep_chat_folder: Path, tmp_path: Path
) -> None:
    """Nothing of the prompts to measure on is trained on; a second run makes nothing again."""
    line = json.dumps(LINES[name])
    # Of the five to measure on, prompt 0 asks what is to be trained on as well.
    for file, numbers in {"mine": range(60), "kept": (0, 90, 91, 92, 93)}.items():
        text = "".join(line.replace("{n}", str(number)) + "\n" for number in numbers)
        if file == "kept":
            text = text.replace("sum_of", "product_of").replace("and why", "and then")
        (tmp_path / f"{file}.jsonl").write_text(text)
    output = cook(name, deep_chat_folder, tmp_path)
    assert "dropped: 1 same_question" in output
    assert "held-out tau" in output
    made = tmp_path / "out" / "bundle" / "manifest.json"
    before = made.stat().st_mtime_ns
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert result["identical"] == result["prompts"] == 5
    again = cook(name, deep_chat_folder, tmp_path)
    assert "there already" in again and "epoch 1" not in again
    assert made.stat().st_mtime_ns == before


def cook(name: str, target: Path, folder: Path) -> str:
    """Runs the recipe; returns what it said."""
    own = {
        "TRAIN_FLAGS": TRAIN[name],
        "TARGET": str(target),
        "OUT": str(folder / "out"),
        "PROMPTS": str(folder / "mine.jsonl"),
        "HELD_OUT": str(folder / "kept.jsonl"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [str(RECIPES / f"{name}.sh")], env=os.environ | SMALL | own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
