"""A bundle compiled again as it was, for more draft tree sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.compiler.builder import BuilderSettings
from forerun.compiler.options import CompileOptions
from forerun.compiler.pipeline import compile_bundle
from forerun.compiler.swap import checkpoint_of
from forerun.errors import ForerunError
from forerun.models.drafters import find_drafter
from forerun.runtime.bundle import Bundle, load_bundle


def compile_sizes(
    bundle: Bundle,
    sizes: Sequence[int],
    target: str | None,
    drafter: str | None,
    say: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """The bundle in its place, with trees of `sizes` nodes besides those it has.

    `target` and `drafter` may be left out where they are ones that ship with forerun. Raises
    ForerunError where they can't be found, or are not what the bundle was compiled from.
    """
    manifest = bundle.manifest
    checkpoint_of(bundle, target)
    name = drafter or manifest.drafter.name
    try:
        source = find_drafter(name)
    except ForerunError:
        if drafter is not None:
            raise
        raise ForerunError(
            f"{bundle.path}: its drafter {name!r} does not come with forerun: give its folder as "
            "--drafter"
        ) from None
    if source.digest != manifest.drafter.digest:
        raise ForerunError(f"{bundle.path}: compiled with another drafter than {name}")
    default = int(manifest.default_tree)
    others = {*map(int, manifest.trees), *sizes} - {1, default}
    engine = manifest.engine
    options = CompileOptions(
        target=target or manifest.target.name,
        output=bundle.path,
        drafter=name,
        engine=engine.kind,
        precision=manifest.precision,
        capacity=manifest.capacity,
        chunk=manifest.chunk,
        trees=(*sorted(others), default),
        acceptance=str(manifest.drafter.options.get("acceptance", "matching")),
        builder=BuilderSettings(devices=engine.devices, refit=engine.refit),
    )
    compile_bundle(options, say)
    return load_bundle(bundle.path)
