"""Exported against eager: the ONNX file must do what the torch step does, on a real prompt."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.compiler.eager import EagerStep
from forerun.compiler.widen import widened
from forerun.errors import ForerunError, MissingDependencyError
from forerun.models.signature import Signature
from forerun.models.step import GROWN_NAMES, Step, StepInputs, StepOutputs
from forerun.models.target import Caches

Array = NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """How far an exported real-valued output may lie from the eager one."""

    absolute: float
    relative: float
    statistic: str
    """Over an output's differences: `max`, or `mean` where single values may flip a rounding."""


TOLERANCES = {
    "fp32": Tolerance(2e-3, 1e-3, "max"),  # logits of some tens, summed in another order
    "fp16": Tolerance(0.1, 5e-2, "mean"),
    "int4": Tolerance(0.1, 5e-2, "mean"),  # float16 on rounded weights
    "fp8": Tolerance(0.5, 5e-2, "mean"),  # as with int8, see there
    # Eager torch and ONNX Runtime differ by 1e-6 before an activation is rounded. Roundings that
    # flip for it add up over the layers to noise like that of int8 itself, so only its mean counts.
    "int8": Tolerance(0.5, 5e-2, "mean"),
}
MAX_DIVERGENCE = 0.05
"""Bound on KL(eager || exported) of the next token's distribution, in any precision."""


def check_onnx(
    step: Step, facts: Signature, path: Path, prompt: Sequence[int], nodes: int, precision: str
) -> float:
    """A prefill and two steps over trees of `nodes`, fed the eager state; -> the largest logit
    difference.

    Real outputs must lie within `TOLERANCES` (polygraphy's comparator), and tokens be equal: in
    float32 always, else where the eager margin between the two best logits exceeds the difference.
    A bfloat16 graph, which ONNX Runtime lacks operators for, is compared in float32 on both sides.
    Raises ForerunError naming the output that differs.
    """
    if precision == "bf16":
        with widened(path) as wide:
            worst = check_onnx(step.float(), facts, wide, prompt, nodes, "fp32")
        step.bfloat16()  # as it was: every weight is a bfloat16 number
        return worst
    slots = facts.inputs["keys_0"][0][2]
    session = _session(path, runs_here=isinstance(slots, str))
    eager = EagerStep(step, slots if isinstance(slots, int) else 512)
    inputs = eager.prefill_inputs(prompt, [len(prompt) - 1], nodes)
    worst = 0.0
    for call in ("prefill", "first step", "second step"):
        feed = _feed(facts, inputs, eager.caches, eager.states)
        outputs, caches, states = eager.run(inputs)
        expected = _named(facts, outputs, caches, states)
        names = list(expected)
        found = dict(zip(names, session.run(names, feed), strict=True))
        where = f"{path.name}, {call}"
        difference = float(np.abs(found["logits"] - expected["logits"]).max())
        if precision == "fp32" or _margin(expected["logits"]) > 2 * difference:
            _compare_tokens(found, expected, where, drafts=precision == "fp32")
        divergence = _divergence(expected["logits"], found["logits"])
        if not divergence < MAX_DIVERGENCE:
            raise ForerunError(
                f"{where}: the next token's distribution diverges from the torch step's: "
                f"KL {divergence:.3g}, at most {MAX_DIVERGENCE}"
            )
        for outputs_ in (found, expected):  # a common shift of all logits means nothing
            outputs_["logits"] = _log_probabilities(outputs_["logits"])
        _compare(found, expected, TOLERANCES[precision], where)
        worst = max(worst, difference)
        inputs = eager.step_inputs(inputs, outputs)
    return worst


def _session(path: Path, runs_here: bool) -> Any:
    """ONNX Runtime with `path`, which is its engine's own graph only if it `runs_here`."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime", "cpu", "checking the ONNX file") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not runs_here:
        # Three calls are not worth float32 copies of all weights, and ONNX Runtime's own form of
        # int4 products, MatMulNBits, would round activations to 8 bits.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        # Each weight is cast just before it is used; by default all casts may come first.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _feed(
    facts: Signature, inputs: StepInputs, caches: Caches, states: Sequence[Tensor]
) -> dict[str, Array]:
    tensors = [getattr(inputs, field.name) for field in fields(inputs)]
    tensors += [*caches.keys, *caches.values, *states]
    return {
        name: np.array(tensor.detach().numpy())  # a copy: eager state must not alias the engine's
        for name, tensor in zip(facts.inputs, tensors, strict=True)
    }


def _named(
    facts: Signature, outputs: StepOutputs, caches: Caches, states: Sequence[Tensor]
) -> dict[str, Array]:
    tensors = [*outputs.named().values(), *caches.keys, *caches.values, *states]
    return {
        name: tensor.detach().numpy() for name, tensor in zip(facts.outputs, tensors, strict=True)
    }


def _log_probabilities(logits: Array) -> Array:
    shifted: Array = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _divergence(expected: Array, found: Array) -> float:
    """The largest KL(expected || found) of any row."""
    p, q = _log_probabilities(expected), _log_probabilities(found)
    return float((np.exp(p) * (p - q)).sum(-1).max())


def _margin(logits: Array) -> float:
    """The smallest distance between a row's two best logits."""
    best = np.partition(logits, -2, axis=-1)[..., -2:]
    return float((best[..., 1] - best[..., 0]).min())


def _compare_tokens(
    found: dict[str, Array], expected: dict[str, Array], where: str, drafts: bool
) -> None:
    count = int(expected["count"][0])
    kept = {
        "count": slice(None),
        "next_length": slice(None),
        "emitted": slice(0, count),
        "next_tokens": slice(None if drafts else 1),
    }
    if drafts:
        kept |= {name: slice(None) for name in GROWN_NAMES if name in expected}
    for name, part in kept.items():
        if not np.array_equal(found[name][..., part], expected[name][..., part]):
            raise ForerunError(
                f"{where}: output {name!r} differs from the torch step: "
                f"{found[name].tolist()} instead of {expected[name].tolist()}"
            )


def _compare(
    found: dict[str, Array], expected: dict[str, Array], tolerance: Tolerance, where: str
) -> None:
    from polygraphy.comparator import CompareFunc, IterationResult

    names = ("logits", "next_pending")
    compare = CompareFunc.simple(
        atol=tolerance.absolute,
        rtol=tolerance.relative,
        check_error_stat=tolerance.statistic,
        fail_fast=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # polygraphy prints its histogram
        results = compare(
            IterationResult({name: found[name] for name in names}),
            IterationResult({name: expected[name] for name in names}),
        )
    for name, result in results.items():
        if not result:
            raise ForerunError(
                f"{where}: output {name!r} lies {result.mean_absdiff:.3g} (mean) and "
                f"{result.max_absdiff:.3g} (max) from the torch step, beyond a "
                f"{tolerance.statistic} of {tolerance.absolute}"
            )
