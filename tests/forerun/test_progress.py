"""A bar on a terminal; nothing, not even an import, anywhere else."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from forerun.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("Reading", total=3) as advance:
        advance()
        advance(2)
    assert "Reading" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "3/3" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_bar_is_left_in_order_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), progress("Reading", total=None) as advance:
        advance()
        raise KeyError


def test_nothing_elsewhere() -> None:
    script = (
        "import sys; from forerun.progress import progress\n"
        "with progress('Reading', 3) as advance: advance(); advance(2)\n"
        "assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
