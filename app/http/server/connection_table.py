"""The table of open connections of one HTTP server.

Bound: `most` connections, and SPARE beyond. A new one beyond `most` takes the place of the one that
has waited longest without a request. If all have a request, it gets a spare place, on which only
probes are answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvlane.app.metrics.metric_set import MetricSet

log = logging.getLogger(__name__)

SPARE = 32
HEAD_BYTES = 64 * 1024
"""Limit of the heads that wait on a connection: several times what clients and proxies send."""
LEAST_HEAD_BYTES = 16 * 1024
"""That limit with many connections: twice what most servers take."""
ALL_HEADS_BYTES = 64 * 1024 * 1024
"""Memory of the heads on all connections, up to 4096 of them."""
LOG_PERIOD_S = 10.0
"""Period of the log line about a full table: with each connection it would fill the log."""


class Connection(Protocol):
    def expire(self, now: float) -> None:
        """End the connection if a time limit of it is over."""

    def abort(self) -> None:
        """End the connection at once."""


class ConnectionTable:
    def __init__(
        self, most: int, time: Callable[[], float], metrics: MetricSet | None = None
    ) -> None:
        self._most = most
        self._time = time
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Those without a request, by the time at which they began to wait."""
        self._spare: dict[Connection, None] = {}
        self._log_at = 0.0
        self._overflow = None if metrics is None else metrics.http_overflow
        if metrics is not None:
            metrics.http_connections.set_function(lambda: len(self))

    def __len__(self) -> int:
        return len(self._open) + len(self._spare)

    @property
    def head_bytes(self) -> int:
        share = ALL_HEADS_BYTES // max(1, len(self))
        return max(LEAST_HEAD_BYTES, min(HEAD_BYTES, share))

    def add(self, connection: Connection) -> bool:
        """Add a connection, which has no request yet. False: it is for probes only."""
        is_full = len(self._open) >= self._most
        if is_full:
            self._report()
        if not is_full or self._displace(self._waiting):
            self._open.add(connection)
            self.wait(connection)
            return True
        if len(self._spare) >= SPARE:
            self._displace(self._spare)
        self._spare[connection] = None
        return False

    def wait(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def begin(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._spare.pop(connection, None)

    def expire(self) -> None:
        now = self._time()
        for connection in (*self._open, *self._spare):
            connection.expire(now)

    def _displace(self, group: dict[Connection, None]) -> bool:
        oldest = next(iter(group), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True

    def _report(self) -> None:
        if self._overflow is not None:
            self._overflow.inc()
        now = self._time()
        if now >= self._log_at:
            self._log_at = now + LOG_PERIOD_S
            log.warning(
                "all %d HTTP connections of this port are in use, %d of them with a request: each "
                "new one closes the one that has been idle longest, or is answered for probes "
                "only. If the clients are wanted, raise KVLANE_HTTP_MAX_STREAMS and the limit of "
                "open files (ulimit -n), or start more gateways",
                self._most, self._most - len(self._waiting),
            )  # fmt: skip
