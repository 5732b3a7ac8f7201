"""Endpoint of OpenAI's Responses API: a chat whose body and answer have another form."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.openai.completions import Completions, ReadBody
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.app.http.responses.response_requests import read_response


class ResponsesEndpoint:
    """Handlers of `/v1/responses`."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, request: Request) -> Response:
        """Answer a chat. Raises ApiError and PreprocessError."""
        return await self._completions.answer("chat", request, _read)


def _read(fields: dict[str, Any]) -> ReadBody:
    asked = read_response(fields)
    shown, namespaces = asked.shown(), asked.namespaces()
    return ReadBody(asked.chat(), partial(ResponseEncoder, request=shown, namespaces=namespaces))
