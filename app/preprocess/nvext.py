"""What a request may say beyond the OpenAI API: the object `nvext` of its body, and its headers.

Owns their names and types, and their way into the hints, targets and settings of a Request. A
header goes before the field of the same meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from app.preprocess.errors import InvalidPrompt
from streams.codecs import pack_tokens
from streams.records import (
    NO_HINTS,
    BlockExtraInfo,
    Hints,
    Json,
    MmObject,
    MmRoutingInfo,
    RouterConfigOverride,
    RouterParams,
    RoutingConstraints,
    SessionControl,
)

STRICT = ConfigDict(
    strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=()
)
"""Unknown fields are ignored, as OpenAI does; wrong types are not guessed at."""

LONGEST_NAME = 200
U32 = 2**32 - 1
U64 = 2**64 - 1
_I32 = 2**31 - 1
_UNSET_RANK = U32
"""What some gateways write into x-prefill-dp-rank for "none"."""

_WORKER = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _worker(value: Any) -> Any:
    """A worker's name, or the number that other systems know it by."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64:
        return str(value)
    if not isinstance(value, str) or not _WORKER.fullmatch(value):
        raise PydanticCustomError("worker", "must be the name of a worker or its number")
    return value


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=LONGEST_NAME)]
Token = Annotated[int, Field(ge=0, le=U32)]
Worker = Annotated[str, BeforeValidator(_worker)]
Rank = Annotated[int, Field(ge=0, le=U32)]
Millis = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class AgentHints(BaseModel):
    """What an agent knows of its request. `osl`: expected output tokens."""

    model_config = STRICT

    priority: int | None = Field(default=None, ge=-_I32, le=_I32)
    strict_priority: int | None = Field(default=None, ge=0, le=_I32)
    osl: int | None = Field(default=None, ge=0, le=U32)
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class Session(BaseModel):
    """Which session the request belongs to. `timeout`: idle seconds."""

    model_config = STRICT

    session_id: Name
    action: Literal["open", "close", "bind"] | None = None
    timeout: int = Field(default=300, ge=1, le=_I32)


class Targets(BaseModel):
    """Latencies the client wants, in ms."""

    model_config = STRICT

    ttft_target: Millis | None = None
    itl_target: Millis | None = None


class Constraints(BaseModel):
    """Taints of workers: those that must be there, those that are preferred, with weights."""

    model_config = STRICT

    required_taints: list[Name] = []
    preferred_taints: dict[str, float] = {}


class Override(BaseModel):
    """Settings of the cost function, for this request alone."""

    model_config = STRICT

    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    router_temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = Field(default=None, ge=0, le=1)


class MmItem(BaseModel):
    """An image or the like in a block: hash of its content, token ranges in the block."""

    model_config = STRICT

    mm_hash: int = Field(ge=0, le=U64)
    offsets: list[Annotated[list[Token], Field(min_length=2, max_length=2)]] = []


class MmBlock(BaseModel):
    """What is in a block besides its tokens."""

    model_config = STRICT

    mm_objects: list[MmItem] = []


class MmRouting(BaseModel):
    """Other tokens for finding overlap, with what each block holds besides them."""

    model_config = STRICT

    routing_token_ids: list[Token] = []
    block_mm_infos: list[MmBlock | None] = []


class NvExt(BaseModel):
    """The object `nvext` of a body."""

    model_config = STRICT

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: Worker | None = None
    token_data: list[Token] | None = Field(default=None, min_length=1)
    max_thinking_tokens: int | None = Field(default=None, ge=0, le=U32)
    extra_fields: list[str] | None = None
    prefill_worker_id: Worker | None = None
    decode_worker_id: Worker | None = None
    dp_rank: Rank | None = None
    prefill_dp_rank: Rank | None = None
    allowed_worker_ids: list[Worker] | None = Field(default=None, min_length=1)
    lora_name: Name | None = None
    agent_hints: AgentHints | None = None
    queue_class: Name | None = None
    agent_context: dict[str, Any] | None = None
    request_timestamp_ms: float | None = None
    session_control: Session | None = None
    cache_salt: Text | None = None
    router: Targets | None = None
    routing_constraints: Constraints | None = None
    router_config_override: Override | None = None
    extra_args: dict[str, Any] | None = None
    mm_routing_info: MmRouting | None = None


def with_headers(ext: NvExt, headers: Mapping[str, str]) -> NvExt:
    """What the headers say in place of what the body says. Names of headers are in lower case.

    Raises InvalidPrompt that names the header.
    """
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
            Session(session_id=session)
            if known is None
            else known.model_copy(update={"session_id": session})
        )
    if (queue_class := _header(headers, "x-queue-class", _NAME)) is not None:
        changes["queue_class"] = queue_class
    return ext.model_copy(update=changes) if changes else ext


_NAME = re.compile(rf".{{1,{LONGEST_NAME}}}")
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
    """The hints for routing. A priority counts for the engine, and in seconds for the queue.

    NO_HINTS itself where nothing is asked for: it takes no room in records, and routers know it.
    """
    agent = ext.agent_hints or AgentHints()
    jump = agent.latency_sensitivity if agent.priority is None else float(max(agent.priority, 0))
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


def targets_of(ext: NvExt) -> RouterParams | None:
    """The latencies that are wanted."""
    return None if ext.router is None else RouterParams(**ext.router.model_dump())


def override_of(ext: NvExt) -> RouterConfigOverride | None:
    """The cost function's settings."""
    override = ext.router_config_override
    return None if override is None else RouterConfigOverride(**override.model_dump())


def context_of(ext: NvExt) -> Json | None:
    """What an agent says of itself, passed on unread."""
    return _json(ext.agent_context)


def extra_of(ext: NvExt) -> Json | None:
    """Arguments for the engine, passed on unread."""
    return _json(ext.extra_args)


def mm_routing_of(ext: NvExt) -> MmRoutingInfo | None:
    """The tokens that overlap is found by instead of the prompt's."""
    info = ext.mm_routing_info
    if info is None:
        return None
    return MmRoutingInfo(
        routing_token_ids=pack_tokens(info.routing_token_ids),
        block_mm_infos=tuple(
            None
            if block is None
            else BlockExtraInfo(
                mm_objects=tuple(
                    MmObject(mm_hash=item.mm_hash, offsets=tuple((a, b) for a, b in item.offsets))
                    for item in block.mm_objects
                )
            )
            for block in info.block_mm_infos
        ),
    )


def _json(value: dict[str, Any] | None) -> Json | None:
    return None if value is None else msgspec.json.encode(value)
