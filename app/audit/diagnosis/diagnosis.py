"""Diagnosis of a deployment: every check over the facts, with the readings that it needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.audit.diagnosis import broker_checks, fleet_checks
from kvlane.app.audit.diagnosis.facts import Facts, Unread
from kvlane.app.audit.diagnosis.findings import Finding


class Check(NamedTuple):
    """A check. `needs`: fields of `Facts`, without which it is skipped."""

    name: str
    needs: tuple[str, ...]
    find: Callable[[Facts], Iterable[Finding]]


CHECKS = (
    Check("broker", (), broker_checks.check_connection),
    Check("replicas", ("brokers",), broker_checks.check_brokers),
    Check("rights", ("denied",), broker_checks.check_rights),
    Check("topics", ("topics",), broker_checks.check_topics),
    Check("copies", ("topics",), broker_checks.check_copies),
    Check("deployment", ("deployment",), broker_checks.check_deployment),
    Check("clocks", ("fleet",), broker_checks.check_clocks),
    Check("records", (), broker_checks.check_records),
    Check("workers", ("fleet",), fleet_checks.check_workers),
    Check("epochs", ("fleet",), fleet_checks.check_epochs),
    Check("models", ("fleet",), fleet_checks.check_models),
    Check("agreement", ("fleet",), fleet_checks.check_agreement),
    Check("secrets", ("fleet",), fleet_checks.check_secrets),
    Check("events", ("fleet",), fleet_checks.check_events),
    Check("index", ("fleet",), fleet_checks.check_drift),
    Check("routers", ("fleet",), fleet_checks.check_routers),
    Check("routing", ("fleet",), fleet_checks.check_routing),
    Check("backlog", ("backlog",), fleet_checks.check_backlog),
    Check("results", ("backlog",), fleet_checks.check_results),
    Check("dead letters", ("backlog",), fleet_checks.check_dead_letters),
    Check("processes", (), fleet_checks.check_processes),
    Check("metrics", (), fleet_checks.check_counters),
    Check("views", (), fleet_checks.check_views),
    Check("files", (), fleet_checks.check_files),
)


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all checks in their order; of a check without one that it is ok, or was
    skipped with the reason."""
    return [each for check in CHECKS for each in _merged(_run(check, facts))]


def _run(check: Check, facts: Facts) -> Iterator[Finding]:
    for name in check.needs:
        if isinstance(reading := getattr(facts, name), Unread):
            yield Finding("skipped", check.name, check.name, message=reading.reason)
            return
    found = list(check.find(facts))
    yield from found or [Finding("ok", check.name, check.name)]


def _merged(found: Iterator[Finding]) -> list[Finding]:
    """The findings of several objects that say the same as one."""
    objects: dict[Finding, list[str]] = {}
    for each in found:
        objects.setdefault(replace(each, object=""), []).append(each.object)
    return [replace(each, object=", ".join(names)) for each, names in objects.items()]
