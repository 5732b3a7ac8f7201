"""Extensions of the OpenAI API: the object `nvext` of a body, and routing headers.

Owns their conversion to the hints, targets and overrides of a Request. A header takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvlane.app.preprocess.json_limits import MAX_PROMPT_TOKENS
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.prompt import without_nulls
from kvlane.streams.record_base import JsonText
from kvlane.streams.request import (
    NO_HINTS,
    BlockExtraInfo,
    Hints,
    MmObject,
    MmRoutingInfo,
    RouterConfigOverride,
    RouterParams,
    RoutingConstraints,
    SessionControl,
)


class StrictModel(BaseModel):
    """Unknown fields are ignored, as OpenAI does; wrong types are not guessed at."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class NullableModel(StrictModel):
    """A model with defaults other than null: null is "not given" in every field."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields)


MAX_NAME_CHARS = 200
MAX_BLOCKS = 2**16
MAX_STREAM_INTERVAL = 1024
MAX_NAMES = 1024
"""Names of workers, taints and the like in one list; keys of an object that is passed on."""
U32 = 2**32 - 1
U64 = 2**64 - 1
I32 = 2**31 - 1
_UNSET_RANK = U32

_WORKER = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _worker(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64:
        return str(value)
    if not isinstance(value, str) or not _WORKER.fullmatch(value):
        raise PydanticCustomError("worker", "must be the name of a worker or its number")
    return value


_Tokens = list[Annotated[int, msgspec.Meta(ge=0, le=U32)]]
_Blocks = tuple[BlockExtraInfo | None, ...]


def is_tokens(value: Any) -> bool:
    try:
        return isinstance(value, list) and bool(msgspec.convert(value, _Tokens))
    except msgspec.ValidationError:
        return False


def _tokens(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    """Token ids, which msgspec reads several times as fast as pydantic."""
    try:
        tokens = msgspec.convert(value, _Tokens)
    except msgspec.ValidationError as e:
        if not isinstance(value, list):
            raise PydanticCustomError("tokens", "must be a list of token ids") from None
        at = int(str(e).rpartition("$[")[2].rstrip("]`"))
        wrong = PydanticCustomError("token", "must be a token id, from 0 to 4294967295")
        raise ValidationError.from_exception_data(
            "tokens", [{"type": wrong, "loc": (at,), "input": None}]
        ) from None
    if len(tokens) > MAX_PROMPT_TOKENS:
        raise PydanticCustomError(
            "tokens", "has more than {most} tokens", {"most": MAX_PROMPT_TOKENS}
        )
    return tokens


def _blocks(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    try:
        blocks = msgspec.convert(_blocks_without_nulls(value), _Blocks)
    except msgspec.ValidationError as e:
        raise PydanticCustomError("blocks", "{wrong}", {"wrong": str(e)}) from None
    numbers = (n for b in blocks if b is not None for o in b.mm_objects for n in _numbers(o))
    if len(blocks) > MAX_BLOCKS or not all(0 <= n <= most for n, most in numbers):
        message = "has more than {most} blocks, or a number out of its bounds"
        raise PydanticCustomError("blocks", message, {"most": MAX_BLOCKS})
    return blocks


def _blocks_without_nulls(blocks: Any) -> Any:
    """Blocks whose objects have no field that is null."""
    if not isinstance(blocks, list):
        return blocks
    given = [without_nulls(block) for block in blocks]
    for block in given:
        if isinstance(block, dict) and isinstance(block.get("mm_objects"), list):
            block["mm_objects"] = [without_nulls(item) for item in block["mm_objects"]]
    return given


def _numbers(item: MmObject) -> Iterator[tuple[int, int]]:
    yield item.mm_hash, U64
    for begin, end in item.offsets:
        yield begin, U32
        yield end, U32


def _not_offered(value: Any) -> Any:
    """Refuse a field that has no effect here; null and empty ask for nothing."""
    if value:
        raise PydanticCustomError("not_offered", "is not supported")
    return value


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
ModelName = Annotated[Text, BeforeValidator(lambda name: "" if name is None else name)]
Token = Annotated[int, Field(ge=0, le=U32)]
TokenIds = Annotated[list[Token], Field(max_length=MAX_PROMPT_TOKENS), WrapValidator(_tokens)]
Object = Annotated[dict[str, Any], Field(max_length=MAX_NAMES)]
_WorkerName = Annotated[str, Field(pattern=f"^{_WORKER.pattern}$")]
_WorkerNumber = Annotated[int, Field(ge=0, le=U64)]
WorkerId = Annotated[
    str, BeforeValidator(_worker, json_schema_input_type=_WorkerName | _WorkerNumber)
]
SHORT_LIST = Field(max_length=MAX_NAMES, fail_fast=True)
Rank = Annotated[int, Field(ge=0, le=U32)]
Millis = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class AgentHints(StrictModel):
    """Hints of an agent. `osl`: expected output tokens. `priority_jump`: seconds by which the
    request counts as older in the queue, by default derived from the other hints."""

    priority: int | None = Field(default=None, ge=-I32, le=I32)
    strict_priority: int | None = Field(default=None, ge=0, le=I32)
    osl: int | None = Field(default=None, ge=0, le=U32)
    speculative_prefill: Annotated[bool, AfterValidator(_not_offered)] | None = None
    latency_sensitivity: float | None = None
    priority_jump: float | None = None


class SessionOptions(NullableModel):
    session_id: Name
    action: Literal["open", "close", "bind"] | None = None
    timeout: int = Field(default=300, ge=1, le=I32)


class LatencyTargets(StrictModel):
    ttft_target: Millis | None = None
    itl_target: Millis | None = None


class TaintConstraints(NullableModel):
    """Required taints of workers, and preferred ones with weights."""

    required_taints: Annotated[list[Name], SHORT_LIST] = []
    preferred_taints: dict[str, float] = Field(default={}, max_length=MAX_NAMES)


class CostOverride(StrictModel):
    """Settings of the cost function, for this request only."""

    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    router_temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: Annotated[Any, AfterValidator(_not_offered)] = None


class MultimodalItem(StrictModel):
    """An image or the like in a block: hash of its content, token ranges in the block."""

    mm_hash: int = Field(ge=0, le=U64)
    offsets: Annotated[
        list[Annotated[list[Token], Field(min_length=2, max_length=2)]], SHORT_LIST
    ] = []


class MultimodalBlock(StrictModel):
    mm_objects: Annotated[list[MultimodalItem], SHORT_LIST] = []


class MultimodalRouting(NullableModel):
    """Tokens that replace the prompt in overlap lookups, with the contents of their blocks."""

    routing_token_ids: TokenIds = []
    block_mm_infos: Annotated[
        list[MultimodalBlock | None], Field(max_length=MAX_BLOCKS), WrapValidator(_blocks)
    ] = []


class NvExt(StrictModel):
    """The object `nvext` of a body. `stream_interval`: tokens of an event of a stream, at least."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: Annotated[list[str], SHORT_LIST] | None = None
    backend_instance_id: WorkerId | None = None
    token_data: Annotated[TokenIds, Field(min_length=1)] | None = None
    max_thinking_tokens: int | None = Field(default=None, ge=0, le=U32)
    extra_fields: Annotated[list[str], SHORT_LIST, AfterValidator(_not_offered)] | None = None
    prefill_worker_id: WorkerId | None = None
    decode_worker_id: WorkerId | None = None
    dp_rank: Rank | None = None
    prefill_dp_rank: Rank | None = None
    allowed_worker_ids: Annotated[list[WorkerId], SHORT_LIST, Field(min_length=1)] | None = None
    lora_name: Name | None = None
    agent_hints: AgentHints | None = None
    queue_class: Name | None = None
    agent_context: Object | None = None
    request_timestamp_ms: float | None = None
    session_control: SessionOptions | None = None
    cache_salt: Text | None = None
    router: LatencyTargets | None = None
    routing_constraints: TaintConstraints | None = None
    router_config_override: CostOverride | None = None
    extra_args: Object | None = None
    mm_routing_info: MultimodalRouting | None = None
    stream_interval: int | None = Field(default=None, ge=1, le=MAX_STREAM_INTERVAL)


def with_headers(ext: NvExt, headers: Mapping[str, str]) -> NvExt:
    """`ext` with the values of headers, whose names are in lower case. Raises InvalidPrompt that
    names the header."""
    changes: dict[str, Any] = {}
    if (worker := _header(headers, "x-worker-instance-id", _WORKER)) is not None:
        changes |= {"backend_instance_id": worker, "decode_worker_id": worker}
    if (worker := _header(headers, "x-prefill-instance-id", _WORKER)) is not None:
        changes["prefill_worker_id"] = worker
    if (rank := _rank(headers, "x-dp-rank")) is not None:
        changes["dp_rank"] = rank
    if (rank := _rank(headers, "x-prefill-dp-rank")) not in (None, _UNSET_RANK):
        changes["prefill_dp_rank"] = rank
    if (session := _header(headers, "x-session-id", _NAME)) is not None:
        known = ext.session_control
        changes["session_control"] = (
            SessionOptions(session_id=session)
            if known is None
            else known.model_copy(update={"session_id": session})
        )
    if (queue_class := _header(headers, "x-queue-class", _NAME)) is not None:
        changes["queue_class"] = queue_class
    return ext.model_copy(update=changes) if changes else ext


_NAME = re.compile(rf".{{1,{MAX_NAME_CHARS}}}")
_RANK = re.compile(r"[0-9]{1,10}")


def _header(headers: Mapping[str, str], name: str, form: re.Pattern[str]) -> str | None:
    value = headers.get(name, "").strip()
    if value and not form.fullmatch(value):
        raise InvalidPrompt(name, f"does not have the form {form.pattern}")
    return value or None


def _rank(headers: Mapping[str, str], name: str) -> int | None:
    value = _header(headers, name, _RANK)
    if value is not None and int(value) > U32:
        raise InvalidPrompt(name, f"exceeds {U32}")
    return None if value is None else int(value)


# --- into the parts of a Request ------------------------------------------------------------------


def hints_of(ext: NvExt) -> Hints:
    """Routing hints. A priority applies to the engine, and to the queue in seconds. NO_HINTS itself
    without any hint: records leave it out, and routers recognise it."""
    agent = ext.agent_hints or AgentHints()
    jump = agent.latency_sensitivity if agent.priority is None else float(max(agent.priority, 0))
    if agent.priority_jump is not None:
        jump = agent.priority_jump
    constraints, session = ext.routing_constraints, ext.session_control
    hints = Hints(
        backend_instance_id=ext.backend_instance_id,
        allowed_worker_ids=tuple(ext.allowed_worker_ids or ()),
        prefill_worker_id=ext.prefill_worker_id,
        decode_worker_id=ext.decode_worker_id,
        dp_rank=ext.dp_rank,
        prefill_dp_rank=ext.prefill_dp_rank,
        expected_output_tokens=agent.osl,
        lora_name=ext.lora_name,
        priority_jump=jump,
        priority=agent.priority,
        strict_priority=agent.strict_priority,
        routing_constraints=None
        if constraints is None
        else RoutingConstraints(
            required_taints=tuple(constraints.required_taints),
            preferred_taints=constraints.preferred_taints,
        ),
        session_control=None if session is None else SessionControl(**session.model_dump()),
        queue_class=ext.queue_class,
    )
    return NO_HINTS if hints == NO_HINTS else hints


class RoutingFields(TypedDict):
    """The fields of a `Request` that `nvext` alone determines, for requests of any kind."""

    hints: Hints
    annotations: tuple[str, ...]
    router_config_override: RouterConfigOverride | None
    router: RouterParams | None
    agent_context: JsonText | None
    request_timestamp_ms: float | None


def routing_fields_of(ext: NvExt) -> RoutingFields:
    override, targets = ext.router_config_override, ext.router
    return RoutingFields(
        hints=hints_of(ext),
        annotations=tuple(ext.annotations or ()),
        router_config_override=RouterConfigOverride(**override.model_dump()) if override else None,
        router=RouterParams(**targets.model_dump()) if targets else None,
        agent_context=_json(ext.agent_context),
        request_timestamp_ms=ext.request_timestamp_ms,
    )


def extra_args_of(ext: NvExt) -> JsonText | None:
    return _json(ext.extra_args)


def mm_routing_of(ext: NvExt) -> MmRoutingInfo | None:
    info = ext.mm_routing_info
    if info is None:
        return None
    return MmRoutingInfo(
        routing_token_ids=pack_tokens(info.routing_token_ids),
        block_mm_infos=tuple(info.block_mm_infos),  # type: ignore[arg-type]
    )


def _json(value: dict[str, Any] | None) -> JsonText | None:
    return None if value is None else msgspec.json.encode(value)
