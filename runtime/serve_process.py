"""The server's process: a socket, uvicorn, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from forerun.errors import ForerunError, MissingDependencyError
from forerun.runtime.serve_app import Service, create_app
from forerun.runtime.serve_log import say

try:
    import uvicorn
except ImportError as error:
    raise MissingDependencyError("uvicorn", "serve", "forerun serve") from error

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Address:
    """Where to listen, and how long an end may take."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    drain_seconds: float = 30.0


def serve(service: Service, address: Address) -> None:
    """Answers requests until a signal ends it; then those that were taken are finished first.

    Raises ForerunError where the address can't be had.
    """
    sock = _listen(address)
    host, port = sock.getsockname()[:2]
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        http="h11",  # the one that bounds headers
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(address.drain_seconds) + 1,
    )
    server = _Server(config, service, address.drain_seconds)
    service.scheduler.start()
    shown = f"[{host}]" if ":" in host else host
    say("listening", url=f"http://{shown}:{port}", model=service.name)
    try:
        asyncio.run(server.serve([sock]))
    finally:
        service.scheduler.close()
        sock.close()
        say("ended")


class _Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: new requests get 503, those that were taken are finished."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._scheduler, self._drain_seconds = service.scheduler, drain_seconds
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's hook for signals. The second one waits for nobody."""
        self._signals += 1
        if self._signals > 1:
            self.should_exit = self.force_exit = True
            return
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_to_drain, signal.Signals(sig).name)

    def _begin_to_drain(self, name: str) -> None:
        say("draining", signal=name, running=self._scheduler.busy, waiting=self._scheduler.waiting)
        self._scheduler.drain()
        self._draining: Any = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """The sockets stay open meanwhile, so that new requests are told."""
        last = time.monotonic() + self._drain_seconds
        while not self._scheduler.idle and time.monotonic() < last:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self._scheduler.close)
        self.should_exit = True


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ForerunError(
            f"can't listen on {address.host} port {address.port}: {reason}: "
            "choose another --host or --port"
        ) from None
