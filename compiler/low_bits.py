"""Weights of 4 bits and of 8 bits in floating point as ONNX has them: types of their own.

torch has no int4 and few operations on float8, so that the step holds such codes as int8 and uint8;
what the exporter made of those becomes the type that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import onnx_ir as ir
import torch
from onnxscript.values import Opset

op: Any = Opset("", 24)

STORED: Mapping[ir.DataType, ir.DataType] = {
    ir.DataType.INT8: ir.DataType.INT4,
    ir.DataType.UINT8: ir.DataType.FLOAT8E4M3FN,
}
"""What the codes of a DequantizeLinear are held as -> what they are. No others are made of 8 bit
integers (`matmul_integer` has an operator of its own)."""


def _dequantize_blocks(codes: Any, scale: Any) -> Any:
    return op.DequantizeLinear(codes, scale, axis=0, block_size=codes.shape[0] // scale.shape[0])


def _dequantize_float8(codes: Any, scale: Any) -> Any:
    return op.DequantizeLinear(codes, scale, axis=1)


def _round_float8(x: Any, scale: Any) -> Any:
    codes = op.QuantizeLinear(x, scale, output_dtype=int(ir.DataType.FLOAT8E4M3FN))
    return op.DequantizeLinear(codes, scale)


LOW_BIT_TRANSLATIONS: Mapping[Any, Any] = {
    torch.ops.forerun.dequantize_blocks.default: _dequantize_blocks,
    torch.ops.forerun.dequantize_float8.default: _dequantize_float8,
    torch.ops.forerun.round_float8.default: _round_float8,
}


def store_low_bits(graph: ir.Graph) -> None:
    """Give the codes of every DequantizeLinear the type that they stand for."""
    for node in graph:
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is None or codes.const_value is None or codes.dtype is None:
            continue
        dtype = STORED.get(codes.dtype)
        if dtype is not None:
            codes.dtype, codes.const_value = dtype, _stored(codes.const_value, dtype)


def _stored(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    array = tensor.numpy()
    if dtype == ir.DataType.INT4:
        return ir.tensor(array.astype(ml_dtypes.int4), dtype, name=tensor.name)
    return ir.tensor(array.view(ml_dtypes.float8_e4m3fn), dtype, name=tensor.name)
