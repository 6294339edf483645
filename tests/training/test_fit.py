"""The training loop by itself, on a small regression, against loops written out here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.training import fit as module  # noqa: E402
from forerun.training.fit import CHECKPOINT, Settings, Task, fit, schedule  # noqa: E402

SETTINGS = Settings(epochs=3, rate=0.05, save_every=2, dtype="float32")
BATCHES = 4


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES, 6, 5, generator=draw)
    return [(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], dim=1)) for x in inputs]


def task_of(net: nn.Module) -> Task[tuple[Tensor, Tensor]]:
    rows = batches()

    def loss(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = (net(batch[0]) - batch[1]).square().mean()
        return found, found.detach()[None]

    def epoch(draw: Any) -> list[tuple[Tensor, Tensor]]:
        return [rows[i] for i in torch.randperm(BATCHES, generator=draw).tolist()]

    def told(number: int, figures: Tensor) -> str:
        return f"epoch {number}: {figures.tolist()[0]:.6f}"

    def save(folder: Path, trained: nn.Module) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(trained.state_dict(), folder / "net.pt")

    return Task(net, BATCHES, epoch, lambda rows: rows, loss, "regression", told, save)


def written(folder: Path) -> nn.Module:
    net = fresh()
    net.load_state_dict(torch.load(folder / "net.pt"))
    return net


def fresh() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def written_out(settings: Settings, share: int = 1) -> tuple[list[list[Tensor]], list[float]]:
    """The weights after each update, and each epoch's loss; `share` batches make an update."""
    net, rows, trail, losses = fresh(), batches(), [], []
    optimiser = torch.optim.AdamW(
        net.parameters(), settings.rate, settings.betas, weight_decay=settings.weight_decay
    )
    per_epoch, step = BATCHES // share, 0
    for epoch in range(settings.epochs):
        draw = torch.Generator().manual_seed(settings.seed * 1000 + epoch)
        order = torch.randperm(BATCHES, generator=draw).tolist()
        told = 0.0
        for place in range(per_epoch):
            done = step / (per_epoch * settings.epochs)
            optimiser.param_groups[0]["lr"] = settings.rate * schedule(done, settings.warmup)
            parts = [rows[i] for i in order[place * share : (place + 1) * share]]
            loss = sum((net(x) - y).square().mean() for x, y in parts) / share
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
            optimiser.step()
            told += float(loss.detach()) / per_epoch
            trail.append([w.detach().clone() for w in net.parameters()])
            step += 1
        losses.append(told)
    return trail, losses


def assert_weights(net: nn.Module, expected: list[Tensor]) -> None:
    for found, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted)


def test_the_loop_is_adamw_along_the_schedule(tmp_path: Path) -> None:
    trail, losses = written_out(SETTINGS)
    net, lines = fresh(), []
    fit(task_of(net), tmp_path, SETTINGS, lines.append)
    assert_weights(net, trail[-1])
    assert lines == [f"epoch {i + 1}: {loss:.6f}" for i, loss in enumerate(losses)]


def test_the_running_mean_is_kept(tmp_path: Path) -> None:
    trail, _ = written_out(SETTINGS)
    mean = trail[0]  # the first update starts the mean
    for weights in trail[1:]:
        mean = [0.9 * old + 0.1 * new for old, new in zip(mean, weights, strict=True)]
    net = fresh()
    fit(task_of(net), tmp_path, replace(SETTINGS, average=0.9))
    assert_weights(net, mean)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_training_ends_when_the_score_rises_no_more(tmp_path: Path, average: float) -> None:
    """Scores that are given: the second epoch's is the best, and two more epochs are waited for."""
    settings = replace(SETTINGS, epochs=9, patience=2, average=average)
    scores, seen = [1.0, 3.0, 2.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0], []

    def score(folder: Path) -> float:
        seen.append([w.detach().clone() for w in written(folder).parameters()])
        return scores[len(seen) - 1]

    net, lines = fresh(), []
    fit(task_of(net), tmp_path, settings, lines.append, score)
    assert len(seen) == 4
    assert_weights(net, seen[1])
    assert_weights(written(tmp_path), seen[1])
    assert {path.name for path in tmp_path.iterdir()} == {"net.pt"}
    assert [line for line in lines if "tau" in line][1] == "epoch 2: held-out tau 3.000"
    if not average:
        assert_weights(net, written_out(settings)[0][2 * BATCHES - 1])


def test_without_patience_the_last_weights_are_kept(tmp_path: Path) -> None:
    net = fresh()
    scores = [3.0, 2.0, 1.0]
    fit(task_of(net), tmp_path, SETTINGS, worth=lambda _: scores.pop(0))
    assert not scores
    assert_weights(net, written_out(SETTINGS)[0][-1])


@pytest.mark.parametrize("settings", [
    replace(SETTINGS, average=0.8),
    replace(SETTINGS, epochs=6, patience=2, average=0.8),
    replace(SETTINGS, epochs=6, patience=2),
])  # fmt: skip
def test_killed_anywhere_it_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """At every single update, and again two updates later."""

    def score(folder: Path) -> float:
        x = torch.ones(1, 5)
        off = written(folder)(x) - torch.tensor([[5.0, 1.0]])
        return -float(off.detach().abs().sum())

    whole, lines = fresh(), []
    fit(task_of(whole), tmp_path / "whole", settings, lines.append, score)
    step, calls, deadly = module._step, [], [0]

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if deadly and len(calls) == deadly[0]:
            deadly.pop(0)
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(module, "_step", counted)
    for place in range(1, settings.epochs * BATCHES, 3):
        calls.clear()
        deadly[:] = [place, place + 2]
        folder = tmp_path / str(place)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                fit(task_of(fresh()), folder, settings, worth=score)
        again, told = fresh(), []
        fit(task_of(again), folder, settings, told.append, score)
        assert_weights(again, [w.detach() for w in whole.parameters()])
        assert not told or told[-1] == lines[-1]


def test_another_runs_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    task = task_of(fresh())
    with pytest.raises(OSError, match="full"):  # what was trained is there all the same
        fit(replace(task, save=full), tmp_path, replace(SETTINGS, rate=0.01))
    assert (tmp_path / CHECKPOINT).exists()
    net = fresh()
    fit(task_of(net), tmp_path, SETTINGS)
    assert_weights(net, written_out(SETTINGS)[0][-1])


def full(folder: Path, trained: nn.Module) -> None:
    raise OSError("full")


WORKER = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
import test_fit
from forerun.training import ranks
from forerun.training.fit import fit
from dataclasses import replace

with ranks.joined():
    net, lines = test_fit.fresh(), []
    settings = replace(test_fit.SETTINGS, epochs=int(sys.argv[2]))
    with ranks.first_then_others():
        seen = Path(sys.argv[1], "first").exists()
        Path(sys.argv[1], "first").touch()
    assert seen == (ranks.rank() > 0)
    fit(test_fit.task_of(net), Path(sys.argv[1]), settings, lines.append)
    weights = [w.detach() for w in net.parameters()]
    torch.save([weights, lines], Path(sys.argv[1], f"{{ranks.rank()}}.pt"))
"""


@pytest.mark.slow
def test_two_processes_step_along_the_mean_of_their_gradients(tmp_path: Path) -> None:
    """Under torchrun, on this machine's CPU: both end with the weights of one process that took
    two batches at once."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parent)))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["--master-port", str(port), str(script), str(tmp_path), str(SETTINGS.epochs)]
    done = subprocess.run(
        [*run, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    trail, losses = written_out(SETTINGS, share=2)
    for rank in range(2):
        weights, lines = torch.load(tmp_path / f"{rank}.pt")
        for found_weight, wanted in zip(weights, trail[-1], strict=True):
            torch.testing.assert_close(found_weight, wanted)
        assert lines == [f"epoch {i + 1}: {loss:.6f}" for i, loss in enumerate(losses)]


def test_more_processes_than_batches_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.training.ranks.size", lambda: 5)
    with pytest.raises(ForerunError, match="5 processes and 4 batches"):
        fit(task_of(fresh()), tmp_path, SETTINGS)
