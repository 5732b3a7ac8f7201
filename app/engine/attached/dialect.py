"""What a server is told: the bodies of completions, in its own words.

Servers agree on OpenAI's fields and on little else. `Speech` is what is found out about one when a
worker is attached to it: whether it takes prompts as tokens, and how its answers give theirs away.
What a request asks for is said in the server's words, left out where it is a wish without
consequences, or refused (InvalidRequest): never dropped where the answer would be another one.

Stop strings and the text of answers are made beside the engine, for all engines alike
(`app/preprocess/stops.py`), so they are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from app.engine.contract import InvalidRequest
from streams.codecs import unpack_tokens
from streams.records import GuidedDecoding, Json, Request

Answers = Literal["token_ids", "log_probs", "text"]
"""Where the tokens of an answer stand: in a field of their own, only in the log probabilities, or
nowhere; then its text is tokenised again."""
TRANSFER = "kv_transfer_params"
FORBIDDEN = -100.0
"""The bias of a token that must not come."""


class Speech(NamedTuple):
    """How one server is spoken to. `owner`: who made it, as its list of models says."""

    model: str
    owner: str = ""
    prompts: Literal["tokens", "text"] = "tokens"
    answers: Answers = "token_ids"
    adapters: frozenset[str] = frozenset()

    @property
    def is_vllm(self) -> bool:
        """Whether all of vLLM's own fields are understood."""
        return self.owner == "vllm"


_OPENAI = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_COMMON = ("top_k", "min_p", "repetition_penalty")
"""Not OpenAI's, but of nearly all that run on GPUs, and passed over by others."""


def body_of(
    request: Request, speech: Speech, max_tokens: int, text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The body of a completion. `text_of`: tokens as text, special ones included.

    Raises InvalidRequest for what the server cannot be asked.
    """
    _refuse(request)
    sampling, stop = request.sampling, request.stop
    tokens = list(unpack_tokens(request.token_ids))
    body: dict[str, Any] = {
        "model": _model(request, speech),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.prompt_embeds is None:
        body["prompt"] = tokens if speech.prompts == "tokens" else text_of(tokens)
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
    if speech.answers == "token_ids":
        body["return_token_ids"] = True
    body |= _log_probs_asked(request, speech)
    return body | (_of_vllm(request, speech) if speech.is_vllm else _of_others(request, speech))


def as_it_came(request: Request, speech: Speech) -> dict[str, Any]:
    """The body of a request that has one already: its own, with what the server has to be told.

    Raises InvalidRequest for what the server cannot be asked.
    """
    assert request.body is not None
    body = _object("body", request.body.json)
    body["model"] = _model(request, speech)
    if request.kind != "embedding":
        given = body.get("stream_options")
        options = given if isinstance(given, dict) else {}
        body |= {"stream": True, "stream_options": options | {"include_usage": True}}
    if request.sampling.seed is not None:  # another one for each of several answers
        body["seed"] = request.sampling.seed
    if request.cache_salt and not speech.is_vllm:
        raise InvalidRequest("cache_salt: the server of this model knows no such thing")
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _of_vllm(request: Request, speech: Speech) -> dict[str, Any]:
    body: dict[str, Any] = {}
    sampling = request.sampling
    if request.id:
        body["request_id"] = request.id
    if speech.prompts == "text":
        body["add_special_tokens"] = False
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if sampling.allowed_token_ids is not None:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if request.stop.max_thinking_tokens is not None:
        body["thinking_token_budget"] = request.stop.max_thinking_tokens
    if (guided := sampling.guided_decoding) is not None:
        body["structured_outputs"] = _structure(guided)
    if request.prompt_embeds is not None:
        body["prompt_embeds"] = request.prompt_embeds
    return body | _extra(request)


def _extra(request: Request) -> dict[str, Any]:
    """Additional arguments; what a prefill has handed over goes before what the request says."""
    body: dict[str, Any] = {}
    extra = _object("extra_args", request.extra_args)
    transfer = extra.pop(TRANSFER, None)
    if request.prefill_result is not None:
        handed = _object("prefill_result", request.prefill_result.disaggregated_params)
        transfer = handed.get(TRANSFER, handed)
    if transfer is not None and not request.is_probe:
        body[TRANSFER] = transfer
    if extra:
        body["vllm_xargs"] = extra
    return body


def _of_others(request: Request, speech: Speech) -> dict[str, Any]:
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
            raise InvalidRequest(f"{field}: the server of this model knows no such thing")
    body: dict[str, Any] = {}
    if speech.owner == "llamacpp" and sampling.repetition_penalty is not None:
        body["repeat_penalty"] = sampling.repetition_penalty
    if guided is None:
        return body
    if guided.json is not None:
        schema = _value("guided_decoding.json", guided.json)
        form = {"name": "answer", "schema": schema}
        return body | {"response_format": {"type": "json_schema", "json_schema": form}}
    if guided.grammar is not None and speech.owner == "llamacpp":
        return body | {"grammar": guided.grammar}
    raise InvalidRequest("guided_decoding: the server of this model knows JSON schemas only")


def _refuse(request: Request) -> None:
    sampling = request.sampling
    if sampling.n not in (None, 1) or sampling.best_of not in (None, 1):
        raise InvalidRequest("n, best_of: a request to an engine has one answer")
    if sampling.use_beam_search or sampling.length_penalty not in (None, 1.0):
        raise InvalidRequest("use_beam_search, length_penalty: no server has beam search here")
    if sampling.detokenize is False:
        raise InvalidRequest("detokenize: an answer always comes with its text")
    if request.output.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: log probabilities of prompts are not passed on")
    if request.multi_modal_data or request.mm_processor_kwargs is not None:
        raise InvalidRequest("multi_modal_data: an attached server is given text only")
    if request.bootstrap_info is not None:
        raise InvalidRequest("bootstrap_info: an attached server meets nobody")
    if not request.token_ids and request.prompt_embeds is None:
        raise InvalidRequest("the prompt is empty")


def _model(request: Request, speech: Speech) -> str:
    name = request.hints.lora_name
    if not name:
        return speech.model
    if name not in speech.adapters:
        raise InvalidRequest(f"lora_name: the server of this worker has no adapter {name!r}")
    return name


def _bias(request: Request) -> dict[str, float]:
    bias = {str(token): value for token, value in (request.sampling.logit_bias or {}).items()}
    for word in request.sampling.bad_words_token_ids or ():
        if len(word) != 1:
            raise InvalidRequest("bad_words_token_ids: a server forbids single tokens only")
        bias[str(word[0])] = FORBIDDEN
    return bias


def _log_probs_asked(request: Request, speech: Speech) -> dict[str, Any]:
    wanted = request.output.logprobs
    if speech.answers == "log_probs":
        wanted = max(wanted or 0, 1)
    if wanted is None:
        return {}
    if speech.answers == "text":
        raise InvalidRequest("logprobs: the server of this model does not say of which tokens")
    return {"logprobs": wanted, "return_tokens_as_token_ids": True}


def _structure(guided: GuidedDecoding) -> dict[str, Any]:
    if guided.backend not in (None, "auto"):
        raise InvalidRequest("guided_decoding_backend: a server has one for all requests")
    forms: dict[str, Any] = {
        "json": guided.json and _value("guided_decoding.json", guided.json),
        "regex": guided.regex,
        "choice": guided.choice and list(guided.choice),
        "grammar": guided.grammar,
        "structural_tag": guided.structural_tag and guided.structural_tag.decode(),
        "whitespace_pattern": guided.whitespace_pattern,
    }
    return {name: form for name, form in forms.items() if form is not None}


def _object(field: str, text: Json | None) -> dict[str, Any]:
    value = {} if text is None else _value(field, text)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is no JSON object")
    return value


def _value(field: str, text: Json) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"{field} is no JSON") from None
