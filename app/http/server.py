"""The HTTP server: uvicorn, as a task of this process.

Its signals are left to FastStream, which runs the process. The socket is bound before anything
else, so that a port in use is an error of the start, and a server that ends by itself ends the
process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from app.http.protocol import BoundedProtocol
from app.lifetime import Lifetime

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the minute for which clients and proxies keep connections, so that it is they who
close: a request on a connection that was just closed is an error for its client."""
LAST_REQUESTS_S = 5.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Server:
    """One server on one socket."""

    def __init__(self, app: ASGIApp, host: str, port: int, life: Lifetime) -> None:
        """`port` 0 takes any free one."""
        self._host, self._port = host, port
        self._life = life
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                http=BoundedProtocol,
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(LAST_REQUESTS_S),
            )
        )

    async def start(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server(
            (self._host, self._port), family=family, backlog=BACKLOG
        )
        self._task = self._life.spawn("http", self._serve())
        log.info("listening on %s", self.url)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Accept nothing more, and give what is under way a few seconds."""
        self._server.should_exit = True
        await self._task

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
        if not self._server.should_exit:
            raise RuntimeError("the HTTP server ended by itself")
