"""Records of `requests` and `ledger`, keyed by request id: requests, cancels, and their history.

Hot code of views compares `type(record)`: `isinstance` is several times slower where types differ.
"""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, final

import msgspec
from msgspec.structs import replace

from kvlane.streams.record_base import Account, EndCode, InternalRecord, Phase, RunKey, ServiceClass
from kvlane.streams.record_types.candidate_records import Candidate, CandidateRows
from kvlane.streams.request import ResultOptions
from kvlane.streams.response_records import Usage

RunCode = Literal[
    "stop", "length", "cancelled", "error", "broken", "worker_full", "expired", "handed_off"
]
"""How a run ended. Only stop, length, cancelled and a final error follow a last Chunk."""

RUN_CODES: Mapping[str, RunCode] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "error": "error",
    "content_filter": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
}
"""The code of a run by the finish reason of its last Chunk."""


class Cancel(InternalRecord, frozen=True):
    """The client cancels this request. It has the request's key, so it is read later."""

    id: str
    reason: str = ""


class Refused(InternalRecord, frozen=True):
    """A preprocessor rejected a prompt; the lane's owner ends the request. `queued_ms`: append time
    of the prompt; 0: unknown."""

    id: str
    code: EndCode
    message: str = ""
    result: ResultOptions | None = None
    queued_ms: int = 0
    account: Account | None = None


class RequestOffset(InternalRecord, frozen=True):
    topic: str
    partition: int
    offset: int


class HandOverChoice(InternalRecord, frozen=True):
    """The choice between a whole request and a hand-over: if `prefill` and `decode` cost less than
    `whole`. `params`: as in `Assigned`, with the time of the transfer. Decode is decided again
    later."""

    whole: Candidate
    prefill: Candidate
    decode: Candidate
    params: dict[str, float]


class SessionUse(InternalRecord, frozen=True):
    """The use of a session by a request. `timeout_s`: idle time after which it expires. `closes`:
    it ends with this request. `bound_*`: its previous worker."""

    id: str
    timeout_s: int = 300
    closes: bool = False
    bound_worker: str = ""
    bound_epoch: int = 0
    bound_rank: int = 0


class RunRecord(InternalRecord, frozen=True):
    """A record about one run of a request: the run key, and the worker with its epoch."""

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int

    @property
    def run_key(self) -> RunKey:
        return RunKey(self.id, self.attempt, self.phase)


@final
class Assigned(RunRecord, frozen=True):
    """The decision: this run of the request goes to this worker.

    `prefill_tokens`: its part of the worker's prefill. `params`: the policy's settings.
    `candidate_rows`: the best candidates and the chosen one; of earlier versions in `listed`
    (`candidates` reads both). `held_ms`: how long the request had waited in the router;
    `ttft_ms_predicted`, `itl_ms_predicted`: by policy predictive. `known_ms`: append time of the
    youngest ledger record that its router had read. `choice`: whether to hand over, where costs
    decided. `is_preemptible`: whether a batch run gives way. `is_prompt`: the request came from
    Kafka, so copies may come for days. `prefix_marks`: keys of blocks of its prompt, 8 bytes each,
    little endian, at depths that all routers have. `routing_order`: offset of the `RoutingOrder`
    that its router had; None: its own settings.
    """

    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    rank: int = 0
    base_tokens: int = 0
    prompt_tokens: int = 0
    policy: str = ""
    seed: int = 0
    listed: tuple[Candidate, ...] = msgspec.field(default=(), name="candidates")
    router: str = ""
    cached_tokens_predicted: int = 0
    prefill_tokens: int = 0
    block_size: int = 0
    params: dict[str, float] = {}
    held_ms: int = 0
    ttft_ms_predicted: float = 0.0
    session: SessionUse | None = None
    lora_name: str = ""
    known_ms: int = 0
    service_class: ServiceClass = "interactive"
    is_preemptible: bool = True
    choice: HandOverChoice | None = None
    candidate_rows: CandidateRows | None = None
    is_prompt: bool = False
    itl_ms_predicted: float = 0.0
    prefix_marks: bytes = b""
    account: Account | None = None
    routing_order: int | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The recorded candidates, made anew from `candidate_rows` on each access."""
        rows = self.candidate_rows
        return self.listed if rows is None else rows.candidates

    def with_candidates(self, candidates: Sequence[Candidate]) -> Assigned:
        """The decision with these candidates in full."""
        return replace(self, listed=tuple(candidates), candidate_rows=None)

    @property
    def has_candidates(self) -> bool:
        rows = self.candidate_rows
        return bool(self.listed if rows is None else rows.places)

    @property
    def candidate_workers(self) -> list[str]:
        rows = self.candidate_rows
        return [c.worker for c in self.listed] if rows is None else [w for w, _, _ in rows.places]

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that was chosen, if it is recorded."""
        place = (self.worker, self.epoch, self.rank)
        if self.candidate_rows is not None:
            return self.candidate_rows.candidate(place)
        return next((c for c in self.listed if (c.worker, c.epoch, c.rank) == place), None)


@final
class Started(RunRecord, frozen=True):
    """A worker has begun the run, after any wait there; acknowledged before its first Chunk.
    `account`: also in `Assigned`, which a router may not live to append."""

    run: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    prompt_tokens: int = 0
    is_prompt: bool = False
    account: Account | None = None


@final
class PrefillDone(RunRecord, frozen=True):
    """The prompt is computed; for phase prefill `handoff` (opaque) lets a decode worker fetch it.
    `lease_until_ms`: broker time until which the engine holds the blocks; 0: unknown."""

    run: int
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff: bytes = b""
    lease_until_ms: int = 0


@final
class Finished(RunRecord, frozen=True):
    """The run is over; sent after its last Chunk is acknowledged. `message`: of its error, for
    operators; `reason`: for clients. `stalled`: its engine made no step, and the run has no
    token. `usage`: the counts of the whole answer, as its last Chunk has them."""

    code: RunCode
    run: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    retryable: bool = False
    message: str = ""
    reason: str = ""
    stalled: bool = False
    usage: Usage | None = None
    account: Account | None = None


@final
class Fencing(InternalRecord, frozen=True):
    """The owner intends to start `attempt`; acknowledged before the Fence is sent. `origin`: with
    reason renewed, the new place of the request, with the answer before `attempt`, of `base_tokens`
    tokens."""

    id: str
    attempt: int
    reason: str = ""
    origin: RequestOffset | None = None
    responses_from: int = 0
    deadline_ms: int = 0
    base_tokens: int = 0


@final
class Ended(InternalRecord, frozen=True):
    """The request is over: no further action is due. `is_prompt`: as in `Assigned`. `account`: of a
    request that its router was admitting; others have it in `Assigned`."""

    id: str
    code: EndCode | Literal["seen"]
    is_prompt: bool = False
    account: Account | None = None


class EndedIds(InternalRecord, frozen=True):
    """Ids of prompts that have ended in a lane. Key: the lane; on `ended-ids`.

    With the records before it, it has those that end below offset `until` of the lane's ledger.
    `digests`: 8 bytes an id; `ended_s`: u32 each, since 1970; little endian. `restarts`: earlier
    offsets count no more.
    """

    lane: int
    until: int
    digests: bytes = b""
    ended_s: bytes = b""
    restarts: bool = False
