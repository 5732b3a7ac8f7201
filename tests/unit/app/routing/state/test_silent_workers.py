"""Tests of silence of workers, by the time at which a reader read their records."""

from __future__ import annotations

import math

from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import InternalRecord
from kvlane.streams.records import EngineConfig, Heartbeat, LogRecord, WorkerCard

REGISTRY, EVENTS = Partition("registry", 0), Partition("kv-events", 0)
TIMEOUT_S = 5.0


class Reader:
    """A reader of a fleet, whose records have any append time."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.silent = SilentWorkers(self.fleet, TIMEOUT_S)

    def card(self, worker: str, epoch: int, now_s: float) -> None:
        config = EngineConfig(model="m")
        self._read(
            REGISTRY, WorkerCard(id=worker, slot=0, model="m", config=config, epoch=epoch), now_s
        )

    def heartbeat(
        self, worker: str, epoch: int, now_s: float, at_ms: int = 0, broker_ms: int | None = None
    ) -> None:
        beat = Heartbeat(worker=worker, epoch=epoch, slot_offset=0)
        self._read(EVENTS, beat, now_s, at_ms, broker_ms)

    def silent_at(self, now_s: float) -> set[str]:
        self.silent.update(now_s)
        return self.silent.names

    def _read(
        self, source: Partition, record: InternalRecord, now_s: float, at_ms: int = 0,
        broker_ms: int | None = None,
    ) -> None:  # fmt: skip
        position = self.fleet.position(source) or 0
        log_record = LogRecord(position, at_ms, record)
        self.fleet.apply(source, [log_record], position + 1)
        self.silent.on_records([log_record], now_s, broker_ms)


def test_worker_is_silent_after_its_time_and_until_its_next_heartbeat() -> None:
    reader = Reader()
    reader.card("w1", 3, 10.0)
    reader.heartbeat("w1", 3, 12.0)
    reader.heartbeat("w2", 4, 13.0)
    assert reader.silent_at(12.0 + TIMEOUT_S) == set()
    before = reader.silent.version
    assert reader.silent_at(12.1 + TIMEOUT_S) == {"w1"}
    assert reader.silent.version == before + 1
    reader.heartbeat("w1", 3, 17.5)
    assert reader.silent.names == set()
    assert reader.silent.version == before + 2
    assert reader.silent_at(17.6) == set()
    assert reader.silent_at(18.1) == {"w2"}


def test_append_times_of_new_records_do_not_count() -> None:
    reader = Reader()
    for now_s in range(60):  # a leader with another clock takes over now and then
        reader.heartbeat("w1", 3, float(now_s), at_ms=100_000 * (now_s % 3))
        assert reader.silent_at(now_s + 1.0) == set()


def test_worker_that_died_before_the_reader_started_is_silent_at_once() -> None:
    reader = Reader()
    reader.heartbeat("dead", 1, 10.0, at_ms=1_000, broker_ms=60_000)
    reader.heartbeat("lives", 2, 10.0, at_ms=59_500, broker_ms=60_000)
    reader.card("dead", 1, 10.0)
    assert reader.silent_at(10.0) == {"dead"}
    assert reader.silent.last_read_s("lives", 2) == 9.5


def test_first_new_heartbeat_ends_the_silence_of_a_worker_of_a_slow_broker() -> None:
    reader = Reader()
    reader.heartbeat("w1", 3, 10.0, at_ms=20_000, broker_ms=60_000)
    assert reader.silent_at(10.0) == {"w1"}
    reader.heartbeat("w1", 3, 11.0, at_ms=21_000)
    assert reader.silent_at(11.0) == set()


def test_new_epoch_has_its_time_from_its_card_on() -> None:
    reader = Reader()
    reader.heartbeat("w1", 3, 10.0)
    reader.card("w1", 7, 30.0)
    reader.heartbeat("w1", 3, 31.0)  # of the process before it
    assert reader.silent.last_read_s("w1", 3) == -math.inf
    assert reader.silent.last_read_s("w1", 7) == 30.0
    assert reader.silent_at(30.1 + TIMEOUT_S) == {"w1"}


def test_worker_that_the_fleet_dropped_is_dropped() -> None:
    reader = Reader()
    reader.heartbeat("w1", 3, 10.0)
    assert reader.silent_at(20.0) == {"w1"}
    reader.fleet.forget(EVENTS)
    reader.heartbeat("w2", 4, 20.0)
    assert reader.silent_at(21.0 + TIMEOUT_S) == {"w2"}
    assert reader.silent.last_read_s("w1", 3) == -math.inf
