"""Schemathesis against the served description: whatever is sent, the server is never at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402

from forerun.runtime.model import load  # noqa: E402
from forerun.runtime.serve_orders import Limits  # noqa: E402
from forerun.runtime.serve_schema import UNSUPPORTED  # noqa: E402

EXAMPLES = 40
"""Requests of a kind, of a route."""

NOT_TAKEN = {*UNSUPPORTED, "best_of", "stream_options", "max_completion_tokens"}


@pytest.fixture(scope="module")
def server(chat_bundle: Path, serving: Any) -> Iterator[Any]:
    service = serving.make_service(load(chat_bundle, threads=1, rows=2), Limits(seconds=20))
    with serving.running(service) as found:
        yield found


def answerable(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what this server refuses though OpenAI knows it."""
    kept = {name: value for name, value in body.items() if name not in NOT_TAKEN}
    return {**kept, "model": "tiny", "max_tokens": 2}


def statuses(operation: Any, mode: Any, change: Callable[[Any], Any]) -> set[int]:
    """What many requests are answered with, each of them as `change` makes it."""
    found: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.body = change(case.body)
        reply = case.call()
        found.add(reply.status_code)
        assert reply.status_code < 500, (reply.status_code, reply.text, case.as_curl_command())

    ask()
    return found


@pytest.mark.slow
def test_no_request_is_answered_by_a_5xx(server: Any) -> None:
    """Requests that fit the description, such that don't, and such that should be answered."""
    modes = schemathesis.GenerationMode
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} > {"/v1/completions", "/health"}
    for operation in operations:
        statuses(operation, modes.POSITIVE, lambda body: body)
        if operation.method.lower() == "post":  # the others take nothing that could be wrong
            assert 400 in statuses(operation, modes.NEGATIVE, lambda body: body)
            assert 200 in statuses(operation, modes.POSITIVE, answerable)
    assert server.service.scheduler.healthy
    assert server.client().completions.create(model="tiny", prompt="hi").choices
