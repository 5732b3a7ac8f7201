"""Recent state of a deployment for operators: workers, open and finished requests, routers.

A view over `SOURCES`, read from the recent records on. It holds the views of routers (`Fleet`,
`LaneState`, `DriftTracker`) and the facts of requests that these leave out: names, times, tokens.
Events before the first record that is read are missing, but for open runs, which workers repeat in
each heartbeat. Memory: the requests of the window, at most `MAX_ENDED` that have ended; the
outcomes that `LaneState` holds, some hundred bytes each, have no bound but the window. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Literal

import msgspec

from kvlane.app.audit.drift import DriftTracker
from kvlane.app.audit.waits import ReportFold
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.ledger import LaneState
from kvlane.app.routing.state.request_state import LedgerRecord, RunLoads, last_code
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import (
    Assigned,
    Fencing,
    Finished,
    Heartbeat,
    LogRecord,
    Lost,
    PrefillDone,
    Refused,
    WorkerCard,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, HOUR_MS, KV_EVENTS, LEDGER, REGISTRY, REQUESTS

SOURCES = (REGISTRY, CAPACITY, KV_EVENTS, LEDGER, REQUESTS)
MAX_ENDED = 50_000
"""Ended requests that are kept, the newest; about 20 MB."""
MAX_CARDS = 10_000
_SWEEP_MS = 60_000


class RequestFacts(msgspec.Struct):
    """Facts of a request. Times by the broker, in ms; 0: not reached, or not read.

    `began_ms`: append of the request, or of its prompt. `offset`: of its record in `requests`; -1:
    not read. `base_tokens`: output of earlier attempts.
    """

    lane: int
    began_ms: int = 0
    deadline_ms: int = 0
    offset: int = -1
    model: str = ""
    tenant: str = ""
    service_class: ServiceClass | Literal[""] = ""
    worker: str = ""
    attempt: int = 0
    decided_ms: int = 0
    first_token_ms: int = 0
    base_tokens: int = 0
    output_tokens: int = 0
    code: str = ""
    reason: str = ""
    ended_ms: int = 0
    last_ms: int = 0


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


class FleetView:
    name = "recent fleet"

    def __init__(self, window_ms: int, on_ended: OnEnded = lambda _: None) -> None:
        """`window_ms`: age up to which records count: ended requests, losses. `on_ended`: called
        for each request that has ended."""
        self.fleet = Fleet()
        self.drift = DriftTracker()
        self.reports = ReportFold()
        self.lanes: dict[int, LaneState] = {}
        self.cards: dict[str, WorkerCard] = {}
        """The newest `MAX_CARDS` of all workers, also of those that are gone."""
        self.heartbeats: dict[str, Heartbeat] = {}
        """Those in `fleet.heartbeats`, with all their figures."""
        self.steps: dict[str, EngineSteps] = {}
        self.lost: dict[str, LostWorker] = {}
        self.requests: dict[str, RequestFacts] = {}
        self.open_ids: set[str] = set()
        """Of requests that have not ended."""
        self._window_ms = window_ms
        self._on_ended = on_ended
        self._loads = RunLoads(ActiveLoad(), BatchRuns())
        self.left_out = 0
        """Ended requests that were dropped before the end of the window."""
        self._ended: list[tuple[int, str]] = []
        """A heap by the time of the end: partitions are read one after the other."""
        self._positions: dict[Partition, int] = {}
        self._swept_ms = 0

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        self._positions.pop(source, None)
        if source.topic in {REGISTRY, KV_EVENTS}:
            self.fleet.forget(source)
        elif source.topic == LEDGER and (lane := self.lanes.pop(source.partition, None)):
            lane.clear(self._loads)

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
        if self._has_dropped(lane, record.id, record.queued_ms or at_ms):
            return
        if isinstance(record, Request):
            facts = self._facts(lane, record.id, at_ms)
            if facts.offset >= 0 and not record.is_renewed:
                return  # a copy
            facts.offset = log_record.offset
            facts.began_ms = record.queued_ms or facts.began_ms or at_ms
            facts.deadline_ms = facts.began_ms + int(record.deadline_s * 1000)
            facts.model, facts.tenant = record.model, record.tenant
            facts.service_class = record.service_class
        else:
            facts = self._facts(lane, record.id, at_ms)
            facts.reason = record.message
            facts.began_ms = facts.began_ms or record.queued_ms or at_ms
            facts.deadline_ms = facts.deadline_ms or at_ms + _SWEEP_MS

    def _on_ledger(self, number: int, log_record: LogRecord) -> None:
        record, at_ms = log_record.record, log_record.timestamp_ms
        if not isinstance(record, LedgerRecord):
            return
        lane = self.lanes.setdefault(number, LaneState(self._window_ms))
        is_dropped = self._has_dropped(number, record.id, at_ms)
        lane.apply(log_record, self._loads)
        self.drift.on_record(log_record)
        if is_dropped:
            return
        facts = self._facts(number, record.id, at_ms)
        if facts.code:
            return
        _note(facts, record, at_ms)
        outcome, state = lane.finished.get(record.id), lane.requests.get(record.id)
        if outcome is not None:
            facts.code = outcome.code
        elif state is not None and not state.is_known and state.is_finished:
            facts.code = last_code(state)  # its decision came before the records that were read
        if facts.code:
            facts.ended_ms = at_ms
            self.open_ids.discard(record.id)
            heappush(self._ended, (facts.ended_ms, record.id))
            self._on_ended(facts)

    def _has_dropped(self, number: int, request_id: str, began_ms: int) -> bool:
        """Whether a request has ended, and its facts were dropped."""
        lane = self.lanes.get(number)
        if request_id in self.requests or lane is None:
            return False
        return request_id in lane.finished or lane.has_forgotten(request_id, began_ms)

    def _facts(self, lane: int, request_id: str, at_ms: int) -> RequestFacts:
        facts = self.requests.get(request_id)
        if facts is None:
            facts = self.requests[request_id] = RequestFacts(lane)
            self.open_ids.add(request_id)
        facts.last_ms = max(facts.last_ms, at_ms)
        return facts

    def _expire(self, now_ms: int) -> None:
        since_ms = now_ms - self._window_ms
        while self._ended and (self._ended[0][0] < since_ms or len(self._ended) > MAX_ENDED):
            ended_ms, request_id = heappop(self._ended)
            self.left_out += ended_ms >= since_ms
            del self.requests[request_id]
        if now_ms - self._swept_ms < _SWEEP_MS:
            return
        self._swept_ms = now_ms
        # Their record is deleted by now: a request that still waits has been appended again.
        old = [n for n in self.open_ids if self.requests[n].last_ms < now_ms - HOUR_MS]
        for request_id in old:
            del self.requests[request_id]
        self.open_ids.difference_update(old)
        self.reports.expire()
        self.lost = {w: lost for w, lost in self.lost.items() if lost.at_ms >= since_ms}
        known = self.fleet.heartbeats
        self.heartbeats = {w: beat for w, beat in self.heartbeats.items() if w in known}
        self.steps = {w: steps for w, steps in self.steps.items() if w in known}


def _note(facts: RequestFacts, record: LedgerRecord, at_ms: int) -> None:
    """Take in the facts of a ledger record that the state of its lane leaves out."""
    if isinstance(record, Assigned):
        facts.worker, facts.attempt = record.worker, record.attempt
        facts.base_tokens = facts.output_tokens = record.base_tokens
        facts.service_class = record.service_class
        facts.decided_ms = facts.decided_ms or at_ms
        facts.deadline_ms = record.deadline_ms
    elif isinstance(record, PrefillDone):
        if record.phase != "prefill":
            facts.first_token_ms = facts.first_token_ms or at_ms
    elif isinstance(record, Finished) and record.attempt >= facts.attempt:
        facts.reason = record.reason or facts.reason
        if record.phase != "prefill":
            facts.output_tokens = facts.base_tokens + record.output_tokens
    elif isinstance(record, Fencing):
        facts.attempt = record.attempt
        facts.reason = record.reason or facts.reason
