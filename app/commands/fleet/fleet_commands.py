"""The commands about a fleet: `kvlane workers`, `models`, `requests`, `queue`, `status`, `top`.

From the log alone, without a router: the registry, and the records since `--since`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvlane.app.audit.fleet.fleet_reader import FleetReader
    from kvlane.app.audit.fleet.fleet_status import FleetStatus, TopicSampler
    from kvlane.app.audit.fleet.fleet_view import FleetView
    from kvlane.app.audit.fleet.request_facts import EndedRequests

T = TypeVar("T")

SinceOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Read records from then on: -30s, -5m, at most -1h, or a time."
    ),
]
WINDOW = "-5m"
MAX_SLOW = 1000
"""Greatest N of `--slow`: the view keeps up to N requests of each minute."""
TOP_ROWS = 10
"""Workers, and open requests, that `kvlane top` shows: the topics have to fit below."""
TOP_MORE_ROWS = 5
"""The same of ended requests and of jobs."""


class _Fleet:
    """A fleet that has been read, with the time-out of its workers."""

    def __init__(self, reader: FleetReader, sampler: TopicSampler, timeout_s: float) -> None:
        self.reader = reader
        self.sampler = sampler
        self.timeout_s = timeout_s

    @property
    def now_ms(self) -> int:
        return self.reader.now_ms()

    def rows(self, name: str, rows: Any) -> dict[str, Any]:
        return {"now_ms": self.now_ms, "since_ms": self.reader.since_ms, name: rows}


def show_workers(since: str, json: Path | None) -> None:
    """`kvlane workers` without a subcommand."""
    from kvlane.app.audit.fleet.worker_rows import worker_rows
    from kvlane.app.commands.fleet.fleet_tables import workers_table

    _show_rows(since, json, "workers", worker_rows, workers_table)


def show_models(since: str, json: Path | None) -> None:
    """`kvlane models` without a subcommand."""
    from kvlane.app.audit.fleet.model_rows import alias_rows, model_rows
    from kvlane.app.audit.fleet.request_rows import open_requests_of
    from kvlane.app.audit.fleet.worker_rows import worker_rows
    from kvlane.app.commands.fleet.fleet_tables import models_view

    async def read(fleet: _Fleet) -> dict[str, Any]:
        view = fleet.reader.view
        workers = worker_rows(view, fleet.now_ms, fleet.timeout_s)
        models = model_rows(view, workers, open_requests_of(view, fleet.now_ms))
        return {**fleet.rows("models", models), "aliases": alias_rows(view, models)}

    found = _read(since, read)
    _show(json, found, lambda: models_view(found["models"], found["aliases"]))


def requests(
    *,
    slow: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SLOW, metavar="N", help="The N slowest that have ended."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Those that have failed, with the reason.")
    ] = False,
    model: Annotated[str, typer.Option(help="Only of this model.")] = "",
    tenant: Annotated[str, typer.Option(help="Only of this tenant.")] = "",
    since: SinceOption = WINDOW,
    json: screen.JsonOption = None,
) -> None:
    """Show the open requests, the oldest first; or those that have ended since a time.

    `kvlane explain ID` has the rest of a row. Times count from the append of the request, or of
    its prompt; without that record from when its router had it. They are unknown (`-`) for a
    request that had a worker before `--since`, and it counts as begun then. Beyond 10 000 ended
    requests, of each minute the last 200 failed ones are shown, and the number of the others. A
    request that a gateway refused is in no topic.

    Examples:

    - `kvlane requests --model demo`

    - `kvlane requests --slow 10 --since -15m`

    - `kvlane requests --failed --json -`
    """
    from kvlane.app.audit.fleet.request_facts import MAX_OF_MINUTE, EndedRequests
    from kvlane.app.audit.fleet.request_rows import ended_requests_of, open_requests_of
    from kvlane.app.commands.fleet.fleet_tables import requests_view

    if slow and failed:
        raise typer.BadParameter("give --slow or --failed, not both")

    async def read(fleet: _Fleet) -> dict[str, Any]:
        view, left_out = fleet.reader.view, 0
        if slow or failed:
            left_out = view.ended.failed_left_out if failed else 0
            rows = ended_requests_of(
                view, "slow" if slow else "failed", since_ms=fleet.reader.since_ms, model=model,
                tenant=tenant, most=slow,
            )  # fmt: skip
        else:
            rows = open_requests_of(view, fleet.now_ms, model=model, tenant=tenant)
            left_out = view.left_out
        return fleet.rows("requests", rows) | {"left_out": left_out}

    found = _read(since, read, ended=EndedRequests(max(slow or 0, MAX_OF_MINUTE), model, tenant))
    rows, left_out = found["requests"], found["left_out"]
    _show(json, found, lambda: requests_view(rows, left_out, ended=bool(slow or failed)))


def queue(*, since: SinceOption = WINDOW, json: screen.JsonOption = None) -> None:
    """Show the queues: requests by lane and class, prompts, batch prompts, open batch jobs.

    `unread`: records of the lane that its router has not read; `lag` of `prompts` and `batch`:
    those that no preprocessor has passed on; `late`: those that are older than a minute.
    `kvlane explain --waiting` lists the requests.

    Examples:

    - `kvlane queue`

    - `kvlane queue --json - | jq '[.lanes[].queued] | add'`
    """
    from kvlane.app.audit.fleet.fleet_reader import reading_jobs
    from kvlane.app.audit.fleet.queue_rows import job_rows, lane_rows, wait_rows
    from kvlane.app.audit.fleet.request_rows import open_requests_of
    from kvlane.app.commands.fleet.fleet_tables import queue_view

    async def read(fleet: _Fleet) -> dict[str, Any]:
        topics = await fleet.sampler.sample(fleet.reader)
        view, now_ms = fleet.reader.view, fleet.now_ms
        open_requests = open_requests_of(view, now_ms)
        async with reading_jobs(fleet.reader.log, fleet.reader.clock) as open_jobs:
            jobs = job_rows(open_jobs())
        return {
            **fleet.rows("lanes", lane_rows(view, now_ms, open_requests)),
            "waits": wait_rows(view, open_requests),
            "backlog": [row for row in topics if row.lag is not None],
            "jobs": jobs,
        }

    found = _read(since, read, samples=True)
    parts = [found[name] for name in ("lanes", "waits", "backlog", "jobs")]
    _show(json, found, lambda: queue_view(*parts))


def status(*, since: SinceOption = WINDOW, json: screen.JsonOption = None) -> None:
    """Show alarms, workers, models, open requests and topics.

    Exit code 1 with an alarm; 3 if the status is unknown, as without a broker; 2 for wrong options.

    Alarms: a worker that is silent, unhealthy, or was lost since `--since`; a model without a ready
    worker; no router, or a lane without one; requests or prompts unread for a minute; dead letters
    since `--since`.

    Examples:

    - `kvlane status`

    - `kvlane status --json - | jq '.alarms[]'`
    """
    from kvlane.app.audit.fleet.fleet_status import fleet_status
    from kvlane.app.audit.fleet.request_rows import open_requests_of
    from kvlane.app.audit.fleet.worker_rows import worker_rows
    from kvlane.app.commands.fleet.fleet_tables import status_view

    async def read(fleet: _Fleet) -> FleetStatus:
        view = fleet.reader.view
        rows = worker_rows(view, fleet.now_ms, fleet.timeout_s)
        open_requests = open_requests_of(view, fleet.now_ms)
        return await fleet_status(fleet.reader, fleet.sampler, rows, open_requests)

    found = _read(since, read, samples=True)
    _show(json, found, lambda: status_view(found))
    if found.alarms:
        raise typer.Exit(1)


def top(*, since: SinceOption = "-1m") -> None:
    """Watch the fleet: as `status`, with workers, requests and batch jobs, every second.

    Ten workers, those that are not ready first, the ten oldest open requests, the five slowest that
    have ended since `--since`, and the five oldest open jobs. `q` or Ctrl-C ends it. Without a
    terminal it prints one frame.

    Examples:

    - `kvlane top`

    - `kvlane top --since -10m | head -40`: one frame
    """
    from kvlane.app.audit.fleet.fleet_reader import reading_jobs
    from kvlane.app.audit.fleet.fleet_status import fleet_status
    from kvlane.app.audit.fleet.queue_rows import job_rows
    from kvlane.app.audit.fleet.request_rows import ended_requests_of, open_requests_of
    from kvlane.app.audit.fleet.worker_rows import worker_rows
    from kvlane.app.commands.fleet import fleet_tables as tables
    from kvlane.app.commands.fleet.live_screen import show_live

    async def watch(fleet: _Fleet) -> None:
        async def frame() -> RenderableType:
            fleet.reader.check()
            view = fleet.reader.view
            oldest = open_requests_of(view, fleet.now_ms)
            rows = worker_rows(view, fleet.now_ms, fleet.timeout_s)
            found = await fleet_status(fleet.reader, fleet.sampler, rows, oldest)
            rows.sort(key=lambda row: row.state == "ready" and not row.order)
            slowest = ended_requests_of(
                view, "slow", since_ms=fleet.reader.since_ms, most=TOP_MORE_ROWS
            )
            details = [tables.workers_table(rows[:TOP_ROWS]), tables.open_table(oldest[:TOP_ROWS])]
            details += [tables.ended_table(slowest)] if slowest else []
            if jobs := job_rows(open_jobs()[:TOP_MORE_ROWS]):
                details.append(tables.jobs_table(jobs))
            return tables.status_view(found, *details)

        async with reading_jobs(fleet.reader.log, fleet.reader.clock) as open_jobs:
            await show_live(screen.make_console(), frame)

    _read(since, watch, samples=True)


def _show_rows(
    since: str,
    json: Path | None,
    name: str,
    rows_of: Callable[[FleetView, int, float], Sequence[Any]],
    table: Callable[[Sequence[Any]], RenderableType],
) -> None:
    async def read(fleet: _Fleet) -> dict[str, Any]:
        return fleet.rows(name, rows_of(fleet.reader.view, fleet.now_ms, fleet.timeout_s))

    found = _read(since, read)
    _show(json, found, lambda: table(found[name]))


def _read(
    since: str,
    read: Callable[[_Fleet], Awaitable[T]],
    *,
    samples: bool = False,
    ended: EndedRequests | None = None,
) -> T:
    """The result of `read` for the fleet since a time. `samples`: it uses the sampler, which needs
    the right to describe all topics. `ended`: the ended requests that are kept."""
    from kvlane.app.audit.fleet.fleet_reader import reading_fleet
    from kvlane.app.audit.fleet.fleet_status import TopicSampler
    from kvlane.app.settings import Settings
    from kvlane.streams.clock import SystemClock

    settings, clock = Settings(), SystemClock()

    async def run() -> T:
        async with kafka_client.connect_kafka(settings, "kvlane-fleet") as log:
            sampler = TopicSampler(log, clock)
            if samples:
                await sampler.begin()
            with ExitStack() as bar:
                progress = bar.enter_context(screen.reading_progress())
                async with reading_fleet(log, clock, since, progress, ended=ended) as reader:
                    bar.close()
                    return await read(_Fleet(reader, sampler, settings.worker_timeout_s))

    return asyncio.run(run())


def _show(json: Path | None, found: Any, view: Callable[[], RenderableType]) -> None:
    screen.show_result(json, found, lambda: screen.make_console().print(view()))
