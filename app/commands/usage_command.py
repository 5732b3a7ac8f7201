"""The command `kvlane usage`: what tenants, keys and models have used, from the log."""

from __future__ import annotations

import asyncio
import csv
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client


def usage(
    *,
    by: Annotated[
        str, typer.Option(metavar="FIELDS", help="tenant, key, model, alias, adapter, class, code.")
    ] = "tenant,model",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="A time (2026-11-01), or an age: -30d, -12h.")
    ] = "-1d",
    until: Annotated[str, typer.Option(metavar="TIME", help="Empty: now.")] = "",
    budgets: Annotated[
        bool, typer.Option("--budgets", help="Show budgets of tenants: used and left until now.")
    ] = False,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the rows as CSV to this file, or stdout (-)."),
    ] = None,
    json: screen.JsonOption = None,
) -> None:
    """Show the usage of a period: requests and tokens, by tenant, model and other fields.

    From the topic `usage`, which has one record for each request at its end. Times without a zone
    are UTC. A period that is over has the same sums whenever it is asked for.

    Examples:

    - `kvlane usage --by tenant --since 2026-11-01 --until 2026-12-01 --csv -`

    - `kvlane usage --by tenant,model,key --since -12h`

    - `kvlane usage --budgets`
    """
    import msgspec

    from kvlane.app.access.key_file import KeyRing, read_key_file
    from kvlane.app.audit.time_range import format_time, range_between
    from kvlane.app.operator_error import OperatorError
    from kvlane.app.results import usage_report
    from kvlane.app.settings import Settings
    from kvlane.streams.clock import SystemClock

    if str(csv_file) == str(json) == "-":
        raise typer.BadParameter("give --csv - or --json -, not both: standard output has one form")
    clock, groups, settings = SystemClock(), usage_report.parse_groups(by), Settings()
    period = range_between(since, until, clock.wall_ms())
    if budgets and settings.api_keys_file is None:
        raise OperatorError("budgets are in the file of keys: set KVLANE_API_KEYS_FILE")

    kept_from_ms: int | None = None

    async def run() -> list[dict[str, Any]]:
        nonlocal kept_from_ms
        async with kafka_client.connect_kafka(settings, "kvlane-usage") as log:
            with screen.reading_progress() as progress:
                if budgets and settings.api_keys_file is not None:
                    tenants = KeyRing(read_key_file(settings.api_keys_file)).tenants
                    return await usage_report.budget_rows(log, clock, tenants, progress)
                sums = await usage_report.sum_usage(log, clock, range(*period), groups, progress)
                kept_from_ms = await usage_report.kept_from(log, clock, period.from_ms)
        return [
            dict(zip(groups, key, strict=True)) | msgspec.structs.asdict(each)
            for key, each in sums.items()
        ]

    rows = asyncio.run(run())
    if kept_from_ms is not None:
        words = f"usage before {format_time(kept_from_ms)} UTC is no longer kept: sums are too low"
        typer.echo(words, err=True)
    found: dict[str, Any] = {"budgets": rows}
    if budgets:
        shown = fields = list(usage_report.BUDGET_FIELDS)
        texts = 2
    else:
        counts, texts = list(usage_report.UsageSum.__struct_fields__), len(groups)
        used = [name for name in counts if any(row[name] for row in rows)] or ["requests"]
        fields, shown = [*groups, *counts], [*groups, *used]
        times = {"from_ms": period.from_ms, "to_ms": period.to_ms, "kept_from_ms": kept_from_ms}
        found = {**times, "usage": rows}
    if csv_file is not None:
        with nullcontext(sys.stdout) if str(csv_file) == "-" else csv_file.open("w") as out:
            writer = csv.DictWriter(out, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if str(csv_file) == "-":
        screen.write_json(json, found)
    else:
        screen.show_result(json, found, lambda: _show(rows, shown, texts))


def _show(rows: list[dict[str, Any]], fields: list[str], texts: int) -> None:
    """Show rows as a table; the first `texts` of the fields are texts."""
    from kvlane.app.audit.time_range import format_time

    words = {"begins_anew_ms": "begins anew (UTC)"}
    headers = [
        words.get(each) or each.removesuffix("_tokens").replace("_ms", " ms") for each in fields
    ]
    table = screen.plain_table(*headers)
    for column in table.columns[texts:]:
        column.justify = "right"
    for row in rows:
        cells = [screen.escape_text(row[each]) or "-" for each in fields[:texts]]
        for each in fields[texts:]:
            is_time = each == "begins_anew_ms"
            cells.append(format_time(row[each])[:16] if is_time else str(row[each]))
        table.add_row(*cells)
    screen.make_console().print(table)
