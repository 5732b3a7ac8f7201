"""The state of one request by the ledger: its attempt, its runs, its end.

Structs only; `request_transitions.py` has the rules by which records change them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvlane.app.routing.state.active_load import NO_LOAD, WorkerLoad
from kvlane.app.routing.worker_rank import WorkerRank
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Phase, RequestOffset, RunKey

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
    """State of one run. `since_ms`: append time of the record that brought it there.

    `place`: the worker's rank; two runs of one request never differ only in it. `tokens`: cache
    needed. `prefill_tokens`: part not cached at assignment.
    """

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
    token whose engines made no step.
    """

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
        """Whether no run is open and no action is due.

        A prefill that was handed off is not an end: its decode is to come. A refusal beside the end
        of a twin needs nothing: a full worker has shown nothing to readers.
        """
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
        """The runs that a worker may still be working on."""
        return [k for k, run in self.runs.items() if run.state in OPEN]


class FinishedRequest(msgspec.Struct, frozen=True, gc=False):
    """The remainder of a finished request: enough to recognise its id, and late runs of it."""

    code: str
    attempt: int
    last_ms: int
