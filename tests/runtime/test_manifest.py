"""A manifest survives the round trip, and nothing but a right one is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.manifest import CONTRACT, FileFacts, Manifest
from forerun.runtime.tree import Tree


@pytest.fixture
def complete(manifest: Manifest) -> Manifest:
    return replace(manifest, files={"a/b.onnx": FileFacts("0f" * 32, 12)})


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside `value`."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def parent_of(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        data = data[key]
    return data


def refused(data: Any, where: str = "b/manifest.json") -> str:
    with pytest.raises(ForerunError) as caught:
        Manifest.from_json(json.dumps(data), where)
    message = str(caught.value)
    assert message.startswith(f"{where}: ") and "\n" not in message
    assert "compile the bundle again" in message
    return message


def test_round_trip(complete: Manifest) -> None:
    assert Manifest.from_json(complete.to_json()) == complete
    assert Manifest.from_json(complete.to_json()).to_json() == complete.to_json()


def test_every_value_of_a_wrong_type_is_named(complete: Manifest) -> None:
    original = json.loads(complete.to_json())
    for place in places(original):
        data = json.loads(complete.to_json())
        # No field is a list of lists, and no free fact is a list at all.
        parent_of(data, place)[place[-1]] = [[]]
        message = refused(data)
        assert str(place[0]) in message, (place, message)


def test_a_bool_is_no_number_and_a_number_no_text(complete: Manifest) -> None:
    for path, wrong in [(("capacity",), True), (("target", "add_bos"), 1), (("recipe",), 7)]:
        data = json.loads(complete.to_json())
        parent_of(data, path)[path[-1]] = wrong
        assert f"{'.'.join(path)}: expected" in refused(data)


def test_every_missing_and_every_unknown_field_is_named(complete: Manifest) -> None:
    original = json.loads(complete.to_json())
    # Free mappings may lose or gain keys; these objects may not.
    fixed = [(), ("target",), ("drafter",), ("engine",), ("trees", "4"), ("files", "a/b.onnx")]
    for place in fixed:
        names = list(parent_of(original, (*place, None)))
        for name in names:
            data = json.loads(complete.to_json())
            del parent_of(data, (*place, None))[name]
            assert f"{'.'.join((*place, name))}: missing" in refused(data)
        data = json.loads(complete.to_json())
        parent_of(data, (*place, None))["surprise"] = 1
        assert "surprise" in refused(data)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("capacity",), 0),
        (("pending",), -1),
        (("pending",), 3),
        (("chunk",), 0),
        (("default_tree",), "7"),
        (("target", "vocab_size"), 0),
        (("target", "stop_ids"), [320]),
        (("target", "stop_ids"), [-1]),
        (("files", "a/b.onnx", "sha256"), "0F" * 32),
        (("files", "a/b.onnx", "sha256"), "ab"),
        (("files", "a/b.onnx", "bytes"), -1),
        (("trees", "4", "parents"), [-1, 0, 2, 1]),
        (("trees", "4", "slots"), [0, 1, 2]),
        (("trees", "1", "parents"), []),
    ],
)
def test_impossible_values_are_refused(complete: Manifest, path: Any, wrong: Any) -> None:
    data = json.loads(complete.to_json())
    parent_of(data, path)[path[-1]] = wrong
    refused(data)


def test_trees_go_by_their_size_and_plain_decoding_is_there(complete: Manifest) -> None:
    data = json.loads(complete.to_json())
    data["trees"]["5"] = data["trees"]["4"]
    assert "trees.5" in refused(data)
    data = json.loads(complete.to_json())
    del data["trees"]["1"]
    assert "plain decoding" in refused(data)
    with pytest.raises(ForerunError, match="pending"):
        replace(complete, trees={"1": Tree.chain(1), "9": Tree.chain(9)})


def test_another_contract_says_both_numbers_before_anything_else(complete: Manifest) -> None:
    data = {"contract": CONTRACT + 41, "whatever": "comes later"}
    message = refused(data)
    assert f"contract {CONTRACT + 41} " in message and f"follows {CONTRACT}" in message
    assert message.count("compile the bundle again") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        "{",
        '{"contract": 1, "contract": 1}',
        '{"contract": NaN}',
        "[" * 100_000,
        "9" * 10_000,
    ],
)
def test_what_is_no_manifest_is_one_line(text: str) -> None:
    with pytest.raises(ForerunError, match=r"^manifest\.json: ") as caught:
        Manifest.from_json(text)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(complete: Manifest) -> None:
    text = complete.to_json().rstrip()
    for length in range(0, len(text), 7):
        with pytest.raises(ForerunError):
            Manifest.from_json(text[:length])
