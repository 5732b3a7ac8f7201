"""Tests of the fleet: live workers, and lost epochs."""

from __future__ import annotations

from typing import Any

from kvlane.app.routing.state.fleet import RETENTION_MS, Fleet
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    AliasTarget,
    Cordon,
    EngineConfig,
    EngineStats,
    Heartbeat,
    LogRecord,
    Lost,
    ModelAlias,
    RoutingOrder,
    RunProgress,
    Tombstone,
    WorkerCard,
)

REGISTRY = Partition("registry", 0)
EVENTS = Partition("kv-events", 5)


def card(epoch: int | None) -> WorkerCard:
    return WorkerCard(id="w1", slot=1, model="demo", config=EngineConfig(model="demo"), epoch=epoch)


def beat(epoch: int, **over: Any) -> Heartbeat:
    return Heartbeat(worker="w1", epoch=epoch, slot_offset=3, **over)


def fleet(registry: dict[int, Any], events: list[Any], registry_end: int = 100) -> Fleet:
    """A fleet that has read these registry offsets and kv-events, one every 100 ms from 1000."""
    view = Fleet()
    view.apply(REGISTRY, [LogRecord(n, 500 + n, r) for n, r in registry.items()], registry_end)
    log_records = [LogRecord(n, 1000 + n * 100, r) for n, r in enumerate(events)]
    view.apply(EVENTS, log_records, len(events))
    return view


def test_offset_of_the_first_card_is_the_epoch() -> None:
    view = fleet({7: card(None), 8: card(7)}, [beat(7)])
    assert view.members["w1"].epoch == 7
    assert view.is_ready("w1")


def test_worker_without_a_complete_card_gets_no_work() -> None:
    assert not fleet({7: card(None)}, [beat(7)]).is_ready("w1")


def test_lost_holds_for_the_epoch_and_all_before_it() -> None:
    view = fleet({7: card(None), 8: card(7)}, [beat(7), Lost(worker="w1", epoch=7)])
    assert view.is_lost("w1", 7)
    assert view.is_lost("w1", 6)
    assert not view.is_ready("w1")


def test_newer_card_makes_the_older_epoch_lost() -> None:
    view = fleet({7: card(None), 8: card(7), 20: card(None)}, [beat(7)])
    assert view.is_lost("w1", 7)
    assert not view.is_lost("w1", 20)
    assert not view.is_ready("w1")


def test_card_of_a_lower_epoch_is_ignored() -> None:
    view = fleet({7: card(None), 20: card(None), 21: card(20), 22: card(7)}, [])
    assert view.members["w1"].epoch == 20


def test_tombstone_ends_its_epoch_and_no_later_one() -> None:
    left = {7: card(None), 8: card(7), 9: Tombstone(key="worker/w1", epoch=7)}
    assert fleet(left, []).is_lost("w1", 7)
    back = left | {20: card(None), 21: card(20), 22: Tombstone(key="worker/w1", epoch=7)}
    assert not fleet(back, []).is_lost("w1", 20)


def test_older_card_does_not_restore_a_worker_that_left() -> None:
    left = {7: card(None), 8: card(7), 9: Tombstone(key="worker/w1", epoch=7), 10: card(7)}
    assert fleet(left, [beat(7)]).members == {}
    unnamed = {7: card(None), 9: Tombstone(key="worker/w1"), 10: card(7)}
    assert fleet(unnamed, [beat(7)]).members == {}
    assert fleet(left | {20: card(None)}, []).members["w1"].epoch == 20


def later(view: Fleet, source: Partition, record: Any, at_ms: int) -> None:
    position = view.position(source) or 0
    view.apply(source, [LogRecord(position, at_ms, record)], position + 1)


def test_worker_without_records_is_dropped_by_record_time() -> None:
    view = fleet({}, [beat(7), Lost(worker="w2", epoch=3)])
    other = Heartbeat(worker="w3", epoch=9, slot_offset=0)
    later(view, EVENTS, other, 1000 + RETENTION_MS)
    assert set(view.heartbeats) == {"w1", "w3"}
    later(view, EVENTS, other, 1200 + RETENTION_MS)
    assert set(view.heartbeats) == {"w3"}
    assert view.state_hash(EVENTS) != Fleet().state_hash(EVENTS)
    later(view, EVENTS, Lost(worker="w3", epoch=9), 1201 + 2 * RETENTION_MS)
    assert view.heartbeats["w3"].epoch == 9, "it was heard of again"


def test_tombstone_of_a_worker_is_dropped_after_its_retention() -> None:
    view = fleet({7: card(None), 8: card(7), 9: Tombstone(key="worker/w1", epoch=7)}, [])
    later(view, REGISTRY, Tombstone(key="worker/w2", epoch=1), 510 + RETENTION_MS)
    later(view, REGISTRY, card(7), 511 + RETENTION_MS)
    assert view.members["w1"].epoch == 7


def test_version_moves_when_another_worker_may_be_routable() -> None:
    view = fleet({7: card(None), 8: card(7)}, [beat(7)])
    seen = [view.version]

    def moved_by(source: Partition, record: Any) -> bool:
        later(view, source, record, 5000)
        seen.append(view.version)
        return seen[-1] != seen[-2]

    assert not moved_by(EVENTS, beat(7))
    assert moved_by(EVENTS, beat(7, state="draining"))
    assert moved_by(EVENTS, Lost(worker="w1", epoch=7))
    assert moved_by(REGISTRY, card(None))
    assert moved_by(REGISTRY, Tombstone(key="worker/w1", epoch=7))


def test_epoch_ahead_of_the_read_registry_is_not_lost() -> None:
    view = fleet({7: card(None)}, [], registry_end=8)
    assert not view.is_lost("w2", 8)
    assert view.is_lost("w2", 5)


def test_heartbeats_of_an_older_epoch_do_not_count() -> None:
    view = fleet({20: card(None), 21: card(20)}, [beat(20), beat(7)])
    assert view.heartbeats["w1"].epoch == 20


def test_snapshot_of_each_source_restores_the_same_state() -> None:
    running = (RunProgress(id="a", attempt=0, phase="aggregated", output_tokens=3),)
    events = [beat(7, running=running), Lost(worker="w1", epoch=3)]
    gone = Tombstone(key="worker/w2", epoch=9)
    first = fleet({7: card(None), 8: card(7), 9: gone}, events)
    second = Fleet()
    for source in (REGISTRY, EVENTS):
        position = first.position(source)
        assert position is not None
        second.restore(source, first.snapshot(source), position)
        assert second.state_hash(source) == first.state_hash(source)
    assert second.members == first.members
    assert second.heartbeats == first.heartbeats
    assert second.heartbeats["w1"].output_tokens == 3
    assert second.is_lost("w1", 3)


def test_answer_weighs_less_the_nearer_it_is_to_its_expected_length() -> None:
    def weight(output_tokens: int, expected: int) -> int:
        run = RunProgress(
            id="a", attempt=0, phase="aggregated", output_tokens=output_tokens,
            expected_output_tokens=expected,
        )  # fmt: skip
        return (
            fleet({7: card(None), 8: card(7)}, [beat(7, running=(run,))])
            .heartbeats["w1"]
            .output_tokens
        )

    assert [weight(n, 0) for n in (10, 1000)] == [10, 1000]
    assert [weight(n, 100) for n in (10, 50, 90, 100, 500)] == [9, 25, 9, 0, 0]


def test_heartbeat_has_the_cache_usage() -> None:
    figures = EngineStats(kv_used_blocks=30, kv_total_blocks=40)
    view = fleet({7: card(None), 8: card(7)}, [beat(7, engine=figures)])
    assert view.heartbeats["w1"].cache_usage == 0.75
    restored = Fleet()
    restored.restore(EVENTS, view.snapshot(EVENTS), 1)
    assert restored.heartbeats["w1"].cache_usage == 0.75
    assert fleet({7: card(None), 8: card(7)}, [beat(7)]).heartbeats["w1"].cache_usage == 0


def test_dropped_source_leaves_the_other_unchanged() -> None:
    view = fleet({7: card(None), 8: card(7)}, [beat(7), Lost(worker="w1", epoch=3)])
    view.forget(EVENTS)
    assert view.heartbeats == {}
    assert view.position(EVENTS) is None
    assert "w1" in view.members
    view.forget(REGISTRY)
    assert view.members == {}


def test_cordon_holds_for_all_epochs_of_a_worker_until_its_tombstone() -> None:
    orders = {7: card(None), 8: Cordon(worker="w1"), 9: Cordon(worker="w1", evacuates=True)}
    lost = orders | {10: Tombstone(key="worker/w1"), 20: card(None), 21: card(20)}
    copy, ended = Fleet(), fleet(lost | {22: Tombstone(key="cordon/w1")}, [])
    copy.restore(REGISTRY, fleet(lost, []).snapshot(REGISTRY), 100)
    for view in (fleet(lost, []), copy):
        assert view.cordons == {"w1": Cordon(worker="w1", evacuates=True)}
    assert ended.cordons == {}
    assert ended.members["w1"].epoch == 20


def test_cordon_changes_the_version_and_the_hash_of_a_fleet() -> None:
    plain, cordoned = fleet({7: card(None)}, []), fleet({7: card(None), 8: Cordon(worker="w1")}, [])
    assert cordoned.version == plain.version + 1
    assert cordoned.state_hash(REGISTRY) != plain.state_hash(REGISTRY)
    cordoned.forget(REGISTRY)
    assert cordoned.cordons == {}


def test_alias_is_in_the_snapshot_and_the_hash_of_a_fleet() -> None:
    alias = ModelAlias(name="chat", targets=(AliasTarget(model="m", weight=1),))
    plain, aliased, copy = fleet({7: card(None)}, []), fleet({7: card(None), 8: alias}, []), Fleet()
    assert aliased.version == plain.version + 1
    assert aliased.state_hash(REGISTRY) != plain.state_hash(REGISTRY)
    copy.restore(REGISTRY, aliased.snapshot(REGISTRY), 100)
    assert copy.aliases == {"chat": alias}
    assert fleet({8: alias, 9: Tombstone(key="alias/chat")}, []).aliases == {}
    aliased.forget(REGISTRY)
    assert aliased.aliases == {}


def test_newest_order_about_routing_is_in_the_snapshot_and_the_hash_of_a_fleet() -> None:
    first, order = RoutingOrder(settings={}), RoutingOrder(settings={"policy": "dynamo"})
    plain, ordered, copy = fleet({}, []), fleet({8: first, 9: order}, []), Fleet()
    assert ordered.version == plain.version + 2
    assert ordered.state_hash(REGISTRY) != plain.state_hash(REGISTRY)
    copy.restore(REGISTRY, ordered.snapshot(REGISTRY), 100)
    for view in (ordered, copy):
        assert view.routing is not None
        assert (view.routing.order, view.routing.offset) == (order, 9)
    assert fleet({8: order, 9: Tombstone(key="routing")}, []).routing is None
    ordered.forget(REGISTRY)
    assert ordered.routing is None
