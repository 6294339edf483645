"""A deployed bundle needs neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, sys
import forerun.runtime
names = [m.name for m in pkgutil.walk_packages(forerun.runtime.__path__, "forerun.runtime.")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


def test_no_module_of_the_runtime_imports_torch_or_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported, heavy = json.loads(done.stdout)
    assert "forerun.runtime.manifest" in imported
    assert heavy == []
