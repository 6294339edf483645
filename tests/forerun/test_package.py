"""The wheel holds everything that the packages need, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("models", "compiler", "runtime", "training", "templates")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy, so that the tree gains no build folder."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("forerun", *PARTS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(work)]
    done = subprocess.run([*command, *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        return archive.namelist()


def files(folder: Path) -> list[Path]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if "__pycache__" not in path.parts]


def test_every_module_template_and_data_file_is_in_the_wheel(wheel: list[str]) -> None:
    expected = {f"forerun/{path.as_posix()}" for path in files(ROOT / "forerun")}
    for part in PARTS:
        expected |= {f"forerun/{part}/{path.as_posix()}" for path in files(ROOT / part)}
    assert "forerun/runtime/manifest.py" in expected and "forerun/py.typed" in expected
    assert expected - set(wheel) == set()
    pages = {name for name in wheel if name.startswith("forerun/templates/report")}
    assert {"forerun/templates/report.html.j2", "forerun/templates/report.css.j2"} < pages


def test_the_wheel_installs_nothing_beside_forerun(wheel: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"forerun"}
