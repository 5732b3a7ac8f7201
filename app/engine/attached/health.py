"""How a server is, looked at again and again: its figures, and whether it is still the same life.

A server that began anew has an empty cache. One that has metrics says when it began; of another it
is assumed when it could not be reached in between. Never raises for what the server does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.engine.attached.figures import Metrics, read_metrics
from app.engine.attached.server import Server
from app.engine.contract import EngineError
from streams.clock import Clock

log = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_S = 5.0


class Health:
    """Of one server. `on_restart` is told of each other life."""

    def __init__(self, server: Server, clock: Clock, on_restart: Callable[[], None]) -> None:
        self.metrics = Metrics()
        """As they were last read."""
        self._server = server
        self._clock = clock
        self._on_restart = on_restart
        self._was_gone = False
        self._has_metrics = True

    async def look(self) -> None:
        """Look once."""
        path = "/metrics" if self._has_metrics else "/v1/models"
        try:
            body = await self._server.get(path, ANSWER_S)
            metrics = read_metrics(body.decode(errors="replace")) if self._has_metrics else None
        except EngineError as e:
            if getattr(e, "status", None) in (404, 405, 501) and self._has_metrics:
                self._has_metrics = False
                log.info("%s has no metrics: heartbeats tell nothing of it", self._server.url)
            elif not self._was_gone:
                self._was_gone = True
                log.warning("%s does not say how it is: %s", self._server.url, e)
            return
        except ValueError as e:
            self._has_metrics = False
            log.warning("the metrics of %s cannot be read: %s", self._server.url, e)
            return
        self._compare(self.metrics.started_at, metrics or Metrics())

    async def keep_looking(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            await self.look()

    def _compare(self, started_before: float | None, now: Metrics) -> None:
        was_gone, self._was_gone = self._was_gone, False
        self.metrics = now
        if started_before is not None and now.started_at is not None:
            is_other = started_before != now.started_at
        else:
            is_other = was_gone
        if is_other:
            log.warning("%s began anew: its cache is empty", self._server.url)
            self._on_restart()
