"""Every record that kvlane writes, field by field; `Request` is in `streams/request.py`.

Inner records travel as msgpack maps, `Chunk`, `Fence` and `End` as JSON, because clients of any
language read them. The header `t` names the type; JSON records carry it as field `t` as well, for
readers that do not see headers. `streams/topics.py` says on which topic each one lives and who
may write it; `streams/prompt.py` holds what a client publishes.

Evolution: fields are only added, optional, at the end; unknown fields are ignored. A change that
breaks this is a new topic name. Fields at their default are left out on the wire.

Terms: a *run* is one execution of an *attempt* of a request in a *phase*; (id, attempt, phase) is
its run key, `run` a random number that distinguishes two executions of one run key. An *epoch* is
one life of a worker. Units are in the names; `*_ms` points in time are broker append time.
"""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from streams.record_base import InternalRecord, ModelKind, PublicRecord, ServiceClass
from streams.request import Request, ResultOptions, SamplingOptions

Phase = Literal["aggregated", "prefill", "decode"]
RunCode = Literal[
    "stop", "length", "cancelled", "error", "broken", "worker_full", "expired", "handed_off"
]
"""How a run ended. Only stop, length, cancelled and a final error follow a last Chunk."""
FinishReason = Literal[
    "stop", "length", "cancelled", "error", "content_filter", "tool_calls", "function_call"
]
"""How an answer ended; the last two if a server says so. On the wire any string, see
`PublicRecord`.
"""
EndCode = Literal[
    "refused",
    "deadline",
    "cancelled",
    "no_workers",
    "attempts",
    "lost",
    "invalid",
    "too_large",
    "queue_full",
    "internal",
    "stop",
    "length",
    "model_not_found",
    "none_eligible",
    "all_busy",
    "pinned_gone",
    "pinned_busy",
    "pin_not_allowed",
]
"""Why a router ended a request; stop and length: the answer was complete, its last Chunk lost."""
WorkerState = Literal["ready", "draining", "unhealthy"]
Role = Literal["aggregated", "prefill", "decode"]
GUIDED_DECODING_FEATURE = "guided_decoding"
LOGPROBS_FEATURE = "logprobs"
"""Features that an engine may not support: names in `EngineConfig.unsupported`."""
MAX_ID_CHARS = 200
"""Longest request id in characters: it is a record key, and part of every log line."""


class RunKey(NamedTuple):
    """The identity of an assignment: a worker starts each run key at most once."""

    id: str
    attempt: int
    phase: Phase


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A decoded record with its position in the log, the input of views."""

    offset: int
    timestamp_ms: int
    record: InternalRecord | PublicRecord


# --- requests: keyed by request id ---------------------------------------------------------------


class Cancel(InternalRecord, frozen=True):
    """The client cancels this request. It has the request's key, so it is read after the
    request."""

    id: str
    reason: str = ""


class Refused(InternalRecord, frozen=True):
    """A preprocessor rejected a prompt; the lane's owner ends the request visibly."""

    id: str
    code: EndCode
    message: str = ""
    result: ResultOptions | None = None


# --- ledger: keyed by request id; the history of each request ---------------------------------


class RequestOffset(InternalRecord, frozen=True):
    """The position of a Request."""

    topic: str
    partition: int
    offset: int


class Candidate(InternalRecord, frozen=True, kw_only=False):
    """A candidate worker with the inputs of its cost, so that the cost can be recomputed.

    The fields from `prompt_tokens` on are inputs of policy predictive. `prompt_tokens`: of the open
    runs. `prefill_runs`: those of them without a first token, `busy_ms`: for how long the worker
    has been at their prompts. `ahead_ms`: prefill, computed alone, of each other request that
    waited in the router and was to go there, by arrival; where they are more than 16, `planned_ms`
    instead: the wait for all of them, as it is in the cost. Then its pace, see `EngineProfile`
    (app/routing/state/performance.py); without a `curve` it is the published one. `later_ms`: by
    how much later than others the router counted on it. `prefill_share`: of its time lately.
    `batch_ms`: the delay by its batch runs.
    """

    worker: str
    epoch: int
    rank: int = 0
    cost: float = 0.0
    open_runs: int = 0
    open_tokens: int = 0
    overlap_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    prefill_tokens: int = 0
    taint_weight: float = 0.0
    prompt_tokens: int = 0
    prefill_runs: int = 0
    busy_ms: float = 0.0
    ahead_ms: tuple[float, ...] = ()
    slowness: float = 1.0
    chunk_tokens: int = 0
    capacity_tokens: int = 0
    curve: tuple[float, ...] = ()
    later_ms: float = 0.0
    planned_ms: float | None = None
    prefill_share: float = 0.0
    batch_ms: float = 0.0


class HandOverChoice(InternalRecord, frozen=True):
    """The choice between a whole request and a hand-over, with the best worker for each part.

    It was handed over if `prefill` and `decode` cost less than `whole`. `params`: the settings and
    estimates in force, as in `Assigned`, with the time of the transfer. Decode is decided again
    when the prompt is computed.
    """

    whole: Candidate
    prefill: Candidate
    decode: Candidate
    params: dict[str, float]


class SessionUse(InternalRecord, frozen=True):
    """The use of a session by a request. `timeout_s`: idle time after which the session expires.

    `closes`: the session ends with this request. `bound_*`: its previous worker, if it applied.
    """

    id: str
    timeout_s: int = 300
    closes: bool = False
    bound_worker: str = ""
    bound_epoch: int = 0
    bound_rank: int = 0


class Assigned(InternalRecord, frozen=True):
    """The decision: this run of the request goes to this worker.

    `prefill_tokens`: what it adds to the worker's prefill until it is done. `params`: the settings
    of the policy that were in force. `candidates`: the best ones, and the chosen one.
    `held_ms`: how long the request had waited in the router, `ttft_ms_predicted`: what was expected
    from here to its first token; both by policy predictive only. `known_ms`: append time of the
    youngest record of the ledger that its router had read. `choice`: whether to hand it over, where
    that was a question of costs. `is_preemptible`: whether a run of class
    batch gives way; not if no other run could go on in the middle of its answer.
    """

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    rank: int = 0
    base_tokens: int = 0
    prompt_tokens: int = 0
    policy: str = ""
    seed: int = 0
    candidates: tuple[Candidate, ...] = ()
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


class Started(InternalRecord, frozen=True):
    """A worker has accepted the run; acknowledged before its first Chunk."""

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    run: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    prompt_tokens: int = 0


class PrefillDone(InternalRecord, frozen=True):
    """The prompt is computed; for phase prefill, `handoff` lets a decode worker fetch it.

    `handoff` is the engine's own, opaque to everything between the two. `lease_until_ms`: broker
    time until which the engine holds the blocks for it; 0 if unknown.
    """

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    run: int
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff: bytes = b""
    lease_until_ms: int = 0


class Finished(InternalRecord, frozen=True):
    """The run is over. Sent after the acknowledgement of its last Chunk."""

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    code: RunCode
    run: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    retryable: bool = False
    message: str = ""


class Fencing(InternalRecord, frozen=True):
    """The owner intends to start `attempt`; acknowledged before the Fence is sent."""

    id: str
    attempt: int
    reason: str = ""


class Ended(InternalRecord, frozen=True):
    """The request is over. Its last record: no further action is due."""

    id: str
    code: EndCode | Literal["seen"]


# --- responses: keyed by request id; what clients read -------------------------------------------


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Token counts of a whole request, over all its attempts. Part of a Chunk.

    `details`: what a server counted besides, under OpenAI's names.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    details: dict[str, Any] | None = None


class LogProb(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token and the logarithm of its probability. Part of a Chunk, as [id, number]."""

    token_id: int
    log_prob: float


class PassthroughDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Output of a server that is not text, unchanged. Part of a Chunk.

    `at`: length of the whole text before it. In an event of OpenAI's form, `delta` is of
    its choice's delta (tool calls, reasoning …), `choice` of the choice, `event` of the event.
    """

    at: int = 0
    delta: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    event: dict[str, Any] = {}


class Chunk(PublicRecord, frozen=True, tag="Chunk"):
    """Some tokens of the answer. `run` is a u64 in decimals, for JSON readers without 64 bits.

    `seq` counts the Chunks of a run from 0; `index` is the place of the first token in the whole
    answer, over all attempts; `chars` is the length of the whole text after this Chunk.
    `stop_reason`: the stop string or the token id that ended the answer; None for an end of text.
    `log_probs`: for each token, if they were asked for, first its own and then the likeliest ones.
    `invalid`: what is wrong with the request, where that is why it ends with an error.
    `data`: of models that are asked in OpenAI's words, what is no text. They bring no tokens.
    `model`: the name of the model, on the first Chunk of a run.
    """

    id: str
    attempt: int
    run: str
    seq: int
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    chars: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    invalid: str = ""
    data: tuple[PassthroughDelta, ...] = ()
    model: str = ""


class Fence(PublicRecord, frozen=True, tag="Fence"):
    """`attempt` begins here; Chunks of lower attempts that come later do not count."""

    id: str
    attempt: int
    reason: str = ""


class DryRunResult(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The result of a dry run: the worker, and the tokens of the prompt. Part of an End.

    `prefill_worker_id`: the worker of the prompt, if another one computes it.
    """

    worker_id: str
    dp_rank: int = 0
    token_ids: tuple[int, ...] = ()
    prefill_worker_id: str = ""
    prefill_dp_rank: int = 0


class End(PublicRecord, frozen=True, tag="End"):
    """A router ended the request with an EndCode; no last Chunk will come."""

    id: str
    code: str
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None
    placed: DryRunResult | None = None


# --- results: keyed by request id; one record per finished request -------------------------------


class ResultError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An error in the form of the OpenAI API. Part of a Result."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ResultUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, over all its attempts. Part of a Result."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


class ResultTimings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times of a request in milliseconds, all between append times. Part of a Result.

    They count from the append of its prompt, over HTTP from that of its request. `queued_ms`: until
    the append of its request; `ttft_ms`: until its first tokens, None without any; `total_ms`:
    until its end. `finished_ms`: the end, in ms since 1970.
    """

    queued_ms: int = 0
    ttft_ms: int | None = None
    total_ms: int = 0
    finished_ms: int = 0


class Result(PublicRecord, frozen=True, tag="Result", omit_defaults=False):
    """A finished request, as one record. All fields are present on the wire.

    `status`: completed, failed or cancelled; `status_code`: what HTTP would have answered. `body`:
    the response object of the OpenAI API; None for one that did not complete, which has an `error`.
    `kind`, `metadata`, `batch_id`, `custom_id`: those of the prompt. `attempts`: how often it was
    begun, 0 for a request that never was.
    """

    id: str
    status: str
    status_code: int
    model: str = ""
    kind: str = "chat"
    body: dict[str, Any] | None = None
    usage: ResultUsage | None = None
    error: ResultError | None = None
    timings: ResultTimings = ResultTimings()
    attempts: int = 0
    metadata: dict[str, Any] = {}
    batch_id: str = ""
    custom_id: str = ""


# --- assignments: one partition per slot; commands to a worker ----------------------------------


class Assignment(InternalRecord, frozen=True):
    """Run this. `taken`: tokens the reader has (u32, little endian), to continue from.

    `handoff_until_ms`: in phase decode, when the blocks of its prefill may be gone: past it the
    worker refuses the run; 0: never. With `Request.bootstrap_info`, in both phases, also the time
    until which the run may wait for their transfer.
    """

    worker: str
    epoch: int
    attempt: int
    phase: Phase
    request: Request
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    budget_s: float
    rank: int = 0
    taken: bytes = b""
    taken_chars: int = 0
    handoff_until_ms: int = 0


class CancelRun(InternalRecord, frozen=True):
    """Stop this run; the reader no longer needs it."""

    worker: str
    epoch: int
    id: str
    attempt: int
    phase: Phase
    reason: str = ""


class Lost(InternalRecord, frozen=True):
    """This epoch of the worker counts as dead, whether it still runs or not."""

    worker: str
    epoch: int
    by: str = ""
    silent_ms: int = 0


# --- kv-events: keyed by worker id ---------------------------------------------------------------


class Blocks(InternalRecord, frozen=True):
    """Cache changes of one worker, as columns: one row per event, keys of all rows end to end.

    kinds u8 (0 stored, 1 removed, 2 cleared), tiers u8, positions u32 (of the first block),
    counts u32, keys u64; all little endian. stored: `count` keys at consecutive positions.
    """

    worker: str
    epoch: int
    first_event_id: int
    rank: int = 0
    model: str = ""
    hash_fingerprint: str = ""
    kinds: bytes = b""
    tiers: bytes = b""
    positions: bytes = b""
    counts: bytes = b""
    keys: bytes = b""


class RunProgress(InternalRecord, frozen=True):
    """An open run, as its worker reports it. `expected_output_tokens`: by its request, 0 if
    unsaid."""

    id: str
    attempt: int
    phase: Phase
    output_tokens: int = 0
    expected_output_tokens: int = 0


class EngineStats(InternalRecord, frozen=True):
    """Current figures of an engine; `steps` since its start."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    steps: int = 0


class Heartbeat(InternalRecord, frozen=True):
    """The worker is alive; `slot_offset` is the next offset of its assignments that it will read.

    `last_event_ids`: for each rank the last cache event of this epoch before this record in the
    log, -1 for none. `waiting` counts runs outside the engine, `engine` what is inside.
    """

    worker: str
    epoch: int
    slot_offset: int
    state: WorkerState = "ready"
    reason: str = ""
    running: tuple[RunProgress, ...] = ()
    waiting: int = 0
    last_event_ids: tuple[int, ...] = ()
    engine: EngineStats | None = None


class Probe(InternalRecord, frozen=True):
    """A router's probe record: tests whether the broker still accepts appends."""

    by: str


# --- capacity: keyed by router -------------------------------------------------------------------


class RouterCapacity(InternalRecord, frozen=True):
    """Remaining capacity of a router: requests, and tokens and bytes of their prompts.

    `positions`: the lanes that it serves, each with the offset up to which it had read `requests`
    at that time. Later records are not counted. `batch_requests`: its room for requests of class
    batch, which the other figures do not count.
    """

    router: str
    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    positions: dict[int, int] = {}
    batch_requests: int = 0


# --- registry: compacted, keyed by entity --------------------------------------------------------


class EngineConfig(InternalRecord, frozen=True):
    """The properties that an engine advertises; None: not advertised.

    `curve`: how long its steps take, see `numbers` in app/perf_curves.py. `lora_names`:
    adapters that it has, `max_loras`: how many it can load besides, at a time.
    `data_parallel_size`: its ranks, each with a cache of its own; None is one. Without
    `gives_tokens` it gives text only, and nobody can continue its answers; with `guesses_cache` its
    cache events are a guess. `kind`: what it takes. `unsupported`: features that it would ignore
    (`guided_decoding`, `logprobs`); requests for them are refused. `transfer_lease_s`: how long it
    holds the blocks of a prompt for another engine; None: it neither hands prompts over nor fetches
    them. `transfer_bytes_per_token`: size of these blocks.
    """

    model: str
    served_model_name: str | None = None
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    curve: tuple[float, ...] | None = None
    lora_names: tuple[str, ...] | None = None
    max_loras: int | None = None
    data_parallel_size: int | None = None
    gives_tokens: bool = True
    guesses_cache: bool = False
    kind: ModelKind = "tokens"
    unsupported: tuple[str, ...] = ()
    transfer_lease_s: float | None = None
    transfer_bytes_per_token: int | None = None


class WorkerCard(InternalRecord, frozen=True):
    """The registration of a worker. Key `worker/<id>`.

    The first card of a life has no epoch: the offset it gets *is* the epoch, unique and rising.
    Every later card of that life repeats it. `life` is random, different for each process of one
    name. With more than `busy_cache` of its cache in use (0 to 1), or with `busy_prefill_tokens`
    of prompts still to be computed on a rank, it is to get no new work; None: no such bound.
    `versions`: of kvlane and of its engine, by name; for people. `max_runs`: how many it has open
    at a time, running and waiting; it refuses more.
    """

    id: str
    slot: int
    model: str
    config: EngineConfig
    epoch: int | None = None
    role: Role = "aggregated"
    ranks: int = 1
    taints: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    life: str = ""
    busy_cache: float | None = None
    busy_prefill_tokens: int | None = None
    max_runs: int | None = None


class Artifact(InternalRecord, frozen=True):
    """A file on `artifacts`: its SHA-256 in hex, and its size in bytes."""

    sha256: str
    size: int


class ModelCard(InternalRecord, frozen=True):
    """A model that clients may ask for. Key `model/<name>`.

    `special_tokens` are the names a template knows (bos_token, eos_token …). `checksum` is over
    everything but name and checksum: equal sums, interchangeable models. No parsers of tool calls
    or reasoning are named: answers to bodies that went on as they came are parsed by the server
    that gives them, and what is made of tokens is text. `served_as`: what such servers call it, who
    tell no files to compare.
    """

    name: str
    kind: ModelKind = "tokens"
    context_length: int | None = None
    block_size: int | None = None
    tokenizer: Artifact | None = None
    template: Artifact | None = None
    special_tokens: dict[str, str] = {}
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingOptions = SamplingOptions()
    checksum: str = ""
    served_as: str = ""


class SnapshotPointer(InternalRecord, frozen=True):
    """The position of a complete snapshot of one partition of a view. Key
    `snapshot/<view>/<partition>`."""

    view: str = msgspec.field(name="fold")  # the name on the wire
    partition: int
    position: int
    first_part: int
    parts: int
    checksum: str
    state_hash: str
    format: int = 1


class Deployment(InternalRecord, frozen=True):
    """Parameters that all processes of a deployment must share. Key `deployment`."""

    lanes: int
    partitions: dict[str, int]
    format: int = 1


class Skip(InternalRecord, frozen=True):
    """A record that readers skip. Key `skip/<topic>/<partition>/<offset>`.

    Counts for records that are marked for newer readers only (`streams/reading/decoding.py`).
    """

    topic: str
    partition: int
    offset: int


class Tombstone(InternalRecord, frozen=True):
    """The removal of an entity. On the wire: a null value, so that it compacts away, and an epoch
    header."""

    key: str
    epoch: int | None = None
