"""Prompt files: each form is read, and a wrong line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.runtime.prompts import Prompt, read_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_every_form(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "raw é", "category": "writing"},
        "",
        "  \t",
        {"messages": CHAT, "id": 3},
        {"turns": ["first", "second"], "category": ""},
    )
    raw, chat, turn = read_prompts(path)
    assert raw == Prompt(None, "raw é", "writing") and raw.content == "raw é"
    assert chat == Prompt(tuple(CHAT), None, None) and chat.content == tuple(CHAT)
    assert turn.content == ({"role": "user", "content": "first"},) and turn.category is None


def test_the_limit_stops_reading(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}, "not JSON")
    assert [prompt.text for prompt in read_prompts(str(path), 2)] == ["a", "b"]
    with pytest.raises(ForerunError, match="line 4: not JSON"):
        read_prompts(path, 3)
    with pytest.raises(ForerunError, match="limit is 0"):
        read_prompts(path, 0)


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in read_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        "null",
        '["prompt"]',
        '"prompt"',
        "[" * 100_000,
        {},
        {"question": "a"},
        {"prompt": "a", "turns": ["a"]},
        {"prompt": 3},
        {"prompt": None},
        {"prompt": ["a"]},
        {"messages": []},
        {"messages": "a"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": 1, "content": "a"}]},
        {"messages": [*CHAT, "a"]},
        {"turns": []},
        {"turns": "a"},
        {"turns": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "category": 3},
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any) -> None:
    path = written(tmp_path, {"prompt": "right"}, "", line)
    with pytest.raises(ForerunError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ") and "\n" not in message


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="no prompts in it"):
        read_prompts(written(tmp_path, "", ""))
    with pytest.raises(ForerunError, match="can't read"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(ForerunError, match="can't read"):
        read_prompts(tmp_path)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ForerunError, match="line 1: not JSON"):
        read_prompts(tmp_path / "latin")
