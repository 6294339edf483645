"""Shards that survive a kill, the manifest, and the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import Checkpoint  # noqa: E402
from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.training import synthesize as module  # noqa: E402
from forerun.training.data import read_data  # noqa: E402
from forerun.training.synthesize import SynthesizeConfig, is_held_out, synthesize  # noqa: E402

CONFIG = SynthesizeConfig(12, temperatures=(0.8,), greedy_share=0.5, shard=4, dtype="float32")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(None, f"{'word ' * (i % 4)}number {i}", f"chat/{i % 2}") for i in range(count)]


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def same(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> None:
    assert left.keys() == right.keys()
    for name, tensors in left.items():
        for key, tensor in tensors.items():
            other = right[name][key]
            if key == "states":  # in bfloat16; other company may round differently
                torch.testing.assert_close(tensor.float(), other.float(), atol=0.02, rtol=0.02)
            else:
                assert torch.equal(tensor, other), (name, key)


@pytest.mark.parametrize("killed_at", [1, 2, 5])
def test_resume_equals_an_uninterrupted_run(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    asked = prompts(23)
    synthesize(tiny_checkpoint, asked, tmp_path / "whole", CONFIG)
    write, calls = module.write_shard, []

    def dying(path: Path, *rest: Any) -> None:
        calls.append(path)
        if len(calls) == killed_at:
            path.with_suffix(".part").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(module, "write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        synthesize(tiny_checkpoint, asked, tmp_path / "killed", CONFIG)
    assert len(contents(tmp_path / "killed")) == killed_at - 1
    monkeypatch.setattr(module, "write_shard", write)
    added = synthesize(tiny_checkpoint, asked, tmp_path / "killed", CONFIG, batch=7)
    assert added > 0
    same(contents(tmp_path / "whole"), contents(tmp_path / "killed"))
    assert synthesize(tiny_checkpoint, asked, tmp_path / "killed", CONFIG) == 0


def test_every_prompt_once_with_its_stop_token(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    synthesize(tiny_checkpoint, prompts(23), tmp_path, CONFIG)
    indices: list[int] = []
    for tensors in contents(tmp_path).values():
        indices += tensors["indices"].tolist()
        ends = tensors["lengths"].cumsum(0).tolist()
        for end, length, prompt in zip(
            ends, tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist(), strict=True
        ):
            last = int(tensors["tokens"][end - 1])
            assert last in tiny_checkpoint.stop_ids or length - prompt == 12
    assert sorted(indices) == list(range(23))


def test_another_configuration_is_refused(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    synthesize(tiny_checkpoint, prompts(5), tmp_path, CONFIG)
    with pytest.raises(ForerunError, match="made with seed 0, now 1"):
        synthesize(tiny_checkpoint, prompts(5), tmp_path, replace(CONFIG, seed=1))
    with pytest.raises(ForerunError, match="prompts"):
        synthesize(tiny_checkpoint, prompts(6), tmp_path, CONFIG)


def test_long_prompts_are_skipped(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    short = replace(CONFIG, max_prompt_tokens=12)
    synthesize(tiny_checkpoint, prompts(9), tmp_path, short)
    assert '"skipped": 6' in (tmp_path / "manifest.json").read_text()
    with pytest.raises(ForerunError, match="no prompt has at most 2 tokens"):
        synthesize(
            tiny_checkpoint, prompts(3), tmp_path / "b", replace(CONFIG, max_prompt_tokens=2)
        )


def test_split_is_deterministic_and_disjoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = prompts(80)
    held = [is_held_out(prompt) for prompt in asked]
    assert held == [is_held_out(prompt) for prompt in asked]
    assert 0 < sum(held) < 20
    synthesize(tiny_checkpoint, asked, tmp_path, replace(CONFIG, temperature=0.0))
    data = read_data([tmp_path], 260)
    assert len(data.held_out.lengths) == sum(held)
    assert len(data.train.lengths) == 80 - sum(held)
    assert set(data.train.kinds) == {"chat"}
    assert len(data.train.states) == len(data.train.tokens) == int(data.train.lengths.sum())


def test_split_looks_at_the_question_alone() -> None:
    example = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    for i in range(40):
        question = {"role": "user", "content": f"Question {i}"}
        bare, shown = Prompt((question,), None, None), Prompt((*example, question), None, None)
        assert is_held_out(bare) == is_held_out(shown)


def test_damaged_shard_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    synthesize(tiny_checkpoint, prompts(5), tmp_path, CONFIG)
    path = tmp_path / "00001.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ForerunError, match=r"00001\.safetensors: damaged shard"):
        read_data([tmp_path], 260)
    with pytest.raises(ForerunError, match="no data in it"):
        read_data([tmp_path / "nowhere"], 260)
