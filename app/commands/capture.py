"""`kvlane capture`, and captures as what other commands read: from a file, or from the log."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import screen
from app.settings import Settings

if TYPE_CHECKING:
    from app.audit.moments import Period
    from app.captured import AnyLine, Counted

SECRET_BYTES = 32


def capture(
    *,
    since: Annotated[
        str,
        typer.Option("--from", metavar="TIME", help="Of this time and later: -1h, or as in --to."),
    ],
    until: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="Before 2025-11-21T06:40:00Z; without, till now"),
    ] = "",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file; compressed where it ends in .zst.")
    ],
) -> None:
    """Put a period of the log into a file, for deciding it again.

    With it `kvlane replay --decisions FILE` takes every decision again and compares, and
    `kvlane simulate --from-ledger FILE` tells what other policies would have made of it. JSON, one
    object a line, explained in `app/captured.py`. The file appears when it is whole.

    In the file: ids of requests and sessions, lengths, times, names of workers, models, adapters
    and taints, each decision with all its inputs, what the engines found and took. Not in it:
    prompts, answers, tokens, tenants, keys, texts of errors. Blocks of prompts go by hashes under a
    secret that is drawn for this file and forgotten: they tell what is equal within it, no more.

    Requests are kept for an hour, decisions for a day: of older ones the requests are missing.

    Examples:

    - `kvlane capture --from -15m --out incident.jsonl.zst`

    - `kvlane capture --from 2025-11-21T06:30:00Z --to 2025-11-21T06:40:00Z --out ten.jsonl.zst`
    """
    from app.audit.moments import between, clock_time
    from app.captured import Counted, written
    from streams.clock import SystemClock

    period = between(since, until, SystemClock().wall_ms())
    last: AnyLine | None = None

    def write(line: AnyLine) -> None:
        nonlocal last
        last = line
        file.write(line)

    with written(out) as file:
        asyncio.run(_read_log(period, write))
    assert isinstance(last, Counted)
    shown, console = _counts(last), screen.console()
    console.print(
        f"{out}, {out.stat().st_size / 1e6:.2f} MB: {shown}\n"
        f"from {clock_time(period.from_ms)} to {clock_time(period.to_ms)} UTC"
    )
    for warning in _warnings(last):
        console.print(warning, style="yellow")


def read(source: str, take: Callable[[AnyLine], None]) -> None:
    """Hand over the lines of a file, or of a period of the log. Raises BadCapture, BadMoment."""
    from app.audit.moments import BadMoment, period
    from app.captured import BadCapture, lines_of
    from streams.clock import SystemClock

    file = Path(source)
    if file.is_file():
        with screen.progress("reading") as progress:
            for line in lines_of(file, progress):
                take(line)
        return
    try:
        wanted = period(source, SystemClock().wall_ms())
    except BadMoment as e:
        if source.startswith("-") or ".." in source:
            raise
        raise BadCapture(f"{source}: no such file, nor a period (-1h, -1h..-5m): {e}") from e
    asyncio.run(_read_log(wanted, take))


async def _read_log(period: Period, take: Callable[[AnyLine], None]) -> None:
    from app import publishing
    from app.audit.capture import capture as capturing
    from indexer.keys import derive
    from streams.clock import SystemClock

    secret = derive(secrets.token_bytes(SECRET_BYTES))
    async with publishing.kafka(Settings(), "kvlane-capture") as log:
        with screen.progress("reading") as progress:
            async with aclosing(capturing(log, SystemClock(), period, secret, progress)) as lines:
                async for line in lines:
                    take(line)


def _counts(counted: Counted) -> str:
    names = {"Asked": "requests", "Decided": "decisions", "Ran": "runs", "Worker": "workers"}
    return ", ".join(f"{counted.lines.get(kind, 0)} {name}" for kind, name in names.items())


def _warnings(counted: Counted) -> list[str]:
    warnings = []
    if counted.without_request:
        warnings.append(
            f"{counted.without_request} decisions are about requests that are not kept any more: "
            "they can be recomputed, but not simulated"
        )
    if counted.unread:
        warnings.append(f"{counted.unread} records could not be read")
    if not counted.lines.get("Decided"):
        warnings.append("nothing was decided in this period; is KVLANE_TOPIC_PREFIX right?")
    return warnings
