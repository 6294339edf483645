"""`forerun synthesize` as people run it: killed, on Ray, with bad input."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forerun.cli import main

torch = pytest.importorskip("torch")

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.drafter import NORMED  # noqa: E402
from forerun.training.kinds import KINDS, READING, features_of_kind  # noqa: E402
from forerun.training.synthesize_cli import _layers  # noqa: E402

KILLS = 10


def written(path: Path, count: int) -> Path:
    """Prompts of all forms and lengths, some of two or three turns."""
    lines: list[dict[str, Any]] = []
    for number in range(count):
        text = f"{'so ' * (number % 7)}question {number}"
        turns = {"turns": [text, "And then?", "Why?"][: number % 4]}
        lines.append(turns if number % 4 else {"prompt": text, "category": f"kind/{number % 3}"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def words(target: Path, prompts: Path, data: Path) -> list[str]:
    """The command's arguments."""
    return [
        *("synthesize", str(target), "--prompts", str(prompts), "-o", str(data)),
        *("--temperature", "0", "--temperature", "0.9", "--samples", "2"),
        *("--max-new-tokens", "24", "--batch", "6", "--shard", "16", "--dtype", "float32"),
        *("--features", "1,2", "--top-logprobs", "4", "--threads", "1"),
    ]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """The real command, in a process group of its own."""
    forerun = Path(sys.executable).with_name("forerun")
    return subprocess.Popen(
        [str(forerun), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(arguments: list[str]) -> str:
    """Runs the command to its end."""
    process = start(arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_nothing(chat_folder: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", 240)
    finish(words(chat_folder, prompts, tmp_path / "whole"))
    whole = contents(tmp_path / "whole")
    assert len(whole) > 2 * 4 * KILLS
    draw, killed = random.Random(4), tmp_path / "killed"
    for kill in range(1, KILLS + 1):
        process = start(words(chat_folder, prompts, killed))
        while process.poll() is None and len([*killed.rglob("*.safetensors")]) < 6 * kill:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
        assert process.poll() is None, process.communicate()[0].decode()
        process.kill()
        process.communicate()
        done = contents(killed)
        assert all(whole[name] == data for name, data in done.items() if not name.endswith(".part"))
        assert len(done) < len(whole)
    assert "there already" in finish(words(chat_folder, prompts, killed))
    assert contents(killed) == whole
    assert ": 0 answer tokens" in finish(words(chat_folder, prompts, killed))
    assert contents(killed) == whole


@pytest.mark.slow
def test_ray_makes_the_same_shards(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a local cluster of two CPUs, and on the command's own; also where others began."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    prompts = written(tmp_path / "prompts.jsonl", 60)
    finish(words(chat_folder, prompts, tmp_path / "alone"))
    alone = contents(tmp_path / "alone")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        result = run([*words(chat_folder, prompts, tmp_path / "ray"), "--ray"])
        assert result.exit_code == 0, result.output
        assert contents(tmp_path / "ray") == alone
        if not ray.cluster_resources().get("GPU"):
            gpus = ["--ray", "--device", "cuda"]
            result = run([*words(chat_folder, prompts, tmp_path / "gpu"), *gpus])
            assert (result.exit_code, result.output.splitlines()[-1]) == (
                1,
                "error: --device cuda: no GPU in the Ray cluster: choose --device cpu",
            )
        (tmp_path / "ray" / "00000.safetensors").unlink()
        (tmp_path / "ray" / "00000.safetensors").mkdir()
        (tmp_path / "ray" / "features-1-2" / "00000.safetensors").unlink()
        result = run([*words(chat_folder, prompts, tmp_path / "ray"), "--ray"])
        assert result.exit_code == 1
        assert result.output.splitlines()[-1].startswith("error: a Ray worker failed: ")
    finally:
        ray.shutdown()
    (tmp_path / "ray" / "00000.safetensors").rmdir()
    (tmp_path / "ray" / "features-1-2" / "00002.safetensors").unlink()
    finish([*words(chat_folder, prompts, tmp_path / "ray"), "--ray"])
    assert contents(tmp_path / "ray") == alone


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_out_of_reach_is_one_line(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    prompts = written(tmp_path / "prompts.jsonl", 6)
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    output = start([*words(chat_folder, prompts, tmp_path / "data"), "--ray"])
    lines = output.communicate(timeout=300)[0].decode().splitlines()
    assert output.returncode == 1
    assert lines[-1].startswith(f"error: can't reach the Ray cluster '{nobody}': ")


def run(arguments: list[str]) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("line", "extra", "message"),
    [
        (None, [], "nowhere.jsonl: can't read the prompts"),
        ('{"prompt": "a"}\n{"prompt"', [], "prompts.jsonl, line 2: not JSON"),
        ('{"turns": ["a", 3]}', [], "prompts.jsonl, line 1: turns must be a list of texts"),
        ('{"prompt": "a", "tools": "f"}', [], "prompts.jsonl, line 1: tools must be a list"),
        ('{"prompt": "a"}', ["--exclude", "none.jsonl"], "none.jsonl: can't read the prompts"),
        ('{"prompt": "a"}', ["--features", "eagle4"], "--features eagle4: give eagle, eagle3"),
        ('{"prompt": "a"}', ["--features", "1,3"], "or layers from 0 to 2 with commas"),
        ('{"prompt": "a"}', ["--top-logprobs", "999"], "--top-logprobs 999: the target has 260"),
        ('{"prompt": "a"}', ["--max-new-tokens", "9999"], "leaves no room for a prompt"),
        ('{"prompt": "' + "a" * 700 + '"}', [], "no prompt is left to answer (1 too_long)"),
        ('{"prompt": "\\ud800"}', [], "prompt 1: half a surrogate pair"),
    ],
)
def test_bad_input_is_one_line(
    chat_folder: Path, tmp_path: Path, line: str | None, extra: list[str], message: str
) -> None:
    prompts = tmp_path / ("nowhere.jsonl" if line is None else "prompts.jsonl")
    if line is not None:
        prompts.write_text(line)
    arguments = ["synthesize", str(chat_folder), "--prompts", str(prompts), "-o"]
    result = run([*arguments, str(tmp_path / "data"), *extra])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("error: ") and result.output.count("\n") == 1
    assert message in result.output
    assert not (tmp_path / "data").exists()


def test_messages_need_a_chat_template(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    result = run(["synthesize", str(tiny_checkpoint_folder), "--prompts", str(prompts), "-o",
                  str(tmp_path / "data")])  # fmt: skip
    assert result.exit_code == 1
    assert result.output == "error: tiny: no chat template: give plain prompts\n"


def test_excluded_prompts_are_printed_and_counted(chat_folder: Path, tmp_path: Path) -> None:
    prompts, held = tmp_path / "prompts.jsonl", tmp_path / "held.jsonl"
    asked = ["One?", "ONE?", "Two?", "Function: pay(to)\nThree?", "Four?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    held.write_text('{"prompt": "two"}\n{"prompt": "Function: pay(a, b)\\nHow much?"}\n')
    arguments = ["synthesize", str(chat_folder), "--prompts", str(prompts)]
    more = ["-o", str(tmp_path / "data"), "--exclude", str(held), "--max-new-tokens", "3"]
    result = run([*arguments, *more])
    assert result.exit_code == 0, result.output
    assert "dropped: 1 duplicate, 1 same_question, 1 same_function" in result.output
    assert "to write: at most " in result.output
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate": 1, "same_question": 1, "same_function": 1}
    assert manifest["prompts"] == 2


def test_a_kind_that_needs_more_layers_spoils_no_other_features() -> None:
    """Named layers, and kinds that read one, on targets too shallow for EAGLE-3."""
    assert _layers("1,2", 2) == (1, 2)
    assert _layers("eagle", 2) == _layers("mtp", 4) == (NORMED,)
    with pytest.raises(ForerunError, match="the target has 2 in all"):
        _layers("eagle3", 2)
    assert tuple(kind for kind in KINDS if kind in READING) == READING
    assert all(features_of_kind(kind, 30) for kind in READING)
    assert not any(features_of_kind(kind, 30) for kind in KINDS if kind not in READING)
