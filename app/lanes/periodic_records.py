"""Periodic records of a router: free capacity for preprocessors, and ids of ended prompts.

`capacity` gets a record of the prompts that the router has room for after every change, a few a
second at most, and again before the last one expires; every ten seconds it also has the requests
that wait, with their reasons, and how the router routes, for operators. `ended-ids` gets a record a
minute for each owned lane. Repeated ones do no harm; after a crash the next owner writes the
missing ones, from its view.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.owner import LaneOwner
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import ReportedWaits, RouterCapacity
from kvlane.streams.topics import CAPACITY, ENDED_IDS, LEDGER

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""Between two reports of changes."""
REFRESH_INTERVAL_S = 1.0
"""Between two reports of the same."""
WAITS_INTERVAL_S = 10.0
"""Between two reports of waits, and the age from which on a wait is reported."""
MAX_REPORTED_WAITS = 2000
"""Interactive requests come first, then those that have waited longest."""


class CapacityReporter:
    def __init__(self, context: RouterContext, owners: Mapping[int, LaneOwner]) -> None:
        self._context = context
        self._owners = owners
        # Its own: the failure detector must not count how long these appends take.
        self._publisher = RecordPublisher(context.log, context.ctx.clock)

    async def run(self) -> None:
        clock = self._context.ctx.clock
        last, reported_at, waits_due_at, routing = None, clock.now(), clock.now(), None
        while True:
            report = self._report()
            now_routing = self._context.routing.report
            has_waits = clock.now() >= waits_due_at or now_routing != routing
            if report != last or has_waits or clock.now() - reported_at >= REFRESH_INTERVAL_S:
                written = report
                if has_waits:
                    written = replace(report, waits=self._waits(), routing=now_routing)
                try:
                    await self._publisher.publish_once(CAPACITY, report.router, written, 0)
                    last, reported_at = report, clock.now()
                    if has_waits:
                        waits_due_at, routing = reported_at + WAITS_INTERVAL_S, now_routing
                except AppendFailed as e:
                    log.warning("cannot report this router's capacity to preprocessors: %s", e)
            await clock.sleep(REPORT_INTERVAL_S)

    def _waits(self) -> ReportedWaits:
        latest_ms = self._context.broker_clock.now_ms() - 1000 * WAITS_INTERVAL_S
        found = sorted(
            (wait.is_batch, wait.since_ms, request_id, wait.text)
            for owner in self._owners.values()
            for request_id, wait in owner.waits.items()
            if wait.since_ms <= latest_ms
        )
        listed = found[:MAX_REPORTED_WAITS]
        numbers: dict[str, int] = {}
        requests = tuple(
            (request_id, since_ms, numbers.setdefault(reason, len(numbers)))
            for _, since_ms, request_id, reason in listed
        )
        return ReportedWaits(
            reasons=tuple(numbers), requests=requests, left_out=len(found) - len(listed)
        )

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


SAVE_INTERVAL_S = 60.0
APPEND_TIMEOUT_S = 10.0


class EndedIdsWriter:
    def __init__(self, context: RouterContext, owners: Mapping[int, LaneOwner]) -> None:
        self._context = context
        self._owners = owners

    async def run(self) -> None:
        clock = self._context.ctx.clock
        while True:
            for lane in [lane for lane, owner in self._owners.items() if owner.serving]:
                await self._save(lane)
            await clock.sleep(SAVE_INTERVAL_S)

    async def _save(self, lane: int) -> None:
        s = self._context
        ended, position = s.ledger.ended_prompts, s.ledger.position(Partition(LEDGER, lane))
        if position is None:
            return
        try:
            if position < (saved := ended.saved_until(lane) or 0):
                end = (await s.log.end_offsets(LEDGER, [lane]))[lane]
                if end < saved:
                    log.warning("lane %d: its ledger was made anew, or lost its end", lane)
                    ended.restart(lane)
            if (record := ended.unsaved(lane, position)) is None:
                return
            until = s.ctx.clock.now() + APPEND_TIMEOUT_S
            await s.publisher.publish(ENDED_IDS, str(lane), record, 0, until=until)
        except (AppendFailed, BrokerUnavailable) as e:  # the next record has these ids as well
            log.warning("lane %d: ids of ended prompts are not written yet: %s", lane, e)
