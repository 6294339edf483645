"""The plain step against the leanest graph for one token alone that the same weights allow.

    python benchmarks/plain.py [--slots 128] [--rounds 30]

The lean graph has fixed shapes, no tree, no pending rows, no sampling, no drafter: embed, layers,
arg-max, caches written in place. It is built with both forms of attention, in int8, from the very
modules of the step. Both sides run in one process, alternating. Needs `cpu` and `compile`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor, nn

from forerun.compiler.export import OPSET, TRANSLATIONS, cache_names, share_zero_points
from forerun.compiler.pipeline import calibration_texts
from forerun.compiler.precision import int8_step
from forerun.models.attention import ATTENTIONS
from forerun.models.checkpoint import load_checkpoint
from forerun.models.choose import argmax
from forerun.models.drafter import Drafter
from forerun.models.target import Caches, Rows, Target
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request
from forerun.runtime.engine_ort import OrtEngine


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
    """Concats with what has no rows (no pending ones) are not there."""
    for node in list(graph):
        if node.op_type != "Concat":
            continue
        real = [v for v in node.inputs if v is not None and (v.shape is None or 0 not in v.shape)]
        if len(real) == 1:
            ir.convenience.replace_all_uses_with(node.outputs[0], real[0])


def lean_run(target: Target, slots: int, folder: Path) -> Callable[[], None]:
    """The lean graph, loaded and bound: each call is a launch."""
    config, path = target.config, folder / "alone.onnx"
    held = target.empty_caches(1, slots)
    caches = [*held.keys, *held.values]
    names, outputs = cache_names(config.num_layers), cache_names(config.num_layers, "new_")
    inputs = (torch.zeros(1, 1, dtype=torch.int64), torch.full((1,), 40), *caches)
    program = torch.export.export(Alone(target).eval(), inputs, strict=False)
    model = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, verbose=False,
        input_names=["token", "position", *names], output_names=["following", *outputs],
        custom_translation_table=dict(TRANSLATIONS),
    )  # fmt: skip
    assert model is not None
    drop_empty(model.model.graph)
    share_zero_points(model.model.graph)
    model.save(str(path), external_data=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = {name: cache.numpy() for name, cache in zip(names, caches, strict=True)}
    arrays |= {"token": inputs[0].numpy(), "position": inputs[1].numpy()}
    following = np.zeros((1, 1), np.int64)
    binding = session.io_binding()
    for value in session.get_inputs():
        array = arrays[value.name]
        binding.bind_input(value.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    given = {"following": following} | {f"new_{name}": arrays[name] for name in names}
    for name, array in given.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    kept: Any = (arrays, given)

    def run() -> None:
        assert kept
        session.run_with_iobinding(binding)

    return run


def plain_run(bundle: Path, slots: int) -> Callable[[], None]:
    """forerun's step at one node, caches of as many slots."""
    engine = OrtEngine(load_bundle(bundle))
    engine._grow(slots)
    engine.prefill(Request([0] * 32, engine.context), 1)
    binding = engine._binding(1, 1)
    return lambda: engine._launch(binding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="an int8 bundle of smollm2")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    checkpoint = load_checkpoint("smollm2")
    texts = calibration_texts(load_bundle(given.bundle))
    step = int8_step(checkpoint, Drafter(), 2048, "grouped", texts)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"step, T = 1": plain_run(given.bundle, given.slots)}
        for form in ("grouped", "fused"):
            step.target.attention = ATTENTIONS[form]
            part = Path(folder) / form
            part.mkdir()
            runs[f"alone, {form}"] = lean_run(step.target, given.slots, part)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                run()
                start = time.perf_counter()
                for _ in range(5):
                    run()
                times[name].append((time.perf_counter() - start) / 5)
    base = min(statistics.median(times[name]) for name in runs if name.startswith("alone"))
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:16} {1e3 * median:6.2f} ms  {median / base:.3f} of the best alone")


if __name__ == "__main__":
    main()
