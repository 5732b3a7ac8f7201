"""Every record kvlane writes, field by field; the only place where their shapes are defined.

Inner records travel as msgpack maps, `Chunk`, `Fence` and `End` as JSON, because clients of any
language read them. The header `t` names the type; JSON records carry it as field `t` as well, for
readers that do not see headers. `streams/topics.py` says on which topic each one lives and who
may write it; `streams/prompt.py` holds what a client publishes.

Evolution: fields are only added, optional, at the end; unknown fields are ignored. A change that
breaks this is a new topic name. Fields at their default are left out on the wire.

Words: a *run* is one execution of an *attempt* of a request in a *phase*; (id, attempt, phase) is
its run key, `run` a random number that tells two executions of one run key apart. An *epoch* is
one life of a worker. Units are in the names; `*_ms` points in time are broker append time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Phase = Literal["aggregated", "prefill", "decode"]
RunCode = Literal[
    "stop", "length", "cancelled", "error", "broken", "worker_full", "expired", "handed_off"
]
"""How a run ended. Only stop, length, cancelled and a final error follow a last Chunk."""
FinishReason = Literal["stop", "length", "cancelled", "error", "content_filter"]
"""How an answer ended. On the wire any string, see `Public`."""
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
]
"""Why a router ended a request; stop and length: the answer was whole, its last Chunk lost."""
WorkerState = Literal["ready", "draining", "unhealthy"]
Role = Literal["aggregated", "prefill", "decode"]


class RunKey(NamedTuple):
    """What makes an assignment unique: a worker starts each run key at most once."""

    id: str
    attempt: int
    phase: Phase


class Fact(NamedTuple):
    """A decoded record at its place in the log; what folds are made of."""

    offset: int
    timestamp_ms: int
    record: Inner | Public


class Inner(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A record that only kvlane's own processes read: a msgpack map."""


class Public(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False, tag_field="t", tag=True
):
    """A record that clients read: a JSON object with its type in field `t`.

    Codes and reasons in them are plain strings: clients are not upgraded before the writers, and
    one that does not know a new code must still see the end that it comes with.
    """


# --- requests: keyed by request id ---------------------------------------------------------------


class StopConditions(Inner, frozen=True):
    """When generation ends, besides the model's own end of text."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class SamplingOptions(Inner, frozen=True):
    """How a token is drawn; None leaves the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class Hints(Inner, frozen=True):
    """What a request may say about its routing."""

    backend_instance_id: str | None = None
    allowed_worker_ids: tuple[str, ...] = ()


class Request(Inner, frozen=True):
    """A tokenised request, ready for a worker. `token_ids`: u32, little endian."""

    id: str
    model: str = ""
    token_ids: bytes = b""
    tenant: str = ""
    deadline_s: float = 600.0
    received_ms: int = 0
    stop: StopConditions = StopConditions()
    sampling: SamplingOptions = SamplingOptions()
    hints: Hints = Hints()


class Cancel(Inner, frozen=True):
    """The client wants no more of this request. Shares the request's key, so it comes after it."""

    id: str
    reason: str = ""


class Refused(Inner, frozen=True):
    """A preprocessor could not turn a prompt into a Request; the lane's owner ends it visibly."""

    id: str
    code: EndCode
    message: str = ""


# --- ledger: keyed by request id; the life story of each request ---------------------------------


class Origin(Inner, frozen=True):
    """Where the Request of a request lies."""

    topic: str
    partition: int
    offset: int


class Candidate(Inner, frozen=True):
    """A worker that was considered, with the inputs of its cost, so that it can be recomputed."""

    worker: str
    epoch: int
    rank: int = 0
    cost: float = 0.0
    open_runs: int = 0
    open_tokens: int = 0


class Assigned(Inner, frozen=True):
    """The decision: this run of the request goes to this worker."""

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    origin: Origin
    responses_from: int
    deadline_ms: int
    rank: int = 0
    base_tokens: int = 0
    prompt_tokens: int = 0
    policy: str = ""
    seed: int = 0
    candidates: tuple[Candidate, ...] = ()
    router: str = ""


class Started(Inner, frozen=True):
    """A worker has taken the run; acknowledged before its first Chunk."""

    id: str
    attempt: int
    phase: Phase
    worker: str
    epoch: int
    run: int
    origin: Origin
    responses_from: int
    deadline_ms: int
    prompt_tokens: int = 0


class PrefillDone(Inner, frozen=True):
    """The prompt is computed; for phase prefill, `handoff` lets a decode worker fetch it.

    `handoff` is the engine's own, in whatever form it likes; nobody between the two reads it.
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


class Finished(Inner, frozen=True):
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


class Fencing(Inner, frozen=True):
    """The owner intends to start `attempt`; acknowledged before the Fence is sent."""

    id: str
    attempt: int
    reason: str = ""


class Ended(Inner, frozen=True):
    """The request is over. Written last of all: nothing is due after it."""

    id: str
    code: EndCode | Literal["seen"]


# --- responses: keyed by request id; what clients read -------------------------------------------


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Token counts of a whole request, over all its attempts. Part of a Chunk."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Chunk(Public, frozen=True, tag="Chunk"):
    """Some tokens of the answer. `run` is a u64 in decimals, for JSON readers without 64 bits.

    `seq` counts the Chunks of a run from 0; `index` is the place of the first token in the whole
    answer, over all attempts; `chars` is the length of the whole text after this Chunk.
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


class Fence(Public, frozen=True, tag="Fence"):
    """`attempt` begins here; Chunks of lower attempts that come later do not count."""

    id: str
    attempt: int
    reason: str = ""


class End(Public, frozen=True, tag="End"):
    """A router ended the request with an EndCode; no last Chunk will come."""

    id: str
    code: str
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None


# --- assignments: one partition per slot; what a worker is told ----------------------------------


class Assignment(Inner, frozen=True):
    """Run this. `taken`: tokens the reader has (u32, little endian), to continue from."""

    worker: str
    epoch: int
    attempt: int
    phase: Phase
    request: Request
    origin: Origin
    responses_from: int
    deadline_ms: int
    budget_s: float
    rank: int = 0
    taken: bytes = b""
    taken_chars: int = 0


class CancelRun(Inner, frozen=True):
    """Stop this run; its reader has been served otherwise."""

    worker: str
    epoch: int
    id: str
    attempt: int
    phase: Phase
    reason: str = ""


class Lost(Inner, frozen=True):
    """This epoch of the worker is dead to everybody, whether it still runs or not."""

    worker: str
    epoch: int
    by: str = ""
    silent_ms: int = 0


# --- kv-events: keyed by worker id ---------------------------------------------------------------


class Blocks(Inner, frozen=True):
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


class RunProgress(Inner, frozen=True):
    """An open run, as its worker sees it."""

    id: str
    attempt: int
    phase: Phase
    output_tokens: int = 0


class Heartbeat(Inner, frozen=True):
    """The worker lives; `slot_offset` is the next offset it will read of its assignments."""

    worker: str
    epoch: int
    slot_offset: int
    state: WorkerState = "ready"
    reason: str = ""
    running: tuple[RunProgress, ...] = ()
    waiting: int = 0


class Probe(Inner, frozen=True):
    """A router's own record, written to find out whether the broker still takes records."""

    by: str


# --- registry: compacted, keyed by entity --------------------------------------------------------


class EngineConfig(Inner, frozen=True):
    """What an engine says about itself; None means: not advertised."""

    model: str
    served_model_name: str | None = None
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


class WorkerCard(Inner, frozen=True):
    """A worker offers itself. Key `worker/<id>`.

    The first card of a life has no epoch: the offset it gets *is* the epoch, unique and rising.
    Every later card of that life repeats it. `life` is random and tells processes of one name apart.
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


class ModelCard(Inner, frozen=True):
    """A model that clients may ask for. Key `model/<name>`."""

    name: str
    kind: Literal["tokens", "chat", "completion", "embedding"] = "tokens"
    context_length: int | None = None
    block_size: int | None = None


class SnapshotPointer(Inner, frozen=True):
    """Where a whole snapshot of a fold's partition lies. Key `snapshot/<fold>/<partition>`."""

    fold: str
    partition: int
    position: int
    first_part: int
    parts: int
    checksum: str
    state_hash: str
    format: int = 1


class Deployment(Inner, frozen=True):
    """The shape all processes of a deployment must agree on. Key `deployment`."""

    lanes: int
    partitions: dict[str, int]
    format: int = 1


class Tombstone(Inner, frozen=True):
    """An entity left. On the wire: a null value, so that it compacts away, and an epoch header."""

    key: str
    epoch: int | None = None
