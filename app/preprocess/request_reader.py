"""Front door of every request body: from parsed JSON to a checked request, then to `Request`s.

    fields, headers ──read_request──► OpenAIRequest or PassthroughRequest ──prepare──► `Request`s

A body is turned into tokens (`openai_requests.py`), or forwarded unchanged to the server behind the
engine (`passthrough.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvlane.app.preprocess.json_limits import MAX_RENDERED_VALUES
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.preprocess.models.model import PreparedPrompts
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, TooLarge
from kvlane.app.preprocess.requests import openai_requests, passthrough
from kvlane.app.preprocess.requests.answer_parsing import enforced_calls
from kvlane.app.preprocess.requests.guided_decoding import guided_field
from kvlane.app.preprocess.requests.nvext import NvExt
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.passthrough import PassthroughRequest
from kvlane.app.preprocess.requests.unsupported_fields import refuse_reserved
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.text.answer_parsers import PARSER_VERSION
from kvlane.streams.records import GUIDED_DECODING_FEATURE, LOGPROBS_FEATURE, WorkerCard
from kvlane.streams.request import Request

TOO_DEEP = "is nested too deep"
ANSWER_PARSING_FEATURE = "answer_parsing"
"""Lacked by workers of another version, in a rolling upgrade: answers stay text until its end."""


def read_request(
    kind: openai_requests.TokenizedKind | passthrough.PassthroughKind,
    fields: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    as_is: bool,
    values: int = 0,
) -> OpenAIRequest | PassthroughRequest:
    """Check a body. `as_is`: its model takes bodies unchanged. `values`: as counted by
    `parse_json`. Raises InvalidPrompt that names the field or the header."""
    try:
        refuse_reserved(fields)
        if kind == "tokens":
            flattened = flatten(fields)
            try:
                return openai_requests.read_openai("tokens", flattened.fields, headers)
            except InvalidPrompt as e:
                raise type(e)(flattened.path_of(e.field), e.message) from None
        if as_is or kind == "embedding":
            return passthrough.read_passthrough(kind, fields, headers)
        request = openai_requests.read_openai(kind, fields, headers)
        _check_rendered(kind, request.ext, values)
    except RecursionError:
        raise InvalidPrompt("", TOO_DEEP) from None
    return request


async def prepare(
    request: OpenAIRequest | PassthroughRequest, model: Model, tenant: str = ""
) -> PreparedPrompts:
    """The requests for a checked body, by the name of the model itself, and the alias that the body
    names. `tenant`: as for `Model.prepare`. Raises InvalidPrompt, PreprocessorOverloaded,
    BadModel."""
    try:
        if isinstance(request, OpenAIRequest):
            prepared = await model.prepare(request, tenant)
        else:
            requests = request.requests(model.card)
            prepared = PreparedPrompts(requests, (None,) * len(requests))
    except RecursionError:  # encoding needs more stack per level than parsing did
        raise InvalidPrompt("", TOO_DEEP) from None
    if (name := model.card.name) in ("", request.model):
        return prepared
    named = (replace(each, model=name, alias=request.model) for each in prepared.requests)
    return prepared._replace(requests=tuple(named))


def _check_rendered(kind: str, ext: NvExt, values: int) -> None:
    """Raise TooLarge for a chat with more values than a template may render."""
    if kind != "chat" or ext.token_data is not None:
        return
    if ext.mm_routing_info is not None:
        values -= len(ext.mm_routing_info.routing_token_ids)
    if values > MAX_RENDERED_VALUES:
        raise TooLarge("", f"it has {values} values; a chat may have {MAX_RENDERED_VALUES}")


def lacking_features(cards: Iterable[WorkerCard]) -> Mapping[str, str]:
    """The features that one or more of these workers lack, and the name of one such engine."""
    engines: dict[str, str] = {}
    for card in cards:
        names = (name for name in card.versions if name != "kvlane")
        engine = next(names, f"of worker {card.id}")
        engines |= dict.fromkeys(card.config.unsupported, engine)
        if card.parser_version != PARSER_VERSION:
            engines[ANSWER_PARSING_FEATURE] = engine
    return engines


def unsupported_features(fleet: Fleet, model: str) -> Mapping[str, str]:
    """As `lacking_features`, of a model's workers; a request may go to any of them."""
    members = (member.card for _, member in fleet.live_members())
    return lacking_features(card for card in members if card.model == model)


def with_supported_features(
    requests: Sequence[Request], unsupported: Collection[str]
) -> tuple[Request, ...]:
    """The requests of a checked body, without the parsing of answers and the form of strict calls
    where a worker lacks them."""
    if ANSWER_PARSING_FEATURE in unsupported:
        requests = [replace(request, parsing=None) for request in requests]
    if GUIDED_DECODING_FEATURE in unsupported:
        requests = [
            replace(request, sampling=replace(request.sampling, guided_decoding=None))
            if request.sampling.guided_decoding is not None
            else request
            for request in requests
        ]
    return tuple(requests)


def check_supported(
    request: OpenAIRequest | PassthroughRequest, unsupported: Mapping[str, str]
) -> None:
    """Raises InvalidPrompt that names the first field that asks for an unsupported feature."""
    if isinstance(request, PassthroughRequest):
        return
    calls, engine = enforced_calls(request), unsupported.get(GUIDED_DECODING_FEATURE)
    if calls and engine:
        raise InvalidPrompt(calls, f"the engine {engine} cannot enforce calls: use auto or none")
    if calls and ANSWER_PARSING_FEATURE in unsupported:
        raise InvalidPrompt(calls, "needs workers of this version: use auto until all are replaced")
    if engine and (field := guided_field(request.body)):
        raise InvalidPrompt(field, f"the engine {engine} cannot enforce the form of an answer")
    if LOGPROBS_FEATURE in unsupported:
        given = {
            "logprobs": request.body.top_logprobs_count(),
            "prompt_logprobs": request.body.prompt_logprobs,
        }
        for name, wanted in given.items():
            if wanted is not None:
                raise InvalidPrompt(name, "the engine of this model gives no log probabilities")


_GROUPS: Mapping[str, Mapping[str, str]] = {
    "": {name: f"nvext.{name}" for name in (
        "annotations", "router_config_override", "extra_args", "agent_context",
        "request_timestamp_ms", "router", "mm_routing_info",
    )},
    "stop_conditions": {
        "max_tokens": "max_tokens", "stop": "stop", "stop_token_ids": "stop_token_ids",
        "stop_token_ids_hidden": "stop_token_ids_hidden", "min_tokens": "min_tokens",
        "ignore_eos": "ignore_eos", "max_thinking_tokens": "nvext.max_thinking_tokens",
    },
    "sampling_options": {name: name for name in (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output",
        "allowed_token_ids", "bad_words_token_ids", "logit_bias",
    )},
    "sampling_options.guided_decoding": {
        "json": "structured_outputs.json", "regex": "structured_outputs.regex",
        "choice": "structured_outputs.choice", "grammar": "structured_outputs.grammar",
        "structural_tag": "structured_outputs.structural_tag",
        "whitespace_pattern": "structured_outputs.whitespace_pattern",
        "backend": "guided_decoding_backend",
    },
    "output_options": {name: name for name in (
        "logprobs", "prompt_logprobs", "skip_special_tokens", "return_tokens_as_token_ids",
    )},
    "routing": {
        "expected_output_tokens": "nvext.agent_hints.osl",
        "priority_jump": "nvext.agent_hints.priority_jump",
        "priority": "nvext.agent_hints.priority",
        "strict_priority": "nvext.agent_hints.strict_priority",
    } | {name: f"nvext.{name}" for name in (
        "backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank",
        "prefill_dp_rank", "lora_name", "allowed_worker_ids", "routing_constraints",
        "session_control", "queue_class",
    )},
}  # fmt: skip
"""By group, the field of a body that each of its fields becomes."""


class Flattened(NamedTuple):
    """The fields of a `TokensBody`. `paths`: of a field that was moved, its path in the form."""

    fields: Mapping[str, Any]
    paths: Mapping[str, str]

    def path_of(self, field: str) -> str:
        for moved, path in self.paths.items():
            if field == moved or field.startswith(f"{moved}."):
                return path + field[len(moved) :]
        return field


def flatten(fields: Mapping[str, Any]) -> Flattened:
    """The fields of a `TokensBody` for a preprocessed request in NVIDIA Dynamo's JSON form, whose
    options stand in groups. Null is absent; `mdc_sum`, of another deployment's card, is ignored.

    Raises InvalidPrompt for a group that is no object, and an option that is given in both forms.
    """
    flat = {name: value for name, value in fields.items() if value is not None}
    paths: dict[str, str] = {}
    for group, options in _GROUPS.items():
        for name, target in options.items():
            path = f"{group}.{name}" if group else name
            if (value := _value(fields, path)) is None:
                continue
            _put(flat, target, path, value)
            if target != path:
                paths[target] = path
    return Flattened(flat, paths)


def _value(fields: Mapping[str, Any], path: str) -> Any:
    """The value at a path, or None. Raises InvalidPrompt for a group that is no object."""
    *groups, name = path.split(".")
    at: Any = fields
    for depth, group in enumerate(groups, 1):
        at = at.get(group)
        if at is None:
            return None
        if not isinstance(at, dict):
            raise InvalidPrompt(".".join(groups[:depth]), "must be an object")
    return at.get(name)


def _put(fields: dict[str, Any], target: str, path: str, value: Any) -> None:
    """Set a field by its path. The objects on the way are copied: they are the client's."""
    *groups, name = target.split(".")
    at = fields
    for group in groups:
        inner = at.get(group)
        if inner is not None and not isinstance(inner, dict):
            raise InvalidPrompt(group, "must be an object")
        at[group] = at = dict(inner or {})
    if at.get(name) is not None and target != path:
        raise InvalidPrompt(path, f"is given twice, as {target} too")
    at[name] = value
