"""The fleet of a deployment as the console's pages see it, by one reader for all of them.

The reader runs while a page asks: `IDLE_S` after the last question it ends, and its memory is
free. What a page gets is made when it asks, at most once in `FRAME_S` for the same question, so
no queue grows for a slow one. An error ends the reader, never the gateway; the next question after
`RETRY_S` starts it again. Memory: as `FleetView`, and the rings of `RecentActivity`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvlane.app.audit.fleet.fleet_reader import FleetReader, reading_fleet
from kvlane.app.audit.fleet.fleet_status import FleetStatus, TopicSampler, fleet_status
from kvlane.app.audit.fleet.queue_rows import job_rows, lane_rows, wait_rows
from kvlane.app.audit.fleet.request_rows import EndedShown, ended_requests_of, open_requests_of
from kvlane.app.audit.fleet.worker_rows import WorkerRow, worker_rows
from kvlane.app.audit.timeline import explain_request, timeline_json
from kvlane.app.audit.waits import explain_wait
from kvlane.app.http.console.recent_activity import RecentActivity, decision_rows
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.errors import CorrectableError
from kvlane.streams.ports import Log
from kvlane.streams.record_types.batch_records import BatchJob

log = logging.getLogger(__name__)

WINDOW = "-5m"
"""As that of the commands, whose alarms and rows are the same."""
IDLE_S = 15.0
"""A page asks every second; a hidden one does not."""
FRAME_S = 1.0
PAUSE_FRAMES = 20
"""Pause after a frame, in durations of that frame: those of a large fleet come seldom."""
RETRY_S = 5.0
MAX_ROWS = 200
MAX_DECISIONS_AT_ONCE = 40
MAX_ANSWERS = 32
"""Questions whose answers are kept for `FRAME_S`."""


class ReaderState(msgspec.Struct, frozen=True):
    """State of the reader: `done` of `total` offsets are read; the error that ended it."""

    state: Literal["reading", "live", "failed"] = "reading"
    done: int = 0
    total: int = 0
    message: str = ""
    correction: str = ""


class LiveFleet:
    def __init__(
        self,
        kafka: Log,
        ctx: ProcessContext,
        pool: WorkPool,
        worker_timeout_s: float,
        jobs: Callable[[], list[BatchJob]],
    ) -> None:
        """`jobs`: the open jobs of the Batch API."""
        self._log = kafka
        self._ctx = ctx
        self._clock = ctx.clock
        self._pool = pool
        self._timeout_s = worker_timeout_s
        self._jobs = jobs
        self._task: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._failed_s = 0.0
        self._clear()
        self._state = ReaderState()

    def _clear(self) -> None:
        self._reader: FleetReader | None = None
        self._activity = RecentActivity()
        self._status: FleetStatus | None = None
        self._workers: list[WorkerRow] = []
        self._answers: dict[tuple[Any, ...], tuple[float, bytes]] = {}

    @property
    def is_reading(self) -> bool:
        return self._task is not None and not self._task.done()

    # --- what pages ask ---

    def fleet(self) -> bytes:
        """Status, workers, and figures over time."""
        return self._answer(("fleet",), self._fleet)

    def requests(self, shown: Literal["open"] | EndedShown, model: str, tenant: str) -> bytes:
        """At most `MAX_ROWS` requests."""

        def rows(reader: FleetReader) -> dict[str, Any]:
            view, now_ms = reader.view, reader.now_ms()
            if shown == "open":
                found = open_requests_of(view, now_ms, model=model, tenant=tenant)
                left_out = view.left_out + max(0, len(found) - MAX_ROWS)
                return {"requests": found[:MAX_ROWS], "left_out": left_out}
            ended = ended_requests_of(
                view, shown, since_ms=reader.since_ms, model=model, tenant=tenant, most=MAX_ROWS
            )
            is_failed = shown == "failed"
            left_out = view.ended.failed_left_out if is_failed else view.ended.count - len(ended)
            return {"requests": ended, "left_out": left_out}

        return self._answer(("requests", shown, model, tenant), rows)

    def queue(self) -> bytes:
        """Lanes, waits, backlog, and open batch jobs."""

        def rows(reader: FleetReader) -> dict[str, Any]:
            view, now_ms, status = reader.view, reader.now_ms(), self._status
            topics = [] if status is None else status.topics
            open_requests = open_requests_of(view, now_ms)
            return {
                "lanes": lane_rows(view, now_ms, open_requests),
                "waits": wait_rows(view, open_requests),
                "backlog": [row for row in topics if row.lag is not None],
                "jobs": job_rows(self._jobs()[:MAX_ROWS]),
            }

        return self._answer(("queue",), rows)

    async def decisions(self, after: int) -> bytes:
        """The newest decisions with a number above `after`."""
        self._ask()
        last = self._activity.decisions
        found = self._activity.newest(after, MAX_DECISIONS_AT_ONCE)
        rows = await self._pool.run(lambda: decision_rows(found))
        return self._encode({"decisions": rows, "last": last})

    async def timeline(self, request_id: str) -> bytes:
        """As `kvlane explain`. Raises BrokerUnavailable, PositionLost, NewerRecord."""
        timeline = await explain_request(self._log, self._clock, request_id)
        wait = await explain_wait(self._log, self._clock, timeline)
        return msgspec.json.encode(timeline_json(timeline, wait) | {"now_ms": timeline.now_ms})

    # --- answers ---

    def _answer(
        self, question: tuple[Any, ...], rows: Callable[[FleetReader], dict[str, Any]]
    ) -> bytes:
        self._ask()
        if (reader := self._reader) is None:
            return self._encode({})
        now, known = self._clock.now(), self._answers.get(question)
        if known is not None and now - known[0] < FRAME_S:
            return known[1]
        answer = self._encode(rows(reader))
        if len(self._answers) >= MAX_ANSWERS:
            self._answers.clear()
        self._answers[question] = now, answer
        return answer

    def _encode(self, fields: dict[str, Any]) -> bytes:
        reader, times = self._reader, {}
        if reader is not None:
            times = {"now_ms": reader.now_ms(), "since_ms": reader.since_ms}
        return msgspec.json.encode({"reader": self._state} | times | fields)

    def _fleet(self, reader: FleetReader) -> dict[str, Any]:
        return {
            "status": self._status,
            "workers": self._workers,
            "points": self._activity.points(reader.now_ms()),
        }

    # --- the reader ---

    def _ask(self) -> None:
        now = self._clock.now()
        self._asked_s = now
        has_failed = self._state.state == "failed" and now - self._failed_s < RETRY_S
        if not self.is_reading and not has_failed:
            self._state = ReaderState()
            self._task = self._ctx.spawn("console", self._read())

    async def _read(self) -> None:
        try:
            await self._follow()
        except Exception as e:  # noqa: BLE001 - a page must not end the gateway
            correction = e.correction if isinstance(e, CorrectableError) else ""
            message = f"{type(e).__name__}: {e}"
            log.warning("the console cannot read the fleet: %s", message)
            self._failed_s = self._clock.now()
            self._state = ReaderState("failed", message=message, correction=correction)
        finally:
            self._clear()

    async def _follow(self) -> None:
        """Read and sample until no page has asked for `IDLE_S`."""
        clock, activity = self._clock, self._activity

        def progress(done: int, total: int) -> None:
            self._state = ReaderState("reading", done, total)

        sampler = TopicSampler(self._log, clock)
        await sampler.begin()
        hooks = (activity.on_records, activity.on_ended)
        async with reading_fleet(self._log, clock, WINDOW, progress, *hooks) as reader:
            while clock.now() - self._asked_s < IDLE_S:
                reader.check()
                began_s = clock.now()
                view, now_ms = reader.view, reader.now_ms()
                open_requests = open_requests_of(view, now_ms)
                self._workers = worker_rows(view, now_ms, self._timeout_s)
                status = await fleet_status(reader, sampler, self._workers, open_requests)
                activity.sample(status.now_ms, self._workers, open_requests)
                self._status, self._reader = status, reader
                self._state = ReaderState("live")
                await clock.sleep(max(FRAME_S, PAUSE_FRAMES * (clock.now() - began_s)))
        log.info("no page of the console is open: its reader has ended")
