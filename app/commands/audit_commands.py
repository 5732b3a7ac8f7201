"""The commands `kvlane replay`, `explain`, `capture` and `verify-decisions`, from the log alone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client
from kvlane.streams.clock import SystemClock

if TYPE_CHECKING:
    from rich.console import Console

    from kvlane.app.audit.captured_errors import CapturedErrors
    from kvlane.app.audit.drift import ErrorShares
    from kvlane.app.audit.rebuild import RebuiltView
    from kvlane.app.audit.recompute import RecomputeReport
    from kvlane.app.audit.time_range import TimeRange
    from kvlane.app.audit.timeline import RequestTimeline
    from kvlane.app.audit.waits import RouterReports
    from kvlane.app.traces.capture_format import AnyCaptureLine, CaptureTotals


def replay(
    *,
    view: Annotated[
        Literal["load", "fleet", "index"],
        typer.Option(help="load: requests and runs; fleet: workers; index: cached blocks."),
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="TIME|OFFSETS",
            help="Read up to here, not to the end: 2025-11-21T06:40:00Z, -15m, or "
            "ledger/3:1200,ledger/4:980.",
        ),
    ] = "",
    json: screen.JsonOption = None,
) -> None:
    """Rebuild a materialized view of the routers from the log alone.

    Prints the offsets that were read to, a hash of the state (equal for replicas at the same
    offsets), and a summary. Reads only.

    Examples:

    - `kvlane replay --view load`: which requests are open, and on which worker

    - `kvlane replay --view fleet --at -15m`: the workers of 15 minutes ago

    - `kvlane replay --view load --at ledger/3:1200 --json load.json`: lane 3 before offset 1200
    """
    result = asyncio.run(_replay(view, at))
    screen.show_result(json, result, lambda: _show_replayed(result))


def verify_decisions(
    source: Annotated[
        str, typer.Argument(metavar="FILE|PERIOD", help="A capture, or a period: -1h, -1h..-5m.")
    ],
    *,
    json: screen.JsonOption = None,
) -> None:
    """Recompute routing decisions from their own records, and compare to the last bit.

    Prints how many have the same worker and costs, and the first that differs; exit code 1 if there
    is one. Then how wrong the predicted times were, as in `kvlane capture`. Reads only.

    Examples:

    - `kvlane verify-decisions -1h`: all decisions of the last hour

    - `kvlane verify-decisions incident.jsonl.zst`: those of a capture
    """
    from kvlane.app.audit.captured_errors import CapturedErrors
    from kvlane.app.audit.recompute import RecomputeReport

    found, errors = RecomputeReport(), CapturedErrors()

    def take(line: AnyCaptureLine) -> None:
        found.add_line(line)
        errors.add_line(line)

    def show() -> None:
        _show_recomputed(found)
        show_errors(errors, screen.make_console())

    read_lines(source, take)
    screen.show_result(json, found, show)
    if found.differ:
        raise typer.Exit(1)


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")] = "",
    *,
    waiting: Annotated[
        bool, typer.Option("--waiting", help="List the requests that wait in routers, and why.")
    ] = False,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Show all inputs of every candidate's cost.")
    ] = False,
    json: screen.JsonOption = None,
) -> None:
    """Show why a request went to its worker, or why it waits, and its timeline.

    First each decision with the runner-up and the engine's figures, then the timeline: the request,
    the candidates with the terms of their costs, the workers' reports, failovers, the response
    stream, and the end. From the log alone: the ledger is kept for a day, requests and responses
    for an hour. Routers report the reason of a wait after ten seconds. Never shows prompts or
    answers.

    Examples:

    - `kvlane explain --waiting`: the ids of requests that wait, with the reasons

    - `kvlane explain 019aa5c1-7f3e-7c02-9d41-0123456789ab-5e884898`

    - `kvlane explain job-17 --inputs`: the id has no time in it, so the whole lane is read
    """
    from kvlane.app.audit.timeline import timeline_json
    from kvlane.app.commands import explain_view

    if bool(request_id) == waiting:
        raise typer.BadParameter("give either the id of a request, or --waiting")
    if waiting:
        reports = asyncio.run(_waiting())
        screen.show_result(
            json, reports.waits, lambda: explain_view.show_waits(reports, screen.make_console())
        )
        return
    timeline, wait = asyncio.run(_explain(request_id))
    explain_view.check_found(timeline)
    screen.show_result(
        json,
        timeline_json(timeline, wait),
        lambda: explain_view.show_timeline(
            timeline, screen.make_console(), inputs=inputs, wait=wait
        ),
    )


async def _replay(view: Any, at: str) -> RebuiltView:
    from kvlane.app.audit.rebuild import rebuild_view as build
    from kvlane.app.audit.time_range import parse_moment
    from kvlane.app.settings import Settings

    settings, clock = Settings(), SystemClock()
    wanted = parse_moment(at, clock.wall_ms()) if at else None
    async with kafka_client.connect_kafka(settings, "kvlane-replay") as log:
        with screen.reading_progress() as progress:
            return await build(log, settings, clock, view, wanted, progress)


async def _explain(request_id: str) -> tuple[RequestTimeline, str]:
    """The timeline of a request, and why it waits."""

    from kvlane.app.audit.timeline import explain_request as tell
    from kvlane.app.audit.waits import explain_wait
    from kvlane.app.settings import Settings

    clock = SystemClock()
    async with kafka_client.connect_kafka(Settings(), "kvlane-explain") as log:
        with screen.reading_progress() as progress:
            timeline = await tell(log, clock, request_id, progress)
        return timeline, await explain_wait(log, clock, timeline)


async def _waiting() -> RouterReports:
    from kvlane.app.audit.waits import read_reports
    from kvlane.app.settings import Settings

    async with kafka_client.connect_kafka(Settings(), "kvlane-explain") as log:
        return await read_reports(log, SystemClock())


def _show_recomputed(found: RecomputeReport) -> None:
    console = screen.make_console()
    policies = ", ".join(f"{name} {count}" for name, count in found.policies.most_common())
    console.print(
        f"{found.decisions} decisions recomputed ({policies or 'none'}): "
        f"[bold]{found.same} equal to the last bit[/], {found.differ} different"
    )
    for count, why in (
        (found.without_inputs, "have no recorded candidates, or a policy of another version"),
        (found.without_session, "depend on a session whose request is no longer retained"),
    ):
        if count:
            console.print(f"{count} could not be recomputed: they {why}", style="yellow")
    if found.first:
        console.print(f"[red]first difference:[/] {screen.escape_text(found.first)}")


def _show_replayed(result: RebuiltView) -> None:
    console = screen.make_console()
    table = screen.plain_table(
        "partition", "read from", "position", "records", "malformed", "state hash"
    )
    for state in result.partitions:
        if state.records or state.start < state.position:
            numbers = (state.start, state.position, state.records, state.malformed)
            name = f"{state.topic}/{state.partition}"
            table.add_row(name, *map(str, numbers), state.state_hash)
    console.print(table)
    empty = sum(not s.records and s.start == s.position for s in result.partitions)
    if empty:
        console.print(f"{empty} partitions without records", style="dim")
    console.print(f"\n[bold]{result.view}[/] state hash {result.state_hash}")
    summary = screen.plain_table("", "")
    summary.show_header = False
    for name, value in result.summary.items():
        rows = value.items() if isinstance(value, dict) else [("", screen.format_value(value))]
        for number, (key, item) in enumerate(rows or [("", "none")]):
            summary.add_row(
                name if number == 0 else "", screen.escape_text(f"{key}  {item}".strip())
            )
    console.print(summary)


SECRET_BYTES = 32


def capture(
    *,
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Start of the period: -1h, or as in --to.")
    ],
    until: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="Its end: 2025-11-21T06:40:00Z; default: now."),
    ] = "",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file; compressed if it ends in .zst.")
    ],
) -> None:
    """Write the routing decisions of a period into a file, with all their inputs.

    `kvlane verify-decisions FILE` recomputes every decision of the file and compares, and
    `kvlane simulate --from-ledger FILE` simulates the period under other policies. JSON, one object
    a line, described in `app/traces/capture_format.py`. The file appears when it is complete.

    The file contains ids of requests and sessions, lengths, times, names of workers, models,
    adapters and taints, each decision with all its inputs, and the engines' figures. It does not
    contain prompts, answers, tokens, tenants, keys or error texts. Prompt blocks are hashes under a
    secret that is drawn for this file and discarded: they can be compared within it only.

    Requests are kept for an hour, decisions for a day: older decisions have no request.

    Afterwards it prints how wrong the predicted times were, by model and worker: the median and the
    90th percentile of |predicted - measured| / measured.

    Examples:

    - `kvlane capture --from -15m --out incident.jsonl.zst`

    - `kvlane capture --from 2025-11-21T06:30:00Z --to 2025-11-21T06:40:00Z --out ten.jsonl.zst`
    """
    from kvlane.app.audit.captured_errors import CapturedErrors
    from kvlane.app.audit.time_range import format_time, range_between
    from kvlane.app.traces.capture_format import CaptureTotals, created_capture

    period = range_between(since, until, SystemClock().wall_ms())
    last: AnyCaptureLine | None = None
    errors = CapturedErrors()

    def write(line: AnyCaptureLine) -> None:
        nonlocal last
        last = line
        errors.add_line(line)
        file.write_line(line)

    with created_capture(out) as file:
        asyncio.run(_read_log(period, write))
    assert isinstance(last, CaptureTotals)
    shown, console = _counts(last), screen.make_console()
    console.print(
        f"{out}, {out.stat().st_size / 1e6:.2f} MB: {shown}\n"
        f"from {format_time(period.from_ms)} to {format_time(period.to_ms)} UTC"
    )
    show_errors(errors, console)
    for warning in _warnings(last):
        console.print(warning, style="yellow")


def show_errors(errors: CapturedErrors, console: Console) -> None:
    """Print the errors of predicted times; nothing if none was predicted."""
    summaries = errors.summaries()
    if not summaries:
        return
    table = screen.plain_table(
        "model", "worker", "runs", "error of TTFT, median", "p90", "of ITL, median", "p90"
    )
    for each in summaries:
        table.add_row(
            screen.escape_text(each.model), screen.escape_text(each.worker) or "all",
            str(each.runs), *_percentages(each.ttft), *_percentages(each.itl),
        )  # fmt: skip
    console.print(table)


def _percentages(of: ErrorShares | None) -> tuple[str, str]:
    return ("-", "-") if of is None else (f"{of.median:.0%}", f"{of.p90:.0%}")


def read_lines(source: str, take: Callable[[AnyCaptureLine], None]) -> None:
    """Pass the lines of a file, or of a period of the log, to `take`.

    Raises InvalidCapture, InvalidTime.
    """
    from kvlane.app.audit.time_range import InvalidTime, parse_range
    from kvlane.app.traces.capture_format import InvalidCapture, read_capture

    file = Path(source)
    if file.is_file():
        with screen.reading_progress() as progress:
            for line in read_capture(file, progress):
                take(line)
        return
    try:
        wanted = parse_range(source, SystemClock().wall_ms())
    except InvalidTime as e:
        if source.startswith("-") or ".." in source:
            raise
        raise InvalidCapture(f"{source}: not a file and not a period (-1h, -1h..-5m): {e}") from e
    asyncio.run(_read_log(wanted, take))


async def _read_log(period: TimeRange, take: Callable[[AnyCaptureLine], None]) -> None:
    from kvlane.app.audit.capture_lines import capture_period as capturing
    from kvlane.app.settings import Settings
    from kvlane.indexer.block_hashes import derive_secret

    secret = derive_secret(secrets.token_bytes(SECRET_BYTES))
    async with kafka_client.connect_kafka(Settings(), "kvlane-capture") as log:
        with screen.reading_progress() as progress:
            async with aclosing(capturing(log, SystemClock(), period, secret, progress)) as lines:
                async for line in lines:
                    take(line)


def _counts(counted: CaptureTotals) -> str:
    names = {"Asked": "requests", "Decided": "decisions", "Ran": "runs", "Worker": "worker epochs"}
    return ", ".join(f"{counted.lines.get(kind, 0)} {name}" for kind, name in names.items())


def _warnings(counted: CaptureTotals) -> list[str]:
    warnings = []
    if counted.without_request:
        warnings.append(
            f"{counted.without_request} decisions are of requests that are no longer retained: "
            "they can be recomputed, but not simulated"
        )
    if counted.unread:
        warnings.append(f"{counted.unread} records are malformed")
    if not counted.lines.get("Decided"):
        warnings.append("no decision in this period; is KVLANE_TOPIC_PREFIX right?")
    return warnings
