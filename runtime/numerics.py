"""How close an engine's logits are to what they should be: the certificate's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.engine import Engine
from forerun.runtime.prompts import read_prompts
from forerun.runtime.sampling import SamplingParams, uniforms

GOLDEN, REFERENCE, PROMPTS = "golden.safetensors", "reference.safetensors", "prompts.jsonl"
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Check:
    """One line of a certificate. `passed` is None for what was not run, or has no bound."""

    name: str
    passed: bool | None
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerances:
    """What a precision's own rounding may change."""

    logits: float
    """Largest difference of a logit."""
    margin: float
    """A greedy choice may flip where the best two logits are closer than this."""
    edge: float
    """A draw may flip where its uniform is closer than this to the end of a token's interval."""


_FP32 = Tolerances(2e-3, 1e-3, 1e-5)
_HALF = Tolerances(5e-1, 2.5e-1, 1e-2)
# int8 steps are row-independent bit for bit, so that no choice may flip between plain and
# speculative on one machine; across machines a rounding flip may move a golden logit.
_INT8 = Tolerances(5e-2, 0.0, 0.0)
# Activations are rounded to 3 bits of mantissa, and a flip of one moves all that follows.
_FP8 = Tolerances(2.0, 1.0, 5e-2)
_BY_PRECISION = {
    **dict.fromkeys(("fp32", "float32"), _FP32),
    # int4 rounds weights alone, beforehand: its arithmetic is float16's.
    **dict.fromkeys(("fp16", "float16", "bf16", "bfloat16", "int4"), _HALF),
    "fp8": _FP8,
}
CLOSE = 0.5
"""Golden arg-maxes of an int8 engine may differ where the best two logits are closer than this."""


def tolerances(precision: str) -> Tolerances:
    """The tolerances of a bundle's precision; those of int8 for any that is not known."""
    return _BY_PRECISION.get(precision, _INT8)


def golden(bundle: Bundle, engine: Engine) -> Check:
    """The engine's logits against those that compilation recorded."""
    if GOLDEN not in bundle.manifest.files:
        return Check("golden", None, f"not run: the bundle holds no {GOLDEN}")
    recorded = _load(bundle, GOLDEN, ("tokens", "logits"))
    wanted = recorded["logits"]
    found = engine.score(recorded["tokens"].tolist())
    if found.shape != wanted.shape:
        raise ForerunError(
            f"{bundle.path}: {GOLDEN}: logits of shape {wanted.shape}: compile the bundle again"
        )
    bounds = tolerances(bundle.manifest.precision)
    largest = float(np.abs(found - wanted).max())
    same = found.argmax(-1) == wanted.argmax(-1)
    best = np.partition(wanted, -2, axis=-1)[:, -2:]
    close = best[:, 1] - best[:, 0] < CLOSE
    int8 = bounds is _INT8
    passed = largest <= bounds.logits or (int8 and bool((same | close).all()))
    agree = f"arg-maxes must agree where the best two are {CLOSE:g} apart"
    rule = agree if int8 else f"allowed: {bounds.logits:g}"
    detail = f"logits differ by at most {largest:.2g} ({rule}), "
    detail += f"{int(same.sum())} of {len(same)} arg-maxes agree"
    facts = {
        "tokens": len(same),
        "max_difference": largest,
        "allowed": bounds.logits,
        "top1_agreement": float(same.mean()),
    }
    return Check("golden", passed, detail, facts)


def reference(bundle: Bundle, engine: Engine) -> Check:
    """How far this engine's distributions are from the float32 target's, at answer positions.

    `reference.safetensors` holds `tokens` `[rows, len]`, `start` and `length` `[rows]`, and the
    float32 target's 64 likeliest `ids` and their `logprobs` `[rows, len, 64]` at each position.
    """
    if REFERENCE not in bundle.manifest.files:
        return Check("float32 agreement", None, f"not run: the bundle holds no {REFERENCE}")
    recorded = _load(bundle, REFERENCE, ("tokens", "start", "length", "ids", "logprobs"))
    agreed: list[NDArray[np.bool_]] = []
    divergence: list[NDArray[np.float64]] = []
    for row, (start, length) in enumerate(
        zip(recorded["start"].tolist(), recorded["length"].tolist(), strict=True)
    ):
        logits = engine.score(recorded["tokens"][row, :length].tolist())[start:]
        ids = recorded["ids"][row, start:length]
        logprobs = recorded["logprobs"][row, start:length]
        likeliest = np.take_along_axis(ids, logprobs.argmax(-1)[:, None], 1)[:, 0]
        agreed.append(logits.argmax(-1) == likeliest)
        divergence.append(kl(ids, logprobs, logits))
    same, apart = np.concatenate(agreed), np.concatenate(divergence)
    if not same.size:
        raise ForerunError(
            f"{bundle.path}: {REFERENCE}: no answer positions: compile the bundle again"
        )
    agreement, mean = float(same.mean()), float(apart.mean())
    detail = f"{agreement:.1%} of {same.size} arg-maxes are the float32 target's, KL {mean:.2g}"
    facts = {"positions": int(same.size), "top1_agreement": agreement, "kl": mean}
    return Check("float32 agreement", None, detail, facts)


def kl(ids: NDArray[Any], logprobs: NDArray[Any], logits: Logits) -> NDArray[np.float64]:
    """KL(recorded || engine) `[n]` in nats, over the recorded ids `[n, k]` and the rest as one."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    found = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    q = np.exp(np.take_along_axis(found, ids.astype(np.int64), 1))
    p = np.exp(logprobs.astype(np.float64))
    p, q = (np.concatenate([part, 1 - part.sum(-1, keepdims=True)], 1) for part in (p, q))
    p, q = np.maximum(p, 1e-12), np.maximum(q, 1e-12)
    result: NDArray[np.float64] = (p * np.log(p / q)).sum(-1)
    return result


def row_independence(bundle: Bundle, engine: Engine) -> Check:
    """Whether a row's logits are the same bit for bit however many rows are computed beside it."""
    name = "row independence"
    tokens = _some_tokens(bundle)
    if tokens is None:
        return Check(name, None, "not run: the bundle holds neither golden tokens nor prompts")
    tokens = tokens[: engine.context]
    alone = engine.score(tokens, 1)
    sizes = sorted({int(size) for size in bundle.manifest.trees} - {1})
    counts: dict[str, int] = {}
    largest = 0.0
    for size in (*sizes, len(tokens)):
        together = engine.score(tokens, size)
        counts[str(size)] = int((together != alone).any(-1).sum())
        largest = max(largest, float(np.abs(together - alone).max()))
    listed = ", ".join(f"{size} at once: {count}" for size, count in counts.items())
    detail = f"of {len(tokens)} rows, these differ from the row alone: {listed} "
    detail += f"(by at most {largest:.2g})"
    facts = {"rows": len(tokens), "different": counts, "max_difference": largest}
    return Check(name, None, detail, facts)


def _some_tokens(bundle: Bundle) -> list[int] | None:
    if GOLDEN in bundle.manifest.files:
        tokens: list[int] = _load(bundle, GOLDEN, ("tokens",))["tokens"].tolist()
        return tokens
    if PROMPTS in bundle.manifest.files:
        prompt = read_prompts(bundle.file(PROMPTS), 1)[0]
        return encode_prompt(bundle, prompt.content)
    return None


def margin(logits: Logits, params: SamplingParams, position: int) -> float:
    """How close a choice at `position` was: greedy, the distance of the best two logits.

    Sampled: the uniform's distance to the nearest step of the cumulative distribution, on the
    assumption that neither top-k nor top-p cuts it.
    """
    wide = logits.astype(np.float64)
    if params.greedy:
        second, first = np.partition(wide, -2)[-2:]
        return float(first - second)
    weights = np.exp((wide - wide.max()) / params.temperature)
    cumulative = weights.cumsum() / weights.sum()
    draw = float(uniforms(params.seed, position + 1)[position])
    return float(np.abs(cumulative[:-1] - draw).min())


def _load(bundle: Bundle, name: str, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        tensors: dict[str, NDArray[Any]] = load_file(bundle.file(name))
    except ForerunError:
        raise
    except Exception as error:  # safetensors raises its own class, OSError and TypeError
        raise ForerunError(f"{bundle.path}: {name}: can't be read: {error}") from None
    for key in keys:
        if key not in tensors:
            raise ForerunError(f"{bundle.path}: {name} has no {key!r}: compile the bundle again")
    return tensors
