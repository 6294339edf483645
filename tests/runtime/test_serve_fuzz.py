"""Schemathesis against the served description: whatever is sent, the server is never at fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from forerun.runtime.model import load  # noqa: E402
from forerun.runtime.serve_orders import Limits  # noqa: E402

EXAMPLES = 60
"""Requests of a kind, of a route."""


@pytest.fixture(scope="module")
def server(chat_bundle: Path, serving: Any) -> Iterator[Any]:
    service = serving.make_service(load(chat_bundle, threads=1, rows=2), Limits(seconds=20))
    with serving.running(service) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_is_answered_by_a_5xx(server: Any, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    mode = schemathesis.GenerationMode[mode]
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} > {"/v1/completions", "/health"}
    statuses: set[int] = set()
    for operation in operations:
        try:
            cases: Any = operation.as_strategy(generation_mode=mode)
        except Exception:  # a route that takes nothing can't be asked wrongly
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases if mode.value == "positive" else st.one_of(cases))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("model") and mode.value == "positive":
                case.body["model"] = "tiny"  # past the first check
                case.body["max_tokens"] = 2
            reply = case.call()
            statuses.add(reply.status_code)
            assert reply.status_code < 500, (reply.status_code, reply.text, case.as_curl_command())

        ask()
    assert 400 in statuses
    assert server.service.scheduler.healthy
    assert server.client().completions.create(model="tiny", prompt="hi").choices
