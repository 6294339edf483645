"""HTTP's side: hostile bodies, keys, sizes, hang-ups, probes and metrics."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from forerun.errors import ForerunError  # noqa: E402
from forerun.runtime.model import load  # noqa: E402
from forerun.runtime.prompts import read_prompts  # noqa: E402
from forerun.runtime.serve_auth import ApiKeys, read_keys  # noqa: E402
from forerun.runtime.serve_log import Capture, JsonLines  # noqa: E402
from forerun.runtime.serve_orders import Limits  # noqa: E402

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
MAX_BODY = 300_000


@pytest.fixture(scope="module")
def server(chat_bundle: Path, serving: Any) -> Iterator[Any]:
    service = serving.make_service(load(chat_bundle, threads=1, rows=2), max_body=MAX_BODY)
    with serving.running(service) as found:
        yield found


def error_of(reply: Any) -> dict[str, Any]:
    """The error, in OpenAI's shape."""
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and isinstance(body["error"]["type"], str)
    found: dict[str, Any] = body["error"]
    return found


CHANGES: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": 2.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": [1]},
    {"top_p": 1.5},
    {"top_p": -0.1},
    {"top_p": float("nan")},
    {"top_k": -1},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_tokens": 1.5},
    {"max_tokens": "many"},
    {"n": 0},
    {"n": 129},
    {"n": -(10**30)},
    {"seed": 1 << 64},
    {"seed": 0.5},
    {"stop": ["x"] * 100},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": "x" * 5000},
    {"stop": [1]},
    {"stream": "perhaps"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"what": 1}},
    {"model": 7},
    {"model": None},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"logit_bias": {"5": 100}},
    {"hello": "world"},
    {"user": {"a": 1}},
]
CHAT_CHANGES: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": None},
    {"messages": [{}]},
    {"messages": [{"role": "wizard", "content": "hi"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]},
    {"messages": [{"role": "user", "content": "x"}] * 5000},
    {"max_completion_tokens": 5},  # and max_tokens
    {"logprobs": True},
    {"top_logprobs": 3},
    {"response_format": {"type": "json_object"}},
    {"response_format": {}},
    {"tools": [{"type": "function"}]},
    {"modalities": ["audio"]},
    {"audio": {}},
]
TEXT_CHANGES: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": None},
    {"prompt": {"a": 1}},
    {"prompt": [[]]},
    {"prompt": ["a", 1]},
    {"prompt": [-1]},
    {"prompt": [10**6]},
    {"prompt": [1.5]},
    {"prompt": [True]},
    {"prompt": ["x"] * 500},
    {"prompt": "x" * 300},
    {"logprobs": 2},
    {"echo": True},
    {"suffix": "end"},
    {"best_of": 5},
]


@pytest.mark.parametrize(
    ("path", "body", "changes"),
    [
        *(("chat/completions", CHAT, change) for change in CHANGES + CHAT_CHANGES),
        *(("completions", TEXT, change) for change in CHANGES + TEXT_CHANGES),
    ],
)
def test_a_bad_field_is_refused_by_name(
    server: Any, path: str, body: dict[str, Any], changes: dict[str, Any]
) -> None:
    content = json.dumps({**body, **changes})  # NaN and all
    reply = httpx.post(
        f"{server.url}/v1/{path}", content=content, headers={"content-type": "application/json"}
    )
    error = error_of(reply)
    assert reply.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] in {*changes, "max_tokens"}


RAW: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b"\xff\xfe{}", 400),
    (b'{"model": "\xc3"}', 400),
    (b"[" * 9000, 400),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400),
    (b'{"model": "tiny", "max_tokens": ' + b"9" * 6000 + b"}", 400),
    (b'{"model": "\\ud800", "messages": []}', 400),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (b'{"model": "tiny", "\\ud800": 1}', 400),
    (b"x" * (MAX_BODY + 1), 413),
]


@pytest.mark.parametrize(("content", "status"), RAW)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_is_no_request_at_all(server: Any, path: str, content: bytes, status: int) -> None:
    reply = httpx.post(
        f"{server.url}/v1/{path}", content=content, headers={"content-type": "application/json"}
    )
    assert reply.status_code == status
    error_of(reply)


def test_a_body_of_unknown_length_is_cut_off_as_well(server: Any) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    reply = httpx.post(
        f"{server.url}/v1/completions",
        content=endless(),
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 413 and error_of(reply)["code"] == "body_too_large"


def test_other_content_types_routes_and_methods(server: Any) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", content=json.dumps(TEXT))
    assert reply.status_code == 415 and error_of(reply)
    for method, path, status in (
        ("GET", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/" + "x" * 3000, 404),
        ("GET", "/v1/models/%ff%00", 404),
    ):
        reply = httpx.request(method, server.url + path)
        assert reply.status_code == status, path
        assert error_of(reply)["type"] == "invalid_request_error"


def test_template_trouble_is_the_clients(server: Any) -> None:
    """Extra fields of a message go to the template; what it makes of them crashes nothing."""
    for extra in ({"name": "bob"}, {"tool_calls": [[[]]]}, {"content": None}, {"self": 1}):
        message = {"role": "assistant", "content": "hi", **extra}
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json={**CHAT, "messages": [message]}
        )
        assert reply.status_code == 200, reply.text


def test_ignored_fields_and_parts(server: Any) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": False, "n": 1, "logprobs": False}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    texts = set()
    for content in ("hi", parts):
        reply = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={
                **CHAT,
                **more,
                "temperature": 0,
                "messages": [{"role": "user", "content": content}],
                "response_format": {"type": "text"},
                "tools": [],
            },
        )
        assert reply.status_code == 200, reply.text
        texts.add(reply.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1


def test_request_ids(server: Any) -> None:
    url = f"{server.url}/v1/models"
    assert httpx.get(url, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = httpx.get(url, headers={"x-request-id": 'a"b c'}).headers["x-request-id"]
    assert made.isalnum() and len(made) == 32


def test_keys(chat_bundle: Path, serving: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("one # the first\n\n# none\ntwo\n")
    monkeypatch.setenv("FORERUN_API_KEYS", "three, four,")
    keys = read_keys(file)
    model = load(chat_bundle, threads=1)
    with serving.running(serving.make_service(model, keys=keys)) as server:
        for key in ("one", "two", "three", "four"):
            assert server.client(api_key=key).models.list().data
        for key in ("One", "one # the first", "none", "thre", "three, four", "é"):
            reply = httpx.post(
                f"{server.url}/v1/completions",
                content=b"x" * 100,  # not even looked at
                headers={"authorization": f"Bearer {key}".encode()},
            )
            assert reply.status_code == 401 and error_of(reply)["code"] == "invalid_api_key"
        for header in ({}, {"authorization": "one"}, {"authorization": "Basic one"}):
            assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="five").models.list()
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert not ApiKeys(set()) and ApiKeys(set()).allow(None)


def test_key_files_that_hold_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ForerunError, match="no API key in it"):
        read_keys(tmp_path / "empty")
    with pytest.raises(ForerunError, match="can't read the API keys"):
        read_keys(tmp_path / "missing")


def test_a_full_queue_says_when_to_come_again(chat_bundle: Path, serving: Any) -> None:
    model = serving.gated(chat_bundle)
    service = serving.make_service(model, Limits(queue=1))
    with serving.running(service) as server, ExitStack() as stack:
        client = server.client()
        for _ in range(2):
            stack.enter_context(_post(server, {**TEXT, "max_tokens": 50, "stream": True}))
        serving.soon(lambda: service.scheduler.busy + service.scheduler.waiting == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="hi")
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.code == "queue_full"
        model.engine.open()
        serving.soon(lambda: service.scheduler.idle)
        assert client.completions.create(model="tiny", prompt="hi").choices[0].text is not None


def _post(server: Any, body: dict[str, Any], path: str = "completions") -> socket.socket:
    """A request that nobody waits for yet."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.sendall(
        b"POST /v1/%s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (path.encode(), len(content), content)
    )
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_who_hangs_up_frees_the_row(
    chat_bundle: Path, serving: Any, stream: bool, begun: bool
) -> None:
    """Before its first step, and in the midst of an answer."""
    model = serving.gated(chat_bundle)
    service = serving.make_service(model)
    with serving.running(service) as server:
        body = {**CHAT, "max_tokens": 150, "stream": stream, "seed": 1}
        with _post(server, body, "chat/completions") as sock:
            model.engine.asked.acquire()
            if begun:
                model.engine.let(3)
                for _ in range(3):
                    model.engine.asked.acquire()
            if stream:
                assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        # The engine is still held: only what was cancelled can end with one more step.
        serving.soon(lambda: bool(service.scheduler._cancelled))
        model.engine.let(1)
        serving.soon(lambda: service.scheduler.idle)
        assert b'forerun_answers_total{outcome="cancelled"} 1.0' in service.metrics.text()
        model.engine.open()
        assert server.client().completions.create(model="tiny", prompt="hi").choices


def test_draining_refuses_and_the_probes_say_so(chat_bundle: Path, serving: Any) -> None:
    service = serving.make_service(load(chat_bundle, threads=1))
    with serving.running(service) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        service.scheduler.drain()
        reply = httpx.post(f"{server.url}/v1/completions", json=TEXT)
        assert reply.status_code == 503 and error_of(reply)["code"] == "draining"
        assert int(reply.headers["retry-after"]) > 0
        for path, status in (("", 503), ("/ready", 503), ("/live", 200)):
            assert httpx.get(f"{server.url}/health{path}").status_code == status


def test_timeouts_and_failures_have_their_status(chat_bundle: Path, serving: Any) -> None:
    for limits, status, code in (
        (Limits(queue_seconds=1e-9), 503, "queue_timeout"),
        (Limits(seconds=1e-9), 504, "timeout"),
    ):
        with serving.running(serving.make_service(load(chat_bundle, threads=1), limits)) as server:
            for stream in (False, True):
                body = {**TEXT, "stream": stream}
                reply = httpx.post(f"{server.url}/v1/completions", json=body)
                assert reply.status_code == status and error_of(reply)["code"] == code


def test_an_engine_that_fails_in_the_midst_ends_a_stream_with_an_error(
    chat_bundle: Path, serving: Any
) -> None:
    broken = [False]
    model = serving.gated(chat_bundle, 1, lambda: broken[0])
    with serving.running(serving.make_service(model)) as server:
        model.engine.let(1)
        stream = server.client().chat.completions.create(**{**CHAT, "max_tokens": 99}, stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        broken[0] = True
        model.engine.let(1)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        broken[0] = False
        model.engine.open()
        assert server.client().completions.create(model="tiny", prompt="hi").choices


def test_metrics(chat_bundle: Path, serving: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    service = serving.make_service(load(chat_bundle, threads=1, rows=2))
    with serving.running(service) as server:
        client = server.client()
        reply = client.completions.create(
            model="tiny", prompt="IJKLMNOPQR" * 3, max_tokens=40, temperature=0
        )
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="hi", temperature=3)
        text = httpx.get(f"{server.url}/metrics").text
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    said = reply.usage.model_extra["speculation"]
    assert found["forerun_steps_total",] == said["steps"]
    assert found["forerun_tau",] == pytest.approx(said["tau"], abs=1e-4)
    accepted = sum(v for (name, *_), v in found.items() if name == "forerun_accepted_depth_total")
    assert accepted == said["accepted"] > 0
    assert found["forerun_tokens_total", ("kind", "answer")] == 40
    assert found["forerun_inter_token_seconds_count",] == 39
    assert found["forerun_first_token_seconds_count",] == 1
    assert found["forerun_answers_total", ("outcome", "length")] == 1
    for status, count in (("200", 1), ("400", 1)):
        key = ("forerun_http_requests_total", ("route", "/v1/completions"), ("status", status))
        assert found[key] == count
    assert (found["forerun_rows",], found["forerun_queue_length",]) == (2, 0)
    assert 0 <= found["forerun_host_share",] <= 1


def test_captured_prompts_are_read_by_synthesize(
    chat_bundle: Path, serving: Any, tmp_path: Path
) -> None:
    file = tmp_path / "seen.jsonl"
    capture = Capture(file)
    service = serving.make_service(load(chat_bundle, threads=1), capture=capture)
    with serving.running(service) as server:
        client = server.client()
        client.chat.completions.create(**CHAT)
        client.completions.create(model="tiny", prompt="naïve\n—", max_tokens=2)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="x" * 1000)
    capture.close()
    chat, text = read_prompts(file)
    assert chat.messages == ({"role": "user", "content": "hi"},) and text.text == "naïve\n—"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ForerunError, match="can't capture prompts"):
        Capture(tmp_path / "no" / "such")


def test_log_lines_are_json_whatever_they_hold() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", (), None)
    record.facts = {"route": 'a"\n{', "half": "\ud800"}
    line = JsonLines().format(record)
    assert "\n" not in line and json.loads(line)["route"] == 'a"\n{'
