"""Health and metrics endpoints: /livez, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.server.authentication import AccessControl, Authentication
from kvlane.app.http.server.http_server import TlsFiles, UvicornServer
from kvlane.app.http.server.origin_guard import OriginGuard
from kvlane.app.metrics.metric_set import MetricSet
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.views.follower import Follower

JSON = "application/json"

Checks = Mapping[str, bool | int]
"""Conditions of readiness by name; numbers are shown and decide nothing."""


def catch_up_checks(followers: Mapping[str, Follower]) -> Checks:
    read = {f"{name}_read": follower.caught_up for name, follower in followers.items()}
    return read | {
        f"{name}_left": follower.remaining_offsets for name, follower in followers.items()
    }


class Probes:
    def __init__(
        self,
        checks: Callable[[], Checks],
        page: Callable[[], Awaitable[bytes]],
        is_alive: Callable[[], bool],
    ) -> None:
        """`page`: metrics in Prometheus' text format. A process is ready if all checks are true."""
        self._checks = checks
        self._page = page
        self._is_alive = is_alive

    def add_to(self, api: Starlette) -> None:
        for path, handler in (
            ("/livez", self.livez),
            ("/readyz", self.readyz),
            ("/metrics", self.metrics),
        ):
            api.add_route(path, handler, methods=["GET"])

    async def livez(self, _: Request) -> Response:
        """200 while the process works, 503 if it must be restarted."""
        return _judged("alive", self._is_alive(), {})

    async def readyz(self, _: Request) -> Response:
        """200 if all checks are true, else 503; the body lists the checks."""
        checks = self._checks()
        return _judged("ready", all(v for v in checks.values() if isinstance(v, bool)), checks)

    async def metrics(self, _: Request) -> Response:
        return Response(await self._page(), headers={"content-type": CONTENT_TYPE_LATEST})


class StatusServer:
    """HTTP server for probes only, on `KVLANE_STATUS_PORT`; without a port there is none. Raises
    SettingsError, KeyFileError as `AccessControl` and `TlsFiles` do."""

    def __init__(
        self, settings: Settings, ctx: ProcessContext, probes: Probes, metrics: MetricSet
    ) -> None:
        self._ctx = ctx
        self._loop_delay = metrics.loop_delay
        self.http = Starlette()
        probes.add_to(self.http)
        port = settings.status_port
        self._server: UvicornServer | None = None
        if port is not None:
            self._access = AccessControl(settings, ctx)
            self.http.add_middleware(Authentication, access=self._access, needs="operator")
            self.http.add_middleware(
                OriginGuard, host=settings.http_host, origins=settings.allowed_origins
            )
            self._server = UvicornServer(
                self.http, settings.http_host, port, ctx, setting="status_port",
                tls=TlsFiles.of(settings), metrics=metrics,
                keep_alive_s=settings.http_keep_alive_s,
            )  # fmt: skip

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Listen, and measure the delay of the event loop. Raises CannotListen."""
        if self._server is not None:
            self._access.start()
            await self._server.start()
            self._ctx.spawn("loop delay", self._loop_delay.watch(self._ctx.clock))

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


class ObservedProcess:
    """A process with a status server. Its constructor sets `_status`."""

    _status: StatusServer

    @property
    def http(self) -> Starlette:
        return self._status.http

    @property
    def url(self) -> str:
        """The address of its probes, if they have a port. Only after `start`."""
        return self._status.url


def _judged(name: str, is_good: bool, more: Checks) -> Response:  # noqa: FBT001 - the verdict
    status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode({name: is_good} | dict(more)), status, media_type=JSON)
