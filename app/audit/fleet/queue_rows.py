"""Queues of lanes, reasons of waits and jobs of the Batch API as rows of `--json`. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.topics import REQUESTS, lane_of


class LaneRow(msgspec.Struct, frozen=True):
    """The queue of a lane. `router`: its owner, "" without one. `unread`: records of `requests`
    that it has not read."""

    lane: int
    router: str
    unread: int | None
    queued: int
    queued_batch: int
    oldest_s: float | None
    queued_unknown: int


class WaitRow(msgspec.Struct, frozen=True):
    """A reason for which requests have waited in routers for ten seconds, and their number."""

    reason: str
    requests: int


def lane_rows(view: FleetView, now_ms: int, open_requests: Sequence[RequestRow]) -> list[LaneRow]:
    """The lanes, with what of all `open_requests` is queued in them."""
    positions, ends = view.reports.reports(now_ms).positions, list(_lane_ends(view))
    queued: dict[int, Counter[str]] = defaultdict(Counter)
    oldest: dict[int, float] = {}
    for row in open_requests:
        if row.phase == "queued":
            lane = lane_of(row.id, len(ends))
            queued[lane][row.service_class] += 1
            oldest[lane] = max(oldest.get(lane, 0.0), row.age_s or 0.0)
    rows = []
    for lane, end in enumerate(ends):
        router, position = positions.get(lane, ("", None))
        unread = None if position is None else max(0, end - position)
        of = queued[lane]
        rows.append(
            LaneRow(
                lane, router, unread, of["interactive"], of["batch"], oldest.get(lane) or None,
                of[""],
            )
        )  # fmt: skip
    return rows


def _lane_ends(view: FleetView) -> Iterator[int]:
    lane = 0
    while (end := view.position(Partition(REQUESTS, lane))) is not None:
        yield end
        lane += 1


def wait_rows(view: FleetView, open_requests: Sequence[RequestRow]) -> list[WaitRow]:
    """The reasons of waits, by the reports of routers, of requests that are queued still."""
    reports = view.reports.reports()
    queued = {row.id for row in open_requests if row.phase == "queued"}
    reasons = Counter(wait.reason for wait in reports.waits if wait.request_id in queued)
    rows = [WaitRow(reason, count) for reason, count in reasons.most_common()]
    return [*rows, WaitRow("not listed", reports.left_out)] if reports.left_out else rows


class JobRow(msgspec.Struct, frozen=True):
    """A job of the Batch API that has not ended. `published`: lines up to which all are prompts."""

    id: str
    tenant: str
    status: str
    lines: int
    published: int
    completed: int
    failed: int
    created_s: int


def job_rows(jobs: Iterable[BatchJob]) -> list[JobRow]:
    return [msgspec.convert(job, JobRow, from_attributes=True) for job in jobs]
