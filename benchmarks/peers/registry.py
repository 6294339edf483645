"""Who is compared: every way of decoding, what it needs, and the settings that are tried for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

Source = Literal["bundle", "gguf", "folder", "int4"]
"""What an engine loads: a bundle, the target's GGUF file, its Hugging Face folder, or the int4 ONNX
model that ONNX Runtime GenAI's builder makes of that folder."""


@dataclass(frozen=True)
class Variant:
    """One way of decoding."""

    adapter: str
    """Module of this package, whose `open_model` loads the engine."""
    source: Source
    packages: tuple[str, ...] = ()
    """What must be installed in the peers' environment; none: it is this project itself."""
    plain: str | None = None
    """The variant whose tokens it must repeat; None: it is plain itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    tried: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Options of which a short probe picks the fastest, besides the number of threads. Those of
    the plain variant are taken over from it, since they may change the tokens."""

    @property
    def ours(self) -> bool:
        """Whether it is this project."""
        return not self.packages

    def settings(self, threads: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Every (threads, options) that the probe tries."""
        rows = [dict(zip(self.tried, row, strict=True)) for row in product(*self.tried.values())]
        return [(count, {**self.options, **row}) for count in threads for row in rows]


OURS, OURS_PLAIN = "forerun", "forerun-plain"

VARIANTS: dict[str, Variant] = {
    OURS_PLAIN: Variant("with_forerun", "bundle", options={"nodes": 1}),
    OURS: Variant("with_forerun", "bundle", plain=OURS_PLAIN),
    "llama.cpp": Variant("with_llama_cpp", "gguf", ("llama-cpp-python",)),
    "llama.cpp-lookup": Variant(
        "with_llama_cpp",
        "gguf",
        ("llama-cpp-python",),
        plain="llama.cpp",
        tried={"lookup": (2, 10)},
    ),
    "ort-genai": Variant("with_ort_genai", "int4", ("onnxruntime-genai",)),
    "openvino": Variant(
        "with_openvino",
        "gguf",
        ("openvino-genai",),
        tried={"attention": ("SDPA", "PA")},
    ),
    "openvino-lookup": Variant(
        "with_openvino",
        "gguf",
        ("openvino-genai",),
        plain="openvino",
        options={"attention": "PA"},
        tried={"lookup": (2, 5)},
    ),
    "transformers": Variant(
        "with_transformers",
        "folder",
        ("transformers", "torch"),
        tried={"dtype": ("float32", "bfloat16")},
    ),
    "transformers-lookup": Variant(
        "with_transformers",
        "folder",
        ("transformers", "torch"),
        plain="transformers",
        tried={"lookup": (3, 10)},
    ),
}


def missing(variant: Variant, installed: Mapping[str, str]) -> str | None:
    """Why `variant` can't take part with these packages (name -> version); None: it can."""
    lacking = [name for name in variant.packages if name not in installed]
    if not lacking:
        return None
    return f"not installed: {', '.join(lacking)} (python -m benchmarks.peers --install)"
