"""Files that a command writes: whole or not at all, and asked for before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.runtime.output import check_output, write_output


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    check_output(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    check_output(path)
    assert path.read_text() == "old"
    write_output(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_output(path, "\ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_a_device_is_only_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    null = Path("/dev/null")
    check_output(null)
    write_output(null, "gone")
    assert null.is_char_device()


@pytest.mark.parametrize("name", ["missing/out.html", "file/out.html", "folder"])
def test_what_cannot_be_written_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for attempt in (check_output, lambda path: write_output(path, "x")):
        with pytest.raises(ForerunError, match="can't write the result") as caught:
            attempt(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
