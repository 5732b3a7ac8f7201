"""A request that is ready for a worker: on `requests`, and within an `Assignment`."""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvlane.streams.record_base import Account, InternalRecord, JsonText, ModelKind, ServiceClass
from kvlane.streams.response_records import Chunk, TurnPlace

ResultKind = Literal["chat", "completion", "tokens", "embedding"]


class StopConditions(InternalRecord, frozen=True):
    """Stop conditions in addition to the model's end of text, none before `min_tokens`.
    `stop_token_ids_hidden` end like an end of text; other stop tokens are reported as the
    reason."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_token_ids_hidden: tuple[int, ...] = ()
    max_thinking_tokens: int | None = None


class GuidedDecoding(InternalRecord, frozen=True):
    """Constraints on the form of an answer; at most one of json, regex, choice, grammar and tag."""

    json: JsonText | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: JsonText | None = None


class SamplingOptions(InternalRecord, frozen=True):
    """Sampling parameters; None leaves the engine's default."""

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


class OutputOptions(InternalRecord, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class RoutingConstraints(InternalRecord, frozen=True):
    """Taints that a worker must have, and preferred taints with their weights."""

    required_taints: tuple[str, ...] = ()
    preferred_taints: dict[str, float] = {}


class SessionControl(InternalRecord, frozen=True):
    """The session of a request, and whether the session begins or ends with it."""

    session_id: str
    action: Literal["open", "close", "bind"] | None = None
    timeout: int = 300  # idle seconds


class Hints(InternalRecord, frozen=True):
    """Routing options of a request. Worker ids are names, or hashes in decimals."""

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
"""Hints of a request without routing options, usually this very object."""


class RouterConfigOverride(InternalRecord, frozen=True):
    """Settings of the cost function for one request."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


class RouterParams(InternalRecord, frozen=True):
    """Latency targets in ms: time to first token, and inter-token latency."""

    ttft_target: float | None = None
    itl_target: float | None = None


class BootstrapInfo(InternalRecord, frozen=True):
    """Rendezvous of prefill and decode runs at the prefill engine. `bootstrap_room`: 63 bits,
    unique to the prefill run, whose rank it is modulo the engine's ranks."""

    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0


class TraceLink(InternalRecord, frozen=True):
    """The span of the previous worker of the request: W3C ids in hex."""

    trace_id: str
    span_id: str


class PromptTokensDetails(InternalRecord, frozen=True):
    """Numbers of audio tokens and cached tokens of the prompt."""

    audio_tokens: int | None = None
    cached_tokens: int | None = None


class AnswerParsing(InternalRecord, frozen=True):
    """How a worker separates reasoning and tool calls of a chat's answer from its content.

    `tools`, `reasoning`: names of parsers; "" for none; `version`: of their rules. `in_reasoning`:
    the prompt ends within the reasoning. `max_calls`: 0: any number. `functions`: the tools as
    OpenAI has them.
    """

    tools: str = ""
    reasoning: str = ""
    version: int = 1
    in_reasoning: bool = False
    shows_reasoning: bool = True
    max_calls: int = 0
    functions: JsonText | None = None


class PrefillResult(InternalRecord, frozen=True):
    """The result of prefill, for decode. The parameters are opaque."""

    disaggregated_params: JsonText
    prompt_tokens_details: PromptTokensDetails | None = None


class MmObject(InternalRecord, frozen=True):
    mm_hash: int
    offsets: tuple[tuple[int, int], ...] = ()


class BlockExtraInfo(InternalRecord, frozen=True):
    mm_objects: tuple[MmObject, ...] = ()


class MmRoutingInfo(InternalRecord, frozen=True):
    """Substitute tokens for prefix matching (u32, little endian), with each block's content."""

    routing_token_ids: bytes = b""
    block_mm_infos: tuple[BlockExtraInfo | None, ...] = ()


class MultimodalData(InternalRecord, frozen=True):
    """One image or the like: by URL, by a string that is used as one, or decoded: the memory that
    holds it, in the words of the transfer library."""

    kind: Literal["url", "raw_url", "decoded"]
    url: str = ""
    decoded: JsonText | None = None


class RoutingTokens(NamedTuple):
    """Input of prefix matching: tokens (u32, little endian), and the content of each block."""

    token_ids: bytes
    blocks: tuple[BlockExtraInfo | None, ...] | None


class OpenAiBody(InternalRecord, frozen=True):
    """An OpenAI request body, passed on unchanged: a JSON object. `prompt_tokens`: an estimate."""

    kind: Literal["chat", "completion", "embedding"]
    json: JsonText
    prompt_tokens: int = 0


class ReplyAddress(InternalRecord, frozen=True):
    """The topic for a copy of a result, by its whole name. `headers`: with the expected correlation
    id. `partition`: None: by the key."""

    topic: str
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


class StoredInput(InternalRecord, frozen=True):
    """The part of a request that a stored response keeps. `shown`: fields that come back with it, a
    JSON object. `input`: JSON list of the items since those in the results at `history`.
    `conversation`: the id of the first response, if it continues one."""

    shown: JsonText
    input: JsonText
    history: tuple[TurnPlace, ...] = ()
    namespaces: dict[str, str] = {}
    conversation: str = ""


class ResultOptions(InternalRecord, frozen=True):
    """The options of the result of a request; a request without them gets none.

    `kind`: of the prompt; it decides the form of the body. `metadata`: a JSON object, copied like
    `custom_id`. `batch_id`: its job. `echo`: the text that the answer begins with. `stored`: the
    result is a stored response.
    """

    kind: ResultKind = "chat"
    metadata: JsonText = b"{}"
    batch_id: str = ""
    custom_id: str = ""
    reply: ReplyAddress | None = None
    echo: str = ""
    stored: StoredInput | None = None


class Request(InternalRecord, frozen=True):
    """A request that is ready for a worker.

    `token_ids`: u32, little endian; none with a `body`. `queued_ms`: it may wait in any queue, and
    its deadline counts from then. `shown`: of a renewed request that has begun, the answer before
    the attempt that the Chunk names.
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
    extra_args: JsonText | None = None
    router: RouterParams | None = None
    agent_context: JsonText | None = None
    mm_processor_kwargs: JsonText | None = None
    request_timestamp_ms: float | None = None
    is_probe: bool = msgspec.field(default=False, name="_HEALTH_CHECK")
    body: OpenAiBody | None = None
    queued_ms: int = 0  # append time of its prompt in its topic; 0: it did not come from Kafka
    service_class: ServiceClass = "interactive"
    is_renewed: bool = False  # takes the place of its record before, which is as good as deleted
    result: ResultOptions | None = None
    traceparent: str = ""  # W3C Trace Context of its first span; empty: it is not sampled
    parsing: AnswerParsing | None = None
    shown: Chunk | None = None
    alias: str = ""  # of `model`, if the client named that
    key_id: str = ""  # of the API key it came with

    @property
    def asked_model(self) -> str:
        """The model by the name that the client gave."""
        return self.alias or self.model

    @property
    def account(self) -> Account:
        return Account(
            self.tenant, self.key_id, self.model, self.hints.lora_name or "", self.service_class,
            self.alias,
        )  # fmt: skip

    @property
    def kind(self) -> ModelKind:
        return "tokens" if self.body is None else self.body.kind

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens; for a body an estimate."""
        return len(self.token_ids) // 4 if self.body is None else self.body.prompt_tokens

    @property
    def prompt_bytes(self) -> int:
        info = self.mm_routing_info
        media = (data for of in (self.multi_modal_data or {}).values() for data in of)
        stored = None if self.result is None else self.result.stored
        return (
            len(self.token_ids)
            + (0 if self.body is None else len(self.body.json))
            + len(self.prompt_embeds or "")
            + len(self.extra_args or b"")
            + (0 if info is None else len(info.routing_token_ids))
            + sum(len(data.url) + len(data.decoded or b"") for data in media)
            + (0 if stored is None else len(stored.shown) + len(stored.input))
        )

    @property
    def is_query(self) -> bool:
        """Whether it is a dry run, by the annotation query_instance_id with any value."""
        return bool(self.annotations) and self.annotation_value("query_instance_id") is not None

    def annotation_value(self, key: str) -> str | None:
        """The text after `key:` in the first such annotation; None without one."""
        prefix = f"{key}:"
        return next(
            (a.removeprefix(prefix) for a in self.annotations if a.startswith(prefix)), None
        )

    def routing_tokens(self) -> RoutingTokens:
        """Tokens for prefix matching: the prompt, or substitutes; none with `prompt_embeds`."""
        if self.prompt_embeds is not None:
            return RoutingTokens(b"", None)
        info = self.mm_routing_info
        if info is None or not info.routing_token_ids:
            return RoutingTokens(self.token_ids, None)
        return RoutingTokens(info.routing_token_ids, info.block_mm_infos)
