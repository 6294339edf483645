"""The exported graph's weights: which are the drafter's, and the files that they lie in.

The drafter's have a file of their own, so that another drafter takes their place by writing that
file and the graph's references to it (`forerun.compiler.swap`); the target's stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.external_data import convert_tensors_to_external
from torch import nn

DRAFTER = "step.drafter."
"""What the names of the drafter's weights start with; the rest is their place in the module."""
DRAFTER_DATA = "drafter.data"
SMALL = 256
"""Bytes: the target's tensors up to this size stay in the graph, since engines read shapes there.
The drafter's never do: all of them may be replaced."""


def drafter_weights(model: ir.Model) -> dict[str, ir.Value]:
    """The drafter's initializers, by their names in the drafter's module."""
    found = model.graph.initializers.items()
    return {name.removeprefix(DRAFTER): v for name, v in found if name.startswith(DRAFTER)}


@contextmanager
def unknown(values: Sequence[ir.Value]) -> Iterator[None]:
    """Initializers whose content nothing inside the block can see.

    What the exporter computes from a weight, or finds equal to another, is right for that weight
    alone: hidden, the graph is the same for every drafter of a form.
    """
    tensors = [value.const_value for value in values]
    for value in values:
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the graph to `path`, the target's weights to `path` + `.data`, the drafter's beside."""
    drafter = drafter_weights(model)
    ours = {value.name for value in drafter.values()}
    large = {
        name: value
        for name, value in model.graph.initializers.items()
        if name not in ours and value.const_value is not None and value.const_value.nbytes > SMALL
    }
    _unload(large, path.parent, f"{path.name}.data")
    _unload(drafter, path.parent, DRAFTER_DATA)
    ir.save(model, path)


def read_back(module: nn.Module, model: ir.Model) -> None:
    """Let the tensors of `module`, from which the saved `model` was made, be those in its files.

    Mapped, they take no memory that the system can't take back. Those whose bytes the graph has in
    another form stay as they are.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in model.graph.initializers.items():
        stored, tensor = value.const_value, own.get(name)
        if tensor is None or not isinstance(stored, ir.ExternalTensor):
            continue
        offset, size = stored.offset or 0, tensor.element_size()
        if not 0 < stored.nbytes == tensor.nbytes or offset % size or not tensor.is_contiguous():
            continue
        file = torch.from_file(stored.path, size=offset + tensor.nbytes, dtype=torch.uint8)
        tensor.data = file[offset:].view(tensor.dtype).view(tensor.shape)


def save_with_drafter(model: ir.Model, path: Path, data: str, tensors: Mapping[str, Any]) -> None:
    """Write the graph anew to `path`, its drafter's weights (`tensors` by their names in the
    drafter's module, as numpy arrays) to the file `data` beside it.

    All other weights stay in the files that they are in, which must come to lie beside `path`.
    """
    weights = drafter_weights(model)
    for name, value in weights.items():
        value.const_value = ir.tensor(tensors[name], name=value.name)
    _unload(weights, path.parent, data)
    ir.save(model, path)


def _unload(weights: Mapping[str, ir.Value], folder: Path, file: str) -> None:
    """Write the tensors of `weights` one after the other to `file`, and refer to them there."""
    if not weights:
        return
    values = list(weights.values())
    tensors = [value.const_value for value in values if value.const_value is not None]
    written = convert_tensors_to_external(tensors, folder, file)
    for value, tensor in zip(values, written, strict=True):
        value.const_value = tensor
