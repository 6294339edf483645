"""Another drafter in a compiled bundle, without exporting or building again.

The new drafter is loaded, trimmed and rounded as `forerun.compiler.pipeline` does it. Where its
form is the compiled one's, the graph is the same, and only the content of its weights differs: it
is written to a new file, with a graph that refers to it, and the manifest is replaced last. Until
then the bundle is the old one, from then on the new one; a killed swap leaves files that no
manifest lists, and the next one removes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from forerun.compiler.initializers import DRAFTER_DATA, drafter_weights, save_with_drafter
from forerun.compiler.options import recipe
from forerun.compiler.pipeline import (
    ENGINE_FILE,
    FORM_FILE,
    ONNX_FILE,
    draft_trees,
    drafter_facts,
)
from forerun.compiler.precision import PRECISIONS
from forerun.compiler.staging import check_destination, put_in_place, staging
from forerun.errors import ForerunError
from forerun.models.checkpoint import SHIPPED, Checkpoint, load_checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import FOLDERLESS, DrafterSource, find_drafter, load_drafter
from forerun.models.form import difference, form
from forerun.runtime.bundle import (
    MANIFEST,
    Bundle,
    file_facts,
    load_bundle,
    read_manifest,
    replace_manifest,
)
from forerun.runtime.engine import BUILD_ONLY
from forerun.runtime.manifest import Manifest

Say = Callable[[str], None]
Array = NDArray[Any]


@dataclass(frozen=True)
class SwapOptions:
    """One swap. `target` may be left out where the bundle's is a shipped one; without `output` the
    bundle itself is changed."""

    bundle: Path
    drafter: str
    target: str | None = None
    output: Path | None = None


@dataclass(frozen=True)
class Swapped:
    """What `swap_drafter` did."""

    path: Path
    manifest: Manifest
    changed: bool
    """Whether the bundle holds another drafter than before."""


@dataclass(frozen=True)
class Replacement:
    """All that a swap changes: the manifest but for its files, and the drafter's weights."""

    manifest: Manifest
    weights: dict[str, Array]


def swap_drafter(options: SwapOptions, say: Say = lambda line: None) -> Swapped:
    """Put the drafter `options.drafter` in the place of the bundle's.

    Raises ForerunError, with the bundle as it was, where the drafter is of another kind or form,
    the target another one, the engine not refittable, or the disk full.
    """
    source, output = options.bundle, options.output
    if output is None or output.resolve() == source.resolve():
        with _alone(source):
            bundle = load_bundle(source)
            new = _replacement(bundle, options, say)
            manifest = bundle.manifest if new is None else _write(bundle, new, say)
        return Swapped(source, manifest, new is not None)
    check_destination(output)
    bundle = load_bundle(source)
    new = _replacement(bundle, options, say)
    with staging(output) as folder:
        copy = _copy(bundle, folder)
        manifest = bundle.manifest if new is None else _write(copy, new, say)
        put_in_place(folder, output)
    return Swapped(output, manifest, new is not None)


# --- what comes into the bundle -----------------------------------------------------------------


def _replacement(bundle: Bundle, options: SwapOptions, say: Say) -> Replacement | None:
    """What the swap will write; None where the bundle holds that drafter already."""
    manifest = bundle.manifest
    source = _source(bundle, options.drafter)
    compiled = recipe(manifest.setting, source)
    # What compiling would not give, since the trees are others, has a recipe of its own.
    fitted = recipe(f"{manifest.setting} {manifest.drafter.options}", source)
    if manifest.recipe in (compiled, fitted):
        return None
    say(f"reading the target and the drafter {source.name}")
    drafter, own = _of_the_bundles_form(bundle, source, _checkpoint(bundle, options.target))
    if not own:
        say("its own best trees need other heads or choices than were compiled: those are kept")
    trees = draft_trees(sorted(map(int, manifest.trees)), drafter)
    facts = drafter_facts(source, drafter)
    drafter = PRECISIONS[manifest.precision].drafter(drafter)
    weights = {name: weight.detach().numpy() for name, weight in drafter.state_dict().items()}
    return Replacement(
        replace(manifest, drafter=facts, trees=trees, recipe=compiled if own else fitted), weights
    )


def _source(bundle: Bundle, name: str) -> DrafterSource:
    """The new drafter, found but not read, once it may take the place of the bundle's."""
    compiled = bundle.manifest.drafter
    if compiled.kind in FOLDERLESS:
        raise ForerunError(
            f"{bundle.path}: its drafter {compiled.kind} has no weights to swap: compile a bundle"
        )
    source = find_drafter(name)
    if source.kind != compiled.kind:
        raise ForerunError(
            f"drafter {name!r} is of kind {source.kind}, the bundle's of kind {compiled.kind}: "
            "only one of the same kind can take its place; compile a bundle with it"
        )
    engine = bundle.manifest.engine
    if engine.kind in BUILD_ONLY and not engine.refit:
        raise ForerunError(
            f"{bundle.path}: its engine can't be refitted: compile it again with --refit"
        )
    return source


def _checkpoint(bundle: Bundle, target: str | None) -> Checkpoint:
    """The bundle's target, which drafters share layers with."""
    compiled = bundle.manifest.target
    if target is None and compiled.name not in SHIPPED:
        raise ForerunError(
            f"{bundle.path}: its target {compiled.name!r} does not come with forerun: "
            "give the folder or file that the bundle was compiled from as --target"
        )
    checkpoint = load_checkpoint(target or compiled.name)
    if checkpoint.digest != compiled.digest:
        raise ForerunError(
            f"{bundle.path}: compiled from another target than {target or compiled.name}: "
            "its files differ: give the one it was compiled from as --target"
        )
    return checkpoint


def _of_the_bundles_form(
    bundle: Bundle, source: DrafterSource, checkpoint: Checkpoint
) -> tuple[Drafter, bool]:
    """The drafter in float32 in the form that was compiled, and whether it is so by itself.

    Trimmed for its own trees, as `forerun compile` would, or else like the compiled one.
    """
    manifest = bundle.manifest
    wanted = json.loads(bundle.file(FORM_FILE).read_text(encoding="utf-8"))
    sizes = sorted(map(int, manifest.trees))
    acceptance = str(manifest.drafter.options.get("acceptance", "matching"))

    def load() -> Drafter:
        return load_drafter(source, checkpoint, manifest.capacity, acceptance)

    drafter = load()
    drafter.trim(sizes)
    if difference(form(drafter), wanted) is None:
        return drafter, True
    drafter = load()
    drafter.trim_like(sizes, manifest.drafter.options)
    different = difference(form(drafter), wanted)
    if different is not None:
        raise ForerunError(
            f"drafter {source.name!r} is not of the form that {bundle.path} was compiled with: "
            f"{different}: compile a bundle with it"
        )
    return drafter, False


# --- writing ------------------------------------------------------------------------------------


def _write(bundle: Bundle, new: Replacement, say: Say) -> Manifest:
    """The new files, the manifest, and only then away with the old ones."""
    folder, old = bundle.path, bundle.manifest
    graph, data, engine = _names(new.manifest.recipe)
    model = ir.load(bundle.file(old.engine.graph))
    replaced = _replaced(bundle, model, new.weights)
    say("writing the drafter's weights")
    with staging(folder / "swap") as fresh:
        save_with_drafter(model, fresh / graph, data, new.weights)
        facts = replace(old.engine, file=graph, graph=graph)
        if old.engine.kind in BUILD_ONLY:
            _refit(bundle, new.weights, model, fresh / engine)
            facts = replace(facts, file=engine)
        made = {path.name: file_facts(fresh, path.name) for path in fresh.iterdir()}
        kept = {name: file for name, file in old.files.items() if name not in replaced}
        manifest = replace(new.manifest, engine=facts, files=dict(sorted((kept | made).items())))
        try:
            for name in made:
                (fresh / name).rename(folder / name)
            replace_manifest(folder, manifest)
        finally:
            _remove_unlisted(folder)
    return manifest


def _copy(bundle: Bundle, folder: Path) -> Bundle:
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
def _alone(folder: Path) -> Iterator[None]:
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
