"""Ledger state: the view of the ledger. The open runs of requests, and the outcomes of the others.

One `LaneState` per ledger partition, made of its records alone: two replicas at the same position
have the same lane (`state_hash`). Next actions are found in `reconcile.py`; decisions that are not
read back are not here; `request_state.py` has the rules of records. Ids are known for longer
than outcomes, as a copy of a request may be read late: those of prompts in `EndedPrompts`, all
others for another window.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.ended_prompts import EndedPrompts, EndIds, id_digest
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.request_state import (
    OPEN,
    FinishedRequest,
    LedgerRecord,
    RequestState,
    RunId,
    RunLoads,
    RunState,
    RunStatus,
    WorkerEpoch,
    apply_record,
    clear_runs,
    last_code,
)
from kvlane.app.routing.state.sessions import Affinity, SessionAffinities, SessionKey
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Assigned, LogRecord, Phase, RequestOffset, RunKey


class LaneState:
    def __init__(self, dedup_window_ms: int) -> None:
        self.position = 0
        self.requests: dict[str, RequestState] = {}
        """Those that are not over, and those whose id is not known yet."""
        self.unfinished: dict[str, RequestState] = {}
        """The known ones of them, in which due actions are searched."""
        self.finished: dict[str, FinishedRequest] = {}
        """Of all others, in the order of their ends."""
        self._ended: deque[str] = deque()
        """Their ids in that order: the first key of a dict is found behind all deleted ones."""
        self._window_ms = dedup_window_ms
        self._forgotten = EndIds(dedup_window_ms // 1000)
        """Ids of outcomes that are no longer in `finished`."""
        self._orphans: deque[tuple[int, str]] = deque()
        self._open_runs: dict[WorkerEpoch, dict[RunKey, None]] | None = None

    @property
    def open_runs(self) -> Mapping[WorkerEpoch, Mapping[RunKey, None]]:
        """Of the unfinished: the runs that each epoch of a worker has to list in its heartbeats.
        Kept from the first access on: only the owner of the lane needs them."""
        if self._open_runs is None:
            self._open_runs = {}
            for request_id, state in self.unfinished.items():
                self._index_open_runs(request_id, state)
        return self._open_runs

    def request(self, request_id: str) -> RequestState | None:
        """The state of a request; of one that has ended, its outcome only."""
        outcome = self.finished.get(request_id)
        if outcome is not None:
            return RequestState(outcome.attempt, ended=outcome.code, last_ms=outcome.last_ms)
        return self.requests.get(request_id)

    def apply(self, log_record: LogRecord, loads: RunLoads) -> bool:
        """Apply one record. Records after the end of a request, by any writer, change nothing.
        Returns whether the record ends a request that came from Kafka."""
        record = log_record.record
        if not isinstance(record, LedgerRecord):
            return False
        ends_prompt = False
        if record.id not in self.finished:
            state = self.requests.get(record.id)
            if state is None:
                state = self.requests[record.id] = RequestState()
            state.last_ms = log_record.timestamp_ms
            is_changed = apply_record(state, record, log_record.timestamp_ms, loads)
            if is_changed or record.id not in self.unfinished:
                self.classify(record.id, state)
                ends_prompt = state.is_prompt and record.id in self.finished
        self._expire(log_record.timestamp_ms, loads)
        return ends_prompt

    def classify(self, request_id: str, state: RequestState) -> None:
        """File a request by its state: unfinished, unknown id, or finished."""
        if not state.is_known:
            self._orphans.append((state.last_ms, request_id))
            return
        if state.is_finished:
            code = state.ended or last_code(state)
            self.finish(request_id, FinishedRequest(code, state.attempt, state.last_ms))
            self.unfinished.pop(request_id, None)
            del self.requests[request_id]
        else:
            self.unfinished[request_id] = state
        self._index_open_runs(request_id, state)

    def _index_open_runs(self, request_id: str, state: RequestState) -> None:
        """Replace the open runs of a request in the index, if that is kept."""
        index = self._open_runs
        if index is None:
            return
        open_runs = tuple([
            ((k.worker, k.epoch), RunKey(request_id, k.attempt, k.phase))
            for k, run in state.runs.items()
            if run.state in OPEN
        ])  # fmt: skip
        if open_runs == state.indexed_open_runs:
            return
        for epoch, key in state.indexed_open_runs:
            of_epoch = index[epoch]
            del of_epoch[key]
            if not of_epoch:
                del index[epoch]
        for epoch, key in open_runs:
            index.setdefault(epoch, {})[key] = None
        state.indexed_open_runs = open_runs

    def finish(self, request_id: str, outcome: FinishedRequest) -> None:
        """Remember how a request ended, as the last one of all."""
        self.finished[request_id] = outcome
        self._ended.append(request_id)

    def _expire(self, now_ms: int, loads: RunLoads) -> None:
        """Drop requests that ended, or stayed unknown, before the window, by the ledger's time."""
        since_ms = now_ms - self._window_ms
        while self._ended and self.finished[self._ended[0]].last_ms < since_ms:
            request_id = self._ended.popleft()
            ended_ms = self.finished.pop(request_id).last_ms
            self._forgotten.add(id_digest(request_id), -(-ended_ms // 1000))
        self._forgotten.expire((since_ms - self._window_ms) // 1000)
        while self._orphans and self._orphans[0][0] < since_ms:
            at_ms, request_id = self._orphans.popleft()
            state = self.requests.get(request_id)
            if state is not None and not state.is_known and state.last_ms <= at_ms:
                clear_runs(request_id, state, loads)
                del self.requests[request_id]

    def has_forgotten(self, request_id: str, appended_ms: int) -> bool:
        """True if a record, by its append time, repeats a request whose outcome was dropped. A copy
        waits in the log for its time limit at most, which is no longer than the window."""
        since_s = (appended_ms - self._window_ms) // 1000
        return self._forgotten.ended_after(id_digest(request_id), since_s)

    def clear(self, loads: RunLoads) -> None:
        """Forget everything; the load of its open runs is removed too."""
        for request_id, state in self.requests.items():
            clear_runs(request_id, state, loads)


class _RequestRow(msgspec.Struct):
    id: str
    attempt: int
    runs: list[tuple[int, Phase, str, int, RunState, int, int, int, int, str, ServiceClass, bool]]
    ended: str
    origin: RequestOffset | None
    responses_from: int
    deadline_ms: int
    failures: int
    fulls: int
    failed_workers: list[str]
    last_ms: int
    failure_reason: str = ""
    is_prompt: bool = False
    stalls: int = 0
    renewed_at: int = -1


class _LaneSnapshot(msgspec.Struct):
    requests: list[_RequestRow] = msgspec.field(name="stories")
    outcomes: list[tuple[str, str, int, int]]
    sessions: list[tuple[SessionKey, Affinity]] = []


class LedgerState:
    """All lanes together; a `MaterializedView` (streams/views/view.py) over the ledger."""

    name = "load"

    def __init__(self, dedup_window_ms: int) -> None:
        self._window_ms = dedup_window_ms
        self._lanes: dict[int, LaneState] = {}
        self.loads = RunLoads(ActiveLoad(), BatchRuns())
        self.sessions = SessionAffinities(dedup_window_ms)
        self.ended_prompts = EndedPrompts(dedup_window_ms)
        """Ids of prompts that ended, of all lanes: also from before the first record."""
        self.last_append_ms = 0
        """Append time of the youngest record that was taken in; 0 before the first."""

    @property
    def active_load(self) -> ActiveLoad:
        return self.loads.active_load

    @property
    def batch_runs(self) -> BatchRuns:
        return self.loads.batch_runs

    def lane(self, number: int) -> LaneState:
        """The lane of a ledger partition; empty at position 0 before anything was read."""
        return self._lanes.get(number) or LaneState(self._window_ms)

    def request(self, lane: int, request_id: str) -> RequestState | None:
        return self.lane(lane).request(request_id)

    def is_repetition(self, lane: int, request_id: str, appended_ms: int) -> bool:
        """True if a request without an outcome, by its append time, repeats one that has ended."""
        return self.lane(lane).has_forgotten(
            request_id, appended_ms
        ) or self.ended_prompts.is_repetition(lane, request_id, appended_ms)

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        lane = self._lanes.setdefault(source.partition, self.lane(source.partition))
        for log_record in log_records:
            if lane.apply(log_record, self.loads):
                request_id = log_record.record.id  # type: ignore[union-attr]
                self.ended_prompts.add(
                    source.partition, log_record.offset, request_id, log_record.timestamp_ms
                )
            if type(log_record.record) is Assigned:
                self.sessions.apply(source.partition, log_record.record, log_record.timestamp_ms)
        if log_records:
            self.last_append_ms = max(self.last_append_ms, log_records[-1].timestamp_ms)
        lane.position = position

    def position(self, source: Partition) -> int | None:
        lane = self._lanes.get(source.partition)
        return None if lane is None else lane.position

    def forget(self, source: Partition) -> None:
        lane = self._lanes.pop(source.partition, None)
        if lane is not None:
            lane.clear(self.loads)
        self.sessions.forget(source.partition)

    def snapshot(self, source: Partition) -> bytes:
        lane = self.lane(source.partition)
        outcomes = [
            (request_id, end.code, end.attempt, end.last_ms)
            for request_id, end in lane.finished.items()
        ]
        sessions = self.sessions.snapshot_rows(source.partition)
        return msgspec.msgpack.encode(_LaneSnapshot(list(_to_rows(lane)), outcomes, sessions))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        snapshot = msgspec.msgpack.decode(data, type=_LaneSnapshot)
        self.forget(source)
        lane = self._lanes[source.partition] = LaneState(self._window_ms)
        for t in sorted(snapshot.requests, key=lambda t: t.last_ms):
            state = RequestState(
                t.attempt, {}, t.ended, t.origin, t.responses_from, t.deadline_ms,
                t.failures, t.fulls, frozenset(t.failed_workers), t.failure_reason, t.last_ms,
                t.is_prompt, stalls=t.stalls, renewed_at=t.renewed_at,
            )  # fmt: skip
            for run_row in t.runs:
                _, _, worker, epoch, run_state, since_ms, tokens, rank = run_row[:8]
                place = WorkerRank(worker, epoch, rank)
                run_id = RunId(*run_row[:4])
                run = RunStatus(run_state, since_ms, place, tokens, *run_row[8:])
                state.runs[run_id] = run
                self.loads.update(t.id, run_id, run)
            lane.requests[t.id] = state
            lane.classify(t.id, state)
        for request_id, code, attempt, at_ms in snapshot.outcomes:
            lane.finish(request_id, FinishedRequest(code, attempt, at_ms))
        self.sessions.restore(source.partition, snapshot.sessions)
        lane.position = position

    def state_hash(self, source: Partition) -> str:
        """BLAKE2b of the requests, in hex: equal for replicas at equal positions."""
        return hashlib.blake2b(self.snapshot(source), digest_size=16).hexdigest()


def _to_rows(lane: LaneState) -> Iterator[_RequestRow]:
    for request_id in sorted(lane.requests):
        s = lane.requests[request_id]
        runs = [
            (
                run_id.attempt,
                run_id.phase,
                run_id.worker,
                run_id.epoch,
                run.state,
                run.since_ms,
                run.tokens,
                run.place.rank,
                run.prefill_tokens,
                run.lora_name,
                run.service_class,
                run.is_preemptible,
            )
            for run_id, run in sorted(s.runs.items())
        ]
        yield _RequestRow(
            request_id, s.attempt, runs, s.ended, s.origin, s.responses_from, s.deadline_ms,
            s.failures, s.full_rejections, sorted(s.failed_workers), s.last_ms,
            s.failure_reason, s.is_prompt, s.stalls, s.renewed_at,
        )  # fmt: skip
