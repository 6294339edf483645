"""What a step of a bundle costs with 1, 2, 4, ... busy rows: `python benchmarks/rows.py BUNDLE`.

Prints JSON lines: milliseconds of a plain step and of one that verifies and drafts the default
tree. A step computes no row above the last busy one, so rows that are idle there cost nothing;
an idle row below a busy one costs what a busy one does.
"""

from __future__ import annotations

import json
import sys

from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import load_engine

ROWS = (1, 2, 3, 4, 6, 8)
THREADS = 1


def main() -> None:
    """Measures each number of rows with an engine of its own."""
    bundle = load_bundle(sys.argv[1])
    tree = int(bundle.manifest.default_tree)
    for rows in ROWS:
        engine = load_engine(bundle, THREADS, rows)
        cost = {nodes: engine.launch_ms(nodes, nodes, 12) for nodes in (1, tree)}
        print(json.dumps({"rows": rows, "ms": cost}), flush=True)


if __name__ == "__main__":
    main()
