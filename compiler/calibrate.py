"""What the linear layers read on real text: what rounding and smoothing work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from forerun.compiler.certificate import float32_forward
from forerun.compiler.quantize import input_hessian
from forerun.models.checkpoint import Checkpoint
from forerun.models.linear import Linear
from forerun.models.target import Forward, Target

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
FUSED_NAMES = {
    "qkv": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
"""A block's linear layers -> the checkpoint's names for them (fused ones in the same style)."""


def linears(target: Target) -> dict[str, Linear]:
    """Every linear layer of the target, by the name of the weight it was made from."""
    found = {
        f"model.layers.{layer}.{name}.weight": getattr(block, place)
        for layer, block in enumerate(target.blocks)
        for place, name in FUSED_NAMES.items()
    }
    if isinstance(target.head, Linear):
        found["lm_head.weight"] = target.head
    return found


@dataclass(frozen=True)
class Measure:
    """What is to be known of a linear layer's inputs."""

    of: Callable[[Tensor], Tensor]
    """Inputs `[n, K]` -> what they show."""
    join: Callable[[Tensor, Tensor], Tensor]
    """That of two parts of the inputs -> that of both."""


HESSIAN = Measure(input_hessian, torch.add)
"""X^T X `[K, K]`."""
LARGEST = Measure(lambda rows: rows.abs().amax(), torch.maximum)
"""The largest magnitude `[]`."""


def over_inputs(
    target: Target,
    texts: Sequence[Sequence[int]],
    measure: Measure,
    watch: Callable[[Forward], object] = lambda forward: None,
) -> dict[str, Tensor]:
    """`measure` of each linear layer's inputs over all tokens of `texts`, by weight name.

    `watch` is called with each text's forward.
    """
    totals: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            found = measure.of(inputs[0].reshape(-1, inputs[0].shape[-1]))
            totals[name] = measure.join(totals[name], found) if name in totals else found

        return add

    layers = linears(target)
    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in layers.items()]
    try:
        for text in texts:
            forward = float32_forward(target, text, (len(target.blocks),))
            watch(forward)
            if isinstance(target.head, Linear):
                target.head(forward.hidden)
    finally:
        for handle in handles:
            handle.remove()
    return totals


def block_by_block(
    checkpoint: Checkpoint, attention: str, texts: Sequence[Sequence[int]], measure: Measure
) -> Iterator[dict[str, Tensor]]:
    """What `over_inputs` finds in each block of the float32 target, the first one's first.

    One block is in memory at a time, with what is found in it: a large model's all would not fit.
    """
    starts = [0, *accumulate(map(len, texts))]
    places = [range(start, end) for start, end in pairwise(starts)]
    ids = torch.tensor([token for text in texts for token in text])
    stream = checkpoint.weights[EMBEDDING][ids]  # [all tokens, H]
    for layer in range(checkpoint.config.num_layers):
        target = _one_block(checkpoint, layer, stream, max(map(len, texts)), attention)
        after: list[Tensor] = []

        def keep(forward: Forward, after: list[Tensor] = after) -> None:
            after.append(forward.taps[1])

        found = over_inputs(target, places, measure, keep)
        yield {name.replace(".layers.0.", f".layers.{layer}."): m for name, m in found.items()}
        stream = torch.cat(after, dim=1)[0]


def _one_block(
    checkpoint: Checkpoint, layer: int, stream: Tensor, capacity: int, attention: str
) -> Target:
    """A target that has the one block, whose tokens are the rows `[n, H]` that enter it."""
    config, prefix = checkpoint.config, f"model.layers.{layer}."
    weights = {
        name.replace(prefix, "model.layers.0."): checkpoint.weights[name]
        for name in checkpoint.weights
        if name.startswith(prefix) or name == NORM
    }
    single = replace(
        config,
        num_layers=1,
        tie_embeddings=True,
        sliding_layers=(config.slides(layer),),
        rope_layers=(config.rotates(layer),),
    )
    return Target(single, {**weights, EMBEDDING: stream}, capacity, attention).eval()
