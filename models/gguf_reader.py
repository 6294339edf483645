"""GGUF container: metadata and raw tensors, read with every count and offset checked.

Written here rather than taken from the `gguf` package because that reader takes two seconds for
one vocabulary, and a forged array length sends it into an endless loop.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.errors import ForerunError, MissingDependencyError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = 24
"""Bytes of magic, version and the two counts."""
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""Value type -> struct code."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as stored: its shape in torch's order, its quantisation and its raw bytes."""

    shape: tuple[int, ...]
    kind: str
    """ggml's name of the type, such as F32 or Q4_1."""
    data: npt.NDArray[np.uint8]
    """`[rows, bytes a row]`, a view of the mapped file."""

    def dequantised(self, rows: int | None = None) -> npt.NDArray[np.float32]:
        """The values as float32 of `shape`, or so many `rows` of them as they lie.

        Raises ForerunError for a type gguf can't decode.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(self.data[:rows], GGMLQuantizationType[self.kind])
        except NotImplementedError:
            raise ForerunError(
                f"tensors of type {self.kind} cannot be read: "
                "convert the GGUF file to F16 or Q8_0 with llama-quantize"
            ) from None
        # Float32 comes back as a view of the read-only file: the caller owns what it gets.
        floats: npt.NDArray[np.float32] = np.require(values, np.float32, ["O", "W"])
        return floats if rows is not None else floats.reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the (mapped, still quantised) tensors of the GGUF file `path`.

    Raises ForerunError where it is no GGUF file, truncated, forged or of an unknown version, and
    MissingDependencyError where the `gguf` package, which decodes the tensors, is not installed.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise MissingDependencyError("gguf", "compile", "reading a GGUF file") from None

    try:
        if path.stat().st_size < _HEADER:
            raise ForerunError(f"{path} is not a GGUF file (too short): give a .gguf file")
        cursor = _Cursor(path, np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise ForerunError(f"{path} can't be read ({error.strerror}): mend its access") from None
    if cursor.take(4) != _MAGIC:
        raise ForerunError(
            f"{path} is not a GGUF file (it does not start with GGUF): give a .gguf file"
        )
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ForerunError(
            f"{path} is of GGUF version {version}, known are {_VERSIONS} in little-endian order: "
            "convert it again with a current llama.cpp"
        )
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    cursor.require(tensor_count, 24, "tensors")
    cursor.require(value_count, 13, "metadata values")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [cursor.tensor_entry() for _ in range(tensor_count)]

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ForerunError(f"{path} is damaged: its alignment is {alignment!r}; download it again")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ForerunError(
                f"{path} has the tensor {name!r} of the unknown type {kind}: update gguf"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if name in tensors or shape[-1] % block:
            raise ForerunError(f"{path} is damaged at the tensor {name!r}: download it again")
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        data = cursor.slice(start + offset, rows * row_bytes, f"the tensor {name!r}")
        tensors[name] = GgufTensor(shape, known.name, data.reshape(rows, row_bytes))
    return GgufFile(metadata, tensors)


class _Cursor:
    """A position in the file that never reads past its end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path, self.data, self.offset = path, data, 0
        self.buffer = data.data

    def require(self, count: int, size: int, what: str) -> None:
        """Refuse `count` items of at least `size` bytes that the rest of the file can't hold."""
        if count * size > len(self.data) - self.offset:
            raise ForerunError(
                f"{self.path} is truncated or damaged: it announces {count} {what} "
                f"but ends at byte {len(self.data)}; download it again"
            )

    def take(self, size: int) -> bytes:
        self.require(size, 1, "bytes")
        self.offset += size
        return bytes(self.buffer[self.offset - size : self.offset])

    def slice(self, offset: int, size: int, what: str) -> npt.NDArray[np.uint8]:
        if offset + size > len(self.data):
            raise ForerunError(
                f"{self.path} is truncated: {what} ends at byte {offset + size}, "
                f"the file at {len(self.data)}; download it again"
            )
        return self.data[offset : offset + size]

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.require(1, size, "more values")
        self.offset += size
        return struct.unpack_from("<" + code, self.buffer, self.offset - size)[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise ForerunError(
                f"{self.path} is damaged: a text before byte {self.offset} is not UTF-8; "
                "download it again"
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ForerunError(
                f"{self.path} is damaged: unknown value type {kind} at byte {self.offset}; "
                "download it again"
            )
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            self.require(count, 8, "texts")
            return [self.text() for _ in range(count)]
        if item not in _SCALARS:
            raise ForerunError(
                f"{self.path} has an array of value type {item} at byte {self.offset}, which no "
                "supported model uses: download it again"
            )
        code = _SCALARS[item]
        size = struct.calcsize("<" + code)
        self.require(count, size, "numbers")
        return list(struct.unpack(f"<{count}{code}", self.take(count * size)))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch's order, ggml type and offset of the next tensor."""
        name, dimensions = self.text(), self.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ForerunError(
                f"{self.path} is damaged: the tensor {name!r} has {dimensions} dimensions; "
                "download it again"
            )
        sizes = [self.number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")
