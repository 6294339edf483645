"""How far a target's precisions are from float32: the step's own module, in torch, on a CPU.

    python benchmarks/precisions.py BUNDLE OUT.json [--target smollm2] [--only bf16 ...] [--limit N]

BUNDLE is any bundle of the target. The float32 target answers those of its verification prompts
that `forerun verify` doesn't score by, and each precision reads the same tokens; none of them is
calibrated on. At each place of an answer: do the arg-maxes agree, and what is KL(float32 || it)?
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.compiler.certificate import float32_logits
from forerun.compiler.eager import EagerStep
from forerun.compiler.pipeline import calibration_texts
from forerun.compiler.precision import PRECISIONS
from forerun.models.checkpoint import load_checkpoint
from forerun.models.drafters import find_drafter, load_drafter
from forerun.models.step import Step
from forerun.runtime.bundle import load_bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.prompts import read_prompts

SLOTS, TOKENS, ATTENTION = 512, 32, "fused"


@torch.no_grad()
def answer(step: Step, prompt: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Greedy, plainly decoded."""
    eager, found = EagerStep(step, SLOTS), []
    inputs = eager.prefill_inputs(prompt, [len(prompt) - 1])
    while len(found) < TOKENS and not set(found) & set(stops):
        outputs, _, _ = eager.run(inputs)
        found += outputs.emitted[0, : int(outputs.count[0])].tolist()
        inputs = eager.step_inputs(inputs, outputs)
    return found


def distances(expected: Sequence[Tensor], found: Sequence[Tensor]) -> dict[str, Any]:
    """Of the log-probabilities of the answers' places."""
    wanted, given = torch.cat(list(expected)), torch.cat(list(found))
    same = wanted.argmax(-1) == given.argmax(-1)
    best = wanted.topk(2).values
    apart = (best[:, 0] - best[:, 1])[~same]
    divergence = (wanted.exp() * (wanted - given)).sum(-1)
    return {
        "positions": len(same),
        "agreement": float(same.double().mean()),
        "kl": float(divergence.mean()),
        "widest_margin_of_a_difference": float(apart.max()) if len(apart) else 0.0,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--only", nargs="+", default=["fp16", "bf16", "int4", "fp8"])
    parser.add_argument("--limit", type=int, default=24)
    options = parser.parse_args()
    bundle, checkpoint = load_bundle(options.bundle), load_checkpoint(options.target)
    texts = calibration_texts(bundle)

    def step(precision: str) -> Step:
        drafter = load_drafter(find_drafter("plain"), checkpoint, SLOTS, "matching")
        return PRECISIONS[precision].step(checkpoint, drafter, SLOTS, ATTENTION, texts)

    exact = step("fp32")
    prompts = read_prompts(bundle.file("prompts.jsonl"))[1::2][: options.limit]
    asked = [encode_prompt(bundle, prompt.content) for prompt in prompts]
    told = [answer(exact, ids, checkpoint.stop_ids) for ids in asked]

    def read(model: Step) -> list[Tensor]:
        """`[n, V]` for each answer: before each of its tokens."""
        return [
            float32_logits(model.target, [*ids, *tokens])[len(ids) - 1 : -1]
            .double()
            .log_softmax(-1)
            for ids, tokens in zip(asked, told, strict=True)
        ]

    expected = read(exact)
    report = {}
    for precision in options.only:
        report[precision] = distances(expected, read(step(precision)))
        print(precision, json.dumps(report[precision]), flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
