"""The shapes of requests as JSON, field by field; `app/preprocess/wire.py` fills and reads them.

A field whose default is None is always written, with null where there is nothing. One whose
default is UNSET is left out then. Reading takes null and absence for the same.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from streams.records import (
    BlockExtraInfo,
    PromptTokensDetails,
    RouterParams,
    RoutingConstraints,
    SessionControl,
    TraceLink,
)

T = TypeVar("T")
U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Unsigned = Annotated[int, msgspec.Meta(ge=0)]
Worker: TypeAlias = Unsigned | str
Optional: TypeAlias = T | UnsetType | None
"""Left out when unset; read as absent when null."""


class StopForm(msgspec.Struct, frozen=True):
    """`stop_conditions`: all of it is written."""

    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_token_ids_hidden: tuple[int, ...] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class GuidedForm(msgspec.Struct, frozen=True):
    """`guided_decoding`: only what is there is written."""

    json: Raw | UnsetType = UNSET
    regex: Optional[str] = UNSET
    choice: Optional[tuple[str, ...]] = UNSET
    grammar: Optional[str] = UNSET
    backend: Optional[str] = UNSET
    whitespace_pattern: Optional[str] = UNSET
    structural_tag: Raw | UnsetType = UNSET


class SamplingForm(msgspec.Struct, frozen=True):
    """`sampling_options`: all of it is written but the last four."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedForm | None = None
    detokenize: Optional[bool] = UNSET
    allowed_token_ids: Optional[tuple[int, ...]] = UNSET
    bad_words_token_ids: Optional[tuple[tuple[int, ...], ...]] = UNSET
    logit_bias: Optional[dict[int, float]] = UNSET


class OutputForm(msgspec.Struct, frozen=True):
    """`output_options`: all of it is written."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class RoutingForm(msgspec.Struct, frozen=True):
    """`routing`: only what is there is written."""

    backend_instance_id: Optional[Worker] = UNSET
    prefill_worker_id: Optional[Worker] = UNSET
    decode_worker_id: Optional[Worker] = UNSET
    dp_rank: Optional[int] = UNSET
    prefill_dp_rank: Optional[int] = UNSET
    expected_output_tokens: Optional[int] = UNSET
    lora_name: Optional[str] = UNSET
    priority_jump: Optional[float] = UNSET
    priority: Optional[int] = UNSET
    strict_priority: Optional[int] = UNSET
    allowed_worker_ids: Optional[tuple[Worker, ...]] = UNSET
    routing_constraints: Optional[RoutingConstraints] = UNSET
    session_control: Optional[SessionControl] = UNSET
    queue_class: Optional[str] = UNSET


class OverrideForm(msgspec.Struct, frozen=True):
    """`router_config_override`: all of it is written."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


class PrefillForm(msgspec.Struct, frozen=True):
    """`prefill_result`."""

    disaggregated_params: Raw
    prompt_tokens_details: Optional[PromptTokensDetails] = UNSET


class MmRoutingForm(msgspec.Struct, frozen=True):
    """`mm_routing_info`."""

    routing_token_ids: tuple[int, ...] = ()
    block_mm_infos: tuple[BlockExtraInfo | None, ...] = ()


class BootstrapForm(msgspec.Struct, frozen=True):
    """`bootstrap_info`."""

    bootstrap_host: str
    bootstrap_port: U16
    bootstrap_room: Unsigned


class RequestForm(msgspec.Struct, frozen=True, kw_only=True):
    """A Request, in the order in which it is written."""

    model: str = ""
    token_ids: tuple[int, ...]
    prompt_embeds: Optional[str] = UNSET
    multi_modal_data: Optional[dict[str, tuple[dict[str, Raw], ...]]] = UNSET
    mm_routing_info: Optional[MmRoutingForm] = UNSET
    stop_conditions: StopForm = StopForm()
    sampling_options: SamplingForm = SamplingForm()
    output_options: OutputForm = OutputForm()
    eos_token_ids: tuple[int, ...] = ()
    mdc_sum: str | None = None
    annotations: tuple[str, ...] = ()
    routing: Optional[RoutingForm] = UNSET
    router_config_override: OverrideForm | None = None
    prefill_result: Optional[PrefillForm] = UNSET
    migration_link: Optional[TraceLink] = UNSET
    bootstrap_info: Optional[BootstrapForm] = UNSET
    extra_args: Raw | UnsetType = UNSET
    router: Optional[RouterParams] = UNSET
    agent_context: Raw | UnsetType = UNSET
    mm_processor_kwargs: Raw | UnsetType = UNSET
    request_timestamp_ms: Optional[float] = UNSET
    is_probe: bool | UnsetType = msgspec.field(default=UNSET, name="_HEALTH_CHECK")


class EmbeddingForm(msgspec.Struct, frozen=True, kw_only=True):
    """An EmbeddingRequest: nothing in it is left out."""

    token_ids: tuple[tuple[int, ...], ...]
    model: str
    encoding_format: str | None = None
    dimensions: int | None = None
    mdc_sum: str | None = None
    annotations: tuple[str, ...] = ()
