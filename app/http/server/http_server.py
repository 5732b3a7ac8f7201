"""The HTTP server: uvicorn, as a task of this process.

Signals are left to FastStream. The socket is bound first, so a port in use is an error of the
start; a server that ends by itself ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from kvlane.app.http.server.connection_table import SPARE, ConnectionTable
from kvlane.app.http.server.http_protocol import HEAD_TIMEOUT_S, BoundedProtocol
from kvlane.app.metrics.metric_set import MetricSet
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings, SettingsError

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75.0
SHUTDOWN_TIMEOUT_S = 5.0
OTHER_FILES = 256
"""Descriptors for everything but HTTP: Kafka, files, status ports."""
FEW_CONNECTIONS = 64
MANY_CONNECTIONS = 1024
"""Connections of another port, or twice its streams if that is more: as many may be idle."""


class ConnectionLimits(NamedTuple):
    """The share of an HTTP port in the open files of its process."""

    connections: int
    backlog: int
    """Connections that wait to be accepted. All of them must fit within the limit of open files."""

    @staticmethod
    def of(files: int, streams: int) -> ConnectionLimits:
        """Those of a port with `streams` concurrent responses, where `files` may be open."""
        backlog = min(BACKLOG, files // 8)
        fit = max(1, files - OTHER_FILES - SPARE - backlog)
        return ConnectionLimits(min(fit, max(MANY_CONNECTIONS, 2 * streams)), backlog)


def fitting_streams(settings: Settings) -> Settings:
    """The settings, with KVLANE_HTTP_MAX_STREAMS lowered to what the limit of open files allows."""
    files, wanted = raise_file_limit(), settings.http_max_streams
    most = ConnectionLimits.of(files, wanted).connections
    if wanted <= most:
        return settings
    log.warning(
        "KVLANE_HTTP_MAX_STREAMS=%d is lowered to %d, since this process may have %d files open: "
        "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, `--ulimit nofile` of Docker), "
        "or set it to %d", wanted, most, files, most,
    )  # fmt: skip
    return settings.model_copy(update={"http_max_streams": most})


class CannotListen(OperatorError):
    correction = (
        "`ss -ltnp` lists the processes that listen. Change the variable that the message names; a "
        "second deployment on one machine needs another value of each port."
    )


class TlsFiles(NamedTuple):
    certificate: Path
    key: Path

    @staticmethod
    def of(settings: Settings) -> TlsFiles | None:
        """That of the HTTP ports, if they have one. Raises SettingsError for files of no use."""
        if settings.http_tls_cert is None or settings.http_tls_key is None:
            return None
        tls = TlsFiles(settings.http_tls_cert, settings.http_tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(*tls, password="")  # without one, it would be asked for
        except (OSError, ValueError) as e:  # SSLError is an OSError
            raise SettingsError(
                f"KVLANE_HTTP_TLS_CERT={tls.certificate} and KVLANE_HTTP_TLS_KEY={tls.key} cannot "
                f"be used: {e}: give a PEM certificate and its key, which is not encrypted"
            ) from None
        return tls


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, metrics: MetricSet | None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._metrics = metrics

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn does not bound the time of a TLS handshake as this does."""
        loop = asyncio.get_running_loop()
        self.table = ConnectionTable(self._limits.connections, loop.time, self._metrics)
        tls = self.config.ssl
        self.servers = [
            await loop.create_server(
                lambda: BoundedProtocol(
                    self.table, config=self.config, server_state=self.server_state, app_state={}
                ),
                sock=listener,
                backlog=self._limits.backlog,
                ssl=tls,
                ssl_handshake_timeout=HEAD_TIMEOUT_S if tls else None,
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self.table.expire()
        return await super().on_tick(counter)


class UvicornServer:
    def __init__(
        self, app: ASGIApp, host: str, port: int, ctx: ProcessContext, setting: str = "http_port",
        *, tls: TlsFiles | None = None, metrics: MetricSet | None = None,
        limits: ConnectionLimits | None = None, keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:  # fmt: skip
        """`port` 0 takes any free one; it is the value of `setting`. Without `limits`: for probes
        only."""
        self._tls = tls
        self._host, self._port = host, port
        self._setting = setting
        self._ctx = ctx
        self._limits = limits or ConnectionLimits(FEW_CONNECTIONS, FEW_CONNECTIONS)
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                http=BoundedProtocol,
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=int(SHUTDOWN_TIMEOUT_S),
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
            ),
            self._limits,
            metrics,
        )

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (self._host, self._port), family=family, backlog=self._limits.backlog
            )
        except OSError as e:
            raise CannotListen(
                f"{self._host}:{self._port}: {os.strerror(e.errno or 0)}. Set "
                f"KVLANE_{self._setting.upper()} to a free port (0 takes any)"
            ) from e
        # Inherited by connections. asyncio sets it for sockets of a named protocol only, which this
        # one is not: without it, a second write waits 40 ms for a delayed ACK.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._task = self._ctx.spawn("http", self._serve())
        log.info("listening on %s", self.url)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            # uvicorn does not close them when it is cancelled. The event loop would take the next
            # socket with the number of a closed one for one that it watches already.
            for listener in getattr(self._server, "servers", ()):
                listener.close()
            self._socket.close()
        if not self._server.should_exit:
            raise RuntimeError("the HTTP server ended by itself")


ENOUGH = 1 << 20
"""More than a process can use; systems that have no limit refuse larger values."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it. The soft limit is 1024 in
    many systems, for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has another limit, below an infinite hard one
        log.warning("the limit of open files stays at %d: raise it by `ulimit -n`", soft)
        return soft
    log.info("the limit of open files is %d instead of %d", wanted, soft)
    return wanted
