"""`forerun train` killed outright (SIGKILL) ten times at random moments, whatever it is doing."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.training.fit import CHECKPOINT  # noqa: E402
from forerun.training.kinds import train  # noqa: E402
from forerun.training.synthesize import SynthesizeConfig, synthesize  # noqa: E402

OPTIONS = {
    "epochs": 4, "unroll": 2, "draft_vocabulary": 64, "batch": 120, "save_every": 3,
    "width": 16, "heads": 2, "depth": 1, "average": 0.9, "dtype": "float32",
}  # fmt: skip


def silent(line: str) -> None:
    """What a killed run would have reported."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A forked process has none of its parent's threads, and would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft"])
def test_a_run_that_is_killed_ten_times_writes_the_same_drafter(
    deep_checkpoint: Any, tmp_path: Path, kind: str
) -> None:
    data = tmp_path / "data"
    asked = [Prompt(None, f"{i} IJKLM", f"chat/{i % 3}") for i in range(48)]
    synthesize(deep_checkpoint, asked, data, SynthesizeConfig(12, shard=16, dtype="float32"))
    begun = time.monotonic()
    train(kind, deep_checkpoint, [data], tmp_path / "whole", OPTIONS, silent)
    took = time.monotonic() - begun
    draw, killed, fork = random.Random(3), 0, multiprocessing.get_context("fork")
    arguments = (kind, deep_checkpoint, [data], tmp_path / "killed", OPTIONS, silent)
    for _ in range(10):
        run = fork.Process(target=train, args=arguments)
        run.start()
        run.join(draw.uniform(0.05, 0.7) * took)
        killed += run.is_alive()
        run.kill()
        run.join()
    assert killed  # a run that is over is made again, so all ten may be
    train(*arguments)
    whole, again = ({path.name: path for path in (tmp_path / name).iterdir()}
                    for name in ("whole", "killed"))  # fmt: skip
    assert whole.keys() == again.keys()
    assert CHECKPOINT not in whole
    for name, path in whole.items():
        assert path.read_bytes() == again[name].read_bytes(), name
