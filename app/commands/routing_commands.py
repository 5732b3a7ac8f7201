"""The commands `kvlane routing`: how routers route, and an order about it, by a record on
`registry`; and `kvlane shadow`, which compares other settings before."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.text import Text

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client
from kvlane.app.commands.fleet.fleet_commands import WINDOW, SinceOption
from kvlane.app.commands.worker_commands import (
    POLL_S,
    append_order,
    connected_fleet,
    end_order,
    followed_fleet,
)
from kvlane.app.operator_error import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from kvlane.app.audit.fleet.routing_rows import RoutingOf, RoutingRow
    from kvlane.app.audit.shadow import ShadowRow
    from kvlane.app.routing.state.fleet import Fleet, PlacedOrder
    from kvlane.streams.clock import Clock
    from kvlane.streams.ports import Log, Partition
    from kvlane.streams.records import LogRecord

KEY = "routing"
SETTLE_S = 5.0
"""Longest wait for the reports of all routers after an order: they follow within half a second."""
MAX_SILENCE_MS = 60_000
"""Age of the newest report at which no router runs."""
_WORDS = {
    "own": "own settings", "order": "by the order", "unread": "the order is not read yet",
    "unusable": "own settings, since it cannot use the order",
    "unreported": "unknown: it has not reported, and earlier versions keep their own settings",
}  # fmt: skip
_OF_CHOICE = (
    "policy", "objective", "session_affinity_tolerance", "overlap_score_credit",
    "prefill_load_scale", "host_cache_weight", "disk_cache_weight", "active_request_weight",
    "overlap_decay", "router_temperature",
)  # fmt: skip
"""Settings on which the choice among recorded candidates depends."""

app = typer.Typer()


class BadRouting(OperatorError):
    """An order about routing that cannot be as the command asks."""

    correction = "`kvlane routing` lists the settings; `kvlane routing reset` ends an order."


@app.callback(invoke_without_command=True)
def routing(context: typer.Context, *, json: screen.JsonOption = None) -> None:
    """Show how the routers route, by their own settings or by an order; change it while they run.

    Examples:

    - `kvlane routing`

    - `kvlane routing --json - | jq '.routers[] | {router, policy: .settings.policy}'`
    """
    if context.invoked_subcommand is None:
        _show(json, *asyncio.run(_read()))


@app.command(name="set")
def set_settings(
    settings: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="The settings.")],
    *,
    json: screen.JsonOption = None,
) -> None:
    """Let all routers route by these settings, instead of their own, from now on.

    Other settings of the last order stay. The order holds for routers that start later too, until
    `kvlane routing reset`. Requests that wait are planned anew; none is lost.

    Exit code 1 if a router does not route by it after 5 seconds, with the reason; the order stands.

    Examples:

    - `kvlane routing set policy=dynamo session_affinity_tolerance=0.2`

    - `kvlane routing set queue_order=edf 'queue_classes={"reports": {"weight": 0.2}}'`
    """
    _show_all(json, "order", *asyncio.run(_set(parse_settings(settings))))


def shadow(
    settings: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="The settings.")],
    *,
    since: SinceOption = WINDOW,
    json: screen.JsonOption = None,
) -> None:
    """Show where requests would have gone by other settings of routing; nothing is changed.

    For each decision since `--since`, and on a terminal for those that follow, until `q`: the
    choice of a policy among the candidates that the decision records, at most 16. All else is as in
    the routers now. `kvlane routing set` with the same words makes the settings hold.

    `regret`: how much more than its own choice the taken worker costs by these settings; `extra`:
    how much more than the taken worker their choice costs by the policy of the router; means. A
    router records the inputs of policy predictive with that policy alone (`unknown`).

    Examples:

    - `kvlane shadow policy=dynamo session_affinity_tolerance=0.2`

    - `kvlane shadow objective=throughput --since -1h --json -`
    """
    asyncio.run(_shadow(settings, since, json))


@app.command()
def reset(*, json: screen.JsonOption = None) -> None:
    """End the order: all routers route by their own settings again.

    Exit code 1 if a router does not after 5 seconds; the order has ended.

    Examples:

    - `kvlane routing reset`
    """
    _show_all(json, "own", *asyncio.run(_reset()))


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The values of texts NAME=VALUE; objects are JSON. Raises BadRouting."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadRouting(f"{text!r} is not of the form NAME=VALUE")
        if name in found:
            raise BadRouting(f"{name!r} is given twice")
        try:
            found[name] = msgspec.json.decode(value) if value.startswith("{") else value
        except msgspec.DecodeError as e:
            raise BadRouting(f"the value of {name!r} is no JSON object: {e}") from e
    return found


_Shown = tuple["PlacedOrder | None", "list[RoutingRow]"]


async def _read() -> _Shown:
    async with connected_fleet() as (log, clock, fleet):
        return fleet.routing, await _rows(log, clock, fleet)


async def _set(given: Mapping[str, Any]) -> _Shown:
    from kvlane.app.settings import Settings, ordered_values, settings_with_order
    from kvlane.streams.records import ROUTING_FORMAT, RoutingOrder

    async with connected_fleet() as (log, clock, fleet):
        before = fleet.routing
        if before is not None and before.order.format > ROUTING_FORMAT:
            raise BadRouting("the present order is of a later version of kvlane: use that version")
        asked = {**({} if before is None else before.order.settings), **given}
        values = ordered_values(settings_with_order(Settings(), asked))
        order = RoutingOrder(settings={n: values[n] for n in asked}, format=ROUTING_FORMAT)
        await append_order(log, clock, KEY, order)
        return await _settled(log, clock, fleet, before)


async def _reset() -> _Shown:
    async with connected_fleet() as (log, clock, fleet):
        if fleet.routing is None:
            return None, await _rows(log, clock, fleet)
        before = fleet.routing
        await end_order(log, clock, KEY)
        return await _settled(log, clock, fleet, before)


async def _settled(log: Log, clock: Clock, fleet: Fleet, before: PlacedOrder | None) -> _Shown:
    """The state after an order, when all routers have read it, or after `SETTLE_S`."""
    until_s = clock.now() + SETTLE_S
    while True:
        rows = await _rows(log, clock, fleet)
        is_read = fleet.routing != before and all(row.routing_of != "unread" for row in rows)
        if is_read or clock.now() > until_s:
            return fleet.routing, rows
        await clock.sleep(POLL_S)


async def _rows(log: Log, clock: Clock, fleet: Fleet) -> list[RoutingRow]:
    from kvlane.app.audit.fleet.routing_rows import routing_rows
    from kvlane.app.audit.waits import read_reports

    reports = await read_reports(log, clock)
    is_live = reports.now_ms > clock.wall_ms() - MAX_SILENCE_MS
    return routing_rows(fleet.routing, reports.routing if is_live else {})


async def _shadow(texts: list[str], since: str, json: Path | None) -> None:
    from kvlane.app.audit.fleet.fleet_reader import reading_fleet
    from kvlane.app.audit.shadow import SHADOWED, Shadow
    from kvlane.app.commands.fleet.live_screen import show_live
    from kvlane.app.lanes.context import routing_config
    from kvlane.app.settings import Settings, settings_with_order
    from kvlane.streams.clock import SystemClock
    from kvlane.streams.topics import LEDGER

    given, own, clock = parse_settings(texts), Settings(), SystemClock()
    if unused := [name for name in given if name not in _OF_CHOICE]:
        raise BadRouting(
            f"{unused[0]!r} changes no choice of a worker",
            correction=f"Give some of {', '.join(_OF_CHOICE)}; `kvlane simulate` tries others.",
        )
    async with kafka_client.connect_kafka(own, "kvlane-shadow") as log:
        async with followed_fleet(log, clock) as fleet:
            rows = await _rows(log, clock, fleet)
        held = next((row.settings for row in rows if row.settings is not None), {})
        other = settings_with_order(own, {**held, **given})
        if other.policy not in SHADOWED:
            raise BadRouting(
                f"policy {other.policy} decides by chance, turns or ids, so its costs say nothing",
                correction=f"Give policy={' or '.join(SHADOWED)}; `kvlane simulate` tries others.",
            )
        found = Shadow(routing_config(other))

        def take(source: Partition, log_records: Sequence[LogRecord]) -> None:
            for log_record in log_records if source.topic == LEDGER else ():
                found.add(log_record)

        with ExitStack() as bar:
            progress = bar.enter_context(screen.reading_progress())
            async with reading_fleet(log, clock, since, progress, take) as reader:
                bar.close()

                async def frame() -> RenderableType:
                    reader.check()
                    return _shadow_view(found.rows, other.policy, texts)

                if str(json) != "-":
                    await show_live(screen.make_console(), frame)
                screen.write_json(json, {"settings": given, "rows": found.rows})


def _shadow_view(rows: list[ShadowRow], policy: str, texts: list[str]) -> RenderableType:
    from kvlane.app.routing.selection.policies.registry import POLICIES

    columns = ("decisions", "elsewhere", "share", "regret", "extra", "unknown")
    table = screen.plain_table("model", "policy", *columns, right=" ".join(columns))
    for row in rows:
        extra = "-" if row.extra_cost is None else f"{row.extra_cost:.4g}"
        table.add_row(
            screen.escape_text(row.model), row.policy, str(row.decisions), str(row.others),
            f"{row.others / max(row.decisions, 1):.1%}",
            f"{row.regret:.4g} {POLICIES[policy].unit}",
            f"{extra} {POLICIES[row.policy].unit}", str(row.unknown),
        )  # fmt: skip
    words = f"to make them hold: kvlane routing set {shlex.join(texts)}"
    return Group(table, Text(f"\n{words}", "dim"))


def _show_all(
    json: Path | None, routing_of: RoutingOf, placed: PlacedOrder | None, rows: list[RoutingRow]
) -> None:
    """As `_show`. Exit code 1 unless all routers route by these settings."""
    _show(json, placed, rows)
    if any(row.routing_of != routing_of for row in rows):
        raise typer.Exit(1)


def _show(json: Path | None, placed: PlacedOrder | None, rows: list[RoutingRow]) -> None:
    order: dict[str, Any] | None = None
    if placed is not None:
        order = {
            "offset": placed.offset, "at_ms": placed.at_ms, "settings": placed.order.settings,
            "format": placed.order.format,
        }  # fmt: skip
    found = {"order": order, "routers": rows}
    screen.show_result(json, found, lambda: screen.make_console().print(_view(placed, rows)))


def _view(placed: PlacedOrder | None, rows: list[RoutingRow]) -> RenderableType:
    """The order, then each group of routers that route alike, with its settings."""
    from kvlane.app.audit.time_range import format_time

    shown: list[RenderableType] = [Text("no order: routers route by their own settings")]
    if placed is not None:
        words = f"order of {format_time(placed.at_ms)}, registry/0:{placed.offset}"
        settings = screen.format_value(placed.order.settings)
        shown = [Text(f"{words}: {screen.escape_control(settings)}")]
    if not rows:
        shown.append(Text("no router has reported for a minute", "yellow"))

    def alike(row: RoutingRow) -> str:
        return repr((row.routing_of, row.problem, row.own, row.settings))

    for _, group in groupby(sorted(rows, key=alike), alike):
        same = list(group)
        row, names = same[0], ", ".join(each.router for each in same)
        problem = f": {row.problem}" if row.problem else ""
        shown.append(Text(screen.escape_lines(f"\n{names}: {_WORDS[row.routing_of]}{problem}")))
        if row.settings is not None and row.own is not None:
            table = screen.plain_table("setting", "value", "own")
            for name, value in row.settings.items():
                own = row.own.get(name)
                texts = (name, *map(screen.format_value, (value, "" if own == value else own)))
                table.add_row(*map(screen.escape_text, texts))
            shown.append(table)
    return Group(*shown)
