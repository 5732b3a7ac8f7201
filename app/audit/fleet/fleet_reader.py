"""Follower of the recent records of a deployment, for commands about the fleet.

Reads `registry` from its start, of the other topics of `FleetView` the records since a time, at
most `MAX_WINDOW_MS` ago. Writes nothing, and is in no group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvlane.app.audit.fleet.fleet_view import SOURCES, FleetView, OnEnded
from kvlane.app.audit.fleet.request_facts import EndedRequests
from kvlane.app.audit.time_range import InvalidTime, parse_range
from kvlane.app.batches.batch_log import BatchView
from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.range_reader import NO_DATA_TIMEOUT_S, Progress
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import BATCH_JOBS, HOUR_MS, REGISTRY
from kvlane.streams.views.follower import Follower, OnApplied

MAX_WINDOW_MS = HOUR_MS
"""Requests are kept for so long, and runs end within it."""
OBSERVE_S = 1.2
"""Time in which a live deployment appends a record: heartbeats and reports of routers, once a
second. Its time is the broker's."""
_POLL_S = 0.05


class FleetReader:
    """A fleet that is being read. `since_ms`: wall time from which on records are read."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        since_ms: int,
        on_applied: OnApplied | None = None,
        on_ended: OnEnded = lambda _: None,
        ended: EndedRequests | None = None,
    ) -> None:
        """`on_applied`: called with records that the view has; `on_ended`, `ended`: as of
        `FleetView`."""
        self.log = log
        self.clock = clock
        self.since_ms = since_ms
        self.window_ms = max(1, clock.wall_ms() - since_ms)
        self.view = FleetView(self.window_ms, on_ended, ended)
        self._broker_clock = BrokerClock(clock)
        self._on_applied = on_applied
        self._live_s = -math.inf
        self.ahead_ms: dict[Partition, int] = {}
        """By partition, how far the time of a record was ahead of this machine's when it was read,
        of records that came while the reader waited for them."""
        self.follower = Follower(
            log, self.view, SOURCES, clock, broker_clock=self._broker_clock, start=self._start,
            on_applied=self._applied,
        )  # fmt: skip
        self.following = asyncio.create_task(self.follower.run())

    def check(self) -> None:
        """Raise the error that has ended the reading, if one has."""
        if self.following.done():
            self.following.result()

    def now_ms(self) -> int:
        """The broker's time by a record of the last moment; without one not before this machine's,
        since records of a deployment that is down are old."""
        broker_ms = self._broker_clock.now_ms()
        if self.clock.now() - self._live_s <= 2 * OBSERVE_S:
            return broker_ms
        return max(broker_ms, self.clock.wall_ms())

    def _applied(self, source: Partition, log_records: Sequence[LogRecord]) -> None:
        if self.follower.caught_up and source.topic != REGISTRY:
            self._live_s = self.clock.now()
            ahead_ms = log_records[-1].timestamp_ms - self.clock.wall_ms()
            self.ahead_ms[source] = max(ahead_ms, self.ahead_ms.get(source, ahead_ms))
        if self._on_applied is not None:
            self._on_applied(source, log_records)

    async def _start(self, source: Partition) -> int:
        if source.topic == REGISTRY:
            return 0
        return await self.log.offset_at(source.topic, source.partition, self.since_ms)


@asynccontextmanager
async def reading_fleet(
    log: Log,
    clock: Clock,
    since: str,
    progress: Progress = lambda _done, _total: None,
    on_applied: OnApplied | None = None,
    on_ended: OnEnded = lambda _: None,
    ended: EndedRequests | None = None,
) -> AsyncIterator[FleetReader]:
    """The fleet since a time (`-5m`), read up to now and kept up to date until the end of the
    block. Raises InvalidTime, BrokerUnavailable, AccessDenied, NewerRecord."""
    start_ms = window_start(since, clock.wall_ms())
    reader = FleetReader(log, clock, start_ms, on_applied, on_ended, ended)
    try:
        await _catch_up(reader.follower, reader.following, clock, progress)
        await clock.sleep(OBSERVE_S)
        reader.check()
        yield reader
    finally:
        reader.following.cancel()
        await asyncio.gather(reader.following, return_exceptions=True)


@asynccontextmanager
async def reading_jobs(log: Log, clock: Clock) -> AsyncIterator[Callable[[], list[BatchJob]]]:
    """A function that gives the open jobs of the Batch API, which are read up to now and kept up to
    date until the end of the block. Both raise BrokerUnavailable, AccessDenied."""
    view = BatchView(clock.wall_ms)
    follower = Follower(log, view, [BATCH_JOBS], clock)
    following = asyncio.create_task(follower.run())

    def open_jobs() -> list[BatchJob]:
        if following.done():
            following.result()
        return view.open_jobs()

    try:
        await _catch_up(follower, following, clock)
        yield open_jobs
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def window_start(since: str, now_ms: int) -> int:
    start_ms = parse_range(since, now_ms).from_ms
    if start_ms < now_ms - MAX_WINDOW_MS:
        raise InvalidTime(
            f"{since} is too long ago: requests are kept for an hour. Give -1h or less"
        )
    return start_ms


async def _catch_up(
    follower: Follower,
    following: asyncio.Task[None],
    clock: Clock,
    progress: Progress = lambda _done, _total: None,
) -> None:
    last, most, until_s = 0, 0, clock.now() + NO_DATA_TIMEOUT_S
    while not follower.caught_up:
        if following.done():
            following.result()
        left = follower.remaining_offsets
        most = max(most, left)
        if most:
            progress(most - left, most)
        if left != last:  # it is 0 until the follower has found the end offsets
            last, until_s = left, clock.now() + NO_DATA_TIMEOUT_S
        elif clock.now() > until_s:
            raise BrokerUnavailable(f"no records for {NO_DATA_TIMEOUT_S:g} s")
        await clock.sleep(_POLL_S)
