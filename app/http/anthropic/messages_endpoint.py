"""Endpoints of Anthropic's Messages API: chats whose bodies and answers have another form."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.http.anthropic.message_events import MessageEncoder
from kvlane.app.http.anthropic.message_requests import (
    chat_of,
    check_version,
    counted_chat_of,
    hides_thinking,
    names_of,
)
from kvlane.app.http.openai.completions import Completions, ReadBody
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.http.openai.served_models import ServedModel
from kvlane.app.http.server.middleware import Hold


class MessagesEndpoint:
    """Handlers of `/v1/messages`."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, request: Request) -> Response:
        """Answer a chat. Raises ApiError and PreprocessError."""
        check_version(request.headers)
        return await self._completions.answer("chat", request, _read)

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a prompt. Raises ApiError and PreprocessError."""
        check_version(request.headers)
        body = await self._completions.prepare("chat", request, _read_counted)
        counted = {"input_tokens": body.prompts.requests[0].prompt_tokens}
        return Response(msgspec.json.encode(counted), media_type="application/json")


def model_of(served: ServedModel) -> JsonObject:
    """A model in the form of Anthropic's API."""
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": served.name, "type": "model", "display_name": served.name, "created_at": created,
        "max_input_tokens": served.context_length, "max_tokens": served.context_length,
    }  # fmt: skip


async def _read(fields: dict[str, Any], _: Hold) -> ReadBody:
    encoder = partial(MessageEncoder, hides_thinking=hides_thinking(fields))
    return ReadBody(chat_of(fields), encoder, names=names_of(fields))


async def _read_counted(fields: dict[str, Any], _: Hold) -> ReadBody:
    return ReadBody(counted_chat_of(fields), names=names_of(fields))
