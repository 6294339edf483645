"""The commands: text to standard output, the rest to standard error, statuses 0, 1 and 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun.runtime.engine_ort import OrtEngine
from forerun.runtime.model import load


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def test_generate_prints_the_text_alone(tiny_bundle: Path) -> None:
    expected = load(tiny_bundle, threads=1).generate("hello", 20)
    result = run("generate", tiny_bundle, "hello", "--max-new-tokens", 20, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.text + "\n"
    assert result.stderr.count("\n") == 1
    for word in ("20 tokens (length)", "tokens/s", "tau", "steps"):
        assert word in result.stderr
    plain = run("generate", tiny_bundle, "-", "--max-new-tokens", 20, "--plain", stdin="hello")
    assert plain.stdout == result.stdout and "tau 1.00" in plain.stderr


def test_generate_as_json(tiny_bundle: Path) -> None:
    sampling = ("--temperature", 0.9, "--top-k", 20, "--top-p", 0.9, "--seed", 7)
    common = ("generate", tiny_bundle, "hello", "--max-new-tokens", 12, *sampling, "--json")
    result = run(*common)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and len(found["token_ids"]) == 12
    assert found["finish_reason"] == "length" and {"text", "tau", "tokens_per_s"} <= set(found)
    for other in ("--plain", "--nodes=4"):
        again = json.loads(run(*common, other).stdout)
        assert again["token_ids"] == found["token_ids"]


def test_generate_ends_before_a_stop_string(tiny_bundle: Path) -> None:
    result = run("generate", tiny_bundle, "IJKLMNOPQRIJKLMNOPQR", "--stop", "x", "--stop", "NO")
    assert result.stdout == "IJKLM\n" and "(stop)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["hello", "--temperature", "-1"], 1, "error: temperature is -1.0"),
        (["hello", "--top-p", "0"], 1, "error: top_p is 0.0"),
        (["hello", "--nodes", "5"], 1, "no tree of 5 nodes: it has 1, 4, 8"),
        (["x" * 400], 1, "error: the prompt has 401 tokens"),
        (["hello", "--max-new-tokens", "0"], 2, "Usage:"),
        ([], 2, "Usage:"),
    ],
)
def test_failures(tiny_bundle: Path, arguments: list[str], status: int, line: str) -> None:
    result = run("generate", tiny_bundle, *arguments)
    assert result.exit_code == status and line in result.stderr
    assert result.stdout == ""
    assert status == 2 or result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "bench", "verify", "inspect"])
def test_a_bundle_that_is_not_there(command: str, tmp_path: Path) -> None:
    more = ["hello"] if command == "generate" else []
    result = run(command, tmp_path / "nothing", *more)
    assert result.exit_code == 1 and "no such folder" in result.stderr


def test_an_interrupted_answer_ends_its_line(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = OrtEngine.step
    steps: list[int] = []

    def step(self: OrtEngine, nodes: int) -> list[list[int]]:
        steps.append(nodes)
        if len(steps) == 10:
            raise KeyboardInterrupt
        return original(self, nodes)

    monkeypatch.setattr(OrtEngine, "step", step)
    result = run("generate", tiny_bundle, "hello", "--plain")
    assert result.exit_code == 130 and result.stderr == "interrupted\n"
    assert result.stdout.endswith("\n") and len(result.stdout) > 1


def test_bench(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abab"}\n{"prompt": "hello", "category": "b"}\n')
    output = tmp_path / "bench.json"
    common = ("--max-new-tokens", 8, "--threads", 1)
    result = run("bench", tiny_bundle, "--prompts", prompts, *common, "--json", output)
    assert result.exit_code == 0, result.output
    assert "speedup" in result.stdout and "2 prompts" in result.stdout
    report = json.loads(output.read_text())
    assert report["prompts"] == report["identical"] == 2 and report["threads"] == 1
    # Without a file the bundle's own prompts; "-" prints the JSON instead of the table.
    own = run("bench", tiny_bundle, "--limit", 3, *common, "--nodes", 4, "--json", "-")
    report = json.loads(own.stdout)
    assert (report["prompts"], report["nodes"]) == (3, 4)


def test_bench_of_a_file_that_cannot_be_written(tiny_bundle: Path, tmp_path: Path) -> None:
    result = run(
        *("bench", tiny_bundle, "--limit", 1, "--max-new-tokens", 4),
        *("--json", tmp_path / "no" / "folder.json"),
    )
    assert result.exit_code == 1 and "can't write the result" in result.stderr


def test_verify(tiny_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "certificate.json"
    result = run("verify", tiny_bundle, "--limit", 2, "--tokens", 8, "--json", output)
    assert result.exit_code == 0, result.output
    assert "losslessness, greedy" in result.stdout and "2 of 2 prompts" in result.stdout
    assert json.loads(output.read_text())["passed"] is True


def test_verify_of_a_lossy_bundle(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = OrtEngine.step

    def step(self: OrtEngine, nodes: int) -> list[list[int]]:
        rows = original(self, nodes)
        return rows if nodes == 1 else [[0] * len(tokens) for tokens in rows]

    monkeypatch.setattr(OrtEngine, "step", step)
    result = run("verify", tiny_bundle, "--limit", 1, "--tokens", 8)
    assert result.exit_code == 1 and "FAILED" in result.stdout
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "losslessness" in result.stderr and "0 of 1 prompts" in result.stderr


def test_inspect(tiny_bundle: Path) -> None:
    result = run("inspect", tiny_bundle)
    assert result.exit_code == 0
    for word in ("ngram", "1 (depth 0), 4 (depth 3), 8 (depth 7)", "fp32", "256 slots"):
        assert word in result.stdout
    found = json.loads(run("inspect", tiny_bundle, "--json").stdout)
    assert found["recipe"] == "tiny" and found["files"]["model.onnx"]["bytes"] > 0
