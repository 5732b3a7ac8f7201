"""Endpoints for chats, completions and embeddings: from HTTP request to streamed response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from opentelemetry.trace import Span, SpanKind
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvlane.app.http.api_errors import ApiError, invalid_request
from kvlane.app.http.openai.event_encoder import EventEncoder, ResponseOptions
from kvlane.app.http.openai.gateway_deps import DEADLINE_MARGIN_S, GatewayDeps
from kvlane.app.http.openai.logprobs import TokenText
from kvlane.app.http.openai.merged_replies import publish_and_read
from kvlane.app.http.openai.openai_responses import Choice, EndpointKind, ResponseHeader
from kvlane.app.http.openai.response_writer import CompletionResponse, EncoderFactory
from kvlane.app.http.server.caller import Caller, caller_of
from kvlane.app.http.server.middleware import BodyLimiter, Hold
from kvlane.app.preprocess.json_limits import check_size, json_error, parse_json
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.preprocess.models.model import PreparedPrompts
from kvlane.app.preprocess.models.model_aliases import choice_key
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, renamed
from kvlane.app.preprocess.request_reader import (
    TOO_DEEP,
    check_supported,
    prepare,
    read_request,
    with_supported_features,
)
from kvlane.app.preprocess.requests import openai_requests
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.passthrough import PassthroughRequest
from kvlane.app.preprocess.thread_pool import Steps, run_cooperatively
from kvlane.app.runtime import spans
from kvlane.streams.ids import issued_ms
from kvlane.streams.request import Request, ResultOptions, StoredInput

DETACH_HEADER = "x-kvlane-detach"


class ReadBody(NamedTuple):
    """The fields of a body in OpenAI's form, and the encoder of its answer. `is_background`: the
    answer continues without its client, and a response without a stream is sent at once. `values`:
    those of an added history, as `parse_json` counts them; `conversation`: the id of its first
    response; `names`: of fields in the body that is in another form (`renamed`)."""

    fields: dict[str, Any]
    encoder: EncoderFactory = EventEncoder
    is_background: bool = False
    stored: StoredInput | None = None
    values: int = 0
    conversation: str = ""
    names: Mapping[str, str] | None = None


BodyReader = Callable[[dict[str, Any], Hold], Awaitable[ReadBody]]


async def read_as_sent(fields: dict[str, Any], _: Hold) -> ReadBody:
    return ReadBody(fields)


class PreparedBody(NamedTuple):
    """A body as requests. `first_id`: of the first one."""

    parsed: OpenAIRequest | PassthroughRequest
    prompts: PreparedPrompts
    model: Model
    read: ReadBody
    first_id: str


class Completions:
    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts
        self._bodies = BodyLimiter(parts.settings.http_max_body_bytes)

    async def create_chat_completion(self, request: HttpRequest) -> Response:
        return await self.answer("chat", request)

    async def create_completion(self, request: HttpRequest) -> Response:
        return await self.answer("completion", request)

    async def create_embeddings(self, request: HttpRequest) -> Response:
        return await self.answer("embedding", request)

    async def answer(
        self, kind: EndpointKind, request: HttpRequest, read: BodyReader = read_as_sent
    ) -> Response:
        """Answer a request; `kind`: that of its body. Raises ApiError and PreprocessError."""
        received = spans.valid_traceparent(request.headers.get(spans.TRACEPARENT))
        span = spans.start_first_span("gateway.request", received, SpanKind.SERVER)
        try:
            traceparent = spans.traceparent_of(span, received)
            return await self._response(kind, request, read, span, traceparent)
        except BaseException as e:
            status = e.status if isinstance(e, ApiError) else 0
            spans.set_error(span, type(e).__name__, is_server_error=status >= 500)
            span.end()
            raise

    async def prepare(
        self, kind: EndpointKind, request: HttpRequest, read: BodyReader
    ) -> PreparedBody:
        """The body of a request, checked and tokenised. Raises ApiError and PreprocessError."""
        caller = caller_of(request)
        await caller.count_request()
        async with self._bodies.read(request) as body:
            fields, values = await run_cooperatively(parse_body(body.content))
            try:
                body_read = await read(fields, body.hold)
            except RecursionError:
                raise InvalidPrompt("", TOO_DEEP) from None
            try:
                return await self._prepare(kind, request, body_read, values + body_read.values)
            except InvalidPrompt as e:
                if body_read.names is None:
                    raise
                raise renamed(e, body_read.names) from e

    async def _prepare(
        self, kind: EndpointKind, request: HttpRequest, body_read: ReadBody, values: int
    ) -> PreparedBody:
        parts, caller, fields = self._parts, caller_of(request), body_read.fields
        aliases = parts.served_models.aliases
        as_is = aliases.kind(fields.get("model")) != "tokens"
        parsed = read_request(kind, fields, request.headers, as_is=as_is, values=values)
        is_stored = body_read.stored is not None and not parsed.is_query
        first_id = parts.streams.new_id(caller.tenant, is_stored=is_stored)
        key = choice_key(parsed, caller.tenant, body_read.conversation or first_id)
        name = aliases.model(parsed.model, key)
        model = await parts.catalog.model(kind, name)
        unsupported = parts.served_models.model(name).unsupported
        check_supported(parsed, unsupported)
        if values:  # a large body, which was parsed in steps
            await asyncio.sleep(0)
        prepared = await prepare(parsed, model, caller.cache_tenant)
        requests = with_supported_features(prepared.requests, unsupported)
        prepared = prepared._replace(requests=requests)
        return PreparedBody(parsed, prepared, model, body_read, first_id)

    async def _response(
        self,
        kind: EndpointKind,
        request: HttpRequest,
        read: BodyReader,
        span: Span,
        traceparent: str,
    ) -> Response:
        parts, caller = self._parts, caller_of(request)
        began_at = parts.ctx.clock.now()
        parsed, prepared, model, form, first_id = await self.prepare(kind, request, read)
        answers = len(prepared.requests) * parsed.n
        if answers > 1 and prepared.requests[0].is_query:
            raise invalid_request(
                "a dry run is about one prompt and one answer", "nvext.annotations"
            )
        if prepared.requests[0].is_query:
            caller.require_operator("dry runs")
        parts.streams.check_capacity(answers)
        detached = form.is_background or request.headers.get(DETACH_HEADER, "").lower() == "true"
        choices = self._choices(parsed, prepared, model)
        requests = self._one_request_each(
            self._with_results(kind, parsed, prepared, form.stored), parsed.n, caller, traceparent,
            first_id,
        )  # fmt: skip
        await caller.count_answers(requests, parsed.n, choices, model.card.context_length)
        options = ResponseOptions(
            header=ResponseHeader(kind, requests[0].id, parsed.model, created_s(requests[0].id)),
            ids=[each.id for each in requests],
            stream=parsed.stream,
            include_usage=parsed.include_usage,
            n=parsed.n,
            reads_to_end=detached and caller.is_counted,
            interval=parsed.stream_interval,
            is_background=form.is_background,
            served_model=requests[0].model if requests[0].alias else "",
        )
        return CompletionResponse(
            options,
            choices,
            publish_and_read(parts.streams, requests, detached=detached),
            parts.ctx.clock,
            parts.metrics,
            parts.settings.deadline_s + DEADLINE_MARGIN_S,
            began_at,
            span,
            encoder=form.encoder,
        )

    def _choices(
        self, parsed: OpenAIRequest | PassthroughRequest, prepared: PreparedPrompts, model: Model
    ) -> list[Choice]:
        choices = []
        spelling = None
        if parsed.echo:
            check_size(sum(len(text or "") for text in prepared.texts) * parsed.n, "texts")
        if isinstance(parsed, OpenAIRequest) and parsed.body.top_logprobs_count() is not None:
            as_ids = parsed.body.return_tokens_as_token_ids
            spelling = TokenText(model.token_bytes, as_ids=bool(as_ids))
        for number, (request, text) in enumerate(zip(*prepared, strict=True)):
            if parsed.echo and text is None:
                raise invalid_request(f"echo: the prompt at {number} is no text", "echo")
            tokens = request.prompt_tokens
            self._parts.metrics.prompt_tokens.observe(tokens)
            before = text if parsed.echo and text is not None else ""
            counted = None if request.body is not None else tokens
            choices += [
                Choice(counted, before=before, keep=not parsed.stream, spelling=spelling)
                for _ in range(parsed.n)
            ]
        return choices

    def _with_results(
        self,
        kind: EndpointKind,
        parsed: OpenAIRequest | PassthroughRequest,
        prompts: PreparedPrompts,
        stored: StoredInput | None,
    ) -> Sequence[Request]:
        is_wanted = self._parts.settings.results == "all" or stored is not None
        if not is_wanted or prompts.requests[0].is_query:
            return prompts.requests
        return [
            replace(
                request,
                result=ResultOptions(
                    kind=kind, echo=(text or "") if parsed.echo else "", stored=stored
                ),
            )
            for request, text in zip(*prompts, strict=True)
        ]

    def _one_request_each(
        self, requests: Sequence[Request], n: int, caller: Caller, traceparent: str, first_id: str
    ) -> list[Request]:
        """One request for each answer; answers to the same prompt are adjacent."""
        parts, options = self._parts, requests[0].result
        is_stored = options is not None and options.stored is not None
        more = (parts.streams.new_id(caller.tenant, is_stored=is_stored) for _ in count(1))
        ids = chain([first_id], more)
        return [
            replace(
                openai_requests.nth_request(request, number),
                id=next(ids),
                deadline_s=parts.settings.deadline_s,
                received_ms=parts.ctx.clock.wall_ms(),
                traceparent=traceparent,
            )
            for request in (caller.with_tenant(each, parts.streams.seal) for each in requests)
            for number in range(n)
        ]


def created_s(request_id: str) -> int:
    """Start time of an answer in seconds since 1970, the same at every gateway."""
    return (issued_ms(request_id) or 0) // 1000


def parse_body(body: bytes) -> Steps[tuple[dict[str, Any], int]]:
    """The fields of a body, and the number of their values (`ParsedJson`). Raises ApiError for a
    body that is no JSON object, TooLarge for one above the limits."""
    try:
        fields, values = yield from parse_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise invalid_request(
            f"the body is not JSON: {json_error(body, e)}", code="invalid_json"
        ) from None
    if not isinstance(fields, dict):
        raise invalid_request("the body is not a JSON object", code="invalid_json")
    if values:
        yield
    return fields, values
