"""The command line imports only what it runs, and every failure is one line and a status."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from forerun import __version__
from forerun.cli import COMMANDS, LazyCommand, LazyGroup, main

PROBE = """
import click
from forerun.errors import ForerunError, MissingDependencyError

@click.command()
@click.argument("how")
def probe_command(how):
    \"\"\"Fail in the way that is asked for.\"\"\"
    if how == "error":
        raise ForerunError("the file x is\\n  broken: mend it")
    if how == "missing":
        raise MissingDependencyError("torch", "compile", "forerun probe")
    if how == "import":
        import no_such_package.part
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "bug":
        raise ZeroDivisionError
    click.echo("done")
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LazyGroup:
    """A group of one good command, one whose package is missing, and one that is broken."""
    (tmp_path / "probe_module.py").write_text(PROBE)
    (tmp_path / "probe_needy.py").write_text("import no_such_package")
    (tmp_path / "probe_broken.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    registry = {
        "probe": LazyCommand("probe_module:probe_command", "Fail."),
        "needy": LazyCommand("probe_needy:needy_command", "Need a package."),
        "broken": LazyCommand("probe_broken:broken_command", "Never import this."),
    }
    return LazyGroup("forerun", registry=registry, help="A group.")


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_help_lists_commands_in_order_and_imports_none(group: LazyGroup) -> None:
    result = run(group, "--help")
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.output.split("Commands:")[1].splitlines()]
    assert [line for line in lines if line] == [
        ["probe", "Fail."],
        ["needy", "Need a package."],
        ["broken", "Never import this."],
    ]


def test_a_command_imports_only_its_own_module(group: LazyGroup) -> None:
    result = run(group, "probe", "--help")
    assert result.exit_code == 0 and "in the way that is asked for" in result.output
    assert run(group, "probe", "well").output == "done\n"


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["probe", "error"], 1, "error: the file x is broken: mend it"),
        (["probe", "missing"], 1, "error: forerun probe needs the package 'torch', which is not"),
        (["probe", "import"], 1, "error: the package 'no_such_package' is not installed"),
        (["needy"], 1, "error: the package 'no_such_package' is not installed"),
        (["probe", "interrupt"], 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line_on_stderr(
    group: LazyGroup, arguments: list[str], status: int, line: str
) -> None:
    result = run(group, *arguments)
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["nothing"], ["probe"], ["probe", "a", "b"], ["--what"]])
def test_wrong_usage_is_status_2(group: LazyGroup, arguments: list[str]) -> None:
    result = run(group, *arguments)
    assert result.exit_code == 2 and "Usage:" in result.stderr


def test_a_bug_keeps_its_traceback(group: LazyGroup) -> None:
    assert isinstance(run(group, "probe", "bug").exception, ZeroDivisionError)


def test_version() -> None:
    assert __version__ in run(main, "--version").output


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_the_list_of_commands_needs_no_part_of_forerun() -> None:
    done = python(
        "import json, sys; from forerun.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(json.dumps(sorted(name for name in sys.modules if 'forerun' in name)))"
    )
    assert done.returncode == 0, done.stderr
    imported = [
        name for name in json.loads(done.stdout.splitlines()[-1]) if "__editable" not in name
    ]
    assert imported == ["forerun", "forerun.cli", "forerun.errors"]


BLOCKED = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript", "polygraphy", "gguf")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_the_base_install(name: str) -> None:
    module = COMMANDS[name].target.partition(":")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    blocked = "".join(f"sys.modules[{package!r}] = None; " for package in BLOCKED)
    done = python(f"import sys; {blocked}from forerun.cli import main; main([{name!r}, '--help'])")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from forerun.cli import main; main(['--help'])"],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == ""
