"""`forerun serve` as a process: it says where it listens, and ends without losing an answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from forerun.runtime.model import load  # noqa: E402

RUN = "from forerun.cli import main; main()"


@contextmanager
def process(*arguments: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN, "serve", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as found:
        try:
            yield found
        finally:
            found.kill()


def event(server: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The log's next line about `name`."""
    assert server.stderr is not None
    for line in server.stderr:
        facts: dict[str, Any] = json.loads(line)
        if facts["event"] == name:
            return facts
    raise AssertionError(f"it ended without {name}")


def test_sigterm_finishes_what_was_taken(chat_bundle: Path, serving: Any) -> None:
    prompt = "IJKLMNOPQ"
    with process(chat_bundle, "--port", 0, "--threads", 1, "--rows", 2, "--plain") as server:
        url = event(server, "listening")["url"]
        assert url.startswith("http://127.0.0.1:")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=220, temperature=0, stream=True
        )
        pieces = [next(stream).choices[0].text]
        server.send_signal(signal.SIGTERM)
        pieces += [chunk.choices[0].text for chunk in stream]
        assert event(server, "draining")["signal"] == "SIGTERM"
        done = event(server, "ended")
        assert done["level"] == "info"
        assert server.wait(30) == 0
    model = load(chat_bundle, threads=1)
    ids = [256, *model.bundle.tokenizer.encode(prompt).ids]
    assert model.bundle.tokenizer.token_to_id("<s>") == 256
    assert "".join(pieces) == model.stream_ids(ids, 220).completion.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-keys", "/nowhere/keys"], "can't read the API keys"),
        (["--host", "203.0.113.1"], "can't listen on 203.0.113.1"),
        (["--nodes", "5"], "no tree of 5 nodes"),
        (["--capture", "/nowhere/seen"], "can't capture prompts"),
    ],
)
def test_wrong_arguments_are_one_line(
    chat_bundle: Path, arguments: list[str], message: str
) -> None:
    from click.testing import CliRunner

    from forerun.cli import main

    result = CliRunner().invoke(main, ["serve", str(chat_bundle), "--port", "0", *arguments])
    assert result.exit_code == 1
    assert message in result.output.splitlines()[-1]
    assert result.output.splitlines()[-1].startswith("error: ")
