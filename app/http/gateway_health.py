"""Liveness and readiness of a gateway."""

from __future__ import annotations

from kvlane.app.http.openai.active_streams import ActiveStreams
from kvlane.app.http.server.probes import Checks
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.views.follower import Follower

READER_STALL_S = 120.0
"""Time without a returned poll after which the reader is considered stuck: a poll takes half a
second, and outages are waited out in steps."""


class GatewayHealth:
    """State of one gateway, for `/livez` and `/readyz`."""

    def __init__(self, streams: ActiveStreams, registry: Follower, ctx: ProcessContext) -> None:
        self._streams = streams
        self._registry = registry
        self._ctx = ctx

    @property
    def is_alive(self) -> bool:
        """Whether its background tasks run. If not, the process must be restarted."""
        return self._ctx.error is None and self._streams.stalled_s < READER_STALL_S

    @property
    def broker_silence_s(self) -> float:
        """Seconds since the broker last responded."""
        probe = self._ctx.broker_probe
        return 0.0 if probe is None else probe.silence_s

    def checks(self) -> Checks:
        """Conditions of readiness, and the number of open streams."""
        return {
            "alive": self.is_alive,
            "registry_read": self._registry.caught_up,
            "log_answers": self._ctx.broker_answers,
            "taking_requests": not self._streams.is_stopping,
            "answers_under_way": self._streams.open_streams,
        }
