"""A bundle: the folder that `forerun compile` writes, checked before anything in it is used."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.runtime.manifest import FileFacts, Manifest

MANIFEST = "manifest.json"
PARTIAL = f"{MANIFEST}.partial"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class Bundle:
    """A checked bundle. Only files that its manifest lists are ever read."""

    path: Path
    manifest: Manifest
    tokenizer: Tokenizer
    chat_template: str | None

    def file(self, name: str) -> Path:
        """The path of the file listed as `name`; raises ForerunError for any other name."""
        if name not in self.manifest.files:
            raise ForerunError(f"{self.path}: the manifest lists no file {name!r}")
        return self.path / name


def load_bundle(path: str | Path) -> Bundle:
    """Opens the bundle in the folder `path` once all its files are as the manifest says.

    Every listed file is hashed (0.7 s per GB here). Raises ForerunError where the folder or a file
    is missing, changed, or outside the bundle, or where the step contract is another.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        _check_file(folder, name, facts)
    for name in (TOKENIZER, manifest.engine.file):
        if name not in manifest.files:
            raise ForerunError(
                f"{folder}: the manifest lists no file {name!r}: compile the bundle again"
            )
    template = _read_text(folder / CHAT_TEMPLATE) if CHAT_TEMPLATE in manifest.files else None
    return Bundle(folder, manifest, load_tokenizer(folder / TOKENIZER), template)


def write_manifest(folder: str | Path, manifest: Manifest) -> Manifest:
    """Hashes every file under `folder`, writes `manifest.json` last, returns it with its `files`.

    A folder without a manifest is no bundle, so an interrupted compilation leaves none behind.
    """
    root = Path(folder)
    (root / PARTIAL).unlink(missing_ok=True)
    files: dict[str, FileFacts] = {}
    for found in sorted(root.rglob("*")):
        name = found.relative_to(root).as_posix()
        if name != MANIFEST and not found.is_dir():
            files[name] = file_facts(root, name)
    complete = replace(manifest, files=files)
    replace_manifest(root, complete)
    return complete


def file_facts(folder: Path, name: str) -> FileFacts:
    """What a manifest says of the file `name` in the bundle's `folder`."""
    path = _inside(folder, name)
    return FileFacts(_sha256(path), path.stat().st_size)


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, whose files are there: the bundle is the old one or the new one."""
    partial = folder / PARTIAL
    try:
        partial.write_text(manifest.to_json(), encoding="utf-8")
        partial.replace(folder / MANIFEST)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, without the truncation and padding it may ask for."""
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Exception itself, or a Rust panic, which is no Exception
        raise ForerunError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, whose files are not looked at."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ForerunError(f"{folder}: no such folder: give the path of a compiled bundle")
    if not path.is_file():
        raise ForerunError(f"{folder}: not a bundle: it has no {MANIFEST}")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ForerunError(f"{path}: larger than any manifest ({MAX_MANIFEST_BYTES} bytes)")
    return Manifest.from_json(_read_text(path), where=os.fspath(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ForerunError(f"{path}: not readable as UTF-8 text: {error}") from None


def _check_file(folder: Path, name: str, listed: FileFacts) -> None:
    path = _inside(folder, name)
    try:
        size = path.stat().st_size
        if size != listed.bytes:
            raise ForerunError(
                f"{path}: {size} bytes, the manifest says {listed.bytes}: "
                "copy or compile the bundle again"
            )
        if _sha256(path) != listed.sha256:
            raise ForerunError(
                f"{path}: the content is not what the manifest says (SHA-256 differs): "
                "copy or compile the bundle again"
            )
    except OSError as error:
        raise ForerunError(f"{path}: can't be read: {error}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _inside(folder: Path, name: str) -> Path:
    """The path of a regular file that really lies in `folder`, links followed."""
    pure = PurePosixPath(name)
    # A backslash and a colon are separators elsewhere: a bundle must mean the same everywhere.
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or not pure.name:
        raise ForerunError(f"{folder}: the file name {name!r} could leave the bundle: rename it")
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ForerunError(f"{path}: a link that leaves the bundle: put the file itself there")
        if not path.is_file():
            raise ForerunError(f"{path}: missing: copy or compile the bundle again")
    except (OSError, ValueError, RuntimeError) as error:  # NUL or surrogates in it; a loop of links
        raise ForerunError(f"{folder}: {name!r} can't be a file's name: {error}") from None
    return path
