"""Operations of domain `forerun`: each a model-local function of standard operators.

An engine that has a kernel for one runs that; every other one, ONNX Runtime and TensorRT-RTX among
them, runs the function's body, which is the exported torch meaning of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnx_ir.tensor_adapters import to_torch_dtype
from onnxscript.values import Op, Opset
from torch import Tensor, nn
from torch.export import Dim

from forerun.models.accept import accept_nodes
from forerun.models.choose import choice
from forerun.models.expand import best_columns, best_nodes
from forerun.models.grow import best_tree
from forerun.models.step import rows_at
from forerun.models.tree_attention import attend

DOMAIN, VERSION = "forerun", 1
SYMBOLS = {"B": 2, "R": 3, "T": 5, "W": 2, "N": 4}
"""Axes that a function leaves open, and their sizes while its body is traced."""
ANY = ("float", "float16", "bfloat16", "int64", "int32", "bool")

BodyExport = Callable[[nn.Module, tuple[Tensor, ...], tuple[dict[int, Any], ...]], ir.Model]
"""(module, example inputs, their symbolic axes) -> its graph."""


@dataclass(frozen=True)
class LocalFunction:
    """A torch operation that becomes a node of domain `forerun`."""

    name: str
    operation: Any
    """The torch operation, as the exporter meets it."""
    meaning: Callable[..., Any]
    """What it computes; what it takes besides tensors is fixed in a graph."""
    inputs: tuple[tuple[str, ...], ...]
    """Each tensor's axes; those of `SYMBOLS` stay open, others are fixed in a graph."""
    outputs: int

    def schema(self, name: str) -> OpSchema:
        """What ONNX has to know of a node of type `name` that calls it."""
        allowed = [f"tensor({name})" for name in ANY]
        given = [f"in{place}" for place in range(len(self.inputs))]
        results = [f"out{place}" for place in range(self.outputs)]
        return OpSchema(
            name,
            DOMAIN,
            VERSION,
            inputs=[OpSchema.FormalParameter(name, f"T_{name}") for name in given],
            outputs=[OpSchema.FormalParameter(name, f"T_{name}") for name in results],
            type_constraints=[(f"T_{name}", allowed, "") for name in (*given, *results)],
        )


GROWN = ("B", "M")
FUNCTIONS = (
    LocalFunction(
        "ChooseTokens",
        torch.ops.forerun.choose_tokens.default,
        choice,
        (("B", "R", "V"), ("B",), ("B",), ("B",), ("B", "R")),
        outputs=1,
    ),
    LocalFunction(
        "AcceptPath",
        torch.ops.forerun.accept_path.default,
        accept_nodes,
        (("B", "R"), ("B", "R"), ("B", "T"), ("B", "T", "T"), ("R",), ("B", "R"), ("B",)),
        outputs=3,
    ),
    LocalFunction(
        "CommitRows",
        torch.ops.forerun.commit_rows.default,
        rows_at,
        (("B", "P"), ("B", "C", "T", "D")),
        outputs=1,
    ),
    LocalFunction(
        "TreeAttention",
        torch.ops.forerun.tree_attention.default,
        attend,
        (
            ("B", "H", "T", "D"),
            ("B", "K", "S", "D"),
            ("B", "K", "S", "D"),
            ("B",),
            ("B",),
            ("B", "T", "W"),
        ),
        outputs=1,
    ),
    LocalFunction(
        "ExpandColumns",
        torch.ops.forerun.expand_columns.default,
        best_columns,
        (("B", "F", "V"), ("B", "F"), ("B", "F")),
        outputs=3,
    ),
    LocalFunction(
        "KeepNodes", torch.ops.forerun.keep_nodes.default, best_nodes, (GROWN, GROWN), outputs=4
    ),
    LocalFunction(
        "PruneTree",
        torch.ops.forerun.prune_tree.default,
        best_tree,
        (("B",), GROWN, GROWN, GROWN, ("N",)),
        outputs=4,
    ),
)


@dataclass(frozen=True)
class Use:
    """How a graph calls a function: what differs makes it another one."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[str | int, ...], ...]
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, function: LocalFunction, tensors: Sequence[Any], constants: Sequence[Any]) -> Use:
        """What the tensors, torch's or the exporter's, fix."""
        shapes = tuple(
            tuple(a if a in SYMBOLS else int(n) for a, n in zip(axes, tensor.shape, strict=True))
            for axes, tensor in zip(function.inputs, tensors, strict=True)
        )
        dtypes = (t.dtype for t in tensors)
        known = (d if isinstance(d, torch.dtype) else to_torch_dtype(d) for d in dtypes)
        return cls(tuple(known), shapes, tuple(constants))


Uses = Mapping[tuple[LocalFunction, Use], str]
"""The functions that a graph calls, and their names in it."""


class Recorder:
    """Makes the nodes of one graph, and remembers the functions that they call."""

    def __init__(self) -> None:
        self.uses: dict[tuple[LocalFunction, Use], str] = {}

    def translations(self) -> Mapping[Any, Any]:
        """For the exporter: operation -> what puts the node in its place."""
        return {function.operation: self._translation(function) for function in FUNCTIONS}

    def _translation(self, function: LocalFunction) -> Callable[..., Any]:
        def translate(*arguments: Any) -> Any:
            count = len(function.inputs)
            tensors, constants = arguments[:count], arguments[count:]
            use = Use.of(function, tensors, constants)
            before = sum(1 for known, _ in self.uses if known is function)
            name = self.uses.setdefault((function, use), _numbered(function.name, before))
            return Op(Opset(DOMAIN, VERSION), name, function.schema(name))(*tensors)

        return translate


def _numbered(name: str, before: int) -> str:
    """A function's name where so many of other sizes or constants came `before` it."""
    return f"{name}{before + 1}" if before else name


def define(model: ir.Model, uses: Uses, export: BodyExport) -> None:
    """Add the functions that the graph of `model` calls."""
    for (function, use), name in uses.items():
        body = _body(function, use, name, export)
        model.functions[body.identifier()] = body
        model.graph.opset_imports[DOMAIN] = VERSION


class _Module(nn.Module):
    """An operation's eager meaning, which the exporter can look into."""

    def __init__(self, function: LocalFunction, constants: Sequence[Any]) -> None:
        super().__init__()
        self.meaning, self.constants = function.meaning, constants

    def forward(self, *tensors: Tensor) -> Any:
        return self.meaning(*tensors, *self.constants)


def _body(function: LocalFunction, use: Use, name: str, export: BodyExport) -> ir.Function:
    dims = {name: Dim(name, min=2, max=1 << 20) for name in SYMBOLS}
    examples = tuple(
        torch.zeros(
            [SYMBOLS[a] if isinstance(a, str) else a for a in shape],
            dtype=dtype,
        )
        for shape, dtype in zip(use.shapes, use.dtypes, strict=True)
    )
    axes = tuple(
        {place: dims[axis] for place, axis in enumerate(shape) if isinstance(axis, str)}
        for shape in use.shapes
    )
    graph = export(_Module(function, use.constants).eval(), examples, axes).graph
    for value in list(graph.initializers.values()):  # a function has none
        constant = ir.node("Constant", [], {"value": value.const_value})
        graph.insert_before(graph[0], constant)
        value.replace_all_uses_with(constant.outputs[0])
    graph.initializers.clear()
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])
