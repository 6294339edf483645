"""Kernel timings kept between TensorRT builds, one file a flavour, version and GPU.

A lost or broken file costs time and nothing else: it is ignored, and replaced by the next build.
Of two builds at once the later one's timings stay.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DIGEST = 32
"""Bytes of the SHA-256 that a file begins with, over all that follow."""


def cache_folder() -> Path:
    """Where forerun keeps what it can make again: FORERUN_CACHE, else the user's cache folder."""
    own = os.environ.get("FORERUN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "forerun")


def timings_file(flavour: str, version: str, device: str) -> Path:
    """The file of these timings."""
    name = re.sub(r"[^\w.-]+", "_", f"{flavour}-{version}-{device}")
    return cache_folder() / "timings" / f"{name}.bin"


def read_timings(path: Path) -> bytes:
    """What `write_timings` wrote there; nothing where it isn't whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    digest, timings = content[:DIGEST], content[DIGEST:]
    return timings if hashlib.sha256(timings).digest() == digest else b""


def write_timings(path: Path, timings: bytes) -> None:
    """Seen whole or not at all; a folder that can't be written to is nobody's error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(timings).digest() + timings)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def kept_timings(config: Any, flavour: str, version: str) -> Iterator[None]:
    """A build of `config` (IBuilderConfig) inside the block begins with those of earlier builds.

    TensorRT itself refuses timings of another version or GPU; it then begins without any.
    """
    path = timings_file(flavour, version, present_gpu())
    cache = config.create_timing_cache(read_timings(path))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    write_timings(path, bytes(config.get_timing_cache().serialize()))


def present_gpu() -> str:
    """The GPU's name, as far as this torch knows: builds need torch, but not one with CUDA."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "gpu"
