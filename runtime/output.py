"""Files that a command is asked to write: tried before the work, seen only when complete."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forerun.errors import ForerunError


def check_output(path: Path) -> None:
    """Raises ForerunError where `path` can't be written: ask before measuring for minutes."""
    if path.is_dir():
        raise ForerunError(f"{path}: can't write the result: it is a folder: name a file in it")
    if _is_device(path):
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=path.name):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def write_output(path: Path, text: str) -> None:
    """Writes the whole of `text` or nothing; raises ForerunError where that fails."""
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)  # a link stays one
    except OSError as error:
        raise _unwritable(path, error) from None


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """A pipe, /dev/null: written to, never replaced."""
    return path.exists() and not path.is_file()


def _unwritable(path: Path, error: OSError) -> ForerunError:
    return ForerunError(f"{path}: can't write the result: {error.strerror}")
