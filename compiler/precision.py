"""Precisions: how a checkpoint's and a drafter's weights become those of the step's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from forerun.compiler.quantize import quantize_weight
from forerun.compiler.rotate import original_basis, rotate
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.models.linear import Int8Embedding, Int8Linear, Linear
from forerun.models.step import Step
from forerun.models.target import Target

StepFactory = Callable[[Checkpoint, Drafter, int, str], Step]
"""(checkpoint, drafter, capacity, attention) -> step in eval mode."""


def float32_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str
) -> Step:
    """The checkpoint as it is."""
    target = Target(checkpoint.config, checkpoint.weights, capacity, attention)
    return Step(target, drafter).eval()


def float16_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str
) -> Step:
    """Weights, caches and activations in float16; probabilities stay in float32."""
    return float32_step(checkpoint, drafter, capacity, attention).half()


def int8_step(checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str) -> Step:
    """Every linear layer as an integer matmul, on weights rotated so that little is lost.

    The rest (norms, attention, residual) stays in float32.
    """
    config = checkpoint.config
    basis = original_basis(checkpoint.weights, config)
    weights = rotate(checkpoint.weights, config)
    # Rotated weights lose the tie: the final norm's gain is folded into the head alone.
    target = Target(replace(config, tie_embeddings=False), weights, capacity, attention, basis)
    target.embed = _int8_embedding(weights["model.embed_tokens.weight"])
    step = Step(target, drafter)
    _quantize_linears(step)
    return step.eval()


PRECISIONS: dict[str, StepFactory] = {
    "fp32": float32_step,
    "fp16": float16_step,
    "int8": int8_step,
}


def _int8_embedding(weight: torch.Tensor) -> Int8Embedding:
    """`[V, H]` -> all 8 bits, since no saturating product reads it."""
    scale = weight.abs().amax(-1) / 127 + 1e-12
    return Int8Embedding((weight / scale[:, None]).round().to(torch.int8), scale)


def _quantize_linears(module: nn.Module) -> None:
    """Replace each `Linear` below `module` by its int8 form."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            weight, scale = quantize_weight(child.weight.T)
            setattr(module, name, Int8Linear(weight, scale, child.bias))
        else:
            _quantize_linears(child)
