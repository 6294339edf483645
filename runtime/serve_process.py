"""The server's process: a socket, uvicorn, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from types import FrameType

import uvicorn

from forerun.errors import ForerunError
from forerun.runtime.serve_app import Service, create_app
from forerun.runtime.serve_log import say

POLL_SECONDS = 0.05


def serve(service: Service, sock: socket.socket, drain_seconds: float) -> None:
    """Answers requests until a signal ends it; then those that were taken are finished first."""
    host, port = sock.getsockname()[:2]
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        http="h11",  # the one that bounds headers
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(drain_seconds) + 1,
    )
    server = _Server(config, service, drain_seconds)
    service.scheduler.start()
    shown = f"[{host}]" if ":" in host else host
    say("listening", url=f"http://{shown}:{port}", model=service.name)
    try:
        asyncio.run(server.serve([sock]))
    finally:
        service.scheduler.close()
        say("ended")


class _Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: new requests get 503, those that were taken are finished."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._scheduler, self._drain_seconds = service.scheduler, drain_seconds
        self._signals = 0
        self._drainage: asyncio.Task[None] | None = None
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
        self._drainage = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """The sockets stay open meanwhile, so that new requests are told."""
        last = time.monotonic() + self._drain_seconds
        while not self._scheduler.idle and time.monotonic() < last:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self._scheduler.close)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there (port 0: any that is free).

    Raises ForerunError where the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ForerunError(
            f"can't listen on {host} port {port}: {error.strerror}: choose another --host or --port"
        ) from None
