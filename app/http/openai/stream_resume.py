"""Endpoints for existing streams: resume reading after a broken connection, or cancel.

Any gateway can serve them: the id shows the tenant of the stream. The URL names the form of the
response, since the log of an answer does not hold it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from http import HTTPStatus
from typing import NamedTuple, get_args
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.api_errors import ApiError, error_of_stream, invalid_request, unknown_stream
from kvlane.app.http.openai.event_encoder import EventEncoder, ResponseOptions
from kvlane.app.http.openai.gateway_deps import DEADLINE_MARGIN_S, GatewayDeps
from kvlane.app.http.openai.logprobs import TokenText
from kvlane.app.http.openai.merged_replies import MergedReplies, ResumedReply, resume_replies
from kvlane.app.http.openai.openai_responses import Choice, EndpointKind, ResponseHeader
from kvlane.app.http.openai.response_writer import CompletionResponse, EncoderFactory
from kvlane.app.http.server.caller import caller_of
from kvlane.app.preprocess.prompt_errors import PreprocessError
from kvlane.app.preprocess.requests.request_models import MAX_CHOICES
from kvlane.streams.errors import StreamError
from kvlane.streams.ids import issued_ms
from kvlane.streams.records import MAX_ID_CHARS, Chunk
from kvlane.streams.responses.reply_reader import may_begin

UNDATED_START_S = 5.0


class ResumedForm(NamedTuple):
    """The form of a resumed answer. `counts_tokens`: its positions are those of the log."""

    kind: EndpointKind
    encoder: EncoderFactory = EventEncoder
    counts_tokens: bool = True


_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


class StreamResume:
    def __init__(self, parts: GatewayDeps, item_forms: Mapping[str, EncoderFactory]) -> None:
        """`item_forms`: encoders of the forms whose positions are not those of the log."""
        self._parts = parts
        self._lifetime_s = parts.settings.max_lifetime_s + DEADLINE_MARGIN_S
        self._forms = {kind: ResumedForm(kind) for kind in get_args(EndpointKind)} | {
            name: ResumedForm("chat", encoder, counts_tokens=False)
            for name, encoder in item_forms.items()
        }

    async def resume(self, request: Request) -> Response:
        """Send a stream from a position on, or those of a response with several answers, whose ids
        and positions are separated by commas. Raises ApiError.

        Query: `from` (a position; the header Last-Event-ID counts more), `form` (chat …),
        `stream` (false: the whole answer, when it is there), `include_usage`.
        """
        request_ids, caller = self._ids_of(request), caller_of(request)
        for request_id in request_ids:
            await caller.count_reader()
            await self._check_not_deleted(request_id, caller.tenant)
        form = self._form(request)
        if len(request_ids) > 1 and not form.counts_tokens:
            raise invalid_request("this form has one answer, and so one id", "request_id")
        return self.response(
            request_ids,
            form,
            from_tokens=_positions(request, len(request_ids)),
            stream=switch(request, "stream", default=True),
            include_usage=switch(request, "include_usage", default=False),
        )

    def response(
        self,
        request_ids: Sequence[str],
        form: ResumedForm,
        *,
        from_tokens: Sequence[int],
        stream: bool = True,
        include_usage: bool = False,
    ) -> Response:
        """The response with streams from positions on, or with their whole answers."""
        parts = self._parts
        choices = [Choice(None, keep=not stream) for _ in request_ids]
        for choice, from_token in zip(choices, from_tokens, strict=True):
            choice.has_started = from_token > 0
        options = ResponseOptions(
            header=self.header_of(request_ids[0], form.kind),
            # An id may hold any character, a line break too.
            ids=[quote(request_id, safe="") for request_id in request_ids],
            stream=stream,
            include_usage=include_usage,
            n=len(request_ids) if form.kind == "chat" else 1,
            is_resumed=True,
            from_tokens=from_tokens,
        )
        resumed = [
            self._resumed(
                request_id, begun=at > 0, after=at if stream and form.counts_tokens else 0
            )
            for request_id, at in zip(request_ids, from_tokens, strict=True)
        ]
        clock = parts.ctx.clock
        return CompletionResponse(
            options,
            choices,
            self._resumed_replies(resumed, form.kind, choices),
            clock,
            parts.metrics,
            self._lifetime_s,
            clock.now(),
            encoder=form.encoder,
        )

    def header_of(self, request_id: str, kind: EndpointKind) -> ResponseHeader:
        issued = issued_ms(request_id)
        created_ms = self._parts.ctx.clock.wall_ms() if issued is None else issued
        return ResponseHeader(kind, request_id, "", created_ms // 1000)

    def join(self, request_id: str) -> AbstractAsyncContextManager[MergedReplies]:
        """Read an existing stream from its beginning."""
        return resume_replies(self._parts.streams, [self._resumed(request_id)])

    @asynccontextmanager
    async def _resumed_replies(
        self, resumed: Sequence[ResumedReply], kind: EndpointKind, choices: Sequence[Choice]
    ) -> AsyncGenerator[MergedReplies, None]:
        """The replies; their choices give log probabilities if their Chunks have any."""
        async with resume_replies(self._parts.streams, resumed) as replies:
            chunks = [piece for piece in replies.first_pieces if isinstance(piece, Chunk)]
            # Of several answers another one may have them, while this one has ended.
            if len(choices) > 1 or any(chunk.log_probs is not None for chunk in chunks):
                name = next((chunk.model for chunk in chunks if chunk.model), "")
                spelling = await self._spelling(kind, name)
                for choice in choices:
                    choice.spelling = spelling
            yield replies

    async def _spelling(self, kind: EndpointKind, model: str) -> TokenText:
        """The texts of tokens; their ids for a model that is not served, or has an alias."""
        if self._parts.served_models.aliases.find(model) is None:
            with suppress(ApiError, PreprocessError):
                return TokenText((await self._parts.catalog.model(kind, model)).token_bytes)
        return TokenText(lambda _: b"", as_ids=True)

    def _resumed(self, request_id: str, *, begun: bool = False, after: int = 0) -> ResumedReply:
        if issued_ms(request_id) is None:
            may_begin_s = UNDATED_START_S
        else:  # it may be queued for all of its lifetime, without a record
            now_ms = self._parts.streams.now_ms
            is_young = may_begin(request_id, now_ms, 1000 * self._lifetime_s)
            may_begin_s = math.inf if is_young else 0.0
        return ResumedReply(request_id, begun, after, may_begin_s)

    async def cancel(self, request: Request) -> Response:
        request_id = self.id_of(request)
        await self._parts.streams.cancel_now(request_id, "its client cancelled it")
        answer = {"id": request_id, "object": "stream", "status": "cancelling"}
        return Response(
            msgspec.json.encode(answer), HTTPStatus.ACCEPTED, media_type="application/json"
        )

    async def _check_not_deleted(self, request_id: str, tenant: str) -> None:
        """Raises ApiError, 404, for a response that its client deleted."""
        if not self._parts.streams.seal.is_stored(request_id, tenant):
            return
        try:
            is_deleted = await self._parts.batches.is_deleted(request_id)
        except StreamError as e:
            raise error_of_stream(e) from e
        if is_deleted:
            raise unknown_stream()

    def _form(self, request: Request) -> ResumedForm:
        form = self._forms.get(request.query_params.get("form", "chat"))
        if form is None:
            raise invalid_request("one of: " + ", ".join(self._forms), "form")
        return form

    def id_of(self, request: Request) -> str:
        """The id in the path. Raises ApiError, 404, for one of another tenant."""
        return self._checked(request.path_params["request_id"], caller_of(request).tenant)

    def _ids_of(self, request: Request) -> list[str]:
        """The ids in the path. Only ids of HTTP come together: others may hold a comma. Raises
        ApiError, 404, for one of another tenant."""
        tenant = caller_of(request).tenant
        request_ids = request.path_params["request_id"].split(",", MAX_CHOICES - 1)
        if not all(self._parts.streams.seal.matches(each, tenant) for each in request_ids):
            return [self.id_of(request)]
        return [self._checked(request_id, tenant) for request_id in request_ids]

    def _checked(self, request_id: str, tenant: str) -> str:
        if not 0 < len(request_id) <= MAX_ID_CHARS:
            raise invalid_request(f"an id has 1 to {MAX_ID_CHARS} characters", "request_id")
        self._parts.streams.check_id(request_id, tenant)
        return request_id


def _positions(request: Request, count: int) -> list[int]:
    """The positions of as many streams."""
    name, given = "last-event-id", request.headers.get("last-event-id")
    if given is None:
        name, given = "from", request.query_params.get("from", "0")
    positions = [read_position(name, each) for each in given.split(",")]
    if len(positions) not in (1, count):
        raise invalid_request(f"has {len(positions)} positions for {count} streams", name)
    return positions if len(positions) == count else positions * count


def read_position(name: str, given: str) -> int:
    """A position from a field of a request. Raises ApiError that names the field."""
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise invalid_request("a position is the id of an event, a number", name)
    return int(given)


def switch(request: Request, name: str, *, default: bool) -> bool:
    """The value of a query parameter, true or false. Raises ApiError."""
    given = request.query_params.get(name)
    switch = default if given is None else _SWITCHES.get(given.lower())
    if switch is None:
        raise invalid_request("true or false", name)
    return switch
