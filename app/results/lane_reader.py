"""The reader of `responses` for all lanes of a collector.

Records of a lane are applied only when its `requests` were read to where they ended after the
records had been polled. A request is appended before its reply, so a reply of an unknown request is
one without a result, and is skipped undecoded. A lane whose requests come late is read again later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from app.results.collector_context import CollectorContext
from app.results.lane_collector import LaneCollector
from streams.errors import PositionLost
from streams.ports import Batches, Partition, Reader
from streams.retry import retry_while_unavailable
from streams.topics import REQUESTS, RESPONSES

log = logging.getLogger(__name__)

POLL_S = 0.5
RECORDS_PER_POLL = 2000
GATHER_S = 0.05
"""Records come together from so long: a result may be so much later, for a fraction of the polls,
each of which costs a query for the ends of `requests`."""
REQUESTS_TIMEOUT_S = 5.0
REQUESTS_POLL_S = 0.01


class LaneReader:
    """Feeds `lanes`, the lanes by number; they are looked up anew at each poll."""

    def __init__(self, context: CollectorContext, lanes: Mapping[int, LaneCollector]) -> None:
        self._context = context
        self._lanes = lanes
        self._assigned: dict[Partition, int] = {}
        """The next offset of the reader by partition."""

    async def run(self) -> None:
        """Read until cancelled. Raises NewerRecord, AccessDenied, LogClosed."""
        reader = self._context.log.reader(gather_s=GATHER_S)
        try:
            while True:
                if not self._assign(reader):
                    await self._context.ctx.clock.sleep(REQUESTS_POLL_S)
                    continue
                try:
                    batches = await reader.poll(POLL_S, RECORDS_PER_POLL)
                except PositionLost as e:
                    if (lane := self._lanes.get(e.partition)) is not None and lane.serving:
                        lane.skip_to(e.start)
                    continue
                if batches:
                    await self._apply(batches)
                await self._context.ctx.clock.sleep(0)
        finally:
            await reader.close()

    def _assign(self, reader: Reader) -> bool:
        """Read what the lanes need, from their positions; False if they need nothing."""
        wanted = {
            Partition(RESPONSES, lane.lane): lane.position
            for lane in self._lanes.values()
            if lane.position is not None and not lane.is_full
        }
        if wanted != self._assigned:
            reader.assign(wanted)
            self._assigned = wanted
        return bool(wanted)

    async def _apply(self, batches: Batches) -> None:
        context = self._context
        numbers = [source.partition for source in batches]
        ends = await retry_while_unavailable(
            context.ctx.clock, lambda: context.log.end_offsets(REQUESTS, numbers)
        )
        until = context.ctx.clock.now() + REQUESTS_TIMEOUT_S
        for source, records in batches.items():
            context.broker_clock.observe(records[-1].timestamp)
            lane = self._lanes.get(source.partition)
            if lane is None or lane.position != self._assigned[source]:
                continue  # revoked, and perhaps assigned anew, during the poll
            if await self._has_read(lane, ends[source.partition], until):
                lane.apply(records)
            self._assigned[source] = records[-1].offset + 1

    async def _has_read(self, lane: LaneCollector, end: int, until: float) -> bool:
        """Wait until the requests of a lane were read up to an offset; False if it lasts."""
        clock = self._context.ctx.clock
        while lane.claim.position < end and not lane.claim.is_lost:
            if clock.now() > until:
                log.warning("lane %d: its requests are not read; replies wait", lane.lane)
                return False
            await clock.sleep(REQUESTS_POLL_S)
        return not lane.claim.is_lost
