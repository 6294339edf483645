"""A server's parts, put together from its configuration."""

from __future__ import annotations

import ipaddress
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from forerun.runtime.model import load
from forerun.runtime.serve_app import Service
from forerun.runtime.serve_auth import VARIABLE, read_keys
from forerun.runtime.serve_log import Capture, log_to_stderr, say
from forerun.runtime.serve_metrics import Metrics
from forerun.runtime.serve_orders import Limits
from forerun.runtime.serve_scheduler import Scheduler


@dataclass(frozen=True)
class ServeConfig:
    """What `forerun serve` is told."""

    bundle: Path
    rows: int = 4
    name: str | None = None
    nodes: int | None = None
    plain: bool = False
    threads: int | None = None
    queue: int = 64
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    max_body: int = 1 << 20
    max_prompt_tokens: int | None = None
    api_keys: Path | None = None
    capture: Path | None = None


def open_service(config: ServeConfig, host: str = "127.0.0.1") -> Service:
    """Loads the bundle. What is wrong with the configuration is said before that takes its time."""
    log_to_stderr()
    keys = read_keys(config.api_keys)
    if not keys and not _is_loopback(host):
        say("no API keys", logging.WARNING, host=host, mend=f"set {VARIABLE} or --api-keys")
    capture = Capture(config.capture) if config.capture else None
    model = load(config.bundle, config.threads, config.rows)
    pace = model.pace(config.plain, config.nodes)
    limits = Limits(config.queue, config.queue_seconds, config.request_seconds)
    metrics = Metrics()
    scheduler = Scheduler(model, pace, limits, metrics)
    metrics.watch(scheduler)
    context = model.engine.context
    return Service(
        name=config.name or model.bundle.manifest.target.name,
        scheduler=scheduler,
        metrics=metrics,
        keys=keys,
        max_prompt=min(config.max_prompt_tokens or context, context),
        max_body=config.max_body,
        capture=capture,
        created=int(time.time()),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
