"""Tests of the settings by which a router routes: its own, and those of an operator's order."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvlane.app.audit.fleet.routing_rows import RoutingOf, routing_rows
from kvlane.app.configuration.router_settings import ORDERED_SETTINGS
from kvlane.app.lanes.context import queue_config
from kvlane.app.lanes.ordered_routing import MAX_PROBLEM_CHARS, OrderedRouting
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.settings import Settings, SettingsError, settings_with_order
from kvlane.streams.codecs import AnyRecord
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RoutingOrder, Tombstone

OWN = {"policy": "least_loaded", "max_queue_wait_s": 3.0}
OTHER: dict[str, Any] = {
    "policy": "dynamo", "objective": "throughput", "max_queue_wait_s": 7.0,
    "session_affinity_tolerance": 0.2, "overlap_score_credit": 2.0, "prefill_load_scale": 3.0,
    "host_cache_weight": 0.5, "disk_cache_weight": 0.1, "active_request_weight": 4.0,
    "overlap_decay": 0.7, "router_temperature": 0.3, "track_output_blocks": False,
    "queue_order": "edf", "queue_classes": {"paid": {"weight": 2.0}}, "max_queued_requests": 7,
    "max_queued_tokens": 8, "handover_min_tokens": 9, "handover_min_share": 0.4,
    "transfer_bandwidth": 1e9, "transfer_latency_ms": 5.0,
}  # fmt: skip


class Ordered:
    """A router's settings, and the registry that it reads."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.routing = OrderedRouting(Settings(_env_file=None, **OWN), self.fleet)
        self._offset = 10

    def read(self, record: AnyRecord) -> bool:
        self._offset += 1
        log_record = LogRecord(self._offset, 0, record)
        self.fleet.apply(Partition("registry", 0), [log_record], self._offset + 1)
        return self.routing.take_order()

    def order(self, **settings: Any) -> bool:
        return self.read(RoutingOrder(settings=settings))

    @property
    def state(self) -> tuple[str, float, RoutingOf, int | None]:
        settings, report = self.routing.settings, self.routing.report
        (row,) = routing_rows(self.fleet.routing, {"r1": report})
        used = self.routing.order_in_use
        return settings.policy, settings.max_queue_wait_s, row.routing_of, used


def test_newest_order_holds_instead_of_the_own_settings_until_its_end() -> None:
    at = Ordered()
    assert at.state == ("least_loaded", 3.0, "own", None)
    assert at.order(policy="dynamo")
    assert at.state == ("dynamo", 3.0, "order", 11)
    assert at.order(max_queue_wait_s=5)
    assert at.state == ("least_loaded", 5.0, "order", 12)
    assert not at.routing.take_order()
    assert at.read(Tombstone(key="routing"))
    assert at.state == ("least_loaded", 3.0, "own", None)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (RoutingOrder(settings={"policy": "dynamo"}, format=2), "format 2"),
        (RoutingOrder(settings={"policy": "dynamo", "curiosity": 1}), "curiosity"),
        (RoutingOrder(settings={"policy": "dynamo", "lanes": 4}), "KVLANE_LANES"),
        (RoutingOrder(settings={"policy": "newest", "max_queue_wait_s": 5}), "newest"),
        (RoutingOrder(settings={"overlap_decay": float("inf")}), "KVLANE_OVERLAP_DECAY"),
        (RoutingOrder(settings={"queue_classes": {"a": {"weight": 0}}}), "weight above 0"),
    ],
)
def test_order_that_cannot_be_used_as_a_whole_is_named_and_leaves_the_own_settings(
    order: RoutingOrder, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    at = Ordered()
    at.order(policy="random")
    with caplog.at_level(logging.WARNING):
        at.read(order)
        at.routing.take_order()
    assert at.state == ("least_loaded", 3.0, "unusable", None)
    (logged,) = caplog.messages
    assert named in at.routing.report.problem
    assert "registry/0:12" in logged
    assert named in logged
    assert at.order(policy="random")
    assert at.state == ("random", 3.0, "order", 13)


def test_reason_in_reports_is_bounded() -> None:
    at = Ordered()
    at.order(policy="x" * 10_000)
    assert len(at.routing.report.problem) == MAX_PROBLEM_CHARS


def test_each_setting_of_an_order_changes_the_config_of_the_queue() -> None:
    assert OTHER.keys() == set(ORDERED_SETTINGS)
    own = Settings(_env_file=None, policy="predictive")
    for name, value in OTHER.items():
        changed = settings_with_order(own, {name: value})
        assert queue_config(changed) != queue_config(own), name
    changed = settings_with_order(own, {"queue_classes": OTHER["queue_classes"]})
    assert changed.queue_classes == {"paid": ClassConfig(2.0)}


def test_misspelt_setting_of_an_order_is_refused_with_a_similar_name() -> None:
    with pytest.raises(SettingsError, match="did you mean policy"):
        settings_with_order(Settings(_env_file=None), {"polcy": "dynamo"})


def test_router_that_has_not_read_the_order_or_reports_nothing_is_told_apart() -> None:
    at, late = Ordered(), OrderedRouting(Settings(_env_file=None, **OWN), Fleet())
    at.order(policy="dynamo")
    reports = {"old": None, "late": late.report, "new": at.routing.report}
    rows = {row.router: row for row in routing_rows(at.fleet.routing, reports)}
    assert {name: row.routing_of for name, row in rows.items()} == {
        "late": "unread", "new": "order", "old": "unreported",
    }  # fmt: skip
    assert rows["late"].settings == late.report.own
    assert rows["new"].settings == {**late.report.own, "policy": "dynamo"}
