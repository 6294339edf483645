"""DFlash exported: a bundle on ONNX Runtime does what eager does, and TensorRT builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.compiler.eager import EagerStep
from forerun.compiler.export import export_step
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.dflash import DFlash, DFlashConfig, dflash
from forerun.models.dflash_folder import dflash_shapes
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.step import Step
from forerun.models.target import Target
from forerun.models.weights import tensor_shapes

CAPACITY, PENDING = 256, 8  # as in the tiny bundles
NODES = (1, 4, 7)
PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4, 9, 9, 8, 1, 2, 0, 0, 7, 41, 42, 43]
"""Longer than the bundles' prefill chunk."""


def random(shape: Sequence[int], seed: int = 1, scale: float = 0.3) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw) * scale


def drafter(hidden: int, head_dim: int, tree: bool, variant: dict[str, Any]) -> DFlash:
    layer = DraftLayerConfig(hidden, 48, 4, 2, head_dim, 1e-6, CAPACITY, RopeConfig(5e3, head_dim))
    config = DFlashConfig(layer, 2, (1, 2), 5, 7, tree=tree, budget=10, **variant)
    weights = {
        name: random(shape, seed) + ("norm" in name)
        for seed, (name, shape) in enumerate(dflash_shapes(config))
        if not name.endswith(".bias")
    }
    return dflash(config, weights, CAPACITY)


VARIANT = {"window": 6, "sliding_layers": (True, False), "causal_layers": (True, False)}


def eagerly(step: Step, nodes: int, new: int) -> tuple[list[int], list[int]]:
    """Greedy tokens and how many each step committed, by torch."""
    eager = EagerStep(step, CAPACITY)
    inputs = eager.prefill_inputs(PROMPT, [len(PROMPT) - 1], nodes)
    tokens: list[int] = []
    counts: list[int] = []
    while len(tokens) < new:
        outputs, _, _ = eager.run(inputs)
        count = int(outputs.count[0])
        tokens += outputs.emitted[0, :count].tolist()
        counts.append(count)
        inputs = eager.step_inputs(inputs, outputs)
    return tokens, counts


@pytest.mark.slow  # exports
@pytest.mark.parametrize("tree", [False, True])
def test_a_bundle_runs_as_eager_does(
    tree: bool, tiny_target: Any, write_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    from forerun.runtime.bundle import load_bundle
    from forerun.runtime.engine import Request, load_engine
    from forerun.runtime.sampling import SamplingParams

    config, weights = tiny_target
    sizes = [n for n in NODES if tree or n <= 5]

    def make() -> DFlash:
        return drafter(config.hidden_size, 8, tree, VARIANT)

    engine = load_engine(load_bundle(write_bundle(tmp_path, tiny_target, make, sizes)), threads=1)

    def run(nodes: int, params: SamplingParams) -> tuple[list[int], list[int]]:
        blocks = [engine.prefill(Request(PROMPT, len(PROMPT) + 60, params), nodes)]
        while sum(map(len, blocks)) < 40:
            blocks.append(engine.step(nodes)[0])
        return [token for block in blocks for token in block], [len(block) for block in blocks]

    step = Step(Target(config, weights, CAPACITY), make(), PENDING).eval()
    for params in (SamplingParams(), SamplingParams(0.8, seed=3)):
        plain, _ = run(1, params)
        for nodes in sizes[1:]:
            tokens, counts = run(nodes, params)
            assert tokens[:40] == plain[:40]
            if params.greedy:
                assert (tokens, counts) == eagerly(step, nodes, 40)


@pytest.mark.slow  # exports
@pytest.mark.parametrize("tree", [False, True])
def test_tensorrt_builds_the_step(tree: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    from forerun.compiler.engine_tensorrt import build_engine

    config = TargetConfig(
        *("llama", 500, 64, 96, 2, 4, 2, 64, 1e-5, CAPACITY), RopeConfig(10000.0, 64)
    )
    weights = {name: random(shape, scale=0.1) for name, shape in tensor_shapes(config)}
    target = Target(config, weights, CAPACITY, attention="fused")
    step = Step(target, drafter(64, 64, tree, VARIANT), PENDING).half()
    step.branching = False
    facts = export_step(step, tmp_path / "step.onnx", {"slots": CAPACITY}, loops=False)
    decode = {
        "batch": 1,
        "nodes": 5,
        "verified": 5,
        "next_nodes": 5,
        "pending_in": PENDING,
        "uniform_positions": CAPACITY,
    }
    profiles = [
        decode,
        decode | {"nodes": 64, "verified": 1, "pending_in": 0},
        decode | {"nodes": 1, "verified": 1, "next_nodes": 1},
    ]
    out = tmp_path / "step.engine"
    build_engine(tmp_path / "step.onnx", out, facts, profiles, "tensorrt-rtx")
    assert out.stat().st_size > 0
