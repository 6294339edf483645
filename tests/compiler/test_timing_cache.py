"""The timing cache's files: whole or ignored, each in its place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forerun.compiler.timing_cache import (
    cache_folder,
    kept_timings,
    read_timings,
    timings_file,
    write_timings,
)


def test_the_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.delenv("FORERUN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "forerun"
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_flavours_versions_and_devices_have_files_of_their_own():
    kinds = [
        ("tensorrt", "11.4.0", "NVIDIA H200"),
        ("tensorrt", "11.5.0", "NVIDIA H200"),
        ("tensorrt", "11.4.0", "NVIDIA L4"),
        ("other", "11.4.0", "NVIDIA L4"),
    ]
    files = {timings_file(*kind) for kind in kinds}
    assert len(files) == len(kinds)
    assert all(
        set(file.name) <= set("abcdefghijklmnopqrstuvwxyzADHILNV0123456789._-") for file in files
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:40] + b"!" + content[41:],
        lambda content: b"",
        lambda content: b"no cache at all, but longer than a digest is",
    ],
)
def test_a_broken_file_is_ignored_and_replaced(tmp_path, damage):
    path = tmp_path / "timings" / "a.bin"
    assert read_timings(path) == b""
    write_timings(path, b"timings " * 20)
    assert read_timings(path) == b"timings " * 20
    path.write_bytes(damage(path.read_bytes()))
    assert read_timings(path) == b""
    write_timings(path, b"new")
    assert read_timings(path) == b"new"


def test_two_builds_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "a.bin"
    written = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda timings: write_timings(path, timings), written))
    assert read_timings(path) in written
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    write_timings(tmp_path / "file" / "a.bin", b"timings")
    assert read_timings(tmp_path / "file" / "a.bin") == b""


@pytest.mark.filterwarnings("ignore:.*no-ops")
@pytest.mark.parametrize("before", [None, b"garbage"])
def test_a_builder_takes_the_cache_and_gives_it_back(tmp_path, monkeypatch, before):
    """TensorRT-RTX has the calls, which do nothing there: enough to see that they fit."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    if before is not None:
        path = timings_file("tensorrt", "1", "gpu")
        path.parent.mkdir(parents=True)
        path.write_bytes(before)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    config = builder.create_builder_config()
    with kept_timings(config, "tensorrt", "1"):
        assert config.get_timing_cache() is not None
    files = list(Path(tmp_path, "timings").iterdir())
    assert len(files) == 1
    assert files[0].read_bytes() != before
