"""Reports of a router's free capacity to preprocessors: the prompts that it has room for.

One small record of `remaining_capacity` after every change, a few a second at most, and again
before the last one expires: a preprocessor drops a router without reports.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.owner import LaneOwner
from kvlane.streams.errors import AppendFailed
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import RouterCapacity
from kvlane.streams.topics import CAPACITY

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""Between two reports of changes. The prompts that a preprocessor may publish in this time are
bounded by the room in the last report, half a queue of `max_queued_requests` (2048)."""
REFRESH_INTERVAL_S = 1.0
"""Between two reports of the same."""


class CapacityReporter:
    def __init__(self, context: RouterContext, owners: Mapping[int, LaneOwner]) -> None:
        self._context = context
        self._owners = owners
        # Its own: the failure detector must not count how long these appends take.
        self._publisher = RecordPublisher(context.log, context.ctx.clock)

    async def run(self) -> None:
        clock = self._context.ctx.clock
        last, reported_at = None, clock.now()
        while True:
            report = self._report()
            if report != last or clock.now() - reported_at >= REFRESH_INTERVAL_S:
                try:
                    await self._publisher.publish_once(CAPACITY, report.router, report, 0)
                    last, reported_at = report, clock.now()
                except AppendFailed as e:
                    log.warning("cannot report this router's capacity to preprocessors: %s", e)
            await clock.sleep(REPORT_INTERVAL_S)

    def _report(self) -> RouterCapacity:
        serving = {lane: owner for lane, owner in self._owners.items() if owner.serving}
        admitted = sum(owner.admitted_requests for owner in serving.values())
        admitted_batch = sum(owner.admitted_batch_requests for owner in serving.values())
        room = self._context.queue.waiting.remaining_capacity(admitted - admitted_batch)
        batch = self._context.queue.batch.waiting
        queued_batch = max(admitted_batch, batch.queued_requests + batch.deferred_requests)
        batch_room = self._context.settings.max_queued_batch_requests - queued_batch
        return RouterCapacity(
            router=self._context.name, requests=room.requests, tokens=room.tokens,
            bytes=room.bytes, batch_requests=max(0, batch_room),
            positions={lane: owner.claim.position for lane, owner in sorted(serving.items())},
        )  # fmt: skip
