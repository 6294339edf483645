"""Triton kernels -> PTX and machine code for a named GPU, on a machine that needs none.

A kernel's module holds the Triton function, its launcher on torch tensors (a GPU's, or any where
Triton interprets: TRITON_INTERPRET=1), and its `KernelForm`s. What it must compute stands in
`forerun.models`, in torch, and is what the tests compare it with.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, MissingDependencyError

CAPABILITIES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities that every kernel is compiled for in the tests."""
WARP = 32
ALIGNMENT = 16
"""Bytes that every pointer is a multiple of, as engines allocate: loads become vectors."""
PTX_VERSION = 87
"""Of the PTX: the oldest that knows all of them, so that drivers from CUDA 12.8 on load it."""


@dataclass(frozen=True)
class KernelForm:
    """A kernel at fixed types and sizes."""

    function: Any
    """What `triton.jit` made."""
    types: Mapping[str, str]
    """Each argument that is passed, in order: `*fp16`, `*i64`, `i32`, `fp32`, ..."""
    constants: Mapping[str, Any]
    """Those that are compiled in."""
    warps: int = 4
    stages: int = 2
    """Of the pipeline that loads ahead."""


@dataclass(frozen=True)
class Binary:
    """A kernel as a GPU takes it. Launched with `warps * 32` threads a block."""

    name: str
    ptx: str
    cubin: bytes
    warps: int
    shared: int
    """Bytes of shared memory a block."""
    capability: int

    @property
    def registers(self) -> int:
        """Each thread's."""
        return self._reported(r"Used (\d+) registers")

    @property
    def spilled(self) -> int:
        """Bytes that a thread stores to memory for want of registers."""
        return self._reported(r"(\d+) bytes spill stores")

    def _reported(self, pattern: str) -> int:
        found = re.search(pattern, self._report)
        assert found is not None, self._report
        return int(found.group(1))

    @cached_property
    def _report(self) -> str:
        """What the assembler that comes with Triton says of the PTX; an engine needs none of it."""
        from triton import knobs

        tool = knobs.nvidia.ptxas if self.capability < 90 else knobs.nvidia.ptxas_blackwell
        found = re.search(r"^\.target (sm_\w+)", self.ptx, re.MULTILINE)
        architecture = found.group(1) if found else f"sm_{self.capability}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.ptx")
            path.write_text(self.ptx)
            command = [tool.path, "-v", f"-arch={architecture}", str(path), "-o", f"{path}.cubin"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def build_kernel(form: KernelForm, capability: int) -> Binary:
    """Compile for the compute capability `capability` (89 is sm_89).

    Raises ForerunError where Triton refuses, MissingDependencyError where it is absent.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError:
        raise MissingDependencyError("triton", "kernels", "Compiling a kernel") from None
    names = form.function.arg_names
    signature = {name: form.types.get(name, "constexpr") for name in names}
    aligned = {
        (place,): [["tt.divisibility", ALIGNMENT]]
        for place, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(form.function, signature, dict(form.constants), aligned)
    target = GPUTarget("cuda", capability, WARP)
    options = {
        "num_warps": form.warps,
        "num_stages": form.stages,
        "enable_fp_fusion": True,
    }
    if capability in CAPABILITIES:  # a newer one needs a newer PTX
        options["ptx_version"] = PTX_VERSION
    try:
        compiled = triton.compile(source, target=target, options=options)
    except (triton.TritonError, RuntimeError, OSError) as error:  # no assembler, or a broken one
        title = form.function.__name__
        raise ForerunError(f"kernel {title} for sm_{capability}: {_line(error)}") from None
    return Binary(
        compiled.metadata.name,
        compiled.asm["ptx"],
        compiled.asm["cubin"],
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        capability,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
