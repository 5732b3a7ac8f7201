"""Fleet state: the view of the registry and of the heartbeats. The workers, and which of them are
live.

Sources are the registry's partition (cards, orders, tombstones) and kv-events (heartbeats, Lost).
No clock: silence is measured by each reader (`silent_workers.py`). Death is a record: an epoch is
dead when a Lost names it or a later one, when the worker has a newer card, or when its card is
gone.

An epoch is the offset of a worker's first card in the registry. Hence epochs of all workers rise
together, and one at or beyond the read registry position is not known yet. The heartbeats and
losses of a worker without records for a long time expire, and so do tombstones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvlane.app.routing.state.change_log import ChangeLog
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Cordon,
    Heartbeat,
    LogRecord,
    Lost,
    ModelAlias,
    ModelCard,
    Phase,
    RoutingOrder,
    RunKey,
    Tombstone,
    WorkerCard,
    WorkerState,
)

REGISTRY = "registry"
"""The topic's name; `streams/topics.py` is not imported here, since it loads the Kafka client."""
RETENTION_MS = 24 * 3600 * 1000
"""How long a name is kept after its last record: as long as kv-events are kept, and as long as the
registry is not compacted."""


class WorkerRank(NamedTuple):
    """A data-parallel rank of one epoch of a worker: the target of a request."""

    worker: str
    epoch: int
    rank: int = 0


class LastSeen:
    """Names and the times of their last records, in the order of these times."""

    def __init__(self, times: dict[str, int] | None = None) -> None:
        self.times = times or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.times)

    def touch(self, name: str, at_ms: int) -> list[str]:
        """Take in a record's time; returns the expired names, which are removed here."""
        self.times.pop(name, None)
        self.times[name] = at_ms
        outdated = []
        for each, time in self.times.items():
            if time >= at_ms - RETENTION_MS:
                break
            outdated.append(each)
        for each in outdated:
            del self.times[each]
        return outdated


class FleetMember(NamedTuple):
    """A worker's card, with its epoch, as it was last read."""

    card: WorkerCard
    epoch: int
    since_ms: int


class LastHeartbeat(NamedTuple):
    """The last heartbeat of a worker; `offset` and `at_ms` are its place in kv-events."""

    partition: int
    offset: int
    at_ms: int
    epoch: int
    slot_offset: int
    state: WorkerState
    running: dict[RunKey, int]
    output_tokens: int = 0
    """Of all these runs, weighted: see `_counted`."""
    cache_usage: float = 0.0
    """Part of the engine's cache that its runs hold, 0 to 1; 0 if it is not reported."""


class PlacedOrder(msgspec.Struct, frozen=True):
    """The order about routing, with its offset in the registry, and when it was appended."""

    order: RoutingOrder
    offset: int
    at_ms: int


class Fleet:
    """Cards, heartbeats and deaths; a `MaterializedView` (streams/views/view.py) over registry and
    kv-events.

    `version` moves when the set of routable workers may change for another reason than silence;
    `changed_heartbeats`: workers with a new heartbeat.
    """

    name = "fleet"

    def __init__(self) -> None:
        self.members: dict[str, FleetMember] = {}
        self.heartbeats: dict[str, LastHeartbeat] = {}
        self.models: dict[str, ModelCard] = {}
        self.cordons: dict[str, Cordon] = {}
        """By worker; also of workers without a card, which may come back."""
        self.aliases: dict[str, ModelAlias] = {}
        self.routing: PlacedOrder | None = None
        self.version = 0
        self.changed_heartbeats = ChangeLog[str]()
        self._lost: dict[str, int] = {}  # worker → its highest lost epoch
        self._last_seen: dict[
            int, LastSeen
        ] = {}  # by kv partition: the workers with a heartbeat or a Lost from there
        self._tombstoned: dict[str, int] = {}  # worker → epoch up to which its cards count no more
        self._tombstone_times = LastSeen()
        self._positions: dict[Partition, int] = {}

    # --- questions -------------------------------------------------------------------------------

    def is_lost(self, worker: str, epoch: int) -> bool:
        """Whether this epoch of the worker is dead for good."""
        if epoch <= self._lost.get(worker, -1):
            return True
        if epoch >= self._positions.get(Partition(REGISTRY, 0), 0):
            return False  # its card is still to be read
        member = self.members.get(worker)
        return member is None or member.epoch != epoch

    def is_ready(self, worker: str) -> bool:
        """True if the worker takes new work unless it is silent or cordoned: card complete, not
        lost, ready."""
        member = self.members.get(worker)
        beat = self.heartbeats.get(worker)
        return (
            member is not None
            and beat is not None
            and member.card.epoch is not None
            and beat.epoch == member.epoch
            and beat.state == "ready"
            and not self.is_lost(worker, member.epoch)
        )

    def live_members(self) -> Iterator[tuple[str, FleetMember]]:
        """The workers whose present epoch is not lost, whether they are silent or not."""
        for worker, member in self.members.items():
            if not self.is_lost(worker, member.epoch):
                yield worker, member

    # --- the view --------------------------------------------------------------------------------

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        for log_record in log_records:
            record = log_record.record
            if isinstance(record, Heartbeat):
                self._beat(source, log_record, record)
            elif isinstance(record, Lost):
                self._mark_lost(source, log_record, record)
            elif isinstance(record, WorkerCard):
                self._on_card(log_record, record)
            elif isinstance(record, ModelCard):
                self.models[record.name] = record
                self.version += 1
            elif isinstance(record, Cordon):
                self.cordons[record.worker] = record
                self.version += 1
            elif isinstance(record, ModelAlias):
                self.aliases[record.name] = record
                self.version += 1
            elif isinstance(record, RoutingOrder):
                self.routing = PlacedOrder(record, log_record.offset, log_record.timestamp_ms)
                self.version += 1
            elif isinstance(record, Tombstone):
                self._remove(log_record, record)
        self._positions[source] = position

    def _on_card(self, log_record: LogRecord, card: WorkerCard) -> None:
        epoch = log_record.offset if card.epoch is None else card.epoch
        known = self.members.get(card.id)
        if (known and epoch < known.epoch) or epoch <= self._tombstoned.get(card.id, -1):
            return
        since_ms = known.since_ms if known and known.epoch == epoch else log_record.timestamp_ms
        self.members[card.id] = FleetMember(card, epoch, since_ms)
        self.version += 1

    def _remove(self, log_record: LogRecord, tombstone: Tombstone) -> None:
        kind, _, name = tombstone.key.partition("/")
        self.version += 1
        if kind == "model":
            self.models.pop(name, None)
        if kind == "cordon":
            self.cordons.pop(name, None)
        if kind == "alias":
            self.aliases.pop(name, None)
        if kind == "routing":
            self.routing = None
        if kind != "worker":
            return
        epoch = log_record.offset if tombstone.epoch is None else tombstone.epoch
        self._tombstoned[name] = max(epoch, self._tombstoned.get(name, -1))
        for forgotten in self._tombstone_times.touch(name, log_record.timestamp_ms):
            del self._tombstoned[forgotten]
        member = self.members.get(name)
        if member is not None and epoch >= member.epoch:
            del self.members[name]

    def _beat(self, source: Partition, log_record: LogRecord, beat: Heartbeat) -> None:
        known = self.heartbeats.get(beat.worker)
        if known is not None and beat.epoch < known.epoch:
            return
        running = {RunKey(r.id, r.attempt, r.phase): r.output_tokens for r in beat.running}
        self.heartbeats[beat.worker] = LastHeartbeat(
            source.partition, log_record.offset, log_record.timestamp_ms,
            beat.epoch, beat.slot_offset, beat.state, running, _counted(beat), _usage(beat)
        )  # fmt: skip
        self.changed_heartbeats.record(beat.worker)
        if known is None or (known.epoch, known.state) != (beat.epoch, beat.state):
            self.version += 1
        self._note(source, log_record, beat.worker)

    def _mark_lost(self, source: Partition, log_record: LogRecord, lost: Lost) -> None:
        self._lost[lost.worker] = max(lost.epoch, self._lost.get(lost.worker, -1))
        self.version += 1
        self._note(source, log_record, lost.worker)

    def _note(self, source: Partition, log_record: LogRecord, worker: str) -> None:
        seen = self._last_seen.setdefault(source.partition, LastSeen())
        for forgotten in seen.touch(worker, log_record.timestamp_ms):
            self._expire(forgotten)

    def _expire(self, worker: str) -> None:
        self.changed_heartbeats.record(worker)
        self.heartbeats.pop(worker, None)
        if self._lost.pop(worker, None) is not None:
            self.version += 1

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        self._positions.pop(source, None)
        self.version += 1
        if source.topic == REGISTRY:
            self.members.clear()
            self.models.clear()
            self.cordons.clear()
            self.aliases.clear()
            self.routing = None
            self._tombstoned.clear()
            self._tombstone_times = LastSeen()
        else:
            for worker in self._last_seen.pop(source.partition, ()):
                self._expire(worker)

    def snapshot(self, source: Partition) -> bytes:
        if source.topic == REGISTRY:
            cards = [(m.epoch, m.since_ms, m.card) for _, m in sorted(self.members.items())]
            models = [m for _, m in sorted(self.models.items())]
            tombstoned = [
                (w, self._tombstoned[w], at_ms) for w, at_ms in self._tombstone_times.times.items()
            ]
            cordons = [cordon for _, cordon in sorted(self.cordons.items())]
            aliases = [alias for _, alias in sorted(self.aliases.items())]
            return msgspec.msgpack.encode(
                _Entities(cards, models, tombstoned, cordons, aliases, self.routing)
            )
        seen = self._last_seen.get(source.partition, LastSeen()).times
        return msgspec.msgpack.encode([self._snapshot_row(w, at_ms) for w, at_ms in seen.items()])

    def _snapshot_row(self, worker: str, seen_ms: int) -> _HeartbeatRow:
        beat = self.heartbeats.get(worker)
        lost = self._lost.get(worker, -1)
        if beat is None:
            return _HeartbeatRow(worker, seen_ms, lost)
        running = [
            (key.id, key.attempt, key.phase, tokens) for key, tokens in sorted(beat.running.items())
        ]
        where = (beat.offset, beat.at_ms, beat.epoch, beat.slot_offset)
        return _HeartbeatRow(
            worker, seen_ms, lost, where, beat.state, running, beat.output_tokens, beat.cache_usage
        )

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        if source.topic == REGISTRY:
            entities = msgspec.msgpack.decode(data, type=_Entities)
            self.forget(source)
            self.members = {
                c.id: FleetMember(c, epoch, since) for epoch, since, c in entities.workers
            }
            self.models = {m.name: m for m in entities.models}
            self.cordons = {cordon.worker: cordon for cordon in entities.cordons}
            self.aliases = {alias.name: alias for alias in entities.aliases}
            self.routing = entities.routing
            self._tombstoned = {worker: epoch for worker, epoch, _ in entities.tombstoned}
            self._tombstone_times = LastSeen(
                {worker: at_ms for worker, _, at_ms in entities.tombstoned}
            )
        else:
            signs = msgspec.msgpack.decode(data, type=list[_HeartbeatRow])
            self.forget(source)
            self._last_seen[source.partition] = LastSeen({s.worker: s.seen_ms for s in signs})
            for sign in signs:
                self._restore(source.partition, sign)
        self._positions[source] = position

    def _restore(self, partition: int, sign: _HeartbeatRow) -> None:
        if sign.lost >= 0:
            self._lost[sign.worker] = sign.lost
        if sign.where is not None:
            self.changed_heartbeats.record(sign.worker)
            offset, at_ms, epoch, slot_offset = sign.where
            running = {RunKey(i, attempt, phase): n for i, attempt, phase, n in sign.running}
            self.heartbeats[sign.worker] = LastHeartbeat(
                partition, offset, at_ms, epoch, slot_offset, sign.state, running,
                sign.output_tokens, sign.cache_usage,
            )  # fmt: skip

    def state_hash(self, source: Partition) -> str:
        """BLAKE2b of the state from one partition, in hex."""
        return hashlib.blake2b(self.snapshot(source), digest_size=16).hexdigest()


class _Entities(msgspec.Struct, omit_defaults=True):
    workers: list[tuple[int, int, WorkerCard]]
    models: list[ModelCard]
    tombstoned: list[tuple[str, int, int]] = msgspec.field(name="buried")
    cordons: list[Cordon] = []
    aliases: list[ModelAlias] = []
    routing: PlacedOrder | None = None


class _HeartbeatRow(msgspec.Struct):
    """A worker in a snapshot. `where`: its heartbeat's offset, time, epoch, slot offset."""

    worker: str
    seen_ms: int = msgspec.field(name="heard_ms")
    lost: int
    where: tuple[int, int, int, int] | None = None
    state: WorkerState = "ready"
    running: list[tuple[str, int, Phase, int]] = []
    output_tokens: int = 0
    cache_usage: float = 0.0


def _counted(beat: Heartbeat) -> int:
    """Output tokens as load: of an answer whose length is expected, those that come to its end
    count less and less, since they will be gone soon."""
    total = 0.0
    for run in beat.running:
        expected, done = run.expected_output_tokens, run.output_tokens
        total += done * max(0.0, 1.0 - done / expected) if expected else done
    return round(total)


def _usage(beat: Heartbeat) -> float:
    figures = beat.engine
    if figures is None or not figures.kv_total_blocks:
        return 0.0
    return figures.kv_used_blocks / figures.kv_total_blocks
