"""Routing settings of the routers of a deployment as rows of `--json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvlane.app.routing.state.fleet import PlacedOrder
from kvlane.streams.records import RoutingReport

RoutingOf = Literal["own", "order", "unread", "unusable", "unreported"]


class RoutingRow(msgspec.Struct, frozen=True):
    """A router. `routing_of`: whose settings hold there, or why those of the order do not: it has
    not read the order, cannot use it (`problem`), or reports nothing, as earlier versions.
    `own`, `settings`: its own ones, and those that hold, by name; None: unknown."""

    router: str
    routing_of: RoutingOf
    problem: str = ""
    own: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None


def routing_rows(
    placed: PlacedOrder | None, reports: Mapping[str, RoutingReport | None]
) -> list[RoutingRow]:
    return [_routing_row(name, placed, report) for name, report in sorted(reports.items())]


def _routing_row(
    router: str, placed: PlacedOrder | None, report: RoutingReport | None
) -> RoutingRow:
    if report is None:
        return RoutingRow(router, "unreported")
    own = report.own
    if report.order != (None if placed is None else placed.offset):
        has_own = report.order is None or report.problem
        return RoutingRow(router, "unread", own=own, settings=own if has_own else None)
    if placed is None or report.problem:
        of: RoutingOf = "unusable" if report.problem else "own"
        return RoutingRow(router, of, report.problem, own, own)
    return RoutingRow(router, "order", own=own, settings={**own, **placed.order.settings})
