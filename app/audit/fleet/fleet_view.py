"""Recent state of a deployment for operators: workers, open and finished requests, routers.

A view over `SOURCES`, read from the recent records on. It holds views of routers (`Fleet`,
`DriftTracker`), the states of requests by their rules, and the facts that these leave out: names,
times, tokens. Events before the first record that is read are missing, but for open runs, which
workers repeat in each heartbeat. Memory has a bound at any rate of requests: `MAX_OPEN`, those of
`request_facts.py` and of `DriftTracker`; the rest grows with workers and routers. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from kvlane.app.audit.drift import DriftTracker
from kvlane.app.audit.fleet.request_facts import EndedRequests, LastEndedIds, RequestFacts
from kvlane.app.audit.waits import ReportFold
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.request_state import (
    LedgerRecord,
    RequestState,
    RunLoads,
    apply_record,
    last_code,
)
from kvlane.streams.ports import Partition
from kvlane.streams.records import Heartbeat, LogRecord, Lost, Refused, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, HOUR_MS, KV_EVENTS, LEDGER, REGISTRY, REQUESTS

SOURCES = (REGISTRY, CAPACITY, KV_EVENTS, LEDGER, REQUESTS)
MAX_OPEN = 50_000
"""Requests without a known end that are kept, the newest; about 75 MB."""
MAX_CARDS = 10_000
_SWEEP_MS = 60_000


OnEnded = Callable[[RequestFacts], None]


class LostWorker(msgspec.Struct, frozen=True):
    epoch: int
    at_ms: int
    silent_ms: int


class EngineSteps(msgspec.Struct, frozen=True):
    """The steps of a worker's engine at its last heartbeat. `step_ms`: mean time of those since the
    heartbeat before; None: it was idle."""

    epoch: int
    at_ms: int
    steps: int
    is_busy: bool
    step_ms: float | None = None


class _NoLoads(RunLoads):
    """The load of runs is that of heartbeats here."""

    def update(self, *_: object, **__: object) -> None: ...

    def remove(self, *_: object, **__: object) -> None: ...


_NO_LOADS = _NoLoads(ActiveLoad(), BatchRuns())


class FleetView:
    name = "recent fleet"

    def __init__(
        self, window_ms: int, on_ended: OnEnded = lambda _: None, ended: EndedRequests | None = None
    ) -> None:
        """`window_ms`: age up to which records count: ended requests, losses. `on_ended`: called
        for each request that has ended. `ended`: which of them are kept."""
        self.fleet = Fleet()
        self.drift = DriftTracker()
        self.reports = ReportFold()
        self.cards: dict[str, WorkerCard] = {}
        """The newest `MAX_CARDS` of all workers, also of those that are gone."""
        self.heartbeats: dict[str, Heartbeat] = {}
        """Those in `fleet.heartbeats`, with all their figures."""
        self.steps: dict[str, EngineSteps] = {}
        self.lost: dict[str, LostWorker] = {}
        self.open: OrderedDict[str, RequestFacts] = OrderedDict()
        """Requests that have not ended, as far as the records were read."""
        self.left_out = 0
        """Number of those that were dropped for later ones while there are `MAX_OPEN`; they may
        have ended."""
        self.ended = ended or EndedRequests()
        self.ended_ids = LastEndedIds()
        self._window_ms = window_ms
        self._on_ended = on_ended
        self._positions: dict[Partition, int] = {}
        self._swept_ms = 0

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        self._positions.pop(source, None)
        if source.topic in {REGISTRY, KV_EVENTS}:
            self.fleet.forget(source)
        elif source.topic == LEDGER:
            for facts in self.open.values():
                if facts.lane == source.partition:
                    facts.state = None

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        topic, partition = source
        if topic in {REGISTRY, KV_EVENTS}:
            self.fleet.apply(source, log_records, position)
        for log_record in log_records:
            if topic == LEDGER:
                self._on_ledger(partition, log_record)
            elif topic == REQUESTS:
                self._on_request(partition, log_record)
            elif topic == CAPACITY:
                self.reports.add(log_record)
            else:
                self._on_worker(log_record)
        self._positions[source] = position
        if log_records and topic != REGISTRY:
            self._expire(log_records[-1].timestamp_ms)

    def _on_worker(self, log_record: LogRecord) -> None:
        record = log_record.record
        if isinstance(record, Heartbeat):
            last = self.fleet.heartbeats.get(record.worker)
            if last is not None and last.epoch == record.epoch:
                self.heartbeats[record.worker] = record
                self._count_steps(record, log_record.timestamp_ms)
        elif isinstance(record, WorkerCard):
            self.cards.pop(record.id, None)
            self.cards[record.id] = record
            if len(self.cards) > MAX_CARDS:
                del self.cards[next(iter(self.cards))]
        elif isinstance(record, Lost):
            at_ms = log_record.timestamp_ms
            self.lost[record.worker] = LostWorker(record.epoch, at_ms, record.silent_ms)

    def _count_steps(self, record: Heartbeat, at_ms: int) -> None:
        engine, last = record.engine, self.steps.get(record.worker)
        if engine is None:
            return
        step_ms, is_busy = None, engine.running > 0
        if last is not None and last.epoch == record.epoch and last.is_busy and is_busy:
            count = engine.steps - last.steps
            step_ms = (at_ms - last.at_ms) / count if count > 0 else None
        self.steps[record.worker] = EngineSteps(record.epoch, at_ms, engine.steps, is_busy, step_ms)

    def _on_request(self, lane: int, log_record: LogRecord) -> None:
        record, at_ms = log_record.record, log_record.timestamp_ms
        if not isinstance(record, Request | Refused):
            return
        facts = self.open.get(record.id) or self.ended.newest.get(record.id)
        if facts is None:
            has_ended = at_ms <= self.ended_ids.forgotten_ms.get(lane, 0)
            if has_ended or record.id in self.ended_ids:
                return
            facts = self._add(lane, record.id)
        facts.last_ms = max(facts.last_ms, at_ms)
        if isinstance(record, Request):
            if facts.offset >= 0 and not record.is_renewed:
                return  # a copy
            facts.offset = log_record.offset
            facts.began_ms = record.queued_ms or facts.began_ms or at_ms
            facts.deadline_ms = facts.began_ms + int(record.deadline_s * 1000)
            facts.model, facts.tenant = record.model, record.tenant
            facts.service_class = record.service_class
        else:
            facts.reason = record.message
            facts.began_ms = facts.began_ms or record.queued_ms or at_ms
            facts.deadline_ms = facts.deadline_ms or at_ms + _SWEEP_MS

    def _on_ledger(self, lane: int, log_record: LogRecord) -> None:
        record, at_ms = log_record.record, log_record.timestamp_ms
        if not isinstance(record, LedgerRecord):
            return
        self.drift.on_record(log_record)
        facts = self.open.get(record.id)
        if facts is None:
            if record.id in self.ended_ids or record.id in self.ended.newest:
                return
            facts = self._add(lane, record.id)
        facts.last_ms = max(facts.last_ms, at_ms)
        facts.note(record, at_ms)
        state = facts.state = facts.state or RequestState()
        if apply_record(state, record, at_ms, _NO_LOADS) and state.is_finished:
            facts.code = state.ended or last_code(state)
            facts.state, facts.ended_ms = None, at_ms
            del self.open[record.id]
            self.ended_ids.add(lane, record.id, at_ms)
            self.ended.add(record.id, facts)
            self._on_ended(facts)

    def _add(self, lane: int, request_id: str) -> RequestFacts:
        facts = self.open[request_id] = RequestFacts(lane)
        if len(self.open) > MAX_OPEN:
            self.open.popitem(last=False)
            self.left_out += 1
        return facts

    def _expire(self, now_ms: int) -> None:
        since_ms = now_ms - self._window_ms
        self.ended.expire(since_ms)
        if now_ms - self._swept_ms < _SWEEP_MS:
            return
        self._swept_ms = now_ms
        if len(self.open) < MAX_OPEN:
            self.left_out = 0
        # Their record is deleted by now: a request that still waits has been appended again.
        for request_id, facts in list(self.open.items()):
            if facts.last_ms < now_ms - HOUR_MS:
                del self.open[request_id]
        self.reports.expire()
        self.lost = {w: lost for w, lost in self.lost.items() if lost.at_ms >= since_ms}
        known = self.fleet.heartbeats
        self.heartbeats = {w: beat for w, beat in self.heartbeats.items() if w in known}
        self.steps = {w: steps for w, steps in self.steps.items() if w in known}
