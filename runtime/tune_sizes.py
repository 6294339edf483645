"""Draft tree sizes that a bundle lacks: compiled into it, where its graph can't take them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from forerun.runtime.bundle import Bundle
from forerun.runtime.engine import BUILT


def with_sizes(
    bundle: Bundle,
    sizes: Sequence[int],
    target: str | None,
    drafter: str | None,
    say: Callable[[str], None],
) -> Bundle:
    """`bundle`, compiled again in its place where that is what it takes to try `sizes`.

    An engine built for fixed sizes has the ones that it was built for; a graph with open sizes
    takes any that the drafter's candidates fill.
    """
    manifest = bundle.manifest
    most = manifest.drafter.candidates + 1
    built = manifest.engine.kind in BUILT
    lacking = [n for n in sizes if n > most or (built and str(n) not in manifest.trees)]
    if not lacking:
        return bundle
    say(f"compiling again, for trees of {', '.join(map(str, lacking))} nodes")
    compile_sizes = importlib.import_module("forerun.compiler.retree").compile_sizes
    found: Bundle = compile_sizes(bundle, lacking, target, drafter, say)
    return found
