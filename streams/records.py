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

from typing import Any, Literal, NamedTuple

import msgspec

Phase = Literal["aggregated", "prefill", "decode"]
RunCode = Literal[
    "stop", "length", "cancelled", "error", "broken", "worker_full", "expired", "handed_off"
]
"""How a run ended. Only stop, length, cancelled and a final error follow a last Chunk."""
FinishReason = Literal[
    "stop", "length", "cancelled", "error", "content_filter", "tool_calls", "function_call"
]
"""How an answer ended; the last two if a server says so. On the wire any string, see `Public`."""
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
"""Why a router ended a request; stop and length: the answer was whole, its last Chunk lost."""
WorkerState = Literal["ready", "draining", "unhealthy"]
Role = Literal["aggregated", "prefill", "decode"]
ModelKind = Literal["tokens", "chat", "completion", "embedding"]
"""What a model takes: tokens, which serve chats and completions, or OpenAI's bodies of one kind."""
LONGEST_ID = 200
"""Of a request's id, in characters: it is a record key, and part of every line about it."""
Json = bytes
"""A JSON value of whatever form, in UTF-8: passed on as it came, read by its receiver only."""


class RunKey(NamedTuple):
    """What makes an assignment unique: a worker starts each run key at most once."""

    id: str
    attempt: int
    phase: Phase


class Fact(msgspec.Struct, frozen=True, gc=False):
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
    """When generation ends, besides the model's own end of text.

    Tokens in `stop_token_ids` are named as the reason when they end an answer, those in
    `stop_token_ids_hidden` end it as an end of text does. Nothing ends it before `min_tokens`.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_token_ids_hidden: tuple[int, ...] = ()
    max_thinking_tokens: int | None = None


class GuidedDecoding(Inner, frozen=True):
    """What form an answer must have; at most one of json, regex, choice, grammar and tag."""

    json: Json | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: Json | None = None


class SamplingOptions(Inner, frozen=True):
    """How a token is drawn; None leaves the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None
    detokenize: bool | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None
    logit_bias: dict[int, float] | None = None


class OutputOptions(Inner, frozen=True):
    """What comes back besides text; None leaves the default of whoever writes it."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class RoutingConstraints(Inner, frozen=True):
    """Taints a worker must have, and taints that speak for it, with their weights."""

    required_taints: tuple[str, ...] = ()
    preferred_taints: dict[str, float] = {}


class SessionControl(Inner, frozen=True):
    """Which session a request belongs to, and whether the session begins or ends with it."""

    session_id: str
    action: Literal["open", "close", "bind"] | None = None
    timeout: int = 300  # idle seconds


class Hints(Inner, frozen=True):
    """What a request may say about its routing. Ids of workers are names, or hashes in decimals."""

    backend_instance_id: str | None = None
    allowed_worker_ids: tuple[str, ...] = ()
    prefill_worker_id: str | None = None
    decode_worker_id: str | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    priority_jump: float | None = None  # seconds by which it counts as older
    priority: int | None = None  # for the engine
    strict_priority: int | None = None
    routing_constraints: RoutingConstraints | None = None
    session_control: SessionControl | None = None
    queue_class: str | None = None


NO_HINTS = Hints()
"""Those of a request that asks for nothing: mostly this very object."""


class RouterConfigOverride(Inner, frozen=True):
    """Settings of the cost function for this request alone."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


class RouterParams(Inner, frozen=True):
    """Latencies the client wants, in ms: to the first token, and from token to token."""

    ttft_target: float | None = None
    itl_target: float | None = None


class BootstrapInfo(Inner, frozen=True):
    """Where prefill and decode of one request meet. `room`: u64, unique to the request."""

    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0


class TraceLink(Inner, frozen=True):
    """The span of the worker that had the request before: W3C ids in hex."""

    trace_id: str
    span_id: str


class PromptTokensDetails(Inner, frozen=True):
    """Of the prompt's tokens, how many were audio and how many came from the cache."""

    audio_tokens: int | None = None
    cached_tokens: int | None = None


class PrefillResult(Inner, frozen=True):
    """What prefill hands to decode. The parameters are the engine's own."""

    disaggregated_params: Json
    prompt_tokens_details: PromptTokensDetails | None = None


class MmObject(Inner, frozen=True):
    """An image or the like in a block: hash of its content (u64), token ranges in the block."""

    mm_hash: int
    offsets: tuple[tuple[int, int], ...] = ()


class BlockExtraInfo(Inner, frozen=True):
    """What is in a block besides its tokens."""

    mm_objects: tuple[MmObject, ...] = ()


class MmRoutingInfo(Inner, frozen=True):
    """Other tokens for finding overlap (u32, little endian), with what each block holds."""

    routing_token_ids: bytes = b""
    block_mm_infos: tuple[BlockExtraInfo | None, ...] = ()


class MultimodalData(Inner, frozen=True):
    """One image or the like: by URL, by a string that is used as one, or decoded already.

    `decoded` describes the memory that holds it, in the words of the transfer library.
    """

    kind: Literal["url", "raw_url", "decoded"]
    url: str = ""
    decoded: Json | None = None


class RoutingTokens(NamedTuple):
    """What overlap is found by: tokens (u32, little endian), and what each block holds."""

    token_ids: bytes
    blocks: tuple[BlockExtraInfo | None, ...] | None


class OpenAiBody(Inner, frozen=True):
    """A request in OpenAI's words, for an engine that takes it as it came: a JSON object.

    `prompt_tokens`: how long its prompt is thought to be; only the engine can count it.
    """

    kind: Literal["chat", "completion", "embedding"]
    json: Json
    prompt_tokens: int = 0


class Request(Inner, frozen=True):
    """A request that is ready for a worker. `token_ids`: u32, little endian; none with a `body`.

    On the topics it is msgpack, like the rest; `app/preprocess/wire.py` turns it into the JSON in
    which other systems hold it, and back.
    """

    id: str
    model: str = ""
    token_ids: bytes = b""
    tenant: str = ""
    deadline_s: float = 600.0
    received_ms: int = 0
    stop: StopConditions = StopConditions()
    sampling: SamplingOptions = SamplingOptions()
    hints: Hints = NO_HINTS
    output: OutputOptions = OutputOptions()
    eos_token_ids: tuple[int, ...] = ()
    mdc_sum: str | None = None  # checksum of the model card it was made with
    annotations: tuple[str, ...] = ()
    cache_salt: str = ""  # requests with different salts share no cache
    prompt_embeds: str | None = None  # base64 of a tensor, used instead of the tokens
    multi_modal_data: dict[str, tuple[MultimodalData, ...]] | None = None  # by type of part
    mm_routing_info: MmRoutingInfo | None = None
    router_config_override: RouterConfigOverride | None = None
    prefill_result: PrefillResult | None = None
    migration_link: TraceLink | None = None
    bootstrap_info: BootstrapInfo | None = None
    extra_args: Json | None = None
    router: RouterParams | None = None
    agent_context: Json | None = None
    mm_processor_kwargs: Json | None = None
    request_timestamp_ms: float | None = None
    is_probe: bool = msgspec.field(default=False, name="_HEALTH_CHECK")
    body: OpenAiBody | None = None

    @property
    def kind(self) -> ModelKind:
        """What its model has to take."""
        return "tokens" if self.body is None else self.body.kind

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens; of a body an estimate."""
        return len(self.token_ids) // 4 if self.body is None else self.body.prompt_tokens

    @property
    def prompt_bytes(self) -> int:
        """What its prompt takes of memory, in whatever form it came."""
        info = self.mm_routing_info
        media = (data for of in (self.multi_modal_data or {}).values() for data in of)
        return (
            len(self.token_ids)
            + (0 if self.body is None else len(self.body.json))
            + len(self.prompt_embeds or "")
            + len(self.extra_args or b"")
            + (0 if info is None else len(info.routing_token_ids))
            + sum(len(data.url) + len(data.decoded or b"") for data in media)
        )

    def has_annotation(self, annotation: str) -> bool:
        """Whether exactly this annotation was given."""
        return annotation in self.annotations

    @property
    def is_query(self) -> bool:
        """Whether it only asks where it would go, and goes nowhere.

        It has the annotation query_instance_id with a value, whatever that is.
        """
        return bool(self.annotations) and self.annotation_value("query_instance_id") is not None

    def annotation_value(self, key: str) -> str | None:
        """What follows `key:` in the first annotation that begins so; None without one."""
        prefix = f"{key}:"
        return next(
            (a.removeprefix(prefix) for a in self.annotations if a.startswith(prefix)), None
        )

    def routing_tokens(self) -> RoutingTokens:
        """What overlap is to be found by: the prompt, unless other tokens stand in for it.

        With `prompt_embeds` the tokens are not what is computed, so nothing overlaps.
        """
        if self.prompt_embeds is not None:
            return RoutingTokens(b"", None)
        info = self.mm_routing_info
        if info is None or not info.routing_token_ids:
            return RoutingTokens(self.token_ids, None)
        return RoutingTokens(info.routing_token_ids, info.block_mm_infos)


class EmbeddingRequest(Inner, frozen=True):
    """Texts to be embedded, tokenised: for each text its tokens (u32, little endian)."""

    id: str
    token_ids: tuple[bytes, ...]
    model: str = ""
    encoding_format: str | None = None
    dimensions: int | None = None
    mdc_sum: str | None = None
    annotations: tuple[str, ...] = ()
    tenant: str = ""
    deadline_s: float = 600.0
    received_ms: int = 0

    def has_annotation(self, annotation: str) -> bool:
        """Whether exactly this annotation was given."""
        return annotation in self.annotations


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


class Candidate(Inner, frozen=True, kw_only=False):
    """A worker that was considered, with the inputs of its cost, so that it can be recomputed.

    From `prompt_tokens` on it is what policy predictive looks at. `prompt_tokens`: of the open
    runs. `prefill_runs`: those of them without a first token, `busy_ms`: for how long the worker
    has been at their prompts. `ahead_ms`: prefill, computed alone, of each other request that
    waited in the router and was to go there, by arrival. Then its pace, see `Pace`
    (app/routing/paces.py); without a `curve` it is the published one. `later_ms`: by how much later
    than others the router counted on it.
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


class SessionUse(Inner, frozen=True):
    """That a session's request went somewhere. `timeout_s`: idle time after which it is forgotten.

    `closes`: the session is over with this. `bound_*`: where it was before, if that counted.
    """

    id: str
    timeout_s: int = 300
    closes: bool = False
    bound_worker: str = ""
    bound_epoch: int = 0
    bound_rank: int = 0


class Assigned(Inner, frozen=True):
    """The decision: this run of the request goes to this worker.

    `prefill_tokens`: what it adds to the worker's prefill until it is done. `params`: the settings
    of the policy that were in force. `candidates`: the best ones, and the chosen one.
    `held_ms`: how long the request had waited in the router, `ttft_ms_predicted`: what was expected
    from here to its first token; both by policy predictive only. `known_ms`: append time of the
    youngest record of the ledger that its router had read.
    """

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
    cached_tokens_predicted: int = 0
    prefill_tokens: int = 0
    block_size: int = 0
    params: dict[str, float] = {}
    held_ms: int = 0
    ttft_ms_predicted: float = 0.0
    session: SessionUse | None = None
    lora_name: str = ""
    known_ms: int = 0


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


class Aside(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What a server said besides the text, as it came. Part of a Chunk.

    `at`: how much of the whole text stands before it. In an event of OpenAI's form, `delta` is of
    its choice's delta (tool calls, reasoning …), `choice` of the choice, `event` of the event.
    """

    at: int = 0
    delta: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    event: dict[str, Any] = {}


class Chunk(Public, frozen=True, tag="Chunk"):
    """Some tokens of the answer. `run` is a u64 in decimals, for JSON readers without 64 bits.

    `seq` counts the Chunks of a run from 0; `index` is the place of the first token in the whole
    answer, over all attempts; `chars` is the length of the whole text after this Chunk.
    `stop_reason`: the stop string or the token id that ended the answer; None for an end of text.
    `log_probs`: for each token, if they were asked for, first its own and then the likeliest ones.
    `invalid`: what is wrong with the request, where that is why it ends with an error.
    `data`: of models that are asked in OpenAI's words, what is no text. They bring no tokens.
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
    data: tuple[Aside, ...] = ()


class Fence(Public, frozen=True, tag="Fence"):
    """`attempt` begins here; Chunks of lower attempts that come later do not count."""

    id: str
    attempt: int
    reason: str = ""


class Placed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Where a request would go that only asks for that, and its tokens. Part of an End."""

    worker_id: str
    dp_rank: int = 0
    token_ids: tuple[int, ...] = ()


class End(Public, frozen=True, tag="End"):
    """A router ended the request with an EndCode; no last Chunk will come."""

    id: str
    code: str
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None
    placed: Placed | None = None


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
    """An open run, as its worker sees it. `expected_output_tokens`: by its request, 0 if unsaid."""

    id: str
    attempt: int
    phase: Phase
    output_tokens: int = 0
    expected_output_tokens: int = 0


class EngineFigures(Inner, frozen=True):
    """What an engine does at the moment; `steps` since its start."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    steps: int = 0


class Heartbeat(Inner, frozen=True):
    """The worker lives; `slot_offset` is the next offset it will read of its assignments.

    `last_event_ids`: for each rank the last cache event of this epoch that stands in the log before
    this record, -1 for none. `waiting` counts runs outside the engine, `engine` what is inside.
    """

    worker: str
    epoch: int
    slot_offset: int
    state: WorkerState = "ready"
    reason: str = ""
    running: tuple[RunProgress, ...] = ()
    waiting: int = 0
    last_event_ids: tuple[int, ...] = ()
    engine: EngineFigures | None = None


class Probe(Inner, frozen=True):
    """A router's own record, written to find out whether the broker still takes records."""

    by: str


# --- registry: compacted, keyed by entity --------------------------------------------------------


class EngineConfig(Inner, frozen=True):
    """What an engine says about itself; None means: not advertised.

    `curve`: how long its steps take, see `numbers` in app/engine/curves.py. `lora_names`: adapters
    that it has, `max_loras`: how many it can load besides, at a time. `data_parallel_size`: its
    ranks, each with a cache of its own; None is one. Without `gives_tokens` it gives text only, and
    nobody can continue its answers; with `guesses_cache` its cache events are a guess. `kind`: what
    it takes.
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


class WorkerCard(Inner, frozen=True):
    """A worker offers itself. Key `worker/<id>`.

    The first card of a life has no epoch: the offset it gets *is* the epoch, unique and rising.
    Every later card of that life repeats it. `life` is random: it tells processes of one name
    apart. With more than `busy_cache` of its cache in use (0 to 1), or with `busy_prefill_tokens`
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


class Artifact(Inner, frozen=True):
    """A file on `artifacts`: its SHA-256 in hex, and its size in bytes."""

    sha256: str
    size: int


class ModelCard(Inner, frozen=True):
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
