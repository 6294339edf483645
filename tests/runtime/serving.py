"""What the server's tests share: a tiny bundle that chats, an engine held at a gate, a server."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from openai import OpenAI

from forerun.runtime.bundle import load_bundle, write_manifest
from forerun.runtime.model import Model, load
from forerun.runtime.serve_app import Service, create_app
from forerun.runtime.serve_auth import ApiKeys
from forerun.runtime.serve_metrics import Metrics
from forerun.runtime.serve_orders import Limits
from forerun.runtime.serve_scheduler import Scheduler

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
NAME = "tiny"


def write_chat_bundle(folder: Path, source: Path) -> None:
    """The bundle `source` with a chat template."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_manifest(folder, load_bundle(source).manifest)


class Gate:
    """An engine whose steps wait until they are let through."""

    def __init__(self, engine: Any, fails: Callable[[], bool] = lambda: False) -> None:
        self._engine, self._fails = engine, fails
        self._steps = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)
        """One for each step that began to wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, nodes: int) -> list[list[int]]:
        self.asked.release()
        self._steps.acquire()
        if self._fails():
            raise RuntimeError("the engine is out of order")
        rows: list[list[int]] = self._engine.step(nodes)
        return rows

    def let(self, steps: int) -> None:
        """Let so many steps through."""
        self._steps.release(steps)

    def open(self) -> None:
        """Let all through from now on."""
        self._steps.release(1 << 20)


def make_service(model: Model, limits: Limits | None = None, **changes: Any) -> Service:
    """A service whose scheduler is still to be started."""
    metrics = Metrics()
    scheduler = Scheduler(model, model.pace(), limits or Limits(), metrics)
    metrics.watch(scheduler)
    values: dict[str, Any] = {"keys": ApiKeys(set()), "max_prompt": model.engine.context}
    return Service(NAME, scheduler, metrics, **{**values, **changes})


def gated(path: Path, rows: int = 1, fails: Callable[[], bool] = lambda: False) -> Model:
    """A model whose engine is a `Gate`."""
    model = load(path, threads=1, rows=rows)
    return Model(model.bundle, Gate(model.engine, fails))


@dataclass(frozen=True)
class Running:
    """A server on a port of its own."""

    service: Service
    url: str

    def client(self, **changes: Any) -> OpenAI:
        """OpenAI's client; it tries once."""
        values: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60.0}
        return OpenAI(base_url=f"{self.url}/v1", **{**values, **changes})


@contextmanager
def running(service: Service) -> Iterator[Running]:
    """The service behind uvicorn in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(
            create_app(service), log_config=None, access_log=False, http="h11", lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        service.scheduler.start()
        thread.start()
        try:
            yield Running(service, f"http://127.0.0.1:{sock.getsockname()[1]}")
        finally:
            service.scheduler.close()
            server.should_exit = True
            thread.join(20)


def soon(condition: Callable[[], bool]) -> None:
    """Waits until it holds, for a while."""
    last = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < last, "it did not come"
        time.sleep(0.005)
