"""Endpoints of OpenAI's Responses API: chats whose bodies and answers have another form.

A response in the background is a detached stream. Its state is read from the log, for as long as
that keeps the stream.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.api_errors import ApiError, error_of_stream
from kvlane.app.http.openai.completions import Completions, ReadBody
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.http.openai.stream_resume import ResumedForm, StreamResume, read_position, switch
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.app.http.responses.response_requests import read_response
from kvlane.app.http.server.authentication import caller_of
from kvlane.app.metrics.gateway_metrics import TokenTimes
from kvlane.streams.errors import StreamError

STATE_S = 1.0
"""Time for which the state of an answer is read that has not ended."""
_FORM = ResumedForm("chat", ResponseEncoder, counts_tokens=False)


class ResponsesEndpoint:
    """Handlers of `/v1/responses`."""

    def __init__(self, parts: GatewayDeps, completions: Completions, streams: StreamResume) -> None:
        self._parts = parts
        self._completions = completions
        self._streams = streams

    async def create(self, request: Request) -> Response:
        """Answer a chat. Raises ApiError and PreprocessError."""
        return await self._completions.answer("chat", request, _read)

    async def retrieve(self, request: Request) -> Response:
        """The state of a response, or with `stream` its events after `starting_after`.

        Raises ApiError.
        """
        request_id = self._streams.id_of(request)
        caller_of(request).count_reader()
        if not switch(request, "stream", default=False):
            return _json(await self._state(request_id))
        after = request.query_params.get("starting_after")
        from_token = 0 if after is None else read_position("starting_after", after) + 1
        return self._streams.response(request_id, _FORM, from_token=from_token)

    async def cancel(self, request: Request) -> Response:
        """Cancel a response that has not ended; its state. Raises ApiError."""
        request_id = self._streams.id_of(request)
        caller_of(request).count_reader()
        state = await self._state(request_id)
        if state["status"] in ("queued", "in_progress"):
            await self._parts.streams.cancel_now(request_id, "its client cancelled it")
            state["status"] = "cancelled"
        return _json(state)

    async def _state(self, request_id: str) -> JsonObject:
        """The response up to now. Raises ApiError for a stream that is not kept."""
        clock, choice = self._parts.ctx.clock, Choice()
        header = self._streams.header_of(request_id, "chat")
        options = ResponseOptions(header=header, ids=[request_id], stream=False)
        encoder = ResponseEncoder(options, [choice], [TokenTimes(clock, clock.now())])
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


def _read(fields: dict[str, Any]) -> ReadBody:
    asked = read_response(fields)
    shown, namespaces = asked.shown(), asked.namespaces()
    encoder = partial(ResponseEncoder, request=shown, namespaces=namespaces)
    return ReadBody(asked.chat(), encoder, bool(asked.body.background))


def _json(body: JsonObject) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
