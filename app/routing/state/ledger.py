"""Ledger state: the view of the ledger. The open runs of requests, and the outcomes of the others.

One `LaneState` per ledger partition, made of that partition's records alone: no clock, no input
of this process. Two replicas at the same position have the same lane (`state_hash`). Next actions
are found in `reconcile.py`; decisions of this router that it has not read back are not in here.

The rules of the view, per request id:

* the attempt is the highest one in any Assigned, Started or Fencing;
* a higher attempt, or Ended, closes every run below it, and nothing below opens afterwards;
* a Started without Assigned counts as assigned (the router may have died between its two sends);
* of several `responses_from` the lowest is kept: scanning too much is only slower;
* the first token of a decode, or its last one, ends the prefills of its attempt;
* an interactive run counts in `active_load`, one of class batch in `batch_runs`;
* the first close of a run is final;
* a request that is over stays so, and only its outcome is kept.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from app.routing.state.active_load import NO_LOAD, ActiveLoad, WorkerLoad
from app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from app.routing.state.sessions import Affinity, SessionAffinities, SessionKey
from app.routing.worker_rank import WorkerRank
from streams.ports import Partition
from streams.record_base import ServiceClass
from streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    LogRecord,
    Phase,
    PrefillDone,
    RequestOffset,
    RunKey,
    Started,
)

LedgerRecord = Assigned | Started | PrefillDone | Finished | Fencing | Ended

RunState = Literal[
    "assigned", "started", "prefilled",
    "stop", "length", "cancelled", "error", "handed_off",
    "broken", "worker_full", "expired", "retryable",
]  # fmt: skip
OPEN: frozenset[RunState] = frozenset({"assigned", "started", "prefilled"})
FAILED: frozenset[RunState] = frozenset({"broken", "worker_full", "retryable", "expired"})
"""Closed without a last Chunk: the reader still waits, so the owner owes the request something."""

NOT_COUNTED_AS_FAILURE = frozenset({"worker_full", "not_started", "preempted", "handover_unused"})
"""Reasons of a new attempt that are not the request's fault and do not use up its attempts."""


WorkerEpoch = tuple[str, int]
"""A worker and one of its epochs."""


class RunId(NamedTuple):
    """One run in the ledger: duplicates of a run key differ in worker or epoch."""

    attempt: int
    phase: Phase
    worker: str
    epoch: int

    def worker_rank(self, rank: int) -> WorkerRank:
        """Where it is, with the rank, which two runs do not differ in alone."""
        return WorkerRank(self.worker, self.epoch, rank)


@dataclass(slots=True)
class RunStatus:
    """State of one run. `since_ms`: append time of the record that brought it there.

    `tokens` it has to hold, `prefill_tokens` of them still to be computed when it was assigned.
    """

    state: RunState
    since_ms: int
    tokens: int = 0
    rank: int = 0
    prefill_tokens: int = 0
    lora_name: str = ""
    service_class: ServiceClass = "interactive"
    is_preemptible: bool = True

    @property
    def load(self) -> WorkerLoad:
        """The load that it adds to its worker's rank now."""
        if self.state not in OPEN:
            return NO_LOAD
        if self.state == "prefilled":
            return WorkerLoad(1, self.tokens)
        return WorkerLoad(1, self.tokens, self.prefill_tokens, 1, self.since_ms)


@dataclass(slots=True)
class RequestState:
    """The state of one request by the ledger. `ended`: the code of its end, "" before."""

    attempt: int = 0
    runs: dict[RunId, RunStatus] = field(default_factory=dict)
    ended: str = ""
    origin: RequestOffset | None = None
    responses_from: int = 0
    deadline_ms: int = 0
    failures: int = 0
    full_rejections: int = 0
    failed_workers: set[str] = field(default_factory=set)
    last_ms: int = 0
    indexed_open_runs: tuple[tuple[WorkerEpoch, RunKey], ...] = ()
    """Its open runs, as `LaneState.open_runs` has them."""

    @property
    def is_known(self) -> bool:
        """Whether the id is taken: a Request that comes again is recognised by this alone."""
        return self.origin is not None or bool(self.ended)

    @property
    def is_batch(self) -> bool:
        """Whether it has a run of class batch."""
        return any(run.service_class == "batch" for run in self.runs.values())

    @property
    def is_finished(self) -> bool:
        """Whether no run is open and no action is due.

        A prefill that was handed off is not an end: its decode is still to come. A refusal beside
        the end of a twin is owed nothing: a full worker has shown nothing to readers.
        """
        if self.ended:
            return True
        is_final = False
        has_decode = any(run_id.phase != "prefill" for run_id in self.runs)
        for run_id, run in self.runs.items():
            if run.state in OPEN:
                return False
            if run_id.phase == "prefill" and has_decode:
                continue  # of a twin, maybe: the answer is that of the other run
            if run.state in FAILED and run.state != "worker_full":
                return False
            is_final |= run.state not in ("handed_off", "worker_full")
        return is_final

    def open_runs(self) -> list[RunId]:
        """The runs that a worker may still be working on."""
        return [k for k, run in self.runs.items() if run.state in OPEN]


class FinishedRequest(NamedTuple):
    """The remainder of a finished request: enough to recognise its id, and late runs of it."""

    code: str
    attempt: int
    last_ms: int


class RunLoads(NamedTuple):
    """The load of all open runs, by the class of their requests."""

    active_load: ActiveLoad
    batch_runs: BatchRuns

    def add(self, request_id: str, run_id: RunId, run: RunStatus) -> None:
        """Count a run."""
        place, load = run_id.worker_rank(run.rank), run.load
        if run.service_class == "interactive":
            self.active_load.add(place, load, run.lora_name)
            if run.state == "prefilled":
                self.active_load.on_first_token(place, run.since_ms)
        elif load.runs:
            left = max(load.prefill_tokens, 1) if load.prefill_runs else 0
            batch_run = BatchRun(request_id, load.tokens, left, run.since_ms, run.is_preemptible)
            self.batch_runs.put(place, _batch_key(request_id, run_id), batch_run)

    def remove(self, request_id: str, run_id: RunId, run: RunStatus) -> None:
        """Undo `add` of the run as it is."""
        if run.service_class == "interactive":
            self.active_load.remove(run_id.worker_rank(run.rank), run.load, run.lora_name)
        else:
            self.batch_runs.discard(_batch_key(request_id, run_id))


def _batch_key(request_id: str, run_id: RunId) -> BatchRunKey:
    return BatchRunKey(request_id, run_id.attempt, run_id.worker, run_id.epoch)


class LaneState:
    """The requests of one ledger partition."""

    def __init__(self, dedup_window_ms: int) -> None:
        self.position = 0
        self.requests: dict[str, RequestState] = {}
        """Those that are not over, and those whose id is not known yet."""
        self.unfinished: dict[str, RequestState] = {}
        """The known ones of them: what obligations are looked for in."""
        self.open_runs: dict[WorkerEpoch, dict[RunKey, None]] = {}
        """Of the unfinished: what each epoch of a worker has to have in its heartbeats."""
        self.finished: dict[str, FinishedRequest] = {}
        """Of all others, in the order of their ends."""
        self._ended: deque[str] = deque()
        """Their ids in that order: the first key of a dict is found behind all deleted ones."""
        self._window_ms = dedup_window_ms
        self._orphans: deque[tuple[int, str]] = deque()

    def request(self, request_id: str) -> RequestState | None:
        """The state of a request; of one that has ended, its outcome only."""
        outcome = self.finished.get(request_id)
        if outcome is not None:
            return RequestState(outcome.attempt, ended=outcome.code, last_ms=outcome.last_ms)
        return self.requests.get(request_id)

    def apply(self, fact: LogRecord, loads: RunLoads) -> None:
        """Take in one record. What comes after the end of a request changes nothing.

        Its end is visible then, whoever wrote it, so later runs and fences are of no consequence.
        """
        record = fact.record
        if not isinstance(record, LedgerRecord):
            return
        if record.id not in self.finished:
            state = self.requests.get(record.id)
            if state is None:
                state = self.requests[record.id] = RequestState()
            state.last_ms = fact.timestamp_ms
            _apply_record(state, record, fact.timestamp_ms, loads)
            self.classify(record.id, state)
        self._expire(fact.timestamp_ms, loads)

    def classify(self, request_id: str, state: RequestState) -> None:
        """File a request by its state: unfinished, unknown id, or finished."""
        if not state.is_known:
            self._orphans.append((state.last_ms, request_id))
        elif state.is_finished:
            code = state.ended or _last_code(state)
            self.finish(request_id, FinishedRequest(code, state.attempt, state.last_ms))
            self.unfinished.pop(request_id, None)
            del self.requests[request_id]
            self._file_open(state, ())
        else:
            self.unfinished[request_id] = state
            open_runs = tuple([
                ((k.worker, k.epoch), RunKey(request_id, k.attempt, k.phase))
                for k, run in state.runs.items()
                if run.state in OPEN
            ])  # fmt: skip
            if open_runs != state.indexed_open_runs:
                self._file_open(state, open_runs)

    def _file_open(self, state: RequestState, runs: tuple[tuple[WorkerEpoch, RunKey], ...]) -> None:
        for epoch, key in state.indexed_open_runs:
            of_epoch = self.open_runs[epoch]
            del of_epoch[key]
            if not of_epoch:
                del self.open_runs[epoch]
        for epoch, key in runs:
            self.open_runs.setdefault(epoch, {})[key] = None
        state.indexed_open_runs = runs

    def finish(self, request_id: str, outcome: FinishedRequest) -> None:
        """Remember how a request ended, as the last one of all."""
        self.finished[request_id] = outcome
        self._ended.append(request_id)

    def _expire(self, now_ms: int, loads: RunLoads) -> None:
        """Drop requests that ended, or stayed unknown, before the window, by the ledger's time."""
        since_ms = now_ms - self._window_ms
        while self._ended and self.finished[self._ended[0]].last_ms < since_ms:
            del self.finished[self._ended.popleft()]
        while self._orphans and self._orphans[0][0] < since_ms:
            at_ms, request_id = self._orphans.popleft()
            state = self.requests.get(request_id)
            if state is not None and not state.is_known and state.last_ms <= at_ms:
                _clear_runs(request_id, state, loads)
                del self.requests[request_id]

    def clear(self, loads: RunLoads) -> None:
        """Forget everything; the load of its open runs is removed too."""
        for request_id, state in self.requests.items():
            _clear_runs(request_id, state, loads)


def _last_code(state: RequestState) -> str:
    """How the worker ended it; twins may both have, and the reader saw the first."""
    return next(
        run.state
        for run in state.runs.values()
        if run.state not in OPEN and run.state not in FAILED and run.state != "handed_off"
    )


def _apply_record(
    state: RequestState,
    record: LedgerRecord,
    at_ms: int,
    loads: RunLoads,
) -> None:
    if isinstance(record, Ended):
        state.ended = state.ended or record.code
        _clear_runs(record.id, state, loads)
        return
    if isinstance(record, Assigned | Started):
        lowest = record.responses_from
        if state.origin is not None:
            lowest = min(lowest, state.responses_from)
        state.origin, state.responses_from = record.origin, lowest
        state.deadline_ms = record.deadline_ms
    if state.ended:
        return
    if record.attempt > state.attempt and isinstance(record, Assigned | Started | Fencing):
        _begin_attempt(state, record, loads)
    if isinstance(record, Fencing) or record.attempt < state.attempt:
        return
    _apply_run(state, record, at_ms, loads)


def _begin_attempt(
    state: RequestState, record: Assigned | Started | Fencing, loads: RunLoads
) -> None:
    state.attempt = record.attempt
    if isinstance(record, Fencing):
        if record.reason in NOT_COUNTED_AS_FAILURE:
            state.full_rejections += record.reason not in ("preempted", "handover_unused")
        else:
            state.failures += 1
            state.failed_workers.update(
                run_id.worker for run_id, run in state.runs.items() if run.state != "worker_full"
            )
    _clear_runs(record.id, state, loads)


def _apply_run(
    state: RequestState,
    record: Assigned | Started | PrefillDone | Finished,
    at_ms: int,
    loads: RunLoads,
) -> None:
    run_id = RunId(record.attempt, record.phase, record.worker, record.epoch)
    run = state.runs.get(run_id)
    if run is None:
        run = state.runs[run_id] = RunStatus("assigned", at_ms)
        if isinstance(record, Started):
            run.tokens = run.prefill_tokens = record.prompt_tokens
    else:
        loads.remove(record.id, run_id, run)
    if isinstance(record, Assigned):  # more exact than a Started that may have overtaken it
        booked = record.policy != "direct"  # who chooses the workers keeps the books there
        run.tokens = (record.prompt_tokens + record.base_tokens) * booked
        run.rank, run.prefill_tokens = record.rank, record.prefill_tokens
        run.lora_name, run.service_class = record.lora_name, record.service_class
        run.is_preemptible = record.is_preemptible
    run_state = _next_state(run.state, record)
    if run_state != run.state:
        run.state, run.since_ms = run_state, at_ms
    loads.add(record.id, run_id, run)
    if run_id.phase == "decode" and not (
        run_state in FAILED or run_state in ("assigned", "started")
    ):
        _end_prefills(state, record.id, at_ms, loads)


def _end_prefills(state: RequestState, request_id: str, at_ms: int, loads: RunLoads) -> None:
    """Close the prefills of an attempt whose decode has tokens: their blocks were transferred.

    On the bootstrap path this may be known before PrefillDone, which the death of its worker may
    keep back for ever.
    """
    for run_id, run in state.runs.items():
        if run_id.phase == "prefill" and run.state in OPEN:
            loads.remove(request_id, run_id, run)
            run.state, run.since_ms = "handed_off", at_ms
            loads.add(request_id, run_id, run)


def _next_state(state: RunState, record: Assigned | Started | PrefillDone | Finished) -> RunState:
    if state not in OPEN or isinstance(record, Assigned):
        return state
    if isinstance(record, Started):
        return "started" if state == "assigned" else state
    if isinstance(record, PrefillDone):
        return "handed_off" if record.phase == "prefill" else "prefilled"
    # No reader sees the error of a prefill: it writes no Chunk.
    is_retryable = record.retryable or record.phase == "prefill"
    return "retryable" if record.code == "error" and is_retryable else record.code


def _clear_runs(request_id: str, state: RequestState, loads: RunLoads) -> None:
    for run_id, run in state.runs.items():
        loads.remove(request_id, run_id, run)
    state.runs.clear()


class _RequestRow(msgspec.Struct):
    """A request in a snapshot."""

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


class _LaneSnapshot(msgspec.Struct):
    requests: list[_RequestRow] = msgspec.field(name="stories")
    outcomes: list[tuple[str, str, int, int]]
    sessions: list[tuple[SessionKey, Affinity]] = []


class LedgerState:
    """All lanes together; a `MaterializedView` (streams/views/view.py) over the ledger's
    partitions.
    """

    name = "load"

    def __init__(self, dedup_window_ms: int) -> None:
        self._window_ms = dedup_window_ms
        self._lanes: dict[int, LaneState] = {}
        self.loads = RunLoads(ActiveLoad(), BatchRuns())
        self.sessions = SessionAffinities(dedup_window_ms)
        self.last_append_ms = 0
        """Append time of the youngest record that was taken in; 0 before the first."""

    @property
    def active_load(self) -> ActiveLoad:
        """The load of interactive runs."""
        return self.loads.active_load

    @property
    def batch_runs(self) -> BatchRuns:
        """The open runs of batch requests."""
        return self.loads.batch_runs

    def lane(self, number: int) -> LaneState:
        """The lane of a ledger partition; empty at position 0 before anything was read."""
        return self._lanes.get(number) or LaneState(self._window_ms)

    def request(self, lane: int, request_id: str) -> RequestState | None:
        """What is known of a request."""
        return self.lane(lane).request(request_id)

    def apply(self, source: Partition, facts: Sequence[LogRecord], position: int) -> None:
        """Take in records of one ledger partition; `position` is the next offset after them."""
        lane = self._lanes.setdefault(source.partition, self.lane(source.partition))
        for fact in facts:
            lane.apply(fact, self.loads)
            if isinstance(fact.record, Assigned):
                self.sessions.apply(source.partition, fact.record, fact.timestamp_ms)
        if facts:
            self.last_append_ms = max(self.last_append_ms, facts[-1].timestamp_ms)
        lane.position = position

    def position(self, source: Partition) -> int | None:
        """Next offset to read of a ledger partition; None before the first."""
        lane = self._lanes.get(source.partition)
        return None if lane is None else lane.position

    def forget(self, source: Partition) -> None:
        """Drop the requests of one partition."""
        lane = self._lanes.pop(source.partition, None)
        if lane is not None:
            lane.clear(self.loads)
        self.sessions.forget(source.partition)

    def snapshot(self, source: Partition) -> bytes:
        """The partition's requests as bytes; equal states give equal bytes."""
        lane = self.lane(source.partition)
        outcomes = [(request_id, *outcome) for request_id, outcome in lane.finished.items()]
        sessions = self.sessions.snapshot_rows(source.partition)
        return msgspec.msgpack.encode(_LaneSnapshot(list(_to_rows(lane)), outcomes, sessions))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`, at a position. Raises msgspec.DecodeError on other bytes."""
        snapshot = msgspec.msgpack.decode(data, type=_LaneSnapshot)
        self.forget(source)
        lane = self._lanes[source.partition] = LaneState(self._window_ms)
        for t in sorted(snapshot.requests, key=lambda t: t.last_ms):
            state = RequestState(
                t.attempt, {}, t.ended, t.origin, t.responses_from, t.deadline_ms,
                t.failures, t.fulls, set(t.failed_workers), t.last_ms,
            )  # fmt: skip
            for run_row in t.runs:
                run_id = RunId(*run_row[:4])
                run = state.runs[run_id] = RunStatus(*run_row[4:])
                self.loads.add(t.id, run_id, run)
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
                *run_id,
                run.state,
                run.since_ms,
                run.tokens,
                run.rank,
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
        )  # fmt: skip
