"""`forerun serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from forerun.errors import MissingDependencyError
from forerun.runtime.cli import NODES, PATH, THREADS

PACKAGES = ("fastapi", "uvicorn", "prometheus-client")
SECONDS = click.FloatRange(0, min_open=True)


@click.command("serve")
@click.argument("bundle", type=PATH)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."
)
@click.option(
    "--rows", type=click.IntRange(1), default=4, show_default=True, help="Answers side by side."
)
@click.option("--name", help="The model's name for clients; default: the target's.")
@NODES
@click.option("--plain", is_flag=True, help="Without speculation.")
@THREADS
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Answers that may wait for a row; more are refused with 429.",
)
@click.option("--queue-timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds.")
@click.option(
    "--request-timeout",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="Seconds from a request to its last token.",
)
@click.option(
    "--max-body", type=click.IntRange(1), default=1 << 20, show_default=True, help="Bytes."
)
@click.option(
    "--max-prompt-tokens", type=click.IntRange(1), help="Default: what the context holds."
)
@click.option(
    "--api-keys",
    type=PATH,
    help="File of keys, one a line; also: the variable FORERUN_API_KEYS, separated by commas.",
)
@click.option(
    "--capture",
    type=PATH,
    help="Append every prompt to this file, which `forerun synthesize` reads.",
)
@click.option(
    "--drain-timeout",
    type=SECONDS,
    default=30.0,
    show_default=True,
    help="Seconds that running answers get after SIGTERM.",
)
def serve_command(
    bundle: Path,
    host: str,
    port: int,
    rows: int,
    name: str | None,
    nodes: int | None,
    plain: bool,
    threads: int | None,
    queue: int,
    queue_timeout: float,
    request_timeout: float,
    max_body: int,
    max_prompt_tokens: int | None,
    api_keys: Path | None,
    capture: Path | None,
    drain_timeout: float,
) -> None:
    """Serves BUNDLE with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    /health says whether it is well, /metrics is for Prometheus. Logs are JSON lines on standard
    error. SIGTERM finishes what was taken, and ends.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise MissingDependencyError(package, "serve", "forerun serve")
    from forerun.runtime.serve_process import listen, serve
    from forerun.runtime.serve_service import ServeConfig, open_service

    config = ServeConfig(
        bundle=bundle,
        rows=rows,
        name=name,
        nodes=nodes,
        plain=plain,
        threads=threads,
        queue=queue,
        queue_seconds=queue_timeout,
        request_seconds=request_timeout,
        max_body=max_body,
        max_prompt_tokens=max_prompt_tokens,
        api_keys=api_keys,
        capture=capture,
    )
    with listen(host, port) as sock:  # first: loading takes its time
        serve(open_service(config, host), sock, drain_timeout)
