"""Status of a deployment: alarms, and rate and lag of its topics, beside the rows of its fleet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvlane.app.audit.fleet.fleet_reader import FleetReader
from kvlane.app.audit.fleet.model_rows import ModelRow, model_rows
from kvlane.app.audit.fleet.queue_rows import LaneRow, lane_rows
from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.app.audit.fleet.worker_rows import WorkerRow
from kvlane.app.audit.waits import SILENCE_MS
from kvlane.streams.clock import Clock
from kvlane.streams.ports import Log
from kvlane.streams.topics import BATCH, DEAD_LETTERS, GROUPS, REQUESTS, TOPICS

LATE_MS = 60_000
"""Age from which on an unread record is late."""
_GROUPS = {GROUPS[group]: group for group in ("preprocessor", "preprocessor-batch", "router")}


class TopicRow(msgspec.Struct, frozen=True):
    """A topic. `rate`: offsets a second since the sample before. `lag`: prompts that preprocessors
    have not published as requests, requests that routers have not read; `late`: those of them that
    are older than a minute; null for the other topics."""

    name: str
    rate: float
    lag: int | None
    late: int | None


class Alarm(msgspec.Struct, frozen=True):
    """A condition that an operator has to look at."""

    kind: Literal["worker", "model", "router", "lag", "dead letters"]
    name: str
    message: str


class FleetStatus(msgspec.Struct, frozen=True):
    """The whole. `workers`, `requests`: numbers by state, and by phase."""

    now_ms: int
    since_ms: int
    alarms: list[Alarm]
    topics: list[TopicRow]
    workers: dict[str, int]
    models: list[ModelRow]
    requests: dict[str, int]
    dead_letters: int


class TopicSampler:
    """Samples of the ends of all topics: rates are those between two of them."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._at_s = 0.0
        self._last: dict[str, dict[int, int]] = {}

    async def begin(self) -> None:
        """Take the first sample. Raises BrokerUnavailable, AccessDenied, TopicMismatch."""
        names = [topic.name for topic in TOPICS]
        ends = await asyncio.gather(*map(self._ends, names))
        self._at_s, self._last = self._clock.now(), dict(zip(names, ends, strict=True))

    async def sample(self, reader: FleetReader) -> list[TopicRow]:
        """Raises as `begin`, which comes first."""
        positions = {
            topic: {**await self._log.committed_offsets(topic, group)}
            for topic, group in _GROUPS.items()
        }
        reports = reader.view.reports.reports()
        positions[REQUESTS] |= {lane: offset for lane, (_, offset) in reports.positions.items()}
        before_s, before = self._at_s, self._last
        await self.begin()
        rows, elapsed_s = [], max(self._at_s - before_s, 0.001)
        for name, ends in self._last.items():
            lag = late = None
            if name in positions:
                before_ms = reader.now_ms() - LATE_MS
                lag, late = await unread_records(self._log, name, positions[name], ends, before_ms)
            appended = sum(ends.values()) - sum(before[name].values())
            rows.append(TopicRow(name, round(appended / elapsed_s, 1), lag, late))
        return rows

    async def dead_letters(self, since_ms: int) -> int:
        ends = await self._ends(DEAD_LETTERS)
        return sum([
            end - await self._log.offset_at(DEAD_LETTERS, partition, since_ms)
            for partition, end in ends.items()
        ])  # fmt: skip

    async def _ends(self, topic: str) -> dict[int, int]:
        return await self._log.end_offsets(topic, range(await self._log.partitions(topic)))


async def unread_records(
    log: Log, topic: str, read: Mapping[int, int], ends: Mapping[int, int], before_ms: int
) -> tuple[int, int]:
    """Records after the positions `read`, and those of them appended before a time. A partition
    without a position counts from its first record: there its reader would begin. Raises
    BrokerUnavailable, AccessDenied."""
    starts = await log.start_offsets(topic, list(ends))
    lag = late = 0
    for partition, end in ends.items():
        position = max(read.get(partition, 0), starts[partition])
        if end > position:
            lag += end - position
            old = await log.offset_at(topic, partition, before_ms)
            late += max(0, old - position)
    return lag, late


async def fleet_status(
    reader: FleetReader,
    sampler: TopicSampler,
    workers: Sequence[WorkerRow],
    open_requests: Sequence[RequestRow],
) -> FleetStatus:
    """The status now, with all `workers` and `open_requests`; rates are those since the last
    sample. Raises as `TopicSampler.sample`."""
    topics = await sampler.sample(reader)
    view, now_ms = reader.view, reader.now_ms()
    dead_letters = await sampler.dead_letters(now_ms - reader.window_ms)
    models = model_rows(view, workers, open_requests)
    alarms = [*_worker_alarms(workers), *_model_alarms(models)]
    alarms += _router_alarms(lane_rows(view, now_ms, open_requests))
    alarms += [
        Alarm("lag", row.name, f"{row.late} records have waited for more than a minute")
        for row in topics
        if row.late and row.name != BATCH  # its prompts wait for capacity
    ]
    if dead_letters:
        words = f"{dead_letters} records could not be processed: `kvlane dead-letters list`"
        alarms.append(Alarm("dead letters", DEAD_LETTERS, words))
    return FleetStatus(
        now_ms, reader.since_ms, alarms, topics, dict(Counter(row.state for row in workers)),
        models, dict(Counter(row.phase for row in open_requests)), dead_letters,
    )  # fmt: skip


def _worker_alarms(workers: Sequence[WorkerRow]) -> list[Alarm]:
    return [
        Alarm("worker", row.id, state_words(row))
        for row in workers
        if row.state in ("silent", "lost", "unhealthy")
    ]


def state_words(row: WorkerRow) -> str:
    """The state of a worker that is silent, lost or unhealthy, with the reason."""
    if row.state == "unhealthy":
        return f"is unhealthy: {row.reason or 'its heartbeat has no reason'}"
    if row.heartbeat_age_s is None:
        return f"is {row.state}: no heartbeat of epoch {row.epoch}"
    return f"is {row.state}: its last heartbeat is {row.heartbeat_age_s:.1f} s old"


def _model_alarms(models: list[ModelRow]) -> list[Alarm]:
    return [
        Alarm("model", row.name, f"has no ready worker, and {row.open} open requests")
        for row in models
        if not row.ready and (row.workers or row.open)
    ]


def _router_alarms(lanes: list[LaneRow]) -> list[Alarm]:
    unowned = [row.lane for row in lanes if not row.router]
    if len(unowned) == len(lanes):
        return [Alarm("router", "all", f"no router has reported a lane for {SILENCE_MS // 1000} s")]
    return [Alarm("router", f"lane {lane}", "no router owns it") for lane in unowned]
