"""The comparison's workers in fresh processes: this project and transformers on a tiny target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.peers.compare import Processes, WorkerError
from benchmarks.peers.environment import Environment
from benchmarks.peers.exchange import Job, Outcome
from benchmarks.peers.registry import OURS, OURS_PLAIN

LETTERS = (tuple(range(40, 46)), tuple(range(43, 50)))
"""Prompts that the tiny target goes on with its round of letters."""


def run_here(variant: str, model: Path, **options: Any) -> Outcome:
    here = Processes(Environment(Path(sys.executable)))
    given = Job(variant, str(model), LETTERS, 24, (257,), 1, options)
    return here(given)


def test_speculative_and_plain_give_the_same_in_processes_of_their_own(tiny_bundle: Path) -> None:
    plain = run_here(OURS_PLAIN, tiny_bundle, nodes=1)
    speculative = run_here(OURS, tiny_bundle)
    for one, other, prompt in zip(plain.answers, speculative.answers, LETTERS, strict=True):
        # the target says the letters after one another, round and round
        expected = [40 + (prompt[-1] - 39 + n) % 10 for n in range(24)]
        assert [*one.tokens] == [*other.tokens] == expected
        assert one.steps == one.decoded == 23 and other.steps < other.decoded
        assert min(one.seconds, one.prefill_seconds, other.seconds) > 0
    assert {*plain.versions} == {"forerun", "onnxruntime"}


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="manifest"):
        run_here(OURS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["transformers", "transformers-lookup"])
def test_transformers_gives_the_same_from_the_folder_made_of_a_checkpoint(
    variant: str, tiny_target: tuple[Any, dict[str, Any]], tiny_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")

    from benchmarks.peers.prepare import write_checkpoint
    from forerun.models.checkpoint import Checkpoint

    config, weights = tiny_target
    tokenizer = Tokenizer.from_file(str(tiny_bundle / "tokenizer.json"))
    checkpoint = Checkpoint(
        *("tiny", config, weights, tokenizer, None, "<s>", "</s>", (257,)), add_bos=True, digest=""
    )
    write_checkpoint(checkpoint, tmp_path / "folder")
    lookup = {"lookup": 3} if "lookup" in variant else {}
    found = run_here(variant, tmp_path / "folder", dtype="float32", **lookup)
    plain = run_here(OURS_PLAIN, tiny_bundle, nodes=1)
    assert [one.tokens for one in found.answers] == [one.tokens for one in plain.answers]
    assert all(one.first == 1 for one in found.answers)
    steps, decoded = (
        sum(getattr(one, name) for one in found.answers) for name in ("steps", "decoded")
    )
    assert steps < decoded if lookup else steps == decoded
