"""Kernels in place of the functions of domain `forerun`, for an engine that takes plugins.

A function's body becomes its kernels, one node each; every node is an ahead-of-time plugin, whose
PTX the engine carries, so that nothing of ours is needed to run it. All of that is computed here,
without TensorRT: `forerun.compiler.plugins_tensorrt` only hands it over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from forerun.compiler.functions import DOMAIN, Use, Uses
from forerun.compiler.kernels import Binary
from forerun.compiler.launch import Launch, Size
from forerun.errors import ForerunError

Sizes = Mapping[str, Size]


@dataclass(frozen=True)
class Limits:
    """What the engine's profiles never go beyond."""

    nodes: int
    """Of a draft tree."""
    slots: int
    """Of the caches: as many in every profile."""


@dataclass(frozen=True)
class Plan:
    """A function as launches; tensors are named as the launches name them."""

    inputs: tuple[str, ...]
    """The function's, in order."""
    outputs: tuple[str, ...]
    axes: Mapping[str, tuple[str | int, ...]]
    """Every tensor's: numbers, and symbols that its readers take their sizes from."""
    launches: Callable[[Sizes], tuple[Launch, ...]]
    derived: Mapping[str, Callable[[Sizes], Size]] = field(default_factory=dict)
    """Symbols that no input has, of those that it has."""


@dataclass(frozen=True)
class PluginKernel:
    """One kernel of a plan, as a plugin."""

    function: str
    """The function's name in the graph."""
    plan: Plan
    place: int
    """Among the plan's launches."""

    @property
    def launch(self) -> Launch:
        """With meaningless sizes: for names, types and constants."""
        return self.plan.launches(_Known())[self.place]

    @property
    def name(self) -> str:
        """The node's type, and the plugin's name: another one for other types or constants."""
        form = self.launch.form
        facts = repr([form.types, form.constants, form.warps, form.stages, self.plan.axes])
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        return f"{self.function}_{form.function.__name__}_{digest}"

    def sized(self, shapes: Sequence[Sequence[Size]]) -> tuple[Launch, list[tuple[Size, ...]]]:
        """The launch for inputs of these shapes, numbers or an engine's symbols; and the outputs'
        shapes."""
        sizes: dict[str, Size] = {}
        for name, shape in zip(self.launch.inputs, shapes, strict=True):
            for axis, size in zip(self.plan.axes[name], shape, strict=True):
                if isinstance(axis, str):
                    sizes.setdefault(axis, size)
        for symbol, of in self.plan.derived.items():
            if symbol not in sizes:
                sizes[symbol] = of(sizes)
        found = self.plan.launches(_Known(sizes))[self.place]
        return found, [
            tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.plan.axes[name])
            for name in found.outputs
        ]


class _Known(dict[str, Size]):
    """Sizes that a launch's own tensors tell; others belong to the plan's other launches."""

    def __missing__(self, symbol: str) -> Size:
        return 1


def kernels_of(function: str, plan: Plan) -> list[PluginKernel]:
    """The kernels, in order, of the function of that name."""
    return [PluginKernel(function, plan, place) for place in range(len(plan.launches(_Known())))]


def with_kernels(model: ir.Model, plans: Mapping[str, Plan]) -> list[PluginKernel]:
    """Replace the bodies of the functions named in `plans` by their kernels' nodes.

    `plugin_namespace` and `plugin_version` are how TensorRT's parser finds a plugin.
    """
    found = []
    for identifier, function in list(model.functions.items()):
        plan = plans.get(function.name)
        if plan is None:
            continue
        kernels = kernels_of(function.name, plan)
        model.functions[identifier] = _body(function, plan, kernels)
        found += kernels
    return found


def _body(function: ir.Function, plan: Plan, kernels: Sequence[PluginKernel]) -> ir.Function:
    values = {
        name: ir.val(value.name or name, value.dtype, value.shape)
        for name, value in zip(plan.inputs, function.inputs, strict=True)
    }
    inputs, nodes = list(values.values()), []
    for kernel in kernels:
        launch = kernel.launch
        node = ir.node(
            kernel.name,
            [values[name] for name in launch.inputs],
            {"plugin_namespace": DOMAIN, "plugin_version": "1"},
            domain=DOMAIN,
            num_outputs=len(launch.outputs),
        )
        nodes.append(node)
        for name, value in zip(launch.outputs, node.outputs, strict=True):
            value.name, values[name] = name, value
    outputs = [values[name] for name in plan.outputs]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 24, DOMAIN: 1})
    return ir.Function(DOMAIN, function.name, graph=graph, attributes=[])


def engine_ptx(binary: Binary, arguments: int) -> str:
    """The kernel's PTX with its first `arguments` parameters alone.

    Triton adds two pointers to scratch memory, which our kernels never touch and an engine would
    not pass. Raises ForerunError where one is used.
    """
    head = re.search(rf"\.entry {re.escape(binary.name)}\(([^)]*)\)", binary.ptx)
    if head is None:
        raise ForerunError(f"{binary.name}: its PTX has no such entry")
    parameters = head.group(1).split(",")
    dropped = [parameter.split()[-1] for parameter in parameters[arguments:]]
    body = binary.ptx[head.end() :]
    used = [name for name in dropped if re.search(rf"\b{name}\b", body)]
    if used or len(parameters) < arguments:
        raise ForerunError(f"{binary.name}: it takes {len(parameters)} arguments, not {arguments}")
    kept = ",".join(parameters[:arguments]).rstrip() + "\n"
    return binary.ptx[: head.start(1)] + kept + binary.ptx[head.end(1) :]


PlanOf = Callable[[Use, Limits], Plan]


def plans_for(uses: Uses, limits: Limits, plans: Mapping[str, PlanOf]) -> dict[str, Plan]:
    """The plan of each function that a graph calls, by its name there."""
    return {name: plans[f.name](use, limits) for (f, use), name in uses.items()}


def output_types(launch: Launch) -> list[Any]:
    """The element types of the launch's outputs, in Triton's names."""
    return [launch.form.types[name].removeprefix("*") for name in launch.outputs]
