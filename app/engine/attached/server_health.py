"""Health of a server, polled: its metrics, and whether it has restarted.

A restarted server has an empty cache. Metrics have its start time; without them a restart is
assumed if the server could not be reached in between. Never raises for faults of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvlane.app.engine.attached.server_client import ServerClient
from kvlane.app.engine.attached.server_metrics import ServerMetrics, read_metrics
from kvlane.app.engine.interface import EngineError
from kvlane.streams.clock import Clock

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 5.0


class ServerHealth:
    """Polls one server. `on_restart` is called after each restart."""

    def __init__(self, server: ServerClient, clock: Clock, on_restart: Callable[[], None]) -> None:
        self.metrics = ServerMetrics()
        """The metrics last read."""
        self._server = server
        self._clock = clock
        self._on_restart = on_restart
        self._was_gone = False
        self._has_metrics = True

    async def check(self) -> None:
        path = "/metrics" if self._has_metrics else "/v1/models"
        try:
            body = await self._server.get(path, CHECK_TIMEOUT_S)
            metrics = read_metrics(body.decode(errors="replace")) if self._has_metrics else None
        except EngineError as e:
            if getattr(e, "status", None) in (404, 405, 501) and self._has_metrics:
                self._has_metrics = False
                log.info(
                    "%s has no metrics: heartbeats have no engine statistics", self._server.url
                )
            elif not self._was_gone:
                self._was_gone = True
                log.warning("%s: the health check failed: %s", self._server.url, e)
            return
        except ValueError as e:
            self._has_metrics = False
            log.warning("%s: its metrics cannot be parsed: %s", self._server.url, e)
            return
        self._compare(self.metrics.started_at, metrics or ServerMetrics())

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await self._clock.sleep(CHECK_INTERVAL_S)
            await self.check()

    def _compare(self, started_before: float | None, now: ServerMetrics) -> None:
        was_gone, self._was_gone = self._was_gone, False
        self.metrics = now
        if started_before is not None and now.started_at is not None:
            is_other = started_before != now.started_at
        else:
            is_other = was_gone
        if is_other:
            log.warning("%s has restarted: its cache is empty", self._server.url)
            self._on_restart()
