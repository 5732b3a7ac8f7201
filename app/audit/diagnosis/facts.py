"""Facts about a deployment from which `kvlane doctor` finds faults: values, each read on its own.

A reading without an answer is an `Unread`, so that its checks are skipped and no fault is missed
in silence.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvlane.app.audit.drift import COMPLETE
from kvlane.app.audit.fleet.fleet_status import TopicRow
from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.indexer.epochs import CacheId
from kvlane.streams.kafka.broker_state import BrokerState
from kvlane.streams.kafka.provision import TopicState
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Blocks,
    Deployment,
    Finished,
    Heartbeat,
    LogRecord,
    RunKey,
)
from kvlane.streams.topics import AclRule

MAX_RUNS = 256
"""Runs kept of each worker: the last ones."""
_MAX_OPEN_RUNS = 65_536


class Unread(NamedTuple):
    """A reading without an answer. `error`: the name of its type; `action`: its correction."""

    reason: str
    error: str = ""
    action: str = ""


_NO_LOG = Unread("there is no connection to Kafka")


class EventSequence(msgspec.Struct):
    """The cache events of one rank. `next_id`: that after the last event; -1: none was read."""

    epoch: int
    next_id: int = -1
    missing: int = 0


class WorkerEvents:
    """Heartbeats by epoch, cache events and ends of runs, of all workers, from their records.
    Partitions may be read in any order, but each in its own."""

    def __init__(self) -> None:
        self.heard_ms: dict[str, dict[int, int]] = defaultdict(dict)
        """By worker and epoch, when the last heartbeat was appended."""
        self.fingerprints: dict[str, str] = {}
        """Of the secret of the last cache events of a worker."""
        self.events_ms: dict[str, int] = {}
        """When the last cache events of a worker were appended."""
        self.streams: dict[CacheId, EventSequence] = {}
        self._stored_ms: dict[str, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=MAX_RUNS)
        )
        """By worker, when each run that computed whole blocks was assigned, and when it ended."""
        self._prompts: dict[RunKey, tuple[int, int, int]] = {}

    def add(self, source: Partition, log_records: Sequence[LogRecord]) -> None:  # noqa: ARG002
        for log_record in log_records:
            record, at_ms = log_record.record, log_record.timestamp_ms
            if isinstance(record, Heartbeat):
                self.heard_ms[record.worker][record.epoch] = at_ms
                for rank, event_id in enumerate(record.last_event_ids):
                    self._reach(CacheId(record.worker, rank), record.epoch, event_id + 1)
            elif isinstance(record, Blocks):
                self.fingerprints[record.worker] = record.hash_fingerprint
                self.events_ms[record.worker] = at_ms
                holder = CacheId(record.worker, record.rank)
                self._reach(holder, record.epoch, record.first_event_id)
                if (stream := self.streams[holder]).epoch == record.epoch:
                    stream.next_id = record.first_event_id + len(record.kinds)
            elif isinstance(record, Assigned):
                if record.block_size and record.phase != "decode":
                    prompt = record.prompt_tokens, record.block_size, at_ms
                    self._prompts[record.run_key] = prompt
                    if len(self._prompts) > _MAX_OPEN_RUNS:
                        del self._prompts[next(iter(self._prompts))]
            elif isinstance(record, Finished):
                self._end(record, at_ms)

    def _reach(self, holder: CacheId, epoch: int, event_id: int) -> None:
        """Note that all events below this id should have been read, from the first one on."""
        stream = self.streams.get(holder)
        if stream is None or epoch > stream.epoch:
            self.streams[holder] = EventSequence(epoch)
        elif epoch == stream.epoch and 0 <= stream.next_id < event_id:
            stream.missing += event_id - stream.next_id
            stream.next_id = event_id

    def _end(self, end: Finished, at_ms: int) -> None:
        prompt_tokens, block_size, began_ms = self._prompts.pop(end.run_key, (0, 1, 0))
        if end.code in COMPLETE and (prompt_tokens - end.cached_tokens) // block_size > 0:
            self._stored_ms[end.worker].append((began_ms, at_ms))

    def runs_without_events(self, worker: str, before_ms: int) -> int:
        """The last runs that computed whole blocks, up to a time, without an event since they were
        assigned: the events of a prompt come before the end of its run."""
        since_ms = self.events_ms.get(worker, 0)
        return sum(
            since_ms < began_ms and ended_ms <= before_ms
            for began_ms, ended_ms in self._stored_ms[worker]
        )


class FleetSample(msgspec.Struct, frozen=True):
    """The fleet at `now_ms`, broker time. `ahead_ms`: by partition, how far the time of a record
    was ahead of this machine's when it was read. `malformed`: records that cannot be decoded."""

    view: FleetView
    events: WorkerEvents
    now_ms: int
    timeout_s: float
    ahead_ms: Mapping[Partition, int] = {}
    malformed: int = 0


class UnreadRecords(msgspec.Struct, frozen=True):
    """Rows of the topics. `uncollected`: requests that are older than any request can be, and have
    no result by collectors; None: no collector has ever run."""

    topics: Sequence[TopicRow]
    uncollected: int | None
    dead_letters: int


class ProcessAnswer(msgspec.Struct, frozen=True):
    """The answers of a process at an address. Status codes; 0: no answer. `not_ready`: checks that
    are false. `ahead_ms`: its clock against this machine's, to a second; None: not given. `counts`:
    counters that must stay 0; `hashes`: by view, topic, partition and offset; None: `unmeasured`
    says why."""

    url: str
    live: int = 0
    ready: int = 0
    slowest_s: float = 0.0
    not_ready: Sequence[str] = ()
    ahead_ms: int | None = None
    counts: Mapping[str, float] | None = None
    hashes: Mapping[tuple[str, str, str, int], float] = {}
    unmeasured: str = ""


class FileState(msgspec.Struct, frozen=True):
    """A file with secrets. `mode`: its permission bits; `problem`: why it cannot be used; `keys`:
    API keys that are valid now, None for another file."""

    path: str
    setting: str
    mode: int = 0o600
    problem: str = ""
    keys: int | None = None


class Facts(msgspec.Struct, frozen=True):
    """All readings. `lanes`, `fingerprint` (of the hash secret): by the settings here. `denied`:
    rights of `roles` that these credentials lack. `deployment`: None: there is no record."""

    servers: str
    lanes: int
    fingerprint: str | Unread
    roles: Sequence[str]
    brokers: BrokerState | Unread = _NO_LOG
    topics: Sequence[TopicState] | Unread = _NO_LOG
    denied: Sequence[AclRule] | Unread = _NO_LOG
    deployment: Deployment | Unread | None = _NO_LOG
    fleet: FleetSample | Unread = _NO_LOG
    backlog: UnreadRecords | Unread = _NO_LOG
    processes: Sequence[ProcessAnswer] = ()
    files: Sequence[FileState] = ()
