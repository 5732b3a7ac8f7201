"""Endpoints of OpenAI's Responses API: chats whose bodies and answers have another form.

A response in the background is a detached stream. The state of one that has not ended is read from
the log of its answer; that of a stored one (`stored_responses.py`) then from its result.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.api_errors import ApiError, error_of_stream, invalid_request
from kvlane.app.http.batches.listing import json_response, limit_of, list_response
from kvlane.app.http.openai.completions import Completions, ReadBody
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.http.openai.stream_resume import ResumedForm, StreamResume, read_position, switch
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.app.http.responses.response_requests import ResponseRequest, read_response
from kvlane.app.http.responses.stored_responses import (
    History,
    StoredResponses,
    item_objects,
    unknown_response,
)
from kvlane.app.http.server.caller import Caller, caller_of
from kvlane.app.http.server.middleware import BodyLimiter, Hold
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.streams.errors import StreamError
from kvlane.streams.request import StoredInput
from kvlane.streams.responses.reply_reader import may_begin

STATE_S = 1.0
"""Time for which the state of an answer is read that has not ended, or for its result."""
MAX_STORED_BYTES = 2 * 1024 * 1024
"""Bytes of the request that a stored response has: request and answer are in one record each."""
_FORM = ResumedForm("chat", ResponseEncoder, counts_tokens=False)
_OPEN = ("queued", "in_progress")


class ResponsesEndpoint:
    """Handlers of `/v1/responses`."""

    def __init__(self, parts: GatewayDeps, completions: Completions, streams: StreamResume) -> None:
        self._parts = parts
        self._completions = completions
        self._streams = streams
        self._stored = StoredResponses(parts)
        self._bodies = BodyLimiter(parts.settings.http_max_body_bytes)

    async def create(self, request: Request) -> Response:
        """Answer a chat. Raises ApiError and PreprocessError."""
        read = partial(self._read, caller_of(request))
        return await self._completions.answer("chat", request, read)

    async def retrieve(self, request: Request) -> Response:
        """The state of a response, or with `stream` its events after `starting_after`.

        Raises ApiError.
        """
        request_id = await self._id_of(request)
        if not switch(request, "stream", default=False):
            return json_response(await self._state(request_id, caller_of(request).tenant))
        after = request.query_params.get("starting_after")
        from_token = 0 if after is None else read_position("starting_after", after) + 1
        return self._streams.response([request_id], _FORM, from_tokens=[from_token])

    async def cancel(self, request: Request) -> Response:
        """Cancel a response that has not ended; its state. Raises ApiError."""
        request_id = await self._id_of(request)
        state = await self._state(request_id, caller_of(request).tenant)
        if state["status"] in _OPEN:
            await self._parts.streams.cancel_now(request_id, "its client cancelled it")
            state["status"] = "cancelled"
        return json_response(state)

    async def input_items(self, request: Request) -> Response:
        """The items of the input of a stored response: `limit`, `after`, `order`. Raises
        ApiError."""
        request_id, tenant = await self._id_of(request), caller_of(request).tenant
        await self._stored.check_kept(request_id, tenant)
        limit, is_ascending = limit_of(request.query_params, 20, 100)
        with self._bodies.holding() as hold:
            items = await self._stored.input_items(request_id, tenant, hold)
            found = item_objects(request_id, items)
            found = found if is_ascending else found[::-1]
            after = request.query_params.get("after")
            ids = [item["id"] for item in found]
            start = ids.index(after) + 1 if after in ids else 0
            page = found[start : start + limit]
            return list_response(page, has_more=start + limit < len(found))

    async def delete(self, request: Request) -> Response:
        """Delete a stored response, and end it if it has not ended. Raises ApiError."""
        request_id = await self._id_of(request)
        await self._stored.delete(request_id, caller_of(request).tenant)
        streams = self._parts.streams
        if may_begin(request_id, streams.now_ms, 1000 * self._parts.settings.max_lifetime_s):
            await streams.cancel_now(request_id, "its client deleted it")
        return json_response({"id": request_id, "object": "response", "deleted": True})

    async def _id_of(self, request: Request) -> str:
        """The id in the path. Raises ApiError, 404, for one of another tenant or a deleted one."""
        request_id, caller = self._streams.id_of(request), caller_of(request)
        await caller.count_reader()
        if self._parts.streams.seal.is_stored(request_id, caller.tenant):
            await self._stored.check_not_deleted(request_id)
        return request_id

    async def _read(self, caller: Caller, fields: dict[str, Any], hold: Hold) -> ReadBody:
        asked, history = read_response(fields), History()
        own = asked.items()
        if previous := asked.body.previous_response_id:
            history = await self._history(previous, caller.tenant, hold)
            asked = asked.after(history.items)
        stored = self._stored_input(asked, [*history.carried, *own], history)
        shown, namespaces = asked.shown(is_stored=stored is not None), asked.namespaces()
        encoder = partial(ResponseEncoder, request=shown, namespaces=namespaces)
        is_background = bool(asked.body.background)
        return ReadBody(
            asked.chat(), encoder, is_background, stored, history.values, history.conversation,
            asked.names(),
        )  # fmt: skip

    async def _history(self, previous: str, tenant: str, hold: Hold) -> History:
        try:
            await self._stored.check_kept(previous, tenant)
            return await self._stored.history(previous, tenant, hold)
        except ApiError as e:
            if e.status != HTTPStatus.NOT_FOUND:
                raise
            param, code = "previous_response_id", "previous_response_not_found"
            raise invalid_request(e.message, param, code=code) from e

    def _stored_input(
        self, asked: ResponseRequest, items: list[JsonObject], history: History
    ) -> StoredInput | None:
        """What is stored of a request; None if its response is not. Raises InvalidPrompt."""
        if asked.body.store is False:
            return None
        refusal = ""
        if self._parts.settings.results == "batch":
            refusal = "no response is stored here (KVLANE_RESULTS=batch)"
        shown = msgspec.json.encode(asked.shown(is_stored=True))
        content = msgspec.json.encode(items)
        if len(shown) + len(content) > MAX_STORED_BYTES:
            refusal = f"a stored response has {MAX_STORED_BYTES} bytes of its request at most"
        if not refusal:
            return StoredInput(
                shown=shown, input=content, history=history.places,
                namespaces=asked.namespaces(), conversation=history.conversation,
            )  # fmt: skip
        if asked.body.store:
            raise InvalidPrompt("store", f"{refusal}: send false")
        return None

    async def _state(self, request_id: str, tenant: str) -> JsonObject:
        """The response up to now. Raises ApiError for one that is not kept."""
        is_stored = self._parts.streams.seal.is_stored(request_id, tenant)
        state: JsonObject | None = None
        try:
            state = await self._answer(request_id)
        except ApiError as e:
            if e.code != "stream_not_found" or not is_stored:
                raise
        if not is_stored or (state is not None and state["status"] in _OPEN):
            assert state is not None
            return state
        wait_s = 0.0 if state is None else STATE_S
        stored = await self._stored.find(request_id, tenant, wait_s)
        if stored is not None and stored.body:
            whole: JsonObject = msgspec.json.decode(stored.body)
            return whole
        if state is None:
            raise unknown_response("its answer is no longer kept")
        return state | {"store": False}

    async def _answer(self, request_id: str) -> JsonObject:
        """The response in the log of its answer, without the fields of its request."""
        clock, choice = self._parts.ctx.clock, Choice(None)
        header = self._streams.header_of(request_id, "chat")
        options = ResponseOptions(header=header, ids=[request_id], stream=False)
        encoder = ResponseEncoder(options, [choice], ())
        async with self._streams.join(request_id) as replies:
            until = clock.now() + STATE_S
            while replies.has_more and (left_s := until - clock.now()) > 0:
                try:
                    _, pieces = await replies.next_pieces(left_s)
                except TimeoutError:
                    break
                except StreamError as e:
                    raise error_of_stream(e) from e
                try:
                    for piece in pieces:
                        encoder.add(0, piece)
                except ApiError as e:
                    return encoder.failed(e)
        return encoder.whole()
