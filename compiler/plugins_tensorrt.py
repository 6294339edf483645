"""Hands the kernels of a graph to TensorRT as ahead-of-time plugins.

Not run: the full `tensorrt` package could not be installed where this was written. So there is
nothing here but TensorRT's own calls; what they are given is computed, and tested, in
`forerun.compiler.plugins`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import GenericAlias
from typing import Any

from forerun.compiler.functions import DOMAIN
from forerun.compiler.kernels import WARP, build_kernel
from forerun.compiler.plugins import PluginKernel, engine_ptx, output_types
from forerun.errors import ForerunError

TYPES = {
    "fp32": "FLOAT",
    "fp16": "HALF",
    "bf16": "BF16",
    "i64": "INT64",
    "i32": "INT32",
    "i1": "BOOL",
}
"""Triton's names of element types, and TensorRT's."""


def register_kernels(trt: Any, kernels: Sequence[PluginKernel], capability: int) -> None:
    """Make `kernels`, compiled for `capability`, known to the parser of this process.

    Raises ForerunError where this TensorRT takes no plugins written in Python.
    """
    try:
        plugin = importlib.import_module(f"{trt.__name__}.plugin")
    except ImportError:
        raise ForerunError(
            f"{trt.__name__} {trt.__version__} takes no plugins: compile with --plugins off"
        ) from None
    known = getattr(plugin.op, DOMAIN, None)
    for kernel in kernels:
        if not hasattr(known, kernel.name):  # of an earlier build in this process
            _register(trt, plugin, kernel, capability)


def _register(trt: Any, plugin: Any, kernel: PluginKernel, capability: int) -> None:
    launch = kernel.launch
    binary = build_kernel(launch.form, capability)
    ptx = engine_ptx(binary, len(launch.arguments))
    types = [getattr(trt.DataType, TYPES[kind]) for kind in output_types(launch)]

    def describe(*inputs: Any) -> Any:
        _, shapes = kernel.sized([tensor.shape_expr for tensor in inputs])
        return tuple(
            plugin.TensorDesc(plugin.ShapeExprs.from_tuple(shape), kind)
            for shape, kind in zip(shapes, types, strict=True)
        )

    def implement(*given: Any) -> Any:
        inputs = given[: len(launch.inputs)]  # then outputs and tactic
        sized, _ = kernel.sized([tensor.shape_expr for tensor in inputs])
        grid = dict(zip(("grid_x", "grid_y", "grid_z"), sized.grid, strict=True))
        where = plugin.KernelLaunchParams(
            **grid, block_x=binary.warps * WARP, shared_mem=binary.shared
        )
        integers = [plugin.SymInt32(size) for size in sized.integers.values()]
        return binary.name, ptx, where, plugin.SymIntExprs.from_tuple(integers)

    # TensorRT reads the tensors' names and number from the functions' signatures.
    named = [_parameter(name, plugin.TensorDesc) for name in launch.inputs]
    several = (plugin.TensorDesc,) * len(types)
    _sign(describe, named, GenericAlias(tuple, several))
    rest = [_parameter(name, inspect.Parameter.empty) for name in ("outputs", "tactic")]
    made = (str, str, plugin.KernelLaunchParams, plugin.SymIntExprs)
    _sign(implement, named + rest, GenericAlias(tuple, made))
    plugin.register(f"{DOMAIN}::{kernel.name}")(describe)
    plugin.aot_impl(f"{DOMAIN}::{kernel.name}")(implement)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _sign(function: Any, parameters: Sequence[inspect.Parameter], result: Any) -> None:
    function.__signature__ = inspect.Signature(parameters, return_annotation=result)
