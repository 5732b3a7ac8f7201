"""The command `kvlane usage`: what tenants, keys and models have used, from the log."""

from __future__ import annotations

import asyncio
import csv
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client

if TYPE_CHECKING:
    from kvlane.app.audit.time_range import TimeRange
    from kvlane.app.results.usage_report import UsageSum


class UsageFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def usage(
    *,
    by: Annotated[
        str, typer.Option(metavar="FIELDS", help="tenant, key, model, alias, adapter, class, code.")
    ] = "tenant,model",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="A time (2026-11-01), or an age: -30d, -12h.")
    ] = "-1d",
    until: Annotated[str, typer.Option(metavar="TIME", help="Empty: now.")] = "",
    form: Annotated[
        UsageFormat, typer.Option("--format", help="Form of the output.")
    ] = UsageFormat.TABLE,
) -> None:
    """Show the usage of a period: requests and tokens, by tenant, model and other fields.

    From the topic `usage`, which has one record for each request at its end. Times without a zone
    are UTC. A period that is over has the same sums whenever it is asked for.

    Examples:

    - `kvlane usage --by tenant --since 2026-11-01 --until 2026-12-01 --format csv`

    - `kvlane usage --by tenant,model,key --since -12h`
    """
    from kvlane.app.audit.time_range import range_between
    from kvlane.app.results.usage_report import parse_groups, sum_usage
    from kvlane.app.settings import Settings
    from kvlane.streams.clock import SystemClock

    clock, groups = SystemClock(), parse_groups(by)
    period = range_between(since, until, clock.wall_ms())

    async def run() -> dict[tuple[str, ...], UsageSum]:
        async with kafka_client.connect_kafka(Settings(), "kvlane-usage") as log:
            with screen.reading_progress("reading") as progress:
                return await sum_usage(log, clock, range(*period), groups, progress)

    _show(asyncio.run(run()), groups, period, form)


def _show(
    sums: dict[tuple[str, ...], UsageSum], groups: list[str], period: TimeRange, form: UsageFormat
) -> None:
    import msgspec

    from kvlane.app.results.usage_report import UsageSum

    rows: list[dict[str, Any]] = [
        dict(zip(groups, key, strict=True)) | msgspec.structs.asdict(each)
        for key, each in sums.items()
    ]
    counts = list(UsageSum.__struct_fields__)
    if form is UsageFormat.JSON:
        found = {"from_ms": period.from_ms, "to_ms": period.to_ms, "usage": rows}
        screen.write_json(Path("-"), found)
    elif form is UsageFormat.CSV:
        writer = csv.DictWriter(sys.stdout, [*groups, *counts], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        shown = [name for name in counts if any(row[name] for row in rows)] or ["requests"]
        table = screen.plain_table(
            *groups, *(_header(name) for name in shown), right=" ".join(map(_header, shown))
        )
        for row in rows:
            texts = (screen.escape_text(row[name]) or "-" for name in groups)
            table.add_row(*texts, *(str(row[name]) for name in shown))
        screen.make_console().print(table)


def _header(name: str) -> str:
    return name.removesuffix("_tokens")
