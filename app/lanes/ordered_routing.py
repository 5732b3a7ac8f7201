"""The settings by which a router routes: its own, and above them those of an operator's order.

The order is the record `RoutingOrder` of the registry. One that this version cannot use as a whole
leaves the router its own settings; the reason is logged once, and reported on `capacity`.
"""

from __future__ import annotations

import logging

from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.settings import Settings, SettingsError, ordered_values, settings_with_order
from kvlane.streams.records import ROUTING_FORMAT, RoutingReport

log = logging.getLogger(__name__)

MAX_PROBLEM_CHARS = 500
"""The text names values of the record, and is repeated in every report."""


class OrderedRouting:
    """One per router. `own`: the settings that it was started with; `settings`: those that hold."""

    def __init__(self, own: Settings, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet
        self.settings = own
        self.report = RoutingReport(own=ordered_values(own))

    @property
    def order_in_use(self) -> int | None:
        """Offset of the order whose settings hold; None: the router's own do."""
        return None if self.report.problem else self.report.order

    def take_order(self) -> bool:
        """Take in the order that the fleet has; whether other settings may hold now."""
        placed = self._fleet.routing
        if self.report.order == (None if placed is None else placed.offset):
            return False
        self.settings, problem = self._own, ""
        if placed is None:
            log.info("the order about routing has ended: this router has its own settings")
        elif placed.order.format > ROUTING_FORMAT:
            problem = (
                f"it has format {placed.order.format}, and this version reads {ROUTING_FORMAT}"
            )
        else:
            try:
                self.settings = settings_with_order(self._own, placed.order.settings)
                log.info("routing by the order at %d: %s", placed.offset, placed.order.settings)
            except SettingsError as e:
                problem = str(e)[:MAX_PROBLEM_CHARS]
        order = None if placed is None else placed.offset
        if problem:
            log.warning(
                "the order about routing at registry/0:%d is not used, and this router keeps its "
                "own settings: %s", order, problem,
            )  # fmt: skip
        self.report = RoutingReport(own=self.report.own, order=order, problem=problem)
        return True
