"""Torch step -> ONNX opset 24, with symbolic B, T, S, ... and one initializer a weight."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript.values import Opset
from torch import Tensor, nn
from torch.export import Dim

from forerun.compiler.functions import Recorder, Uses, define
from forerun.compiler.initializers import drafter_weights, read_back, save_graph, unknown
from forerun.compiler.low_bits import LOW_BIT_TRANSLATIONS, store_low_bits
from forerun.compiler.parts import name_parts
from forerun.models.ops import ACTIVATION_ZERO, HALVINGS, SPAN
from forerun.models.signature import Signature, signature
from forerun.models.step import INPUT_NAMES, Step, StepInputs
from forerun.models.target import Caches
from forerun.models.tree_attention import BITS, WORD

OPSET = 24
op: Any = Opset("", OPSET)

# Sizes that stand for the symbols while tracing: distinct, and neither 0 nor 1, which torch.export
# would take for constants.
TRACE_SIZES = {
    "batch": 3,
    "nodes": 5,
    "verified": 4,
    "next_nodes": 6,
    "pending_in": 7,
    "slots": 64,
    "uniform_positions": 80,
}

NOISY = (
    "torch.onnx._internal.exporter._registration",
    "onnx_ir.passes.common.initializer_deduplication",
)
"""Loggers of what the exporter says to nobody."""


def _tensor_scatter(cache: Any, rows: Any, index: Any) -> Any:
    return op.TensorScatter(cache, rows, index, axis=2)


def _quantize_rows(x: Any, scale: Any) -> Any:
    zero = op.Expand(
        op.Constant(value=ir.tensor([[ACTIVATION_ZERO]], ir.DataType.UINT8)),
        op.Shape(scale),
    )
    # A row is one block: scales of a column's shape, as the product takes them (no Unsqueeze).
    return op.QuantizeLinear(x, scale, zero, axis=1, block_size=x.shape[1])


def _matmul_integer(rows: Any, weight: Any) -> Any:
    zero = op.Constant(value=ir.tensor(ACTIVATION_ZERO, ir.DataType.UINT8))
    return op.MatMulInteger(rows, weight, zero)


def _matmul_transposed(rows: Any, weight: Any) -> Any:
    return op.Gemm(rows, weight, transB=1)


def _threshold(values: Any, measure: Any, wanted: Any) -> Any:
    """Bisection as a Loop that carries the lower end.

    Not unrolled, because TensorRT-RTX's build time is exponential in the length of such a chain,
    and not a Scan, because that fails to build where T = 1 (both measured with 1.7.1).
    """
    zero, axis = op.Constant(value_float=0.0), op.Constant(value_ints=[-1])
    lowest = op.Expand(op.Constant(value_float=-SPAN), op.Shape(wanted))
    widths = op.Constant(value_floats=[SPAN / 2**halving for halving in range(1, HALVINGS + 1)])
    turn, going, low = (
        ir.val(f"{wanted.name}_{name}", dtype, shape)
        for name, dtype, shape in (
            ("turn", ir.DataType.INT64, []),
            ("going", ir.DataType.BOOL, []),
            ("low", ir.DataType.FLOAT, wanted.shape),
        )
    )
    body = Tape()
    middle = body.op("Add", [low, body.op("Gather", [widths, turn])])
    upper = body.op("Where", [body.op("GreaterOrEqual", [values, middle]), measure, zero])
    kept = body.op("ReduceSum", [upper, axis], {"keepdims": 1})
    enough = body.op("GreaterOrEqual", [kept, wanted])
    results = [body.op("Identity", [going]), body.op("Where", [enough, middle, low])]
    graph = ir.Graph([turn, going, low], results, nodes=body.nodes, name="bisection")
    # By keyword: torch 2.13 counts M and cond among v_initial where they come by position.
    # No turns at all where nothing is wanted: a cut that is off costs nothing.
    on = op.Cast(op.Greater(op.ReduceMax(wanted, keepdims=0), zero), to=int(ir.DataType.INT64))
    turns, always = op.Mul(on, op.Constant(value_int=HALVINGS)), op.Constant(value=ir.tensor(True))
    found = op.Loop(M=turns, cond=always, v_initial=(lowest,), body=graph)
    return op.Where(op.Greater(wanted, zero), found, op.Constant(value_float=float("-inf")))


def _pack_ancestors(ancestors: Any) -> Any:
    """Padded to whole words, each the sum of what its bits are worth.

    Added half to half: ONNX Runtime 1.32's ReduceSum of int64 loses the lowest bits (measured).
    """
    last, word = op.Constant(value_ints=[2]), op.Constant(value_ints=[WORD])
    spare = op.Concat(op.Shape(ancestors, end=2), op.Constant(value_ints=[WORD - 1]), axis=0)
    empty = op.Expand(op.Constant(value=ir.tensor(False)), spare)
    padded = op.Concat(ancestors, empty, axis=2)  # [B, T, T + 63]
    whole = op.Mul(op.Div(op.Shape(padded, start=2), word), word)
    cut = op.Slice(padded, op.Constant(value_ints=[0]), whole, last)
    bits = op.Reshape(cut, op.Constant(value_ints=[0, 0, -1, WORD]))  # [B, T, W, 64]
    worth = op.Where(bits, op.Constant(value_ints=list(BITS)), op.Constant(value_int=0))
    for _ in range(WORD.bit_length() - 1):
        worth = op.Add(*op.Split(worth, axis=-1, num_outputs=2))
    return op.Squeeze(worth, op.Constant(value_ints=[-1]))


def _sym_stride(x: Any, dim: int) -> Any:
    """A contiguous tensor's stride: torch.cond passes operands' strides along with them."""
    return op.ReduceProd(op.Shape(x, start=dim + 1), keepdims=0)


def _threshold_without_loop(values: Any, measure: Any, wanted: Any) -> Any:
    """The same search by sixteenths instead of halves, eight rounds unrolled.

    For engines that refuse the loop; all fifteen cuts of a round are tried at once.
    """
    zero, last = op.Constant(value_float=0.0), op.Constant(value_ints=[-1])
    cuts = op.Constant(value_floats=[float(cut) for cut in range(1, 16)])
    rows = op.Unsqueeze(values, op.Constant(value_ints=[-2]))  # [B, R, 1, V]
    measures = op.Unsqueeze(measure, op.Constant(value_ints=[-2]))
    low = op.Expand(op.Constant(value_float=-SPAN), op.Shape(wanted))  # [B, R, 1]
    for turn in range(1, 9):
        width = op.Constant(value_float=SPAN / 16**turn)
        middles = op.Add(low, op.Mul(cuts, width))  # [B, R, 15]
        above = op.GreaterOrEqual(rows, op.Unsqueeze(middles, last))  # [B, R, 15, V]
        kept = op.ReduceSum(op.Where(above, measures, zero), last, keepdims=0)
        enough = op.Cast(op.GreaterOrEqual(kept, wanted), to=int(ir.DataType.FLOAT))
        low = op.Add(low, op.Mul(op.ReduceSum(enough, last, keepdims=1), width))
    return op.Where(op.Greater(wanted, zero), low, op.Constant(value_float=float("-inf")))


TRANSLATIONS: Mapping[Any, Any] = {
    torch.ops.forerun.tensor_scatter.default: _tensor_scatter,
    torch.ops.forerun.quantize_rows.default: _quantize_rows,
    torch.ops.forerun.matmul_integer.default: _matmul_integer,
    torch.ops.forerun.matmul_transposed.default: _matmul_transposed,
    torch.ops.forerun.threshold.default: _threshold,
    torch.ops.forerun.pack_ancestors.default: _pack_ancestors,
    torch.ops.aten.sym_stride.int: _sym_stride,
    **LOW_BIT_TRANSLATIONS,
}


class FlatStep(nn.Module):
    """The step with one positional tensor an input, in the order of the ONNX graph's inputs."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        layers = self.step.target.config.num_layers
        head = len(INPUT_NAMES)
        inputs = StepInputs(*tensors[:head])
        keys = list(tensors[head : head + layers])
        values = list(tensors[head + layers : head + 2 * layers])
        states = list(tensors[head + 2 * layers :])
        outputs, caches, new_states = self.step(inputs, Caches(keys, values), states)
        return (*outputs.named().values(), *caches.keys, *caches.values, *new_states)


def trace_inputs(facts: Signature) -> tuple[Tensor, ...]:
    """Tensors of the tracing sizes: zeros, but for what indexes something."""
    tensors = []
    for axes, dtype in facts.inputs.values():
        shape = [TRACE_SIZES[axis] if isinstance(axis, str) else axis for axis in axes]
        tensors.append(torch.zeros(shape, dtype=dtype))
    return tuple(tensors)


def branches_as_loops(graph: ir.Graph) -> None:
    """Replace every `If` that holds a loop by a `Loop` of no or one turn around its then-branch.

    TensorRT-RTX 1.7.1 fails on a loop inside a conditional (internal error) and builds a loop
    inside a loop. The else-branch moves in front and runs always, so it must be cheap.
    """
    for node in list(graph):
        if node.op_type != "If":
            continue
        taken, otherwise = (node.attributes[f"{k}_branch"].as_graph() for k in ("then", "else"))
        if not any(inner.op_type in ("Loop", "Scan") for inner in taken):
            continue
        starts = list(otherwise.outputs)
        moved = list(otherwise)
        otherwise.remove(moved)
        turn, going = (
            ir.val(f"{node.name}_{name}", dtype, [])
            for name, dtype in (("turn", ir.DataType.INT64), ("going", ir.DataType.BOOL))
        )
        unused = (ir.val(f"{start.name}_in", start.dtype, start.shape) for start in starts)
        taken.inputs.extend([turn, going, *unused])
        again = ir.val(f"{node.name}_again", ir.DataType.BOOL, [])
        # A turn runs only while `going`, so its negation ends the loop.
        taken.append(ir.node("Not", [going], outputs=[again]))
        taken.outputs.insert(0, again)
        loop = ir.node(
            "Loop", [None, node.inputs[0], *starts], {"body": taken}, num_outputs=len(starts)
        )
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], [*moved, loop], node.outputs, loop.outputs
        )


def share_zero_points(graph: ir.Graph) -> None:
    """One tensor of zero points for all matrices of as many rows, instead of one a matrix.

    QuantizeLinear wants them as long as its scales; that length is the same all through the layers.
    """
    shared: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type != "QuantizeLinear" or len(node.inputs) < 3:
            continue
        scale, zero = node.inputs[1], node.inputs[2]
        if scale is None or zero is None or scale.shape is None:
            continue
        first = shared.setdefault(str(scale.shape), zero)
        node.replace_input_with(2, first)


def halve_apart(graph: ir.Graph) -> None:
    """Halves of a matrix's columns, as of gate and up, by a Reshape and two Gathers.

    Told by Split TensorRT-RTX 1.7.1 computes them for a single row by two products, each with a
    copy of its half of the weight, which other profiles have as a whole (measured).
    """
    for node in list(graph):
        if node.op_type != "Split" or len(node.outputs) != 2 or len(node.inputs) > 1:
            continue
        matrix = node.inputs[0]
        shape = None if matrix is None else matrix.shape
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            continue
        tape = Tape()
        size = tape.op("Constant", [], {"value_ints": [-1, 2, shape[1] // 2]})
        both = tape.op("Reshape", [matrix, size])  # [n, 2, K]
        places = [tape.op("Constant", [], {"value_int": place}) for place in range(2)]
        halves = [tape.op("Gather", [both, place], {"axis": 1}) for place in places]
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], tape.nodes, node.outputs, halves
        )


def name_axes(graph: ir.Graph, facts: Signature) -> None:
    """Give the inputs' symbolic axes the names of `facts` instead of the exporter's own."""
    for value in graph.inputs:
        assert value.name is not None
        value.shape = ir.Shape(facts.inputs[value.name][0])


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of torchvision's absence, its own deprecations, and weights that we hide
    from it: no user's concern."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def translations(loops: bool) -> dict[Any, Any]:
    """What the exporter puts in place of our operations; without `loops` no `Loop`."""
    if loops:
        return dict(TRANSLATIONS)
    return {**TRANSLATIONS, torch.ops.forerun.threshold.default: _threshold_without_loop}


def export_functions(model: ir.Model, uses: Uses, loops: bool) -> None:
    """Add the functions that the graph of `model` calls."""
    define(model, uses, partial(_to_onnx, translations=translations(loops)))


def _to_onnx(
    module: nn.Module,
    examples: tuple[Tensor, ...],
    shapes: tuple[dict[int, Any], ...],
    translations: Mapping[Any, Any],
    inputs: list[str] | None = None,
    outputs: list[str] | None = None,
) -> ir.Model:
    """What `module` does to tensors like `examples`; `shapes` are their symbolic axes."""
    with _quiet():
        program = torch.export.export(module, examples, dynamic_shapes=(shapes,), strict=False)
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            custom_translation_table=dict(translations),
            verbose=False,
            optimize=False,
        )
        assert onnx_program is not None
        model = onnx_program.model
        with unknown(list(drafter_weights(model).values())):
            onnx_program.optimize()
    return model


def export_step(
    step: Step,
    path: Path,
    fixed: Mapping[str, int] | None = None,
    loops: bool = True,
    recorder: Recorder | None = None,
) -> Signature:
    """Write the step to `path` (`.onnx`), weights beside it (`forerun.compiler.initializers`).

    `fixed` gives sizes to symbols that an engine can't leave open; without `loops` the graph holds
    no `Loop`. `recorder` learns which functions of domain `forerun` it calls.
    """
    recorder = recorder or Recorder()
    facts = signature(step, fixed)
    dims = {name: Dim(name, min=2, max=1 << 20) for name in TRACE_SIZES}
    shapes = tuple(
        {place: dims[axis] for place, axis in enumerate(axes) if isinstance(axis, str)}
        for axes, _ in facts.inputs.values()
    )
    flat = FlatStep(step).eval()
    model = _to_onnx(
        flat,
        trace_inputs(facts),
        shapes,
        {**translations(loops), **recorder.translations()},
        list(facts.inputs),
        list(facts.outputs),
    )
    export_functions(model, recorder.uses, loops)
    branches_as_loops(model.graph)
    share_zero_points(model.graph)
    if not loops:
        halve_apart(model.graph)
    store_low_bits(model.graph)
    name_axes(model.graph, facts)
    RemoveUnusedNodesPass()(model)
    name_parts(model, step.target.config.num_layers)
    save_graph(model, path)
    read_back(flat, model)
    return facts
