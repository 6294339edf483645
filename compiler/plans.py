"""Which kernels compute which function of domain `forerun`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.compiler.functions import FUNCTIONS, Use
from forerun.compiler.kernel_accept import accept_launch
from forerun.compiler.kernel_attention import AttentionForm, attention_launches, choose_tiles
from forerun.compiler.kernel_choose import choose_launch
from forerun.compiler.kernel_commit import commit_launch
from forerun.compiler.kernel_expand import best_of_blocks_launch, children_launch, keep_launch
from forerun.compiler.kernel_grow import in_order_launch, link_launch
from forerun.compiler.launch import TYPES, Launch
from forerun.compiler.plugins import Limits, Plan, PlanOf, Sizes, kernels_of, output_types


def choose_plan(use: Use, limits: Limits) -> Plan:
    """One program a row."""
    vocabulary, element = int(use.shapes[0][2]), TYPES[use.dtypes[0]]

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        return (choose_launch(sizes["B"], sizes["R"], vocabulary, element),)

    inputs = ("logits", "temperature", "top_k", "top_p", "uniform")
    axes = dict(zip(inputs, use.shapes, strict=True))
    return Plan(inputs, ("chosen",), axes | {"chosen": ("B", "R")}, launches)


def accept_plan(use: Use, limits: Limits) -> Plan:
    """One program a row of the batch."""
    pending = int(use.constants[0])

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        return (accept_launch(sizes["B"], sizes["R"], sizes["T"], pending, limits.nodes),)

    inputs = ("tokens", "chosen", "depth", "ancestors", "verify", "parents", "allowed")
    made = {"count": ("B",), "emitted": ("B", pending), "nodes": ("B", pending)}
    return Plan(inputs, tuple(made), dict(zip(inputs, use.shapes, strict=True)) | made, launches)


def commit_plan(use: Use, limits: Limits) -> Plan:
    """One gather."""
    pending, (groups, _, dim) = int(use.shapes[0][1]), use.shapes[1][1:]
    element = TYPES[use.dtypes[1]]

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        return (commit_launch(sizes["B"], int(groups), sizes["T"], pending, int(dim), element),)

    axes = {"nodes": use.shapes[0], "written": use.shapes[1]}
    made = {"pending": ("B", groups, pending, dim)}
    return Plan(("nodes", "written"), ("pending",), axes | made, launches)


def attention_plan(use: Use, limits: Limits) -> Plan:
    """One kernel, or one a part of the slots and one that combines them."""
    (_, heads, _, dim), (_, kv_heads, _, _) = use.shapes[:2]
    element, cache = TYPES[use.dtypes[0]], TYPES[use.dtypes[1]]
    form = AttentionForm(
        int(heads), int(kv_heads), int(dim), float(use.constants[0]), element, cache
    )
    tiles = choose_tiles(form, 1, limits.nodes, limits.slots)

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        return attention_launches(form, tiles, sizes["B"], sizes["T"], limits.slots)

    inputs = ("query", "keys", "values", "committed", "first", "bits")
    axes = dict(zip(inputs, use.shapes, strict=True))
    if tiles.parts == 1:
        return Plan(inputs, ("parts",), axes | {"parts": use.shapes[0]}, launches)
    made = {
        "parts": ("B", heads, "T", tiles.parts, dim),
        "sums": ("B", heads, "T", tiles.parts, 2),
        "out": use.shapes[0],
    }
    return Plan(inputs, ("out",), axes | made, launches)


def expand_plan(use: Use, limits: Limits) -> Plan:
    """The best of each block of logits, then of each node's blocks."""
    (_, width, vocabulary), top_k = use.shapes[0], int(use.constants[0])
    element = TYPES[use.dtypes[0]]

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        nodes = sizes["B"] * int(width)
        return (
            best_of_blocks_launch(nodes, int(vocabulary), top_k, element),
            children_launch(nodes, int(vocabulary), top_k, mapped=False),
        )

    inputs = ("logits", "scores", "nodes")
    outputs = ("child_tokens", "child_parents", "child_scores")
    parts = int(launches({"B": 1})[0].grid[1])
    made = {
        "values": ("B", width, parts, top_k),
        "indices": ("B", width, parts, top_k),
        "sums": ("B", width, parts),
        **dict.fromkeys(outputs, ("B", int(width) * top_k)),
    }
    return Plan(inputs, outputs, dict(zip(inputs, use.shapes, strict=True)) | made, launches)


def keep_plan(use: Use, limits: Limits) -> Plan:
    """One program a row of the batch."""
    level, (before, top_k) = int(use.shapes[0][1]), map(int, use.constants)

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        return (keep_launch(sizes["B"], level, before, top_k),)

    inputs = ("tokens", "scores")
    outputs = ("kept_tokens", "kept_scores", "kept_nodes", "kept_above")
    axes = dict(zip(inputs, use.shapes, strict=True)) | dict.fromkeys(outputs, ("B", top_k))
    return Plan(inputs, outputs, axes, launches)


def prune_plan(use: Use, limits: Limits) -> Plan:
    """The nodes in order of score, then their links."""
    proposed, max_depth = int(use.shapes[1][1]), int(use.constants[0])

    def launches(sizes: Sizes) -> tuple[Launch, ...]:
        batch, nodes = sizes["B"], sizes["N"]
        return (
            in_order_launch(batch, proposed, nodes, limits.nodes),
            link_launch(batch, proposed, nodes, limits.nodes, max_depth),
        )

    inputs = ("root", "tokens", "parents", "scores", "places")
    outputs = ("tree_tokens", "tree_depth", "tree_ancestors", "tree_parents")
    made: dict[str, tuple[str | int, ...]] = dict.fromkeys(("order", *outputs), ("B", "N"))
    made["tree_ancestors"] = ("B", "N", "N")
    return Plan(inputs, outputs, dict(zip(inputs, use.shapes, strict=True)) | made, launches)


PLANS: Mapping[str, PlanOf] = {
    "ChooseTokens": choose_plan,
    "AcceptPath": accept_plan,
    "CommitRows": commit_plan,
    "TreeAttention": attention_plan,
    "ExpandColumns": expand_plan,
    "KeepNodes": keep_plan,
    "PruneTree": prune_plan,
}


def run_kernels(
    name: str,
    tensors: Sequence[Tensor],
    constants: Sequence[Any],
    limits: Limits,
    run: Callable[[Launch, Mapping[str, Tensor]], None] = Launch.run,
) -> list[Tensor]:
    """The function's outputs, by its kernels as an engine would launch them: on a GPU's tensors, or
    any where Triton interprets. `run` launches one on tensors by name."""
    function = next(function for function in FUNCTIONS if function.name == name)
    plan = PLANS[name](Use.of(function, tensors, constants), limits)
    known = dict(zip(plan.inputs, tensors, strict=True))
    for kernel in kernels_of(name, plan):
        launch, shapes = kernel.sized([known[name].shape for name in kernel.launch.inputs])
        for output, shape, kind in zip(launch.outputs, shapes, output_types(launch), strict=True):
            known[output] = tensors[0].new_empty(shape, dtype=TORCH[kind])
        run(launch, {name: _as(launch, name, tensor) for name, tensor in known.items()})
    return [known[name] for name in plan.outputs]


TORCH = {name: dtype for dtype, name in TYPES.items()}


def _as(launch: Launch, name: str, tensor: Tensor) -> Tensor:
    """A tensor as the launch takes its memory: ancestor bits come as halves of words."""
    halves = launch.form.types.get(name) == "*i32" and tensor.dtype == torch.int64
    return tensor.view(torch.int32) if halves else tensor
