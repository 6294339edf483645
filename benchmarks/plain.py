"""The plain step against the leanest graph for one token alone that the same weights allow.

    python benchmarks/plain.py BUNDLE OUT [--slots 128] [--rounds 8]

The lean graph has fixed shapes, no tree, no pending rows, no sampling, no drafter: embed, layers,
arg-max, caches written in place. It is built with both forms of attention, in int8, from the very
modules of the step. Each is timed in a process of its own, for idle ONNX Runtime sessions take time
from each other, and they take turns. Needs the extras `cpu` and `compile`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor, nn

from forerun.compiler.export import OPSET, TRANSLATIONS, share_zero_points
from forerun.compiler.pipeline import calibration_texts
from forerun.compiler.precision import int8_step
from forerun.models.attention import ATTENTIONS
from forerun.models.checkpoint import load_checkpoint
from forerun.models.choose import argmax
from forerun.models.drafter import Drafter
from forerun.models.signature import cache_names
from forerun.models.target import Caches, Rows, Target
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request
from forerun.runtime.engine_ort import NUMPY_TYPES, OrtEngine

FORMS = ("grouped", "fused")
LAUNCHES = 60


class Alone(nn.Module):
    """One token in, the next one out."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def forward(self, token: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """`token` `[1, 1]` at `position` `[1]`, caches `[1, kv, S, D]`."""
        layers = self.target.config.num_layers
        slots = torch.arange(caches[0].shape[2])
        mask = (slots[None] <= position[:, None])[:, None]  # [1, 1, S]
        rows = Rows(position[:, None], position, self.target.no_pending(1), mask)
        held = Caches(list(caches[:layers]), list(caches[layers:]))
        forward = self.target(token, held, rows)
        following = argmax(self.target.head(forward.hidden))  # [1, 1]
        return following, *forward.caches.keys, *forward.caches.values


def drop_empty(graph: ir.Graph) -> None:
    """Take out the Concats with pending rows, of which there are none."""
    for node in list(graph):
        if node.op_type != "Concat":
            continue
        real = [v for v in node.inputs if v is not None and (v.shape is None or 0 not in v.shape)]
        if len(real) == 1:
            ir.convenience.replace_all_uses_with(node.outputs[0], real[0])


def export(target: Target, slots: int, path: Path) -> None:
    """The lean graph of `target` with caches of `slots` slots."""
    held = target.empty_caches(1, slots)
    inputs = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    layers = target.config.num_layers
    program = torch.export.export(
        Alone(target).eval(), (*inputs, *held.keys, *held.values), strict=False
    )
    model = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        verbose=False,
        input_names=["token", "position", *cache_names(layers)],
        output_names=["following", *cache_names(layers, "new_")],
        custom_translation_table=dict(TRANSLATIONS),
    )
    assert model is not None
    drop_empty(model.model.graph)
    share_zero_points(model.model.graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(str(path), external_data=True)


def lean_run(path: Path) -> Callable[[], object]:
    """The lean graph, loaded and bound in place: each call is a launch."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = {v.name: np.zeros(v.shape, NUMPY_TYPES[v.type]) for v in session.get_inputs()}
    arrays["position"][:] = 40
    following = np.zeros((1, 1), np.int64)
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for value in session.get_outputs():
        array = following if value.name == "following" else arrays[value.name.removeprefix("new_")]
        binding.bind_output(value.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(_keep: object = (arrays, following)) -> None:
        session.run_with_iobinding(binding)

    return run


def plain_run(bundle: Path, slots: int) -> Callable[[], object]:
    """forerun's step at one node, with caches of as many slots."""
    engine = OrtEngine(load_bundle(bundle))
    engine._grow(slots)
    engine.prefill(Request([0] * 32, engine.context), 1)
    binding = engine._binding(1, 1)
    return lambda: engine._launch(binding)


def milliseconds(run: Callable[[], object]) -> float:
    """Median of many launches, after a few that warm up."""
    times = []
    for number in range(LAUNCHES + 10):
        start = time.perf_counter()
        run()
        if number >= 10:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="an int8 bundle of smollm2")
    parser.add_argument("out", type=Path)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--time", choices=["step", *FORMS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    paths = {form: given.out / f"{form}-{given.slots}" / "alone.onnx" for form in FORMS}
    if given.time:
        step = given.time == "step"
        run = plain_run(given.bundle, given.slots) if step else lean_run(paths[given.time])
        print(milliseconds(run))
        return
    if not all(path.exists() for path in paths.values()):
        texts = calibration_texts(load_bundle(given.bundle))
        target = int8_step(load_checkpoint("smollm2"), Drafter(), 2048, "grouped", texts).target
        for form, path in paths.items():
            target.attention = ATTENTIONS[form]
            export(target, given.slots, path)
    found: dict[str, list[float]] = {name: [] for name in ("step", *FORMS)}
    for _ in range(given.rounds):
        for name, times in found.items():
            words = [sys.executable, *sys.argv, "--time", name]
            times.append(float(subprocess.run(words, check=True, capture_output=True).stdout))
    medians = {name: statistics.median(times) for name, times in found.items()}
    best = min(medians[form] for form in FORMS)
    for name, median in medians.items():
        print(f"{name:8} {median:6.2f} ms  {median / best:.3f} of the best alone")


if __name__ == "__main__":
    main()
