"""Requests as JSON, for exchange with systems that speak of preprocessed requests.

In the log a Request is a msgpack map with packed tokens. Here it has lists of token ids, the names
`stop_conditions`, `sampling_options`, `output_options` and `routing`, workers as numbers where they
are numbers, and JSON values in their own form. Always written, with null where there is nothing:
options, `mdc_sum`, `router_config_override`. Everything else is left out when it is absent. Unknown
fields are ignored; all but `token_ids` may be missing.

What only the log knows (id, tenant, deadline, cache salt) has no place here, nor have requests that
were never tokenised.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw, UnsetType

from app.preprocess.forms import (
    BootstrapForm,
    EmbeddingForm,
    GuidedForm,
    MmRoutingForm,
    Optional,
    OutputForm,
    OverrideForm,
    PrefillForm,
    RequestForm,
    RoutingForm,
    SamplingForm,
    StopForm,
    Worker,
)
from streams.codecs import pack_tokens, unpack_tokens
from streams.errors import Malformed
from streams.records import (
    NO_HINTS,
    BootstrapInfo,
    EmbeddingRequest,
    GuidedDecoding,
    Hints,
    Json,
    MmRoutingInfo,
    MultimodalData,
    OutputOptions,
    PrefillResult,
    Request,
    RouterConfigOverride,
    SamplingOptions,
    StopConditions,
)

T = TypeVar("T", bound=msgspec.Struct)

_requests = msgspec.json.Decoder(RequestForm)
_embeddings = msgspec.json.Decoder(EmbeddingForm)


# --- writing --------------------------------------------------------------------------------------


def to_json(request: Request) -> bytes:
    """The JSON form of a request."""
    info, result, bootstrap = (
        request.mm_routing_info, request.prefill_result, request.bootstrap_info,
    )  # fmt: skip
    media, override = request.multi_modal_data, request.router_config_override
    wire = _copied(
        request,
        RequestForm,
        token_ids=tuple(unpack_tokens(request.token_ids)),
        multi_modal_data=UNSET
        if media is None
        else {part: tuple(map(_medium, data)) for part, data in media.items()},
        mm_routing_info=UNSET
        if info is None
        else MmRoutingForm(tuple(unpack_tokens(info.routing_token_ids)), info.block_mm_infos),
        stop_conditions=_copied(request.stop, StopForm),
        sampling_options=_sampling(request.sampling),
        output_options=_copied(request.output, OutputForm),
        routing=UNSET if request.hints == NO_HINTS else _routing(request.hints),
        router_config_override=None if override is None else _copied(override, OverrideForm),
        prefill_result=UNSET
        if result is None
        else _copied(result, PrefillForm, disaggregated_params=Raw(result.disaggregated_params)),
        bootstrap_info=UNSET if bootstrap is None else _copied(bootstrap, BootstrapForm),
        extra_args=_raw(request.extra_args),
        agent_context=_raw(request.agent_context),
        mm_processor_kwargs=_raw(request.mm_processor_kwargs),
    )
    return msgspec.json.encode(wire)


def embedding_to_json(request: EmbeddingRequest) -> bytes:
    """The JSON form of a request for embeddings."""
    token_ids = tuple(tuple(unpack_tokens(text)) for text in request.token_ids)
    return msgspec.json.encode(_copied(request, EmbeddingForm, token_ids=token_ids))


def _sampling(options: SamplingOptions) -> SamplingForm:
    guided = options.guided_decoding
    return _copied(
        options,
        SamplingForm,
        guided_decoding=None
        if guided is None
        else _copied(
            guided, GuidedForm, json=_raw(guided.json), structural_tag=_raw(guided.structural_tag)
        ),
    )


def _routing(hints: Hints) -> RoutingForm:
    return _copied(
        hints,
        RoutingForm,
        backend_instance_id=_number(hints.backend_instance_id),
        prefill_worker_id=_number(hints.prefill_worker_id),
        decode_worker_id=_number(hints.decode_worker_id),
        allowed_worker_ids=tuple(_number(w) for w in hints.allowed_worker_ids) or UNSET,
    )


def _number(worker: str | None) -> Worker | UnsetType:
    """A worker's id as the number that it is, if it is one."""
    if worker is None:
        return UNSET
    if worker.isascii() and worker.isdigit() and str(int(worker)) == worker and int(worker) < 2**64:
        return int(worker)
    return worker


def _medium(data: MultimodalData) -> dict[str, Raw]:
    if data.kind == "decoded":
        return {"Decoded": Raw(data.decoded or b"null")}
    return {"Url": Raw(msgspec.json.encode(data.url))}


def _raw(value: Json | None) -> Raw | UnsetType:
    return UNSET if value is None else Raw(value)


# --- reading --------------------------------------------------------------------------------------


def from_json(data: bytes, request_id: str = "") -> Request:
    """The request in a JSON form, under an id of ours. Raises Malformed."""
    try:
        request = _request(_requests.decode(data), request_id)
        msgspec.msgpack.encode(request)  # JSON has numbers that the log has not
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as e:
        raise Malformed(f"not a preprocessed request: {e}") from e
    return request


def embedding_from_json(data: bytes, request_id: str = "") -> EmbeddingRequest:
    """The request for embeddings in a JSON form. Raises Malformed."""
    try:
        wire = _embeddings.decode(data)
        texts = tuple(pack_tokens(text) for text in wire.token_ids)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as e:
        raise Malformed(f"not a preprocessed request for embeddings: {e}") from e
    return _copied(wire, EmbeddingRequest, id=request_id, token_ids=texts)


def _request(wire: RequestForm, request_id: str) -> Request:
    media, info = wire.multi_modal_data, wire.mm_routing_info
    result, routing, bootstrap = wire.prefill_result, wire.routing, wire.bootstrap_info
    override = wire.router_config_override
    return _copied(
        wire,
        Request,
        id=request_id,
        token_ids=pack_tokens(wire.token_ids),
        multi_modal_data={part: tuple(map(_data, data)) for part, data in media.items()}
        if media
        else None,
        mm_routing_info=MmRoutingInfo(
            routing_token_ids=pack_tokens(info.routing_token_ids),
            block_mm_infos=info.block_mm_infos,
        )
        if info
        else None,
        stop=_copied(wire.stop_conditions, StopConditions),
        sampling=_options(wire.sampling_options),
        output=_copied(wire.output_options, OutputOptions),
        hints=_hints(routing) if routing else NO_HINTS,
        router_config_override=_copied(override, RouterConfigOverride) if override else None,
        prefill_result=_copied(
            result, PrefillResult, disaggregated_params=bytes(result.disaggregated_params)
        )
        if result
        else None,
        bootstrap_info=_copied(bootstrap, BootstrapInfo) if bootstrap else None,
        extra_args=_json(wire.extra_args),
        agent_context=_json(wire.agent_context),
        mm_processor_kwargs=_json(wire.mm_processor_kwargs),
    )


def _options(wire: SamplingForm) -> SamplingOptions:
    guided = wire.guided_decoding
    return _copied(
        wire,
        SamplingOptions,
        guided_decoding=None
        if guided is None
        else _copied(
            guided,
            GuidedDecoding,
            json=_json(guided.json),
            structural_tag=_json(guided.structural_tag),
        ),
    )


def _hints(wire: RoutingForm) -> Hints:
    allowed = wire.allowed_worker_ids
    if allowed == ():
        raise Malformed("allowed_worker_ids is empty: no worker could be chosen")
    return _copied(
        wire,
        Hints,
        backend_instance_id=_name(wire.backend_instance_id),
        prefill_worker_id=_name(wire.prefill_worker_id),
        decode_worker_id=_name(wire.decode_worker_id),
        allowed_worker_ids=tuple(map(str, allowed)) if allowed else (),
    )


def _name(worker: Optional[Worker]) -> str | None:
    return None if worker is None or worker is UNSET else str(worker)


def _data(wire: dict[str, Raw]) -> MultimodalData:
    """One of {"Url": …}, {"RawUrl": …}, {"Decoded": …}. What is no URL is a raw one."""
    if len(wire) != 1:
        raise Malformed("multi_modal_data: each item has one key, Url, RawUrl or Decoded")
    ((kind, value),) = wire.items()
    if kind == "Decoded":
        return MultimodalData(kind="decoded", decoded=bytes(value))
    if kind not in ("Url", "RawUrl"):
        raise Malformed(f"multi_modal_data: {kind!r} is neither Url nor RawUrl nor Decoded")
    url = msgspec.json.decode(value, type=str)
    return MultimodalData(kind="url" if kind == "Url" and _has_scheme(url) else "raw_url", url=url)


def _has_scheme(url: str) -> bool:
    try:
        return bool(urlsplit(url).scheme)
    except ValueError:
        return False


def _json(value: Raw | UnsetType) -> Json | None:
    """The value as it came; null is as good as none."""
    data = b"null" if value is UNSET else bytes(value)
    return None if data.strip() == b"null" else data


def _copied(source: msgspec.Struct, kind: type[T], **values: Any) -> T:
    """A struct with the fields of `source` that have its names, where those say anything.

    What is absent in one form (unset, null, or as it is by default) is absent in the other.
    """
    known = {field.name: field.default for field in msgspec.structs.fields(source)}
    for field in msgspec.structs.fields(kind):
        if field.name not in values and field.name in known:
            value = getattr(source, field.name)
            if value is not None and value is not UNSET and value != known[field.name]:
                values[field.name] = value
    return kind(**values)
