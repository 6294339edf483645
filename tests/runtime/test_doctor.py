"""`forerun doctor` says what is there, and goes on whatever is missing or broken."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest

from forerun.runtime.doctor import CudaFacts, Device, Found, Needs, ability

PRELUDE = """
import importlib.abc, importlib.machinery, sys

class Fake(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    '''Packages that can't be found, or whose import raises.'''
    def __init__(self, missing, broken):
        self.missing, self.broken = missing, broken
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in self.missing:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        if name in self.broken:
            return importlib.machinery.ModuleSpec(name, self)
    def exec_module(self, module):
        raise self.broken[module.__name__]

ALL = ['torch', 'onnx', 'onnxscript', 'polygraphy', 'gguf', 'onnxruntime', 'tensorrt_rtx',
       'tensorrt', 'triton', 'cuda', 'transformers', 'onnx_ir']
"""
RUN = """
from forerun.cli import main
main(['doctor', *sys.argv[1:]])
"""


def doctor(fakes: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = PRELUDE + fakes + RUN
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


def report(fakes: str = "") -> dict[str, Any]:
    done = doctor(fakes, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_with_the_base_install_alone() -> None:
    found = report("sys.meta_path.insert(0, Fake(ALL, {}))\n")
    assert {item["state"] for item in found["packages"].values()} == {"missing"}
    assert found["packages"]["torch"]["install"] == "pip install 'forerun[compile]'"
    assert found["packages"]["tensorrt-rtx"]["install"] == "pip install 'forerun[rtx]'"
    assert found["cuda"]["devices"] == [] and "cuda-bindings" in found["cuda"]["detail"]
    for able in found["engines"].values():
        assert not able["builds"] and not able["runs"] and able["missing"]
    assert "onnxruntime: pip install 'forerun[cpu]'" in found["engines"]["ort"]["missing"]


def test_the_table_with_the_base_install_alone() -> None:
    done = doctor("sys.meta_path.insert(0, Fake(ALL, {}))\n")
    assert done.returncode == 0 and done.stderr == ""
    for text in ("missing", "forerun[compile]", "--engine tensorrt-rtx", "needs"):
        assert text in done.stdout


BROKEN = {
    "a library is missing": "ImportError('libcudart.so.13: cannot open shared object file')",
    "another package is missing": "ModuleNotFoundError('No module named sympy', name='sympy')",
    "it exits": "SystemExit(3)",
    "it fails": "RuntimeError('two\\nlines')",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_reported(case: str) -> None:
    others = "[name for name in ALL if name != 'triton']"
    found = report(f"sys.meta_path.insert(0, Fake({others}, {{'triton': {BROKEN[case]}}}))\n")
    triton = found["packages"]["triton"]
    assert triton["state"] == "broken" and triton["install"] == "pip install 'forerun[kernels]'"
    assert triton["detail"].partition(":")[0] == BROKEN[case].partition("(")[0]
    assert "\n" not in triton["detail"]
    assert found["packages"]["torch"]["state"] == "missing"


def test_a_module_that_is_blocked_is_missing() -> None:
    blocked = "sys.modules['tensorrt_rtx'] = None\n"
    others = "[name for name in ALL if name != 'tensorrt_rtx']"
    found = report(f"sys.meta_path.insert(0, Fake({others}, {{}}))\n{blocked}")
    assert found["packages"]["tensorrt-rtx"]["state"] == "missing"


def test_what_is_here() -> None:
    """Versions are those of the packages' own metadata, and abilities follow from them."""
    found = report()
    for name in ("torch", "onnxruntime", "onnx"):
        pytest.importorskip(name)
        assert found["packages"][name]["state"] == "ok"
        assert found["packages"][name]["version"] == importlib.metadata.version(name)
    import onnxruntime

    assert found["onnxruntime_providers"] == onnxruntime.get_available_providers()
    assert found["engines"]["ort"]["runs"] and found["engines"]["torch"]["runs"]
    if not found["cuda"]["devices"]:
        assert found["engines"]["torch"]["runs_on"] == ["cpu"]
        for kind in ("tensorrt", "tensorrt-rtx"):
            assert not found["engines"][kind]["runs"]
            assert any(line.startswith("a GPU: ") for line in found["engines"][kind]["missing"])


OK, GONE = Found("ok", "1"), Found("missing", install="pip install x")
GPU = CudaFacts("13.0", (Device("some GPU", "sm_89", 24 << 30),))
NONE = CudaFacts(None, (), "no driver")


@pytest.mark.parametrize(
    ("packages", "cuda", "builds", "runs", "missing"),
    [
        ({"a": OK, "b": OK}, GPU, True, True, []),
        ({"a": OK, "b": OK}, NONE, True, False, ["a GPU: no driver"]),
        ({"a": OK, "b": GONE}, GPU, True, False, ["b: pip install x"]),
        ({"a": GONE, "b": OK}, GPU, False, True, ["a: pip install x"]),
        ({"a": Found("broken", install="y"), "b": OK}, GPU, False, True, ["a: y"]),
    ],
)
def test_abilities(
    packages: dict[str, Found], cuda: CudaFacts, builds: bool, runs: bool, missing: list[str]
) -> None:
    needs = Needs(("a",), ("b",), gpu_to_run=True)
    assert ability(needs, packages, cuda) == {"builds": builds, "runs": runs, "missing": missing}
