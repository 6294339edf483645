"""Another drafter in a compiled bundle, without exporting or building again.

The new drafter is loaded, trimmed and rounded as `forerun.compiler.pipeline` does it. Where its
form is the compiled one's, the graph is the same, and only the content of its weights differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.compiler.options import ENGINE_KINDS, recipe
from forerun.compiler.pipeline import FORM_FILE, draft_trees, drafter_facts
from forerun.compiler.precision import PRECISIONS
from forerun.compiler.staging import check_destination, put_in_place, staging
from forerun.compiler.swap_files import Array, alone, copy_bundle, write_drafter
from forerun.errors import ForerunError
from forerun.models.checkpoint import SHIPPED, Checkpoint, load_checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import FOLDERLESS, DrafterSource, find_drafter, load_drafter
from forerun.models.form import difference, form
from forerun.models.linear import transpose_linears
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.engine import BUILT
from forerun.runtime.manifest import Manifest

Say = Callable[[str], None]


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
    output = options.output
    if output is None or output.resolve() == options.bundle.resolve():
        with alone(options.bundle):
            bundle = load_bundle(options.bundle)
            return _swapped(bundle, _replacement(bundle, options, say))
    check_destination(output)
    bundle = load_bundle(options.bundle)
    new = _replacement(bundle, options, say)
    with staging(output) as folder:
        swapped = _swapped(copy_bundle(bundle, folder), new)
        put_in_place(folder, output)
    return replace(swapped, path=output)


def _swapped(bundle: Bundle, new: Replacement | None) -> Swapped:
    if new is None:
        return Swapped(bundle.path, bundle.manifest, changed=False)
    manifest = write_drafter(bundle, new.manifest, new.weights)
    return Swapped(bundle.path, manifest, changed=True)


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
    drafter, own = _of_the_bundles_form(bundle, source, checkpoint_of(bundle, options.target))
    if not own:
        say("its own best trees need other heads or choices than were compiled: those are kept")
    trees = draft_trees(sorted(map(int, manifest.trees)), drafter)
    facts = drafter_facts(source, drafter)
    drafter = PRECISIONS[manifest.precision].drafter(drafter)
    if ENGINE_KINDS[manifest.engine.kind].transposed:
        transpose_linears(drafter)
    weights = {name: weight.detach().numpy() for name, weight in drafter.state_dict().items()}
    return Replacement(
        replace(
            manifest,
            drafter=facts,
            trees=trees,
            plan=None,  # which was made for the old one
            recipe=compiled if own else fitted,
        ),
        weights,
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
    if engine.kind == "torch":
        raise ForerunError(
            f"{bundle.path}: a torch bundle is not swapped: compile it again with the "
            "other drafter, which takes seconds"
        )
    if engine.kind in BUILT and not engine.refit:
        raise ForerunError(
            f"{bundle.path}: its engine can't be refitted: compile it again with --refit"
        )
    return source


def checkpoint_of(bundle: Bundle, target: str | None) -> Checkpoint:
    """What the bundle's target was compiled from; `target` may be left out for a shipped one.

    Raises ForerunError where it isn't known, or is another one.
    """
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
