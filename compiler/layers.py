"""What a TensorRT engine is made of, as a file for people who look for a slow or wide layer."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

LAYERS_FILE = "engine.layers.json"

INSPECTED = "the built engine's layers, by TensorRT's engine inspector"
PARSED = (
    "the network's layers before the build, which fuses them: "
    "the engine can be inspected only on a GPU that it was built for"
)


def write_layers(trt: Any, log: Any, network: Any, engine: Path, out: Path) -> None:
    """Write the layers of the file `engine`, built from `network`, to `out` as JSON.

    `what` says which they are, `layers` holds one object a layer.
    """
    layers = _inspected(trt, log, engine)
    what = PARSED if layers is None else INSPECTED
    rows = _parsed(network) if layers is None else layers
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f'{{"what": {json.dumps(what)},\n"layers": [\n{lines}\n]}}\n', encoding="utf-8")


def _inspected(trt: Any, log: Any, engine: Path) -> list[Any] | None:
    """The engine's own account; None where it can't be loaded. Has not been run: no GPU."""
    with engine.open("rb") as stream:
        plan = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        loaded = trt.Runtime(log).deserialize_cuda_engine(plan)
        if loaded is None:
            return None
        inspector = loaded.create_engine_inspector()
        layers = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        return list(json.loads(layers)["Layers"])


def _parsed(network: Any) -> list[dict[str, Any]]:
    """Name, type, ONNX node, and the name, shape (-1: open) and dtype of what goes in and out."""
    return [_layer(network.get_layer(index)) for index in range(network.num_layers)]


def _layer(layer: Any) -> dict[str, Any]:
    inputs = (layer.get_input(index) for index in range(layer.num_inputs))
    outputs = (layer.get_output(index) for index in range(layer.num_outputs))
    return {
        "name": layer.name,
        "type": layer.type.name,
        "node": layer.metadata,
        "inputs": [_tensor(tensor) for tensor in inputs if tensor is not None],
        "outputs": [_tensor(tensor) for tensor in outputs if tensor is not None],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "shape": _shape(tensor), "dtype": tensor.dtype.name}


def _shape(tensor: Any) -> list[int] | None:
    try:
        return list(tensor.shape)
    except ValueError:  # not even its rank is known
        return None
