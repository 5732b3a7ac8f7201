"""The state of one request by the ledger, its attempt, runs and end; and the rules by which records
change it, and the load.

No clock, no input of this process: equal records give equal states. Per request id:

* the attempt is the highest one in any Assigned, Started or Fencing;
* a higher attempt, or Ended, closes every run below it, and nothing below opens afterwards;
* a Started without Assigned counts as assigned (the router may have died between its two sends);
* of several `responses_from` the lowest is kept: scanning too much is only slower;
* a renewal moves origin, `responses_from` and deadline, unless its attempt has a run; records about
  another origin move them no more;
* the first token of a decode, or its last one, ends the prefills of its attempt;
* an interactive run counts in `active_load`, one of class batch in `batch_runs`;
* the first close of a run is final;
* a request that is over stays so; `ledger.py` keeps its outcome only.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvlane.app.routing.policy_names import adds_load
from kvlane.app.routing.state.active_load import NO_LOAD, ActiveLoad, WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    Phase,
    PrefillDone,
    RequestOffset,
    RunKey,
    Started,
)

RunState = Literal[
    "assigned", "started", "prefilled",
    "stop", "length", "cancelled", "error", "handed_off",
    "broken", "worker_full", "expired", "retryable",
]  # fmt: skip
OPEN: frozenset[RunState] = frozenset({"assigned", "started", "prefilled"})
FAILED: frozenset[RunState] = frozenset({"broken", "worker_full", "retryable", "expired"})
"""Closed without a last Chunk: the reader still waits, so the owner owes the request something."""

WorkerEpoch = tuple[str, int]
"""A worker and one of its epochs."""


class RunId(msgspec.Struct, frozen=True, order=True, gc=False):
    """One run in the ledger: duplicates of a run key differ in worker or epoch."""

    attempt: int
    phase: Phase
    worker: str
    epoch: int


class RunStatus(msgspec.Struct):
    """State of one run. `since_ms`: append time of the record that brought it there. `place`: the
    worker's rank; two runs of one request never differ only in it. `tokens`: cache needed.
    `prefill_tokens`: part not cached at assignment."""

    state: RunState
    since_ms: int
    place: WorkerRank
    tokens: int = 0
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


class RequestState(msgspec.Struct):
    """The state of one request by the ledger. `ended`: the code of its end, "" before.
    `failure_reason`: for clients, of the last failed run with one. `stalls`: its runs without a
    token whose engines made no step."""

    attempt: int = 0
    runs: dict[RunId, RunStatus] = {}
    ended: str = ""
    origin: RequestOffset | None = None
    responses_from: int = 0
    deadline_ms: int = 0
    failures: int = 0
    full_rejections: int = 0
    failed_workers: frozenset[str] = frozenset()
    failure_reason: str = ""
    last_ms: int = 0
    is_prompt: bool = False
    """It came from Kafka, not over HTTP."""
    indexed_open_runs: tuple[tuple[WorkerEpoch, RunKey], ...] = ()
    """Its open runs, as `LaneState.open_runs` has them."""
    stalls: int = 0
    renewed_at: int = -1
    """The offset of its record with the answer so far, of a request that was renewed; -1 else."""

    @property
    def is_known(self) -> bool:
        """Whether the id is taken: a Request that comes again is recognised by this alone."""
        return self.origin is not None or bool(self.ended)

    @property
    def is_batch(self) -> bool:
        return any(run.service_class == "batch" for run in self.runs.values())

    @property
    def is_finished(self) -> bool:
        """Whether no run is open and no action is due. A prefill that was handed off is not an end:
        its decode is to come. A refusal beside the end of a twin needs nothing."""
        if self.ended:
            return True
        is_final = False
        for run_id, run in self.runs.items():
            if run.state in OPEN:
                return False
            if run_id.phase == "prefill" and any(other.phase != "prefill" for other in self.runs):
                continue  # of a twin, maybe: the answer is that of the other run
            if run.state in FAILED and run.state != "worker_full":
                return False
            is_final |= run.state not in ("handed_off", "worker_full")
        return is_final

    def open_runs(self) -> list[RunId]:
        return [k for k, run in self.runs.items() if run.state in OPEN]


class FinishedRequest(msgspec.Struct, frozen=True, gc=False):
    """The remainder of a finished request: enough to recognise its id, and late runs of it."""

    code: str
    attempt: int
    last_ms: int


LedgerRecord = Assigned | Started | PrefillDone | Finished | Fencing | Ended

NOT_COUNTED_AS_FAILURE = frozenset(
    {"worker_full", "not_started", "preempted", "handover_unused", "renewed", "evacuated"}
)
"""Reasons of a new attempt that are not the request's fault and do not use up its attempts."""


class RunLoads(NamedTuple):
    """The load of all open runs, by the class of their requests."""

    active_load: ActiveLoad
    batch_runs: BatchRuns

    def update(
        self, request_id: str, run_id: RunId, run: RunStatus, old_load: WorkerLoad = NO_LOAD
    ) -> None:
        """Count a run as it is; it was counted with the load `old_load`, if at all."""
        place, load = run.place, run.load
        if run.service_class == "interactive":
            self.active_load.replace(place, old_load, load, run.lora_name)
            if run.state == "prefilled":
                self.active_load.on_first_token(place, run.since_ms)
            return
        key = _batch_key(request_id, run_id)
        if old_load.runs:
            self.batch_runs.discard(key)
        if load.runs:
            left = max(load.prefill_tokens, 1) if load.prefill_runs else 0
            batch_run = BatchRun(request_id, load.tokens, left, run.since_ms, run.is_preemptible)
            self.batch_runs.put(place, key, batch_run)

    def remove(self, request_id: str, run_id: RunId, run: RunStatus) -> None:
        """Undo `update` of the run as it is."""
        if run.service_class == "interactive":
            self.active_load.remove(run.place, run.load, run.lora_name)
        else:
            self.batch_runs.discard(_batch_key(request_id, run_id))


def _batch_key(request_id: str, run_id: RunId) -> BatchRunKey:
    return BatchRunKey(request_id, run_id.attempt, run_id.worker, run_id.epoch)


def apply_record(state: RequestState, record: LedgerRecord, at_ms: int, loads: RunLoads) -> bool:
    """Take in one record, appended at `at_ms`. Returns False if its run was open before and still
    is, and no other run has opened or closed."""
    if type(record) is Ended:
        state.ended = state.ended or record.code
        state.is_prompt |= record.is_prompt
        clear_runs(record.id, state, loads)
        return True
    if type(record) is Assigned or type(record) is Started:
        if state.renewed_at in (-1, record.origin.offset):
            lowest = record.responses_from
            if state.origin is not None:
                lowest = min(lowest, state.responses_from)
            state.origin, state.responses_from = record.origin, lowest
            state.deadline_ms = record.deadline_ms
        state.is_prompt |= record.is_prompt
    if state.ended:
        return True
    if record.attempt > state.attempt and isinstance(record, Assigned | Started | Fencing):
        _begin_attempt(state, record, loads)
    if type(record) is Fencing:
        if record.origin is not None and record.attempt == state.attempt and not state.runs:
            state.origin, state.renewed_at = record.origin, record.origin.offset
            state.responses_from, state.deadline_ms = record.responses_from, record.deadline_ms
            state.is_prompt = True
        return True
    if record.attempt < state.attempt:
        return True
    return _apply_run(state, record, at_ms, loads)


def _begin_attempt(
    state: RequestState, record: Assigned | Started | Fencing, loads: RunLoads
) -> None:
    state.attempt = record.attempt
    if isinstance(record, Fencing):
        is_failure = record.reason not in NOT_COUNTED_AS_FAILURE
        state.failures += is_failure
        state.full_rejections += record.reason in ("worker_full", "not_started")
        if is_failure or record.reason == "evacuated":
            state.failed_workers |= {
                run_id.worker for run_id, run in state.runs.items() if run.state != "worker_full"
            }
    clear_runs(record.id, state, loads)


def _apply_run(
    state: RequestState,
    record: Assigned | Started | PrefillDone | Finished,
    at_ms: int,
    loads: RunLoads,
) -> bool:
    """As `apply_record`, for a record about a run of the present attempt."""
    run_id = RunId(record.attempt, record.phase, record.worker, record.epoch)
    run, before = state.runs.get(run_id), NO_LOAD
    is_new = run is None
    if type(record) is Assigned:  # more exact than a Started that may have overtaken it
        if run is not None:
            loads.remove(record.id, run_id, run)  # it may have had another rank
        run = state.runs[run_id] = _assigned_run(record, run, at_ms)
    elif run is None:
        run = state.runs[run_id] = RunStatus(
            "assigned", at_ms, WorkerRank(record.worker, record.epoch)
        )
        if type(record) is Started:
            run.tokens = run.prefill_tokens = record.prompt_tokens
    else:
        before = run.load
    run_state = _next_state(run.state, record)
    if type(record) is Finished and record.reason:
        state.failure_reason = record.reason
    if run_state != run.state:
        state.stalls += type(record) is Finished and record.stalled
        run.state, run.since_ms = run_state, at_ms
    loads.update(record.id, run_id, run, before)
    if run_id.phase == "decode" and not (
        run_state in FAILED or run_state in ("assigned", "started")
    ):
        _end_prefills(state, record.id, at_ms, loads)
        return True
    return is_new or run_state not in OPEN


def _assigned_run(record: Assigned, before: RunStatus | None, at_ms: int) -> RunStatus:
    """A run by its decision. `before`: the run by the records that came first."""
    return RunStatus(
        "assigned" if before is None else before.state,
        at_ms if before is None else before.since_ms,
        WorkerRank(record.worker, record.epoch, record.rank),
        (record.prompt_tokens + record.base_tokens) * adds_load(record.policy),
        record.prefill_tokens, record.lora_name, record.service_class, record.is_preemptible,
    )  # fmt: skip


def _end_prefills(state: RequestState, request_id: str, at_ms: int, loads: RunLoads) -> None:
    """Close the prefills of an attempt whose decode has tokens: their blocks were transferred. On
    the bootstrap path this may come before PrefillDone, or without it."""
    for run_id, run in state.runs.items():
        if run_id.phase == "prefill" and run.state in OPEN:
            before = run.load
            run.state, run.since_ms = "handed_off", at_ms
            loads.update(request_id, run_id, run, before)


def _next_state(state: RunState, record: Assigned | Started | PrefillDone | Finished) -> RunState:
    if state not in OPEN or type(record) is Assigned:
        return state
    if type(record) is Started:
        return "started" if state == "assigned" else state
    if type(record) is PrefillDone:
        return "handed_off" if record.phase == "prefill" else "prefilled"
    # No reader sees the error of a prefill: it writes no Chunk.
    is_retryable = record.retryable or record.phase == "prefill"
    return "retryable" if record.code == "error" and is_retryable else record.code


def clear_runs(request_id: str, state: RequestState, loads: RunLoads) -> None:
    for run_id, run in state.runs.items():
        loads.remove(request_id, run_id, run)
    state.runs.clear()


def last_code(state: RequestState) -> str:
    """How a worker ended a request without an Ended. Twins may both have ended it, and the reader
    saw the first."""
    return next(
        run.state
        for run in state.runs.values()
        if run.state not in OPEN and run.state not in FAILED and run.state != "handed_off"
    )
