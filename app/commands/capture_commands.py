"""The command `kvlane capture`, and reading captures from a file or from the log."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlane.app.commands import console as screen
from kvlane.app.settings import Settings

if TYPE_CHECKING:
    from kvlane.app.audit.time_range import TimeRange
    from kvlane.app.traces.capture_format import AnyCaptureLine, CaptureTotals

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

    Examples:

    - `kvlane capture --from -15m --out incident.jsonl.zst`

    - `kvlane capture --from 2025-11-21T06:30:00Z --to 2025-11-21T06:40:00Z --out ten.jsonl.zst`
    """
    from kvlane.app.audit.time_range import format_time, range_between
    from kvlane.app.traces.capture_format import CaptureTotals, created_capture
    from kvlane.streams.clock import SystemClock

    period = range_between(since, until, SystemClock().wall_ms())
    last: AnyCaptureLine | None = None

    def write(line: AnyCaptureLine) -> None:
        nonlocal last
        last = line
        file.write_line(line)

    with created_capture(out) as file:
        asyncio.run(_read_log(period, write))
    assert isinstance(last, CaptureTotals)
    shown, console = _counts(last), screen.make_console()
    console.print(
        f"{out}, {out.stat().st_size / 1e6:.2f} MB: {shown}\n"
        f"from {format_time(period.from_ms)} to {format_time(period.to_ms)} UTC"
    )
    for warning in _warnings(last):
        console.print(warning, style="yellow")


def read(source: str, take: Callable[[AnyCaptureLine], None]) -> None:
    """Pass the lines of a file, or of a period of the log, to `take`.

    Raises InvalidCapture, InvalidTime.
    """
    from kvlane.app.audit.time_range import InvalidTime, parse_range
    from kvlane.app.traces.capture_format import InvalidCapture, read_capture
    from kvlane.streams.clock import SystemClock

    file = Path(source)
    if file.is_file():
        with screen.reading_progress("reading") as progress:
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
    from kvlane.app.commands import kafka_client
    from kvlane.indexer.block_keys import derive_secret
    from kvlane.streams.clock import SystemClock

    secret = derive_secret(secrets.token_bytes(SECRET_BYTES))
    async with kafka_client.connect_kafka(Settings(), "kvlane-capture") as log:
        with screen.reading_progress("reading") as progress:
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
