"""What to compile, and the hash that says whether it was compiled already."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun import __version__
from forerun.compiler.builder import DEFAULTS, BuilderSettings
from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafters import DrafterSource
from forerun.runtime.manifest import CONTRACT


@dataclass(frozen=True)
class EngineKind:
    """What an engine asks of the graph it is built from."""

    precisions: tuple[str, ...]
    """The first one is the default."""
    attention: str
    static_slots: bool
    branches: bool
    """Whether the graph may hold `If` and `Loop`: TensorRT-RTX 1.7.1 crashes on them at size."""
    package: str
    transposed: bool = False
    """Whether weights are best laid out `[N, K]` (`transpose_linears`)."""
    exports: bool = True
    """Whether it takes an ONNX graph; torch takes the step's weights as they are."""


TENSORRT_PRECISIONS = ("fp16", "bf16", "int4", "fp8", "fp32")
ENGINE_KINDS: dict[str, EngineKind] = {
    "ort": EngineKind(("int8", "fp32"), "grouped", False, True, "onnxruntime"),
    "tensorrt-rtx": EngineKind(TENSORRT_PRECISIONS, "fused", True, False, "tensorrt-rtx", True),
    "tensorrt": EngineKind(TENSORRT_PRECISIONS, "fused", True, False, "tensorrt", True),
    "torch": EngineKind(("fp32", "fp16", "bf16"), "stacked", False, True, "torch", exports=False),
}


@dataclass(frozen=True)
class CompileOptions:
    """One compilation. `precision` and `trees` may be left to their defaults (None, empty)."""

    target: str
    output: Path
    drafter: str = "ngram"
    engine: str = "ort"
    precision: str | None = None
    capacity: int = 2048
    chunk: int = 256
    trees: tuple[int, ...] = ()
    """Numbers of nodes to build steps for; 1 (plain) is always built."""
    acceptance: str = "matching"
    """matching, or rejection where the drafter samples from a distribution that it knows."""
    builder: BuilderSettings = DEFAULTS
    """For TensorRT engines."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINE_KINDS:
            raise ForerunError(f"engine {self.engine!r}: choose one of {', '.join(ENGINE_KINDS)}")
        offered = self.kind.precisions
        if self.precision is not None and self.precision not in offered:
            raise ForerunError(
                f"precision {self.precision!r} with engine {self.engine}: "
                f"choose one of {', '.join(offered)}"
            )
        if self.capacity < 2 * self.chunk:
            raise ForerunError(
                f"capacity {self.capacity} does not hold two prefill chunks of {self.chunk} "
                "tokens: raise --capacity"
            )
        self.builder.check(self.engine, self.real_precision)
        if any(nodes < 1 or nodes > self.chunk for nodes in self.trees):
            raise ForerunError(f"a tree has 1 to {self.chunk} nodes: --tree {max(self.trees)}")

    @property
    def kind(self) -> EngineKind:
        """The engine's facts."""
        return ENGINE_KINDS[self.engine]

    @property
    def devices(self) -> tuple[str, ...]:
        """What a TensorRT engine is built for; none: the GPU present, or no TensorRT engine."""
        return self.builder.real_devices(self.engine)

    @property
    def attention(self) -> str:
        """The form of attention in the graph."""
        return "tree" if self.builder.with_plugins(self.engine) else self.kind.attention

    @property
    def real_precision(self) -> str:
        """The precision, chosen or by default."""
        return self.precision or self.kind.precisions[0]


def versions(options: CompileOptions) -> dict[str, str]:
    """The packages that decide what an engine looks like, and their versions."""
    found = {}
    kernels = ("triton",) if options.builder.with_plugins(options.engine) else ()
    for package in ("torch", "onnx", "onnxscript", options.kind.package, *kernels):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def setting(options: CompileOptions, checkpoint: Checkpoint, kind: str) -> str:
    """SHA-256 over everything that goes into a bundle but the drafter of this `kind` itself."""
    facts = asdict(options) | {
        "output": None,
        "target": checkpoint.digest,
        "drafter": kind,
        "precision": options.real_precision,
        "builder": asdict(options.builder)
        | {"devices": options.devices, "plugins": options.builder.with_plugins(options.engine)},
        "contract": CONTRACT,
        "forerun": __version__,
        "code": code_digest(),
        "versions": versions(options),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def recipe(setting: str, drafter: DrafterSource) -> str:
    """SHA-256 over everything that goes into a bundle: same recipe, same bundle."""
    return hashlib.sha256(f"{setting} {drafter.digest}".encode()).hexdigest()


def code_digest() -> str:
    """SHA-256 over the sources that shape a graph, so that a development change recompiles."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    models = Path(importlib.import_module("forerun.models").__file__ or "").parent
    for folder in (models, package):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
