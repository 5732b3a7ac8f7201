"""Tests of the comparison of routers' load and caches with the log."""

from __future__ import annotations

from kvlane.app.metrics.indexer_metrics import HASH_SHIFT
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.indexer.block_hashes import derive_secret
from kvlane.indexer.events import CacheEvent, EventKind, Tier, encode_events
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import InternalRecord
from kvlane.streams.records import Assigned, Blocks, Finished, LogRecord, RequestOffset
from workbench.bench.routing.router_views import (
    LoadFigures,
    ReferenceState,
    RouterFigures,
    RouterView,
    StateDifference,
    differences,
    disagreements,
)

SECRET = derive_secret(b"test")
LANES = (Partition("ledger", 0), Partition("ledger", 1))
EVENTS = Partition("kv-events", 0)


def assigned(name: str, worker: str, tokens: int) -> Assigned:
    return Assigned(
        id=name, attempt=0, phase="aggregated", worker=worker, epoch=1, responses_from=0,
        origin=RequestOffset(topic="requests", partition=0, offset=0), deadline_ms=10_000,
        prompt_tokens=tokens, prefill_tokens=tokens - 1,
    )  # fmt: skip


def finished(name: str, worker: str) -> Finished:
    return Finished(id=name, attempt=0, phase="aggregated", worker=worker, epoch=1, code="stop")


def stored(worker: str, *keys: int) -> Blocks:
    columns = encode_events([CacheEvent(EventKind.STORED, Tier.DEVICE, 0, keys)])
    return Blocks(
        worker=worker, epoch=1, first_event_id=0, hash_fingerprint=SECRET.fingerprint,
        **columns._asdict(),
    )  # fmt: skip


def log_records(*records: InternalRecord) -> list[LogRecord]:
    return [LogRecord(offset, offset, record) for offset, record in enumerate(records)]


LOG = {
    LANES[0]: log_records(assigned("a", "w1", 100), finished("a", "w1")),
    LANES[1]: log_records(assigned("b", "w1", 30), assigned("c", "w2", 7)),
    EVENTS: log_records(stored("w1", 17, 18)),
}


def truth() -> ReferenceState:
    return ReferenceState(LOG, LedgerState(60_000), KvIndexView(SECRET))


def at(*offsets: int) -> dict[Partition, int]:
    return dict(zip((*LANES, EVENTS), offsets, strict=True))


def cache_of(*records: InternalRecord) -> dict[Partition, int]:
    index = KvIndexView(SECRET)
    index.apply(EVENTS, log_records(*records), len(records))
    return {EVENTS: int(index.state_hash(EVENTS), 16) >> HASH_SHIFT}


EMPTY, FILLED = cache_of(), cache_of(stored("w1", 17, 18))


def test_truth_is_the_log_up_to_the_positions_of_the_view() -> None:
    true = truth()
    assert true.at(at(0, 0, 0)) == RouterFigures({}, EMPTY)
    assert true.at(at(1, 0, 0)) == RouterFigures({"w1": LoadFigures(1, 100, 99)}, EMPTY)
    assert true.at(at(1, 1, 1)) == RouterFigures({"w1": LoadFigures(2, 130, 128)}, FILLED)
    assert true.at(at(2, 2, 1)) == RouterFigures(
        {"w1": LoadFigures(1, 30, 29), "w2": LoadFigures(1, 7, 6)}, FILLED
    )


def view(router: str, positions: dict[Partition, int], known: RouterFigures) -> RouterView:
    return RouterView(router, positions, known)


def test_view_correct_at_its_own_positions_is_no_difference_however_old() -> None:
    right = [
        view("r1", at(1, 0, 0), RouterFigures({"w1": LoadFigures(1, 100, 99)}, EMPTY)),
        view("r1", at(2, 0, 1), RouterFigures({}, FILLED)),
    ]
    assert list(differences(right, truth())) == []


def test_missing_or_extra_run_is_a_difference() -> None:
    forgotten = view("r1", at(1, 0, 0), RouterFigures({}, EMPTY))
    assert list(differences([forgotten], truth())) == [
        StateDifference("r1", "w1", None, LoadFigures(1, 100, 99))
    ]
    kept = view("r2", at(2, 0, 1), RouterFigures({"w1": LoadFigures(1, 100, 99)}, FILLED))
    assert list(differences([kept], truth())) == [
        StateDifference("r2", "w1", LoadFigures(1, 100, 99), None)
    ]


def test_other_blocks_in_a_cache_are_a_difference() -> None:
    wrong = view("r1", at(0, 0, 1), RouterFigures({}, cache_of(stored("w1", 17))))
    (found,) = differences([wrong], truth())
    assert (found.router, found.key) == ("r1", str(EVENTS))


def test_views_agree_when_they_are_equal_at_the_same_positions() -> None:
    known, other = RouterFigures({}, FILLED), RouterFigures({"w2": LoadFigures(1, 7, 6)}, FILLED)
    same = [view("r1", at(2, 0, 1), known), view("r2", at(2, 0, 1), known)]
    assert list(disagreements(same)) == []
    (found,) = disagreements([*same, view("r3", at(2, 0, 1), other)])
    assert (found.router, found.key) == ("r3", "w2")
    (found,) = disagreements([*same, view("r3", at(2, 2, 1), known)])
    assert (found.router, found.key) == ("r3", "positions")


def test_router_is_idle_when_nothing_is_open_nor_waits_nor_is_unread() -> None:
    idle = view("r1", at(0, 0, 0), RouterFigures({}, EMPTY))
    assert idle.is_idle
    assert not idle._replace(queued=1).is_idle
    assert not idle._replace(unconfirmed=1).is_idle
    assert not idle._replace(figures=RouterFigures({"w": LoadFigures(0, 0, 1)}, {})).is_idle
