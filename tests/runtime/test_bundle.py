"""A bundle opens only as it was written, and never reads outside its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.runtime.bundle import load_bundle, load_tokenizer, write_manifest
from forerun.runtime.manifest import Manifest

FILES = ["tokenizer.json", "chat_template.jinja", "model.onnx", "golden/inputs.npz"]


def refused(folder: Path) -> str:
    with pytest.raises(ForerunError) as caught:
        load_bundle(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def edit(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_bundle_opens_as_written(bundle_folder: Path, manifest: Manifest) -> None:
    bundle = load_bundle(str(bundle_folder))
    assert set(bundle.manifest.files) == set(FILES)
    assert bundle.manifest.target == manifest.target
    assert bundle.chat_template == "{{ messages[0].content }}"
    assert bundle.tokenizer.decode(bundle.tokenizer.encode("hello").ids) == "hello"
    assert bundle.file("golden/inputs.npz").read_bytes() == b"golden"
    assert not (bundle_folder / "manifest.json.partial").exists()


def test_writing_again_finds_the_same(bundle_folder: Path, manifest: Manifest) -> None:
    before = (bundle_folder / "manifest.json").read_bytes()
    (bundle_folder / "manifest.json.partial").write_bytes(b"left by an interrupted run")
    write_manifest(bundle_folder, manifest)
    assert (bundle_folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte(bundle_folder: Path, name: str) -> None:
    content = bytearray((bundle_folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle_folder / name).write_bytes(content)
    assert f"{name}: the content is not what the manifest says" in refused(bundle_folder)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_and_a_longer_file(bundle_folder: Path, name: str) -> None:
    content = (bundle_folder / name).read_bytes()
    for wrong in (content[:-1], b"", content + b" "):
        (bundle_folder / name).write_bytes(wrong)
        assert f"{name}: {len(wrong)} bytes" in refused(bundle_folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_and_a_folder_in_its_place(bundle_folder: Path, name: str) -> None:
    (bundle_folder / name).unlink()
    assert f"{name}: missing" in refused(bundle_folder)
    (bundle_folder / name).mkdir()
    assert f"{name}: missing" in refused(bundle_folder)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_bundle(bundle_folder: Path, name: str) -> None:
    outside = bundle_folder.parent / "outside"
    # The right content, so that only the place is wrong.
    (bundle_folder / name).rename(outside)
    (bundle_folder / name).symlink_to(outside)
    assert f"{name}: a link that leaves the bundle" in refused(bundle_folder)
    with pytest.raises(ForerunError, match="leaves the bundle"):
        write_manifest(bundle_folder, load_manifest(bundle_folder))


def load_manifest(folder: Path) -> Manifest:
    return Manifest.from_json((folder / "manifest.json").read_text())


def test_a_folder_linked_out_of_the_bundle(bundle_folder: Path) -> None:
    (bundle_folder / "golden").rename(bundle_folder.parent / "elsewhere")
    (bundle_folder / "golden").symlink_to(bundle_folder.parent / "elsewhere")
    assert "leaves the bundle" in refused(bundle_folder)


def test_a_link_inside_the_bundle_and_a_loop_of_links(bundle_folder: Path) -> None:
    (bundle_folder / "model.onnx").rename(bundle_folder / "real")
    (bundle_folder / "model.onnx").symlink_to("real")
    assert load_bundle(bundle_folder).file("model.onnx").stat().st_size == 1280
    (bundle_folder / "model.onnx").unlink()
    (bundle_folder / "model.onnx").symlink_to("model.onnx")
    assert "model.onnx" in refused(bundle_folder)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../secret",
        "golden/../../secret",
        "golden/../golden/inputs.npz",
        "",
        ".",
        "..",
        "C:\\x",
        "a\\..\\b",
        "n\0",
        "\ud800",
    ],
)
def test_a_name_that_leaves_the_bundle(bundle_folder: Path, name: str) -> None:
    (bundle_folder.parent / "secret").write_bytes(b"golden")

    def move(data: Any) -> None:
        data["files"][name] = data["files"].pop("golden/inputs.npz")

    edit(bundle_folder, move)
    refused(bundle_folder)


def test_an_extra_file_is_never_read(bundle_folder: Path) -> None:
    (bundle_folder / "chat_template.jinja").unlink()
    edit(bundle_folder, lambda data: data["files"].pop("chat_template.jinja"))
    (bundle_folder / "chat_template.jinja").write_text("not the compiler's")
    bundle = load_bundle(bundle_folder)
    assert bundle.chat_template is None
    for name in ("chat_template.jinja", "manifest.json", "../outside", "/etc/passwd"):
        with pytest.raises(ForerunError, match="lists no file"):
            bundle.file(name)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.onnx"])
def test_an_unlisted_necessity(bundle_folder: Path, name: str) -> None:
    edit(bundle_folder, lambda data: data["files"].pop(name))
    assert f"lists no file '{name}'" in refused(bundle_folder)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "it has no manifest.json" in refused(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(tmp_path)
    with (tmp_path / "manifest.json").open("wb") as stream:
        os.truncate(stream.fileno(), 1 << 40)
    assert "larger than any manifest" in refused(tmp_path)


def test_another_contract(bundle_folder: Path) -> None:
    edit(bundle_folder, lambda data: data.update(contract=99))
    assert "step contract 99" in refused(bundle_folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\x80", b'{"model": {"type": "BPE"}}'])
def test_a_listed_file_that_is_no_tokenizer(
    bundle_folder: Path, manifest: Manifest, content: bytes
) -> None:
    (bundle_folder / "tokenizer.json").write_bytes(content)
    write_manifest(bundle_folder, manifest)
    assert "not a tokenizer" in refused(bundle_folder)


def test_a_tokenizer_that_makes_the_library_panic(bundle_folder: Path) -> None:
    path = bundle_folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(data))
    with pytest.raises(ForerunError, match="not a tokenizer"):
        load_tokenizer(path)


def test_a_tokenizer_neither_truncates_nor_pads(bundle_folder: Path) -> None:
    path = bundle_folder / "tokenizer.json"
    greedy = Tokenizer.from_file(str(path))
    greedy.enable_truncation(2)
    greedy.enable_padding(length=50)
    greedy.save(str(path))
    loaded = load_tokenizer(path)
    assert loaded.decode(loaded.encode("hello world, hello").ids) == "hello world, hello"
    assert len(loaded.encode("hello").ids) < 50
