"""The waits of requests for a worker, with their reasons, from the log alone.

Routers report them on `capacity` (`app/lanes/periodic_records.py`). What no router has read waits
in its lane. Ages are those of the broker's clock: the newest report is taken for now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from kvlane.app.audit.timeline import RequestTimeline, TimelineStep
from kvlane.streams.clock import Clock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.reading.range_reader import read_range, record_at
from kvlane.streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    LogRecord,
    RouterCapacity,
    RoutingReport,
    Started,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, REQUESTS

REPORTED_AFTER_S = 10
"""Wait after which routers report a request, and between two reports of waits."""
SILENCE_MS = 5_000
"""Age of a report at which its router owns no lane any more, for lack of newer ones."""
_READ_MS = 25_000
"""Time before the newest report of which reports are read: each router's last one with waits."""
_REPORTED_WITHIN_MS = 1000 * REPORTED_AFTER_S + SILENCE_MS
_CAPACITY = Partition(CAPACITY, 0)


class ReportedWait(NamedTuple):
    """A request that waits in a router, with the reason. Times are the broker's, in ms."""

    request_id: str
    router: str
    since_ms: int
    reason: str
    at_ms: int


class RouterReports(NamedTuple):
    """The state of all routers at `now_ms`, when the last of them reported; 0: none ever did.

    `positions`: by lane its owner, and the offset up to which that has read `requests`. `left_out`:
    requests that wait and are not in `waits`, since too many do. `routing`: of each router that is
    not silent; None: it has reported none for longer than routers do, as earlier versions.
    """

    now_ms: int
    positions: dict[int, tuple[str, int]]
    waits: tuple[ReportedWait, ...]
    left_out: int
    routing: Mapping[str, RoutingReport | None] = {}

    def wait_of(self, request_id: str) -> ReportedWait | None:
        return next((wait for wait in self.waits if wait.request_id == request_id), None)


class ReportFold:
    """The newest reports of each router, of the records of `capacity` in their order."""

    def __init__(self) -> None:
        self._first_ms = self._newest_ms = 0
        self._states: dict[str, tuple[int, RouterCapacity]] = {}
        self._waits: dict[str, tuple[int, RouterCapacity]] = {}

    def add(self, log_record: LogRecord) -> None:
        report, at_ms = log_record.record, log_record.timestamp_ms
        self._first_ms = self._first_ms or at_ms
        self._newest_ms = max(self._newest_ms, at_ms)
        if isinstance(report, RouterCapacity):
            self._states[report.router] = at_ms, report
            if report.waits is not None:
                self._waits[report.router] = at_ms, report

    def expire(self) -> None:
        """Drop the routers that have reported no waits for long."""
        for known in (self._states, self._waits):
            for name in [n for n, (at_ms, _) in known.items() if at_ms < self._oldest_ms]:
                del known[name]

    @property
    def _oldest_ms(self) -> int:
        return self._newest_ms - _READ_MS

    def reports(self, now_ms: int = 0) -> RouterReports:
        """Owners are routers that are not silent at `now_ms`, or when the last one reported."""
        now_ms = max(now_ms, self._newest_ms)
        live = {n: r for n, r in self._states.items() if now_ms - r[0] < SILENCE_MS}
        recent = {n: r for n, r in self._waits.items() if r[0] >= self._oldest_ms}
        return RouterReports(
            self._newest_ms,
            {  # a lane that has moved is that of the newer report
                lane: (name, position)
                for name, (_, report) in sorted(live.items(), key=lambda s: s[1][0])
                for lane, position in report.positions.items()
            },
            tuple(
                ReportedWait(request_id, name, since_ms, report.waits.reasons[reason], at_ms)
                for name, (at_ms, report) in recent.items()
                if report.waits is not None
                for request_id, since_ms, reason in report.waits.requests
            ),
            sum(r.waits.left_out for _, r in recent.values() if r.waits is not None),
            {
                n: recent[n][1].routing if n in recent else None
                for n in sorted(live)
                if n in recent or self._newest_ms - self._first_ms > _REPORTED_WITHIN_MS
            },
        )


async def read_reports(log: Log, clock: Clock) -> RouterReports:
    """The newest reports of all routers. Raises BrokerUnavailable, PositionLost, NewerRecord."""
    end = (await log.end_offsets(CAPACITY, [0]))[0]
    newest = await record_at(log, clock, _CAPACITY, end - 1) if end else None
    if newest is None:
        return RouterReports(0, {}, (), 0)
    start = await log.offset_at(CAPACITY, 0, newest.timestamp - _READ_MS)
    fold, decoding = ReportFold(), RecordDecoder(log, clock)
    async with aclosing(read_range(log, clock, {_CAPACITY: start}, {_CAPACITY: end})) as batches:
        async for source, records, _ in batches:
            for log_record in await decoding.decode_records(source, records):
                fold.add(log_record)
    return fold.reports()


async def explain_wait(log: Log, clock: Clock, timeline: RequestTimeline) -> str:
    """Why a request waits, and where; "" if it does not, or its engine has it. Raises as
    `read_reports`."""
    if timeline.ending or not any(step.name == Request.__name__ for step in timeline.steps):
        return ""
    since_ms = unassigned_since_ms(timeline.steps)
    if since_ms is None:
        return _unstarted(timeline)
    waited_s = max(0, timeline.now_ms - since_ms) / 1000
    why = _place(timeline, await read_reports(log, clock))
    return f"assigned to no worker for {waited_s:.1f} s: {why}"


def _place(timeline: RequestTimeline, reports: RouterReports) -> str:
    silent_s = (timeline.now_ms - reports.now_ms) / 1000
    if silent_s > 60:
        return "no router has reported for a minute, so none runs, or the broker's clock differs"
    owner = reports.positions.get(timeline.lane)
    if owner is None:
        return f"no router owns lane {timeline.lane}; it is unread there until one takes it over"
    router, position = owner
    offset = max(s.offset for s in timeline.steps if s.name == Request.__name__)
    if position <= offset:
        return (
            f"unread in its lane: router {router} has read `{REQUESTS}` up to offset {position}, "
            f"and it is at {offset}"
        )
    wait = reports.wait_of(timeline.request_id)
    if wait is not None and wait.router == router:
        age_s = (reports.now_ms - wait.at_ms) / 1000
        return f"queued in router {router}: {wait.reason} (as of {age_s:.0f} s ago)"
    last = timeline.steps[-1]
    if last.name == Finished.__name__ and last.fields.get("code") == "worker_full":
        worker = last.fields["worker"]
        return f"worker {worker} refused it for lack of room; router {router} tries again soon"
    rest = f"; {reports.left_out} wait that none reports" if reports.left_out else ""
    return (
        f"queued in router {router}, which reports the reason of a wait of {REPORTED_AFTER_S} s "
        f"within {REPORTED_AFTER_S} s{rest}"
    )


def _unstarted(timeline: RequestTimeline) -> str:
    """The wait of a run that its worker has not begun."""
    about_runs = (Assigned.__name__, Started.__name__, Finished.__name__, Ended.__name__)
    step = next((s for s in reversed(timeline.steps) if s.name in about_runs), None)
    if step is None or step.name != Assigned.__name__:
        return ""
    waited_s = max(0, timeline.now_ms - step.at_ms) / 1000
    if waited_s < 1:
        return ""
    return (
        f"not started by its worker for {waited_s:.1f} s: {step.fields['worker']} runs as many "
        "requests as its engine admits (`kvlane_worker_requests_waiting`), or has not read it"
    )


def unassigned_since_ms(steps: Sequence[TimelineStep]) -> int | None:
    """Broker time from which on a request has been waiting for a worker; None if it is not.

    After its first record, a fence, the refusal of a worker, and a prefill whose decode is to come.
    """
    since_ms: int | None = None
    latest: dict[str, Any] = {}
    for step in steps:
        record = step.fields
        is_of_latest = record.get("attempt", 0) == latest.get("attempt", 0)
        if step.name == Ended.__name__:
            return None
        if step.name == Assigned.__name__:
            latest, since_ms = record, None
        elif step.name in (Request.__name__, Fencing.__name__):
            since_ms = step.at_ms
        elif step.name == Finished.__name__ and is_of_latest:
            is_prefill = record.get("code") == "handed_off" and latest.get("phase") == "prefill"
            if is_prefill or record.get("retryable"):
                since_ms = step.at_ms
    return since_ms
