"""EAGLE steps as ONNX: the same trees and tokens as eager torch, through a real bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from forerun.compiler.check import check_onnx
from forerun.compiler.engine_tensorrt import build_engine
from forerun.compiler.export import export_step
from forerun.models.config import RopeConfig
from forerun.models.eagle import Eagle
from forerun.models.signature import signature
from forerun.models.step import Step
from forerun.models.target import Target
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import decode
from forerun.runtime.sampling import SamplingParams

SIZES = [1, 4, 9]
PROMPT = [3, 4, 5, 6, 3, 4, 0, 250, *range(20)]
"""Longer than a prefill chunk."""
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.8, seed=1),
    "warped": SamplingParams(1.0, top_p=0.9, seed=2),
}
KINDS = [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "mtp")), "eagle3"]


@pytest.fixture(scope="module", params=KINDS)
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: tuple[Any, dict[str, Any]],
    make_bundle: Callable[..., Path],
    make_eagle: Callable[..., Eagle],
) -> tuple[Path, Step]:
    """(bundle, its step)."""
    target = Target(*tiny_target, 256)
    drafter = make_eagle(target, request.param, depth=2, top_k=3)
    folder = make_bundle(tmp_path_factory.mktemp(request.param), lambda: drafter, SIZES)
    return folder, Step(target, drafter, 8).eval()


@pytest.mark.parametrize("nodes", SIZES[1:])
def test_trees_and_tokens_are_those_of_eager_torch(exported: Any, nodes: int) -> None:
    folder, step = exported
    check_onnx(step, signature(step), folder / "model.onnx", PROMPT, nodes, "fp32")


def test_speculation_changes_no_token(exported: Any) -> None:
    engine = load_engine(load_bundle(exported[0]), threads=1)
    for params in PARAMS.values():
        request = Request(PROMPT, len(PROMPT) + 40, params)
        runs = {n: [t for block in decode(engine, request, n) for t in block.tokens] for n in SIZES}
        assert runs[4] == runs[9] == runs[1]
        assert len(runs[1]) == 40


def test_rows_run_beside_each_other(exported: Any) -> None:
    prompts = [PROMPT, [9, 8, 7]]
    bundle = load_bundle(exported[0])
    alone = load_engine(bundle, threads=1)
    both = load_engine(bundle, threads=1, rows=2)
    found = [both.prefill(Request(p, len(p) + 60), 9, row) for row, p in enumerate(prompts)]
    for _ in range(6):
        for row, tokens in enumerate(both.step(9)):
            found[row] += tokens
    for row, prompt in enumerate(prompts):
        expected = alone.prefill(Request(prompt, len(prompt) + 60), 9)
        while len(expected) < len(found[row]):
            expected += alone.step(9)[0]
        assert expected[: len(found[row])] == found[row]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_step_builds_as_a_tensorrt_engine(
    kind: str, make_target: Any, make_eagle: Any, tmp_path: Path
) -> None:
    """In half precision, without branches, as `forerun compile --engine tensorrt-rtx` makes it."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    sizes = {"vocab_size": 500, "hidden_size": 64, "head_dim": 64}
    target = make_target(attention="fused", rope=RopeConfig(10000.0, 64), **sizes)
    step = Step(target, make_eagle(target, kind, depth=2, top_k=3), 5).half()
    step.branching = False
    slots = target.capacity
    facts = export_step(step, tmp_path / "step.onnx", {"slots": slots}, loops=False)
    tree = {"batch": 1, "nodes": 8, "verified": 8, "next_nodes": 8, "pending_in": 5}
    tree["uniform_positions"] = slots
    prefill = tree | {"nodes": 64, "verified": 1, "pending_in": 0}
    plain = tree | {"nodes": 1, "verified": 1, "next_nodes": 1}
    out = tmp_path / "step.engine"
    build_engine(tmp_path / "step.onnx", out, facts, [tree, prefill, plain], "tensorrt-rtx")
    assert out.stat().st_size > 0
