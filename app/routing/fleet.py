"""Fleet: the fold of the registry and of the heartbeats. Which workers there are, and which live.

Sources are the registry's one partition (cards, tombstones) and the partitions of kv-events
(heartbeats, Lost). There is no clock in here: how long a worker has been silent is a question with
a time in it. Death is a record: an epoch is dead when a Lost names it or a later one, when the
worker has a newer card, or when its card is gone; never because of a time-out alone.

An epoch is the offset of a worker's first card in the registry. Hence epochs of all workers rise
together, and an epoch at or beyond the registry position read so far is simply not known yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from streams.ports import Partition
from streams.records import (
    Fact,
    Heartbeat,
    Lost,
    ModelCard,
    Phase,
    RunKey,
    Tombstone,
    WorkerCard,
    WorkerState,
)

REGISTRY = "registry"
"""The topic's name; `streams.topics` is not imported here, since it loads the Kafka client."""


class FleetWorker(NamedTuple):
    """A worker's card, with its epoch, as it was last read."""

    card: WorkerCard
    epoch: int
    since_ms: int


class Beat(NamedTuple):
    """The last heartbeat of a worker; `offset` and `at_ms` are its place in kv-events."""

    partition: int
    offset: int
    at_ms: int
    epoch: int
    slot_offset: int
    state: WorkerState
    running: dict[RunKey, int]


class Fleet:
    """Cards, heartbeats and deaths; a `Fold` (streams/follow.py) over registry and kv-events."""

    name = "fleet"

    def __init__(self) -> None:
        self.members: dict[str, FleetWorker] = {}
        self.beats: dict[str, Beat] = {}
        self.models: dict[str, ModelCard] = {}
        self._lost: dict[str, tuple[int, int]] = {}  # worker → (kv partition, highest lost epoch)
        self._positions: dict[Partition, int] = {}

    # --- questions -------------------------------------------------------------------------------

    def is_lost(self, worker: str, epoch: int) -> bool:
        """Whether this epoch of the worker is dead for good."""
        if epoch <= self._lost.get(worker, (0, -1))[1]:
            return True
        if epoch >= self._positions.get(Partition(REGISTRY, 0), 0):
            return False  # its card is still to be read
        member = self.members.get(worker)
        return member is None or member.epoch != epoch

    def is_routable(self, worker: str, now_ms: int, timeout_ms: int) -> bool:
        """Whether new work may go there: card complete, alive, ready, and heard of lately."""
        member = self.members.get(worker)
        beat = self.beats.get(worker)
        return (
            member is not None
            and beat is not None
            and member.card.epoch is not None
            and beat.epoch == member.epoch
            and beat.state == "ready"
            and now_ms - beat.at_ms <= timeout_ms
            and not self.is_lost(worker, member.epoch)
        )

    def living(self) -> Iterator[tuple[str, FleetWorker]]:
        """The workers whose present epoch is not lost, whether they are heard of or not."""
        for worker, member in self.members.items():
            if not self.is_lost(worker, member.epoch):
                yield worker, member

    def heard_ms(self, worker: str) -> int:
        """Append time of the last sign of life of the worker's present epoch; 0 for none."""
        member = self.members.get(worker)
        if member is None:
            return 0
        beat = self.beats.get(worker)
        return beat.at_ms if beat is not None and beat.epoch == member.epoch else member.since_ms

    # --- the fold --------------------------------------------------------------------------------

    def apply(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        """Take in records of one partition; `position` is the next offset after them."""
        for fact in facts:
            record = fact.record
            if isinstance(record, Heartbeat):
                self._beat(source, fact, record)
            elif isinstance(record, Lost):
                self._bury(source, record)
            elif isinstance(record, WorkerCard):
                self._card(fact, record)
            elif isinstance(record, ModelCard):
                self.models[record.name] = record
            elif isinstance(record, Tombstone):
                self._remove(record)
        self._positions[source] = position

    def _card(self, fact: Fact, card: WorkerCard) -> None:
        epoch = fact.offset if card.epoch is None else card.epoch
        known = self.members.get(card.id)
        if known is None or epoch >= known.epoch:
            since_ms = known.since_ms if known and known.epoch == epoch else fact.timestamp_ms
            self.members[card.id] = FleetWorker(card, epoch, since_ms)

    def _remove(self, tombstone: Tombstone) -> None:
        kind, _, name = tombstone.key.partition("/")
        if kind == "model":
            self.models.pop(name, None)
        member = self.members.get(name) if kind == "worker" else None
        epoch = tombstone.epoch
        if member is not None and (epoch is None or epoch >= member.epoch):
            del self.members[name]

    def _beat(self, source: Partition, fact: Fact, beat: Heartbeat) -> None:
        known = self.beats.get(beat.worker)
        if known is not None and beat.epoch < known.epoch:
            return
        running = {RunKey(r.id, r.attempt, r.phase): r.output_tokens for r in beat.running}
        self.beats[beat.worker] = Beat(
            source.partition, fact.offset, fact.timestamp_ms,
            beat.epoch, beat.slot_offset, beat.state, running,
        )  # fmt: skip

    def _bury(self, source: Partition, lost: Lost) -> None:
        highest = max(lost.epoch, self._lost.get(lost.worker, (0, -1))[1])
        self._lost[lost.worker] = (source.partition, highest)

    def position(self, source: Partition) -> int | None:
        """Next offset to read; None before the first."""
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        """Drop what came from one partition."""
        self._positions.pop(source, None)
        if source.topic == REGISTRY:
            self.members.clear()
            self.models.clear()
        else:
            p = source.partition
            self.beats = {w: b for w, b in self.beats.items() if b.partition != p}
            self._lost = {w: x for w, x in self._lost.items() if x[0] != p}

    def snapshot(self, source: Partition) -> bytes:
        """What came from one partition, as bytes; equal state gives equal bytes."""
        if source.topic == REGISTRY:
            cards = [(m.epoch, m.since_ms, m.card) for _, m in sorted(self.members.items())]
            return msgspec.msgpack.encode(
                _Entities(cards, [m for _, m in sorted(self.models.items())])
            )
        p = source.partition
        signs = _Signs(
            [(w, *b[:-1], [(*k, n) for k, n in sorted(b.running.items())])
             for w, b in sorted(self.beats.items()) if b.partition == p],
            [(w, epoch) for w, (at, epoch) in sorted(self._lost.items()) if at == p],
        )  # fmt: skip
        return msgspec.msgpack.encode(signs)

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`, at a position. Raises msgspec.DecodeError on other bytes."""
        if source.topic == REGISTRY:
            entities = msgspec.msgpack.decode(data, type=_Entities)
            self.forget(source)
            self.members = {
                c.id: FleetWorker(c, epoch, since) for epoch, since, c in entities.workers
            }
            self.models = {m.name: m for m in entities.models}
        else:
            signs = msgspec.msgpack.decode(data, type=_Signs)
            self.forget(source)
            for worker, p, offset, at_ms, epoch, slot_offset, state, running in signs.beats:
                runs = {RunKey(i, attempt, phase): n for i, attempt, phase, n in running}
                self.beats[worker] = Beat(p, offset, at_ms, epoch, slot_offset, state, runs)
            for worker, epoch in signs.lost:
                self._lost[worker] = (source.partition, epoch)
        self._positions[source] = position

    def state_hash(self, source: Partition) -> str:
        """BLAKE2b of what came from one partition, in hex."""
        return hashlib.blake2b(self.snapshot(source), digest_size=16).hexdigest()


_Running = tuple[str, int, Phase, int]


class _Entities(msgspec.Struct):
    workers: list[tuple[int, int, WorkerCard]]
    models: list[ModelCard]


class _Signs(msgspec.Struct):
    beats: list[tuple[str, int, int, int, int, int, WorkerState, list[_Running]]]
    lost: list[tuple[str, int]]
