"""Chats, completions and embeddings: from an HTTP request to the answer that is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from app.http.answers import Choice, Heading, Kind
from app.http.errors import invalid
from app.http.front import Bodies
from app.http.joined import asking
from app.http.logprobs import Spelling
from app.http.parts import MARGIN_S, Parts
from app.http.telling import Manner, Telling
from app.preprocess import openai, passed
from app.preprocess.byte_model import Model
from app.preprocess.loaded import Prepared
from app.preprocess.openai import Asked
from app.preprocess.passed import Passed
from streams import records
from streams.ids import issued_ms

DETACH = "x-kvlane-detach"
"""Header: with the value true, a request runs on when its client leaves."""


class Generation:
    """The endpoints that ask models."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bodies = Bodies(parts.settings.http_body_bytes)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._answer("chat", request)

    async def complete(self, request: Request) -> Response:
        """Complete a text."""
        return await self._answer("completion", request)

    async def embed(self, request: Request) -> Response:
        """Embed texts."""
        return await self._answer("embedding", request)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        """Raises ApiError and whatever else is wrong with the prompt."""
        parts = self._parts
        began_at = parts.life.clock.now()
        async with self._bodies.read(request) as body:
            fields = fields_of(body)
            as_is = parts.served.kind(fields.get("model")) != "tokens"
            asked = passed.read(kind, fields, request.headers, as_is=as_is)
            model = await parts.library.model(kind, asked.model)
            prepared = await passed.prepare(asked, model)
        answers = len(prepared.requests) * asked.n
        if answers > 1 and prepared.requests[0].is_query:
            raise invalid("a dry run is about one prompt and one answer", "nvext.annotations")
        parts.streams.check(answers)
        asks = self._asks(prepared.requests, asked.n)
        manner = Manner(
            heading=Heading(kind, asks[0].id, asked.model, created_s(asks[0].id)),
            ids=[ask.id for ask in asks],
            stream=asked.stream,
            include_usage=asked.include_usage,
            n=asked.n,
        )
        return Telling(
            manner,
            self._choices(asked, prepared, model),
            asking(parts.streams, asks, run_on=request.headers.get(DETACH, "").lower() == "true"),
            parts.life.clock,
            parts.metrics,
            parts.settings.deadline_s + MARGIN_S,
            began_at,
        )

    def _choices(self, asked: Asked | Passed, prepared: Prepared, model: Model) -> list[Choice]:
        choices = []
        spelling = None
        if isinstance(asked, Asked) and asked.body.logprobs_wanted() is not None:
            as_ids = asked.body.return_tokens_as_token_ids
            spelling = Spelling(model.token_bytes, as_ids=bool(as_ids))
        for number, (request, text) in enumerate(zip(*prepared, strict=True)):
            if asked.echo and text is None:
                raise invalid(f"echo: the prompt at {number} is no text", "echo")
            tokens = request.prompt_tokens
            self._parts.metrics.prompt_tokens.observe(tokens)
            before = text if asked.echo and text is not None else ""
            choices += [
                Choice(tokens, before=before, keep=not asked.stream, spelling=spelling)
                for _ in range(asked.n)
            ]
        return choices

    def _asks(self, requests: Sequence[records.Request], n: int) -> list[records.Request]:
        """One request for each answer; those to the same prompt one after the other."""
        parts = self._parts
        return [
            replace(
                openai.one_of_n(request, number),
                id=parts.streams.new_id(),
                deadline_s=parts.settings.deadline_s,
                received_ms=parts.life.clock.wall_ms(),
            )
            for request in requests
            for number in range(n)
        ]


def created_s(request_id: str) -> int:
    """When an answer began, in seconds since 1970: the same at every gateway that tells it."""
    return (issued_ms(request_id) or 0) // 1000


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a body. Raises ApiError when it is no JSON object."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise invalid(f"the body is not JSON: {e}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    return fields
