"""Tests of the bounds of a fleet's memory, and of the requests that are kept within them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvlane.app.audit import drift
from kvlane.app.audit.fleet import fleet_view, request_facts
from kvlane.app.audit.fleet.request_facts import EndedRequests
from kvlane.app.audit.fleet.request_rows import ended_requests_of
from kvlane.app.http.console import recent_activity
from kvlane.app.http.console.recent_activity import RecentActivity
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import Account
from kvlane.streams.records import Candidate, Finished, PrefillDone, RouterCapacity
from kvlane.streams.topics import CAPACITY, LEDGER
from tests.harness.made_fleet import NOW_MS, WINDOW_MS, MadeFleet

MINUTE_MS = 60_000
NEWEST, IDS, OPEN, MOST = 40, 60, 30, 5
WANTED_MODEL, WANTED_TENANT = {"model": "wanted"}, {"tenant": "wanted"}
ACCOUNT = Account("acme", model="wanted")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> MadeFleet:
    """A fleet of small bounds."""
    monkeypatch.setattr(request_facts, "MAX_NEWEST", NEWEST)
    monkeypatch.setattr(request_facts, "MAX_ENDED_IDS", IDS)
    monkeypatch.setattr(fleet_view, "MAX_OPEN", OPEN)
    monkeypatch.setattr(drift, "MAX_OPEN_DECISIONS", OPEN)
    monkeypatch.setattr(drift, "MAX_RUNS", 20)
    monkeypatch.setattr(recent_activity, "MAX_SAMPLES", 2)
    return MadeFleet(EndedRequests(MOST))


def assign(fleet: MadeFleet, name: str, at_ms: int) -> dict[str, Any]:
    chosen = Candidate(worker="w1", epoch=0, cost=1.0)
    return fleet.assign(name, 0, at_ms, block_size=16, listed=(chosen,))


def play(
    fleet: MadeFleet, name: str, at_ms: int, took_ms: int = 20, code: str = "stop", **request: str
) -> None:
    """A request from its append to its end."""
    fleet.ask(name, at_ms, **request)
    run = assign(fleet, name, at_ms + 1)
    fleet.append(LEDGER, PrefillDone(**run, run=1), at_ms + 5)
    reason = "it failed" if code == "error" else ""
    end = Finished(**run, code=code, output_tokens=9, reason=reason)  # type: ignore[arg-type]
    fleet.append(LEDGER, end, at_ms + took_ms)


def containers(of: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """The lengths of all containers of an object, by their place in it."""
    if id(of) in seen or isinstance(of, str | bytes | int | float | type(None)):
        return
    seen.add(id(of))
    parts: list[tuple[str, Any]] = []
    if isinstance(of, dict | list | tuple | set | frozenset | deque):
        yield path, len(of)
        values = of.values() if isinstance(of, dict) else of
        parts = [("[]", each) for each in values]
    elif isinstance(of, msgspec.Struct):
        parts = [(f".{name}", getattr(of, name)) for name in of.__struct_fields__]
    elif hasattr(of, "__dict__"):
        parts = [(f".{name}", each) for name, each in vars(of).items()]
    for name, each in parts:
        yield from containers(each, path + name, seen)


def elements(*objects: Any) -> dict[str, int]:
    """By place the number of elements of all containers there."""
    found: dict[str, int] = {}
    for each in objects:
        for path, count in containers(each, type(each).__name__, set()):
            found[path] = found.get(path, 0) + count
    return found


def test_memory_does_not_grow_with_the_rate_of_requests(fleet: MadeFleet) -> None:
    """Five times as many requests in equal time, and each container has as many elements."""
    view, activity = fleet.view, RecentActivity()
    view._on_ended = activity.on_ended
    fleet.register("w1")
    sizes = []
    for part, requests in enumerate((200, 200, 1000)):
        began_ms = part * WINDOW_MS
        for number in range(requests):
            at_ms, name = began_ms + number * WINDOW_MS // requests, f"{part}-{number}"
            play(fleet, name, at_ms, 20 + number % 7, "error" if number % 4 == 0 else "stop")
            fleet.ask(f"waits-{name}", at_ms)
            if number % 3 == 0:
                fleet.start(assign(fleet, f"runs-{name}", at_ms), at_ms)
        sizes.append(elements(view, activity))
        activity.points(NOW_MS + began_ms + WINDOW_MS)
    _, full, last = sizes
    grown = {path: (full.get(path, 0), n) for path, n in last.items() if n > full.get(path, 0)}
    # By chance some more: of ids, and of runs among the open requests.
    assert {path: n for path, n in grown.items() if n[1] > 1.1 * n[0] + IDS} == {}
    assert len(view.open) == OPEN
    assert len(view.ended.newest) == NEWEST
    assert len(view.ended_ids._known) == len(view.ended_ids._order) == IDS
    minutes = view.ended._minutes.values()
    assert len(minutes) <= WINDOW_MS // MINUTE_MS + 1
    assert {(len(minute.slowest), len(minute.failed)) for minute in minutes} == {(MOST, MOST)}
    assert view.ended.count > 800
    assert view.left_out > 1000


def test_slow_and_failed_requests_of_early_minutes_are_found(fleet: MadeFleet) -> None:
    fleet.register("w1")
    for number in range(600):
        took_ms, code = 20 + number % 10, "stop"
        if number in (10, 300):
            took_ms, code = 9000 - number, "error"
        play(fleet, f"r{number}", number * WINDOW_MS // 600, took_ms, code)
    view = fleet.view
    slow = ended_requests_of(view, "slow", most=3)
    assert [(row.id, row.total_ms) for row in slow[:2]] == [("r10", 8990), ("r300", 8700)]
    assert slow[2].total_ms == 29
    failed = ended_requests_of(view, "failed")
    assert [(row.id, row.reason) for row in failed] == [("r300", "it failed"), ("r10", "it failed")]
    assert failed[0].tenant == "acme"
    assert view.ended.failed_left_out == 0
    assert [row.id for row in ended_requests_of(view, most=2)] == ["r599", "r598"]
    fleet.append(CAPACITY, RouterCapacity(router="r1"), 2 * WINDOW_MS)
    assert ended_requests_of(view, "failed") == []
    assert view.ended.count == 0


def test_failed_requests_that_are_not_kept_are_counted(fleet: MadeFleet) -> None:
    for number in range(100):
        play(fleet, f"r{number}", 100 * number, code="error")
    kept = [row.id for row in ended_requests_of(fleet.view, "failed")]
    assert kept[: NEWEST + MOST] == [f"r{n}" for n in range(99, 99 - NEWEST - MOST, -1)]
    assert fleet.view.ended.failed_left_out == 100 - len(kept)


def test_requests_of_a_wanted_model_are_kept_among_many_of_another(fleet: MadeFleet) -> None:
    others = [MadeFleet(EndedRequests(MOST, **of)) for of in (WANTED_MODEL, WANTED_TENANT)]
    for number in range(200):
        for each in (fleet, *others):
            play(each, f"r{number}", 600 * number, 500)
            if number == 10:
                play(each, "wanted", 600 * number, 30, **WANTED_MODEL, **WANTED_TENANT)
    for each, of in zip(others, (WANTED_MODEL, WANTED_TENANT), strict=True):
        rows = ended_requests_of(each.view, "slow", most=5, **of)
        assert [(row.id, row.total_ms) for row in rows] == [("wanted", 30)]
        assert each.view.ended.count == NEWEST + 1
    assert ended_requests_of(fleet.view, "slow", most=5, **WANTED_MODEL) == []


def test_request_that_is_read_long_after_its_end_is_not_open(fleet: MadeFleet) -> None:
    """Partitions are read one after the other: the ledger may come first, as a whole."""
    for number in range(300):
        run = fleet.assign(f"r{number}", 0, number, held_ms=7, account=ACCOUNT)
        fleet.append(LEDGER, Finished(**run, code="stop"), number + 100)
    fleet.append(LEDGER, Finished(**run, code="stop"), 1000)
    for number in range(300):
        fleet.ask(f"r{number}", number - 9)
    fleet.ask("new", 500)
    assert list(fleet.open(NOW_MS + 500)) == ["new"]
    rows = fleet.ended()
    assert len(rows) == NEWEST + MOST
    exact, early = rows["r299"], rows["r99"]
    assert (exact.wait_ms, exact.total_ms, exact.tenant) == (9, 109, "acme")
    assert (early.wait_ms, early.total_ms) == (7, 107), "from when its router had it"
    assert (early.model, early.tenant) == ("wanted", "acme")


def test_open_requests_are_dropped_for_later_ones_and_known_again_by_the_ledger(
    fleet: MadeFleet,
) -> None:
    epoch = fleet.register("w1")
    for number in range(OPEN + 5):
        fleet.ask(f"r{number}", number - 1000)
    assert list(fleet.open()) == [f"r{n}" for n in range(5, OPEN + 5)]
    assert fleet.view.left_out == 5
    fleet.assign("r0", epoch, 100, account=ACCOUNT)
    row = fleet.open()["r0"]
    assert (row.phase, row.worker, row.model) == ("assigned", "w1", "wanted")


def test_open_request_is_forgotten_an_hour_after_its_last_record(fleet: MadeFleet) -> None:
    fleet.ask("open", 0, deadline_s=3 * 3600)
    fleet.append(CAPACITY, RouterCapacity(router="r1"), 3_500_000)
    assert list(fleet.view.open) == ["open"]
    fleet.append(CAPACITY, RouterCapacity(router="r1"), 3_700_000)
    assert not fleet.view.open


def test_ledger_that_is_read_again_ends_no_request_twice(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    play(fleet, "r0", 0)
    fleet.assign("runs", epoch)
    fleet.view.forget(Partition(LEDGER, 0))
    assert fleet.open() == {}, "until it is read again"
    play(fleet, "r0", 0)
    fleet.assign("runs", epoch)
    assert fleet.view.ended.count == 1
    assert list(fleet.open()) == ["runs"]
    assert fleet.open()["runs"].phase == "assigned"
