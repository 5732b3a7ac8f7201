"""The reader of `responses` for all lanes of a collector.

Records of a lane are applied when its `requests` were read to their end after the poll. A request
is appended before its reply, so a reply of an unknown request has no result, and is skipped
undecoded. Records of a lane whose requests come late wait here, at most one poll; no other lane
waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.lane_collector import LaneCollector
from kvlane.streams.errors import PositionLost
from kvlane.streams.ports import Batches, Partition, Reader, Record
from kvlane.streams.retry import retry_while_unavailable
from kvlane.streams.topics import REQUESTS, RESPONSES

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
RECORDS_PER_POLL = 2000
GATHER_S = 0.05
"""Records come together from so long: a result may be so much later, for a fraction of the polls,
each of which costs a query for the ends of `requests`."""
REQUESTS_WAIT_S = 0.25
"""Time for the requests of a poll, which are mostly read at once: setting a lane aside costs new
fetches."""
REQUESTS_POLL_S = 0.01
ASIDE_POLL_S = 0.1
"""Poll time while lanes are set aside, which delays their records."""


class _WaitingRecords(NamedTuple):
    """Polled records of a lane, and the end of `requests` up to which it has to be read first."""

    records: Sequence[Record]
    end: int


class LaneReader:
    """Feeds `lanes`, the lanes by number; they are looked up anew at each poll."""

    def __init__(self, context: CollectorContext, lanes: Mapping[int, LaneCollector]) -> None:
        self._context = context
        self._lanes = lanes
        self._assigned: dict[Partition, int] = {}
        """The next offset of the reader by partition."""
        self._aside: dict[LaneCollector, _WaitingRecords] = {}

    async def run(self) -> None:
        reader = self._context.log.reader(gather_s=GATHER_S)
        try:
            while True:
                self._apply_waiting()
                if not self._assign(reader):
                    await self._context.ctx.clock.sleep(REQUESTS_POLL_S)
                    continue
                try:
                    timeout_s = ASIDE_POLL_S if self._aside else IDLE_POLL_S
                    batches = await reader.poll(timeout_s, RECORDS_PER_POLL)
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
        """Read the records that the lanes need, from their positions; False if they need
        nothing."""
        wanted = {
            Partition(RESPONSES, lane.lane): lane.position
            for lane in self._lanes.values()
            if lane.position is not None and not lane.is_full and lane not in self._aside
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
        polled: dict[LaneCollector, _WaitingRecords] = {}
        for source, records in batches.items():
            context.broker_clock.observe(records[-1].timestamp)
            lane = self._lanes.get(source.partition)
            if lane is None or lane.position != self._assigned[source]:
                continue  # revoked, and perhaps assigned anew, during the poll
            self._assigned[source] = records[-1].offset + 1
            polled[lane] = _WaitingRecords(records, ends[source.partition])
        self._aside |= polled
        until = context.ctx.clock.now() + REQUESTS_WAIT_S
        self._apply_waiting()
        while polled.keys() & self._aside.keys() and context.ctx.clock.now() < until:
            await context.ctx.clock.sleep(REQUESTS_POLL_S)
            self._apply_waiting()
        for lane in polled.keys() & self._aside.keys():
            log.warning("lane %d: its requests are not read; replies wait", lane.lane)

    def _apply_waiting(self) -> None:
        """Apply the records of lanes whose requests are read."""
        for lane, waiting in list(self._aside.items()):
            if lane.claim.is_lost:
                del self._aside[lane]
            elif lane.claim.position >= waiting.end:
                del self._aside[lane]
                lane.apply(waiting.records)
