"""Prompts on Kafka: `Prompt` in, `Request`, `Cancel` or `Refused` out.

Every invalid prompt with an id ends in a `Refused` that names the field. A record that is no JSON
object, or has no id, is `UnreadablePrompt`: a dead letter, and its key is answered if it can be an
id. `read_prompt` is pure; `to_request` checks against the model and may wait for the tokenizer.
`ResultRules` decide which prompts get a record on `results`, and where a copy of it may go.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from kvlane.app.preprocess.json_limits import json_error, parse_json
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.preprocess.prompt_errors import (
    BadModel,
    InvalidPrompt,
    PreprocessorOverloaded,
    TooLarge,
    UnknownModel,
    invalid_prompt,
)
from kvlane.app.preprocess.request_reader import prepare, read_request
from kvlane.app.preprocess.requests import openai_requests, passthrough
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.passthrough import PassthroughRequest
from kvlane.app.preprocess.thread_pool import Steps, run_now
from kvlane.streams import ports
from kvlane.streams.prompt import Prompt
from kvlane.streams.record_base import Account, ServiceClass
from kvlane.streams.records import MAX_ID_CHARS, Cancel, EndCode, Refused
from kvlane.streams.request import ReplyAddress, Request, ResultOptions

ResultScope = Literal["requested", "all", "batch"]

MAX_CORRELATION_BYTES = 1024
_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_STYLES = (("reply_to", "correlation_id"), ("kafka_replyTopic", "kafka_correlationId"))
_REPLY_PARTITION = "kafka_replyPartition"
_PARTITION = struct.Struct(">i")

ReadHeaders = Sequence[tuple[str, bytes | None]]


class ResultRules(NamedTuple):
    """Rules of results. A prompt names the topic of a reply in its headers, as FastStream or Spring
    Kafka's ReplyingKafkaTemplate write them (`_STYLES`); the reply has the correlation id.

    `scope`: the setting `KVLANE_RESULTS`. `reply_prefixes`: of the topics that may be written to,
    never those of the deployment, which begin with `own_prefix`.
    """

    scope: ResultScope = "requested"
    reply_prefixes: tuple[str, ...] = ()
    own_prefix: str = "kvlane."

    def options(self, prompt: Prompt, headers: ReadHeaders = ()) -> ResultOptions | None:
        """The options of the result of a prompt; None if it gets no result. Raises InvalidPrompt
        that names the header or the field."""
        if prompt.kind == "cancel":
            return None
        reply = self._reply(headers)
        is_asked = prompt.result or reply is not None
        if self.scope == "batch" and is_asked and not prompt.batch_id:
            field = "result" if prompt.result else "headers"
            raise InvalidPrompt(field, "only batch jobs get results here (KVLANE_RESULTS=batch)")
        if self.scope != "all" and not (is_asked or prompt.batch_id):
            return None
        return ResultOptions(
            kind=prompt.kind,
            metadata=msgspec.json.encode(prompt.metadata),
            batch_id=prompt.batch_id,
            custom_id=prompt.custom_id,
            reply=reply,
        )

    def _reply(self, headers: ReadHeaders) -> ReplyAddress | None:
        given = dict(headers)
        for topic_header, correlation_header in _STYLES:
            if topic := given.get(topic_header):
                correlation = given.get(correlation_header)
                return ReplyAddress(
                    topic=self._topic(topic_header, topic),
                    headers=_correlation(correlation_header, correlation),
                    partition=_partition(given) if topic_header == "kafka_replyTopic" else None,
                )
        return None

    def _topic(self, header: str, value: bytes) -> str:
        name, field = value.decode(errors="replace"), f"headers.{header}"
        if not _TOPIC_NAME.fullmatch(name):
            raise InvalidPrompt(field, "is no name of a topic")
        if not self.reply_prefixes:
            raise InvalidPrompt(field, "no replies are allowed (KVLANE_REPLY_TOPIC_PREFIXES)")
        if not name.startswith(self.reply_prefixes) or name.startswith(self.own_prefix):
            raise InvalidPrompt(
                field, "the topic is not among those allowed (KVLANE_REPLY_TOPIC_PREFIXES)"
            )
        return name


def _correlation(header: str, value: bytes | None) -> tuple[tuple[str, bytes], ...]:
    if value is None:
        return ()
    if len(value) > MAX_CORRELATION_BYTES:
        raise InvalidPrompt(f"headers.{header}", f"has more than {MAX_CORRELATION_BYTES} bytes")
    return ((header, value),)


def _partition(headers: Mapping[str, bytes | None]) -> int | None:
    value = headers.get(_REPLY_PARTITION)
    if value is None:
        return None
    if len(value) != _PARTITION.size or (number := _PARTITION.unpack(value)[0]) < 0:
        raise InvalidPrompt(f"headers.{_REPLY_PARTITION}", "is no number of a partition")
    return int(number)


_OF_RESULTS = ("kind", "result", "metadata", "batch_id", "custom_id")

FindModel = Callable[[str], Awaitable[Model]]
"""The model of a name; raises InvalidPrompt, BadModel, TimeoutError."""
NO_REPLIES = ResultRules()
IsPassthrough = Callable[[object], bool]


class UnreadablePrompt(NamedTuple):
    """A record that goes to dead-letters. `refusal`: the answer to its key, if that is an id."""

    reason: str
    refusal: Refused | None = None


class PromptRecord(NamedTuple):
    prompt: Prompt
    request: OpenAIRequest | PassthroughRequest
    received_ms: int
    result: ResultOptions | None = None


def read_prompt(
    key: bytes | None,
    value: bytes | None,
    received_ms: int,
    passes_on: IsPassthrough = lambda _: False,
    headers: ReadHeaders = (),
    rules: ResultRules = NO_REPLIES,
) -> PromptRecord | Cancel | Refused | UnreadablePrompt:
    """Parse a record of `prompts` in one step. Never raises."""
    return run_now(prompt_steps(key, value, received_ms, passes_on, headers, rules))


def prompt_steps(
    key: bytes | None,
    value: bytes | None,
    received_ms: int,
    passes_on: IsPassthrough,
    headers: ReadHeaders,
    rules: ResultRules,
) -> Steps[PromptRecord | Cancel | Refused | UnreadablePrompt]:
    """Parse a record of `prompts`, in steps that are short enough for the event loop."""
    wanted_id = None
    fields: Mapping[str, Any] = {}
    try:
        found = yield from _fields(value or b"")
        if isinstance(found, str):
            refused = _refused(key, None, InvalidPrompt("", found))
            return UnreadablePrompt(found, refused if isinstance(refused, Refused) else None)
        fields, values = found
        wanted_id = fields.get("id")
        prompt = Prompt.model_validate(fields)
        if prompt.kind == "cancel":
            return Cancel(id=prompt.id, reason="the client cancelled it")
        result = rules.options(prompt, headers)
        as_is = passes_on(prompt.body.get("model"))
        if values:
            yield
        request = _read_body(prompt.kind, prompt.body, values, as_is=as_is)
        if values:
            yield
    except (ValidationError, InvalidPrompt) as e:
        error = invalid_prompt(e) if isinstance(e, ValidationError) else e
        refused = _refused(key, wanted_id, error, _options_of_invalid(fields, rules))
        if isinstance(refused, Refused):
            return replace(refused, account=_account_of_invalid(fields))
        return refused
    return PromptRecord(prompt, request, received_ms, result)


def _fields(value: bytes) -> Steps[tuple[dict[str, Any], int] | str]:
    """The fields of a JSON object and the number of their values, or the parse error. Raises
    TooLarge."""
    if isinstance(value, ports.Unreadable):
        return value.reason
    try:
        fields, values = yield from parse_json(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return f"not a JSON object in UTF-8: {json_error(value, e)}"
    return (fields, values) if isinstance(fields, dict) else "not a JSON object"


def _read_body(
    kind: openai_requests.TokenizedKind | passthrough.PassthroughKind,
    body: dict[str, Any],
    values: int,
    *,
    as_is: bool,
) -> OpenAIRequest | PassthroughRequest:
    """The request in the body. Raises InvalidPrompt with the field's path from the prompt on."""
    try:
        return read_request(kind, body, as_is=as_is, values=values)
    except InvalidPrompt as e:
        raise type(e)(f"body.{e.field}" if e.field else "body", e.message) from None


async def to_request(
    parsed: PromptRecord,
    find: FindModel,
    deadline_s: float,
    service_class: ServiceClass = "interactive",
    traceparent: str = "",
) -> Request | Refused:
    """The request of a prompt. Raises nothing that is about this prompt. `deadline_s` counts for
    prompts that name none; `service_class`: of the prompt's topic."""
    prompt, request, received_ms, result = parsed
    account = Account(prompt.tenant, prompt.key_id, request.model or "", "", service_class)
    refuse = partial(Refused, id=prompt.id, result=result, account=account)
    if request.n != 1:
        message = "body.n: one answer a request; publish several requests"
        return refuse(code="invalid", message=message)
    try:
        model = await find(request.model)
        requests, texts = await prepare(request, model, prompt.tenant)
    except InvalidPrompt as e:
        message = f"body.{e}" if e.field else f"body: {e}"
        return refuse(code=_code_of(e), message=message)
    except (BadModel, PreprocessorOverloaded, TimeoutError) as e:
        message = f"body.model: it cannot be used at the moment: {e}"
        return refuse(code="internal", message=message)
    if len(requests) != 1:
        return refuse(code="invalid", message=f"body.{request.field}: one prompt a request")
    if result is not None and request.echo:
        result = replace(result, echo=texts[0] or "")
    return replace(
        requests[0],
        id=prompt.id,
        tenant=prompt.tenant,
        key_id=prompt.key_id,
        deadline_s=prompt.deadline_s if "deadline_s" in prompt.model_fields_set else deadline_s,
        received_ms=received_ms,
        queued_ms=received_ms,
        result=result,
        service_class=service_class,
        traceparent=traceparent,
    )


def _options_of_invalid(fields: Mapping[str, Any], rules: ResultRules) -> ResultOptions | None:
    """The result options of an invalid prompt, if they are valid themselves; without a reply."""
    try:
        options = {name: fields[name] for name in _OF_RESULTS if name in fields}
        return rules.options(Prompt.model_validate(options | {"id": "-"}))
    except (ValidationError, InvalidPrompt):
        return None


def _account_of_invalid(fields: Mapping[str, Any]) -> Account | None:
    """The account of an invalid prompt, if its fields are valid themselves."""
    try:
        named = {name: fields[name] for name in ("tenant", "key_id") if name in fields}
        prompt = Prompt.model_validate(named | {"id": "-"})
    except ValidationError:
        return None
    return Account(prompt.tenant, prompt.key_id)


def _refused(
    key: bytes | None, wanted_id: Any, error: InvalidPrompt, result: ResultOptions | None = None
) -> Refused | UnreadablePrompt:
    """Answer to the id in the prompt, else to the record's key, if either can be an id."""
    for candidate in (wanted_id, _text(key)):
        if isinstance(candidate, str) and 0 < len(candidate) <= MAX_ID_CHARS:
            return Refused(id=candidate, code=_code_of(error), message=str(error), result=result)
    return UnreadablePrompt(str(error))


def _code_of(error: InvalidPrompt) -> EndCode:
    match error:
        case TooLarge():
            return "too_large"
        case UnknownModel():
            return "model_not_found"
    return "invalid"


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None
