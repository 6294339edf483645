"""Precisions: how a checkpoint's and a drafter's weights become those of the step's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from forerun.compiler.blocks import block_size, float8_scale, quantize_blocks, quantize_float8
from forerun.compiler.calibrate import HESSIAN, LARGEST, block_by_block, linears, over_inputs
from forerun.compiler.quantize import quantize_weight
from forerun.compiler.rotate import original_basis, rotate
from forerun.compiler.smooth import smooth
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.models.linear import Float8Linear, Int4Linear, Int8Embedding, Int8Linear, Linear
from forerun.models.step import Step
from forerun.models.stored import cast
from forerun.models.target import Target, TiedHead

Texts = Sequence[Sequence[int]]
StepFactory = Callable[[Checkpoint, Drafter, int, str, Texts], Step]
"""(checkpoint, drafter, capacity, attention, calibration texts as ids) -> step in eval mode."""


@dataclass(frozen=True)
class Precision:
    """A way to make a step's modules from float32 weights."""

    step: StepFactory
    drafter: Callable[[Drafter], Drafter]
    """A drafter as it stands in such a step: its weights depend on nothing else there."""


def float32_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """The checkpoint as it is."""
    target = Target(checkpoint.config, checkpoint.weights, capacity, attention)
    return Step(target, drafter).eval()


def float16_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """Weights, caches and activations in float16; probabilities stay in float32."""
    return cast_step(checkpoint, drafter, capacity, attention, torch.float16)


def bfloat16_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """The same in bfloat16."""
    return cast_step(checkpoint, drafter, capacity, attention, torch.bfloat16)


def cast_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, dtype: torch.dtype
) -> Step:
    """Everything but probabilities in `dtype`."""
    weights = cast(checkpoint.weights, dtype)
    return Step(Target(checkpoint.config, weights, capacity, attention), drafter).eval().to(dtype)


def int8_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """Every linear layer as an integer matmul, on weights rewritten so that little is lost.

    Rotated (outlier channels spread out), smoothed (down_proj's input, which no rotation reaches),
    and rounded with error feedback on what the layers read on `texts`. Norms, attention and the
    residual stay in float32.
    """
    # Rotated weights lose the tie: the final norm's gain is folded into the head alone.
    config = replace(checkpoint.config, tie_embeddings=False)
    weights: Mapping[str, Tensor] = dict(checkpoint.weights)  # read once
    basis = original_basis(weights, config)
    weights = rotate(weights, config)
    longest = max(map(len, texts))
    hessians = over_inputs(Target(config, weights, longest, attention).eval(), texts, HESSIAN)
    weights, hessians = smooth(weights, config, hessians)
    target = Target(config, weights, capacity, attention, basis)
    by_layer = {id(layer): hessians[name] for name, layer in linears(target).items()}
    target.embed = _int8_embedding(weights["model.embed_tokens.weight"])
    _quantize_linears(target, by_layer)
    return Step(target, int8_drafter(drafter)).eval()


def int8_drafter(drafter: Drafter) -> Drafter:
    """Every linear layer rounded to the nearest codes: nothing is known of what it will read."""
    _quantize_linears(drafter, {})
    return drafter


def int4_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """float16, but for the weights of the target's blocks: 4 bits, rounded with error feedback.

    Embedding, head and drafter stay in float16, and so does a layer whose inputs fill no blocks.
    """
    step = float16_step(checkpoint, drafter, capacity, attention, texts)

    def narrow(layer: Linear, hessian: Tensor) -> nn.Module:
        size = block_size(len(layer.weight))
        if size is None:
            return layer
        return Int4Linear(*quantize_blocks(layer.weight.T, size, hessian), layer.bias)

    _narrow_blocks(step.target, block_by_block(checkpoint, attention, texts, HESSIAN), narrow)
    return step.half()


def float8_step(
    checkpoint: Checkpoint, drafter: Drafter, capacity: int, attention: str, texts: Texts
) -> Step:
    """float16, but for the matrix products in the target's blocks: 8 bit floats on both sides.

    Embedding, head, attention and drafter stay in float16.
    """
    step = float16_step(checkpoint, drafter, capacity, attention, texts)

    def narrow(layer: Linear, largest: Tensor) -> nn.Module:
        codes, scale = quantize_float8(layer.weight)
        return Float8Linear(codes, scale, float8_scale(largest), layer.bias)

    _narrow_blocks(step.target, block_by_block(checkpoint, attention, texts, LARGEST), narrow)
    return step.half()


def _narrow_blocks(
    target: Target,
    measured: Iterable[Mapping[str, Tensor]],
    narrow: Callable[[Linear, Tensor], nn.Module],
) -> None:
    """Replace the linear layers of each block by what `narrow` makes of one and its measure."""
    names = {id(layer): name for name, layer in linears(target).items()}
    for block, found in zip(target.blocks, measured, strict=True):
        for place, layer in list(block.named_children()):
            if isinstance(layer, Linear):
                setattr(block, place, narrow(layer, found[names[id(layer)]]))


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(float32_step, lambda drafter: drafter),
    "fp16": Precision(float16_step, lambda drafter: drafter.half()),
    "bf16": Precision(bfloat16_step, lambda drafter: drafter.bfloat16()),
    "int4": Precision(int4_step, lambda drafter: drafter.half()),
    "fp8": Precision(float8_step, lambda drafter: drafter.half()),
    "int8": Precision(int8_step, int8_drafter),
}


def _int8_embedding(weight: Tensor) -> Int8Embedding:
    """`[V, H]` -> all 8 bits, since no saturating product reads it."""
    scale = weight.abs().amax(-1) / 127 + 1e-12
    return Int8Embedding((weight / scale[:, None]).round().to(torch.int8), scale)


def _quantize_linears(module: nn.Module, hessians: dict[int, Tensor]) -> None:
    """Replace each `Linear` below `module` by its int8 form, and a drafter's own embedding too.

    A head that is tied to an embedding becomes a layer of its own.
    """
    for name, child in module.named_children():
        if isinstance(child, Linear):
            weight, scale = quantize_weight(child.weight.T, hessians.get(id(child)))
            setattr(module, name, Int8Linear(weight, scale, child.bias))
        elif isinstance(child, TiedHead):
            assert isinstance(child.embed, nn.Embedding)
            setattr(module, name, Int8Linear(*quantize_weight(child.embed.weight)))
        elif isinstance(child, nn.Embedding):
            setattr(module, name, _int8_embedding(child.weight))
        else:
            _quantize_linears(child, hessians)
