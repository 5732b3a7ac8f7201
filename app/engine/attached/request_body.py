"""Request bodies for a server, in its dialect of the OpenAI API (`ServerDialect`).

Each field of a request is translated, omitted if the answer does not depend on it, or refused with
InvalidRequest. Stop strings are not sent: `app/text/stop_conditions.py` handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from kvlane.app.engine.interface import KV_TRANSFER_FIELD, InvalidRequest, refuse_unknown_options
from kvlane.app.engine.media_urls import refuse_media
from kvlane.app.text.answer_forms import after_reasoning
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.record_base import JsonText
from kvlane.streams.request import GuidedDecoding, Request

AnswerTokens = Literal["token_ids", "log_probs", "text"]
"""Where an answer has its token ids: in their own field, only in the log probabilities, or nowhere;
then its text is tokenised again."""
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""The bootstrap host of requests that a SGLang server in disaggregation mode answers alone."""
FORBIDDEN_BIAS = -100.0
"""The logit bias of a forbidden token."""


class ServerDialect(NamedTuple):
    """The API dialect of one server. `vendor`: `owned_by` in its list of models.
    `is_disaggregated`: a SGLang server that needs another one for each request."""

    model: str
    vendor: str = ""
    prompt_form: Literal["tokens", "text"] = "tokens"
    answer_tokens: AnswerTokens = "token_ids"
    adapters: frozenset[str] = frozenset()
    is_disaggregated: bool = False

    @property
    def is_vllm(self) -> bool:
        return self.vendor == "vllm"


_OPENAI = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_COMMON = ("top_k", "min_p", "repetition_penalty")
"""Not OpenAI's, but supported by nearly all GPU servers and ignored by others."""


def completion_body(
    request: Request,
    dialect: ServerDialect,
    max_tokens: int,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """The body of a completion. `text_of`: converts tokens to text, special ones included. Raises
    InvalidRequest for a field that the server does not support."""
    _refuse(request, dialect)
    sampling, stop = request.sampling, request.stop
    tokens = list(unpack_tokens(request.token_ids))
    body: dict[str, Any] = {
        "model": _model(request, dialect),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.prompt_embeds is None:
        body["prompt"] = tokens if dialect.prompt_form == "tokens" else text_of(tokens)
    for name in (*_OPENAI, *_COMMON):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    if stop.min_tokens:
        body["min_tokens"] = stop.min_tokens
    if stop.ignore_eos:
        body["ignore_eos"] = True
    hidden = () if stop.ignore_eos else (*stop.stop_token_ids_hidden, *request.eos_token_ids)
    if ends := [*stop.stop_token_ids, *hidden]:
        body["stop_token_ids"] = ends
    if bias := _bias(request):
        body["logit_bias"] = bias
    if dialect.answer_tokens == "token_ids":
        body["return_token_ids"] = True
    body |= _log_prob_fields(request, dialect)
    return body | (_of_vllm(request, dialect) if dialect.is_vllm else _of_others(request, dialect))


def prefill_body(
    request: Request, dialect: ServerDialect, text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The body of a prefill: a completion of one token, whose response has transfer parameters.

    No stream, which would lack them. On the bootstrap path there are none, and the response comes
    after the transfer. Raises as `completion_body`.
    """
    body = completion_body(request, dialect, 1, text_of)
    del body["stream"], body["stream_options"]
    body.pop("min_tokens", None)
    if dialect.is_disaggregated:
        return body
    return body | {KV_TRANSFER_FIELD: {"do_remote_decode": True, "do_remote_prefill": False}}


def passthrough_body(
    request: Request, dialect: ServerDialect, media_hosts: Collection[str] = ()
) -> dict[str, Any]:
    """The client's own body, with the fields that the server needs.

    `media_hosts`: from which the server may fetch media. Raises InvalidRequest for other media, and
    for a field that the server does not support.
    """
    assert request.body is not None
    body = _object("body", request.body.json)
    refuse_media(body, media_hosts)
    body["model"] = _model(request, dialect)
    if request.kind != "embedding":
        given = body.get("stream_options")
        options = given if isinstance(given, dict) else {}
        body |= {"stream": True, "stream_options": options | {"include_usage": True}}
    if request.sampling.seed is not None:  # differs between the answers of one request
        body["seed"] = request.sampling.seed
    if request.cache_salt and not dialect.is_vllm:
        raise InvalidRequest("cache_salt: not supported by the server of this model")
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _of_vllm(request: Request, dialect: ServerDialect) -> dict[str, Any]:
    body: dict[str, Any] = {}
    sampling = request.sampling
    if request.id:
        body["request_id"] = request.id
    if dialect.prompt_form == "text":
        body["add_special_tokens"] = False
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if sampling.allowed_token_ids is not None:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if request.stop.max_thinking_tokens is not None:
        body["thinking_token_budget"] = request.stop.max_thinking_tokens
    if (guided := after_reasoning(sampling.guided_decoding, request.parsing)) is not None:
        body["structured_outputs"] = _structure(guided)
    if request.prompt_embeds is not None:
        body["prompt_embeds"] = request.prompt_embeds
    return body | _extra(request)


def _extra(request: Request) -> dict[str, Any]:
    """Additional arguments, and the transfer of a prefill. Raises InvalidRequest for a transfer in
    the arguments, which a client may have written."""
    body: dict[str, Any] = {}
    extra = _object("extra_args", request.extra_args)
    if KV_TRANSFER_FIELD in extra:
        raise InvalidRequest(
            f"extra_args.{KV_TRANSFER_FIELD}: reserved for transfers between servers"
        )
    if request.prefill_result is not None and not request.is_probe:
        handed = _object("prefill_result", request.prefill_result.disaggregated_params)
        body[KV_TRANSFER_FIELD] = handed.get(KV_TRANSFER_FIELD, handed)
    if extra:
        body["vllm_xargs"] = extra
    return body


def _of_others(request: Request, dialect: ServerDialect) -> dict[str, Any]:
    sampling, guided = request.sampling, request.sampling.guided_decoding
    unknown = {
        "cache_salt": request.cache_salt,
        "allowed_token_ids": sampling.allowed_token_ids,
        "max_thinking_tokens": request.stop.max_thinking_tokens,
        "prompt_embeds": request.prompt_embeds,
        "extra_args": request.extra_args,
        "prefill_result": request.prefill_result,
    }
    for field, value in unknown.items():
        if value:
            raise InvalidRequest(f"{field}: not supported by the server of this model")
    body: dict[str, Any] = _meeting(request) if dialect.is_disaggregated else {}
    if dialect.vendor == "llamacpp" and sampling.repetition_penalty is not None:
        body["repeat_penalty"] = sampling.repetition_penalty
    if guided is None:
        return body
    if guided.json is not None:
        schema = _value("guided_decoding.json", guided.json)
        form = {"name": "answer", "schema": schema}
        return body | {"response_format": {"type": "json_schema", "json_schema": form}}
    if guided.grammar is not None and dialect.vendor == "llamacpp":
        return body | {"grammar": guided.grammar}
    raise InvalidRequest("guided_decoding: the server of this model supports JSON schemas only")


def _meeting(request: Request) -> dict[str, Any]:
    """Room and address of a SGLang pair of servers. Raises InvalidRequest for a whole request."""
    if request.is_probe:
        return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
    info = request.bootstrap_info
    if info is None:
        raise InvalidRequest(
            "a server in disaggregation mode serves no request alone: set "
            "KVLANE_ATTACH_BOOTSTRAP of its prefill workers, and KVLANE_ENFORCE_DISAGGREGATION of "
            "the routers"
        )
    return {
        "bootstrap_host": info.bootstrap_host,
        "bootstrap_port": info.bootstrap_port,
        "bootstrap_room": info.bootstrap_room,
    }


def _refuse(request: Request, dialect: ServerDialect) -> None:
    refuse_unknown_options(request, "beam search is not supported")
    if request.multi_modal_data or request.mm_processor_kwargs is not None:
        raise InvalidRequest("multi_modal_data: an attached server receives text only")
    if request.bootstrap_info is not None and not dialect.is_disaggregated:
        raise InvalidRequest("bootstrap_info: not supported by the server of this worker")
    if not request.token_ids and request.prompt_embeds is None:
        raise InvalidRequest("the prompt is empty")


def _model(request: Request, dialect: ServerDialect) -> str:
    name = request.hints.lora_name
    if not name:
        return dialect.model
    if name not in dialect.adapters:
        raise InvalidRequest(f"lora_name: the server of this worker has no adapter {name!r}")
    return name


def _bias(request: Request) -> dict[str, float]:
    bias = {str(token): value for token, value in (request.sampling.logit_bias or {}).items()}
    for word in request.sampling.bad_words_token_ids or ():
        if len(word) != 1:
            raise InvalidRequest("bad_words_token_ids: a server can forbid single tokens only")
        bias[str(word[0])] = FORBIDDEN_BIAS
    return bias


def _log_prob_fields(request: Request, dialect: ServerDialect) -> dict[str, Any]:
    wanted = request.output.logprobs
    if dialect.answer_tokens == "log_probs":
        wanted = max(wanted or 0, 1)
    if wanted is None:
        return {}
    if dialect.answer_tokens == "text":
        raise InvalidRequest("logprobs: the server of this model returns none with token ids")
    return {"logprobs": wanted, "return_tokens_as_token_ids": True}


def _structure(guided: GuidedDecoding) -> dict[str, Any]:
    if guided.backend not in (None, "auto"):
        raise InvalidRequest("guided_decoding_backend: a server has one backend for all requests")
    forms: dict[str, Any] = {
        "json": guided.json and _value("guided_decoding.json", guided.json),
        "regex": guided.regex,
        "choice": guided.choice and list(guided.choice),
        "grammar": guided.grammar,
        "structural_tag": guided.structural_tag and guided.structural_tag.decode(),
        "whitespace_pattern": guided.whitespace_pattern,
    }
    return {name: form for name, form in forms.items() if form is not None}


def _object(field: str, text: JsonText | None) -> dict[str, Any]:
    value = {} if text is None else _value(field, text)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is not a JSON object")
    return value


def _value(field: str, text: JsonText) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"{field} is not valid JSON") from None
