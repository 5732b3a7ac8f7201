"""Whether this process lives, and whether requests should be sent to it."""

from __future__ import annotations

import logging
from typing import Any

from app.http.streams import Streams
from app.lifetime import Lifetime
from streams.errors import BrokerUnavailable
from streams.follow import Follower
from streams.ports import Log
from streams.topics import RESPONSES

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""How often the log is asked whether it is there."""
SILENCE_S = 30.0
"""Without an answer for so long, other gateways may be better off. Elections take less."""
STALL_S = 120.0
"""A reader that has not come back for so long never will: its polls take half a second, and
outages are waited out in steps."""


class Health:
    """Looks at the parts of one gateway."""

    def __init__(self, kafka: Log, streams: Streams, registry: Follower, life: Lifetime) -> None:
        self._log = kafka
        self._streams = streams
        self._registry = registry
        self._life = life
        self._answered_at = life.clock.now()

    async def probe(self) -> None:
        """Ask the log for a sign of life again and again, until cancelled.

        Raises what asking again cannot cure, such as Denied.
        """
        while True:
            try:
                await self._log.end_offsets(RESPONSES, [0])
                self._answered_at = self._life.clock.now()
            except BrokerUnavailable as e:
                log.warning("the log does not answer: %s", e)
            await self._life.clock.sleep(PROBE_S)

    @property
    def is_alive(self) -> bool:
        """Whether its loops go on. If not, it has to be started again."""
        return self._life.failed is None and self._streams.stalled_s < STALL_S

    @property
    def log_silent_s(self) -> float:
        """How long ago the log last answered."""
        return self._life.clock.now() - self._answered_at

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether it can answer requests, and what that depends on."""
        checks = {
            "alive": self.is_alive,
            "registry_read": self._registry.caught_up,
            "log_answers": self.log_silent_s < SILENCE_S,
            "taking_requests": not self._streams.stopping,
        }
        return all(checks.values()), checks | {"answers_under_way": self._streams.open}
