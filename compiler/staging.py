"""A bundle is only ever seen whole: it is made beside its place, and renamed when it is done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import ForerunError


def check_destination(output: Path) -> None:
    """Never overwrite what is not a bundle."""
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / "manifest.json").exists()):
        raise ForerunError(f"{output} exists and is no bundle: choose another -o, or remove it")


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output`, gone afterwards whatever happens.

    Its name holds this process's id, so that what a killed process left is found and removed.
    """
    prefix, suffix = f".{output.name}.", ".partial"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for left in output.parent.glob(f"{prefix}*{suffix}"):
            owner = left.name.removeprefix(prefix).split(".")[0]
            if owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(left, ignore_errors=True)
        folder = output.parent / f"{prefix}{os.getpid()}{suffix}"
        folder.mkdir()
    except OSError as error:
        raise ForerunError(f"{output.parent}: can't write there: {error.strerror}") from None
    try:
        yield folder
    except OSError as error:
        raise ForerunError(f"{output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, output: Path) -> None:
    """Put the finished `folder` in the place of `output`; the old bundle goes only then."""
    if not output.exists():
        folder.rename(output)
        return
    old = folder.with_name(folder.name.replace(".partial", ".old.partial"))
    output.rename(old)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return True
