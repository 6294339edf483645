"""The files of a swap: new ones under new names first, the manifest last.

Until the manifest is replaced the bundle is the old one, from then on the new one. A killed swap
leaves files that no manifest lists, and the next one removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from forerun.compiler.initializers import DRAFTER_DATA, drafter_weights, save_with_drafter
from forerun.compiler.pipeline import ENGINE_FILE, ONNX_FILE
from forerun.compiler.staging import staging
from forerun.errors import ForerunError
from forerun.runtime.bundle import (
    MANIFEST,
    Bundle,
    file_facts,
    read_manifest,
    replace_manifest,
)
from forerun.runtime.engine import BUILT
from forerun.runtime.manifest import Manifest

Array = NDArray[Any]


def write_drafter(bundle: Bundle, new: Manifest, weights: dict[str, Array]) -> Manifest:
    """Put the drafter's `weights`, by their names in its module, in the place of the bundle's.

    `new` is the manifest but for its files; returned whole. First come the new files, then the
    manifest, and only then the old files go.
    """
    folder, old = bundle.path, bundle.manifest
    graph, data, engine = _names(new.recipe)
    model = ir.load(bundle.file(old.engine.graph))
    replaced = _replaced(bundle, model, weights)
    with staging(folder / "swap") as fresh:
        save_with_drafter(model, fresh / graph, data, weights)
        facts = replace(old.engine, file=graph, graph=graph)
        if old.engine.kind in BUILT:
            _refit(bundle, weights, model, fresh / engine)
            facts = replace(facts, file=engine)
        made = {path.name: file_facts(fresh, path.name) for path in fresh.iterdir()}
        kept = {name: file for name, file in old.files.items() if name not in replaced}
        manifest = replace(new, engine=facts, files=dict(sorted((kept | made).items())))
        try:
            for name in made:
                (fresh / name).rename(folder / name)
            replace_manifest(folder, manifest)
        finally:
            _remove_unlisted(folder)
    return manifest


def copy_bundle(bundle: Bundle, folder: Path) -> Bundle:
    """The bundle's files in the empty `folder`."""
    for name in (MANIFEST, *bundle.manifest.files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, folder / name)
    return replace(bundle, path=folder)


def _names(recipe: str) -> tuple[str, str, str]:
    """New names for the graph, the drafter's weights and the engine, none of them in use."""
    tag = recipe[:12]
    names = (
        f"{Path(name).stem}-{tag}{Path(name).suffix}"
        for name in (ONNX_FILE, DRAFTER_DATA, ENGINE_FILE)
    )
    graph, data, engine = names
    return graph, data, engine


def _replaced(bundle: Bundle, model: ir.Model, weights: dict[str, Array]) -> set[str]:
    """The bundle's files that the swap makes superfluous.

    Raises ForerunError where the graph's weights are not those that the new drafter has.
    """
    engine = bundle.manifest.engine
    files = {engine.file, engine.graph}
    compiled = drafter_weights(model)
    if not compiled:
        raise ForerunError(f"{bundle.path}: {engine.graph} holds no drafter's weights: compile it")
    for name, value in compiled.items():
        tensor, new = value.const_value, weights.get(name)
        if new is None or not isinstance(tensor, ir.ExternalTensor):
            raise ForerunError(f"{bundle.path}: the drafter's weight {name!r} can't be replaced")
        if tensor.dtype.numpy() != new.dtype or tuple(tensor.shape) != new.shape:
            raise ForerunError(
                f"{bundle.path}: the drafter's weight {name!r} is {tensor.dtype.numpy()} "
                f"{list(tensor.shape)}, the new one {new.dtype} {list(new.shape)}"
            )
        files.add(str(tensor.location))
    return files


def _refit(bundle: Bundle, weights: dict[str, Array], model: ir.Model, out: Path) -> None:
    """The bundle's TensorRT engine with these weights, written to `out`."""
    from forerun.compiler.engine_tensorrt import refit_engine

    named = {str(value.name): weights[name] for name, value in drafter_weights(model).items()}
    engine = bundle.manifest.engine
    refit_engine(bundle.file(engine.file), out, named, engine.kind)


def _remove_unlisted(folder: Path) -> None:
    """Away with graphs, weights and engines of other drafters than the manifest's own.

    By the manifest that is there now, whichever that is: an interruption may come anywhere.
    """
    listed = read_manifest(folder).files
    for name in (ONNX_FILE, DRAFTER_DATA, ENGINE_FILE):
        ours = re.compile(rf"{Path(name).stem}(-[0-9a-f]{{12}})?{re.escape(Path(name).suffix)}")
        for path in folder.iterdir():
            if ours.fullmatch(path.name) and path.name not in listed:
                with suppress(OSError):  # what stays does no harm
                    path.unlink()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other swap changes the bundle meanwhile."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        raise ForerunError(
            f"{folder}: no such folder: give the path of a compiled bundle"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ForerunError(f"{folder}: another swap is changing it: wait for it to end") from None
    finally:
        os.close(handle)
