"""A bfloat16 graph in float32, for engines without bfloat16: the same nodes on the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from forerun.compiler.initializers import save_graph

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


@contextmanager
def widened(path: Path) -> Iterator[Path]:
    """The graph in `path` with float32 wherever it says bfloat16, as a file of its own."""
    model = ir.load(path)
    widen(model.graph, model.graph.initializers.values())
    for function in model.functions.values():
        widen(function)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wide = Path(folder, path.name)
        save_graph(model, wide)
        yield wide


def widen(graph: ir.Graph | ir.Function, weights: Iterable[ir.Value] = ()) -> None:
    """In place: values, weights, constants and casts, in bodies too."""
    for value in (*graph.inputs, *weights):
        _widen_value(value)
    for node in graph.all_nodes():
        for value in node.outputs:
            _widen_value(value)
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, _wide(attribute.as_tensor()))
            elif name in ("to", "dtype", "output_dtype") and attribute.value == NARROW:
                node.attributes[name] = ir.AttrInt64(name, int(WIDE))


def _widen_value(value: ir.Value) -> None:
    if value.dtype == NARROW:
        value.dtype = WIDE
    if value.const_value is not None:
        value.const_value = _wide(value.const_value)


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if tensor.dtype != NARROW:
        return tensor
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
