"""How far a build is, and how it ends early. Builds are real ones, of a tiny network."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import onnx
import onnx.parser
import pytest
import torch

from forerun.compiler import build_progress
from forerun.compiler.build_progress import Phases
from forerun.compiler.engine_tensorrt import build_engine
from forerun.models.signature import Signature

FACTS = Signature({"x": ((4, 4), torch.float32)}, ("y",))


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 24]> g (float[4, 4] x) => (float[4, 4] y)'
        "{ a = MatMul(x, x)  b = Relu(a)  y = Softmax(b) }"
    )
    path = tmp_path / "graph" / "model.onnx"
    path.parent.mkdir()
    onnx.save(model, path)
    return path


def test_a_phase_fills_a_step_of_the_one_around_it() -> None:
    phases = Phases()
    assert phases.share == 0
    phases.start("all", None, 4)
    phases.start("first", "all", 2)
    phases.step("first", 0)
    assert phases.share == pytest.approx(1 / 8)
    phases.step("all", 0)  # the first one has said nothing of its second step
    phases.start("second", "all", 5)
    assert phases.share == pytest.approx(1 / 4)
    phases.step("second", 4)
    assert phases.share == pytest.approx(1 / 2)
    phases.start("first", "all", 2)  # a name comes again
    assert phases.share == pytest.approx(1 / 2)
    for step in range(4):
        phases.step("all", step)
    assert phases.share == 1


def test_the_share_never_falls_whatever_is_reported() -> None:
    phases = Phases()
    phases.step("unknown", 3)
    phases.start("all", None, 2)
    phases.step("all", 0)
    before = phases.share
    phases.start("lost", "never heard of", 10)
    assert phases.share >= before
    phases.step("lost", 99)
    assert phases.share <= 1


def test_a_real_build_reaches_the_end_of_its_bar(graph, tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    seen = []
    real = Phases.step

    def step(self: Phases, name: str, number: int) -> None:
        real(self, name, number)
        seen.append(self.share)

    monkeypatch.setattr(Phases, "step", step)
    build_engine(graph, tmp_path / "engine", FACTS, [{}], "tensorrt-rtx")
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1)


def test_ctrl_c_ends_a_build_and_leaves_nothing(graph, tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    steps, events = [], []
    real, real_monitor = Phases.step, build_progress._monitor

    def step(self: Phases, name: str, number: int) -> None:
        """The user presses Ctrl-C during the first step, which goes on until that has arrived."""
        steps.append(name)
        real(self, name, number)
        if len(steps) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert events[0].wait(60)

    def monitor(trt, phases, advance, stopped):
        events.append(stopped)
        return real_monitor(trt, phases, advance, stopped)

    monkeypatch.setattr(Phases, "step", step)
    monkeypatch.setattr(build_progress, "_monitor", monitor)
    out = tmp_path / "out" / "engine"
    out.parent.mkdir()
    # Where the tests run in the background the signal is ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(graph, out, FACTS, [{}], "tensorrt-rtx")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(steps) == 1  # the step that was under way was the last
    assert not list(out.parent.iterdir())
