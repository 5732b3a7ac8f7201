"""Streams by their id: to go on reading one whose connection broke, or to end it.

Any gateway will do: the id itself says whose stream it is. What a request was asked as is not in
the log of its answer, so the URL says in which form to tell it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import get_args
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from app.http.answers import Choice, Heading, Kind
from app.http.errors import invalid
from app.http.joined import attaching
from app.http.parts import MARGIN_S, Parts
from app.http.telling import Manner, Telling
from streams.ids import issued_ms
from streams.records import LONGEST_ID

_FORMS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


class Attachment:
    """The endpoints for streams that exist."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def attach(self, request: Request) -> Response:
        """Tell a stream from a position on. Raises ApiError.

        Query: `from` (a position; the header Last-Event-ID counts more), `form` (chat …),
        `stream` (false: the whole answer, when it is there), `include_usage`.
        """
        parts, settings = self._parts, self._parts.settings
        request_id = self._id_of(request)
        from_token = _position(request)
        issued = issued_ms(request_id)
        now_ms = parts.life.clock.wall_ms()
        lifetime_s = settings.max_lifetime_s + MARGIN_S
        # It may wait in a queue without a word; an id without a time says nothing about that.
        may_begin = issued is not None and now_ms - issued < lifetime_s * 1000
        choice = Choice(keep=not (stream := _switch(request, "stream", default=True)))
        choice.begun = begun = from_token > 0
        manner = Manner(
            heading=Heading(_form(request), request_id, "", (issued or now_ms) // 1000),
            ids=[quote(request_id, safe="")],  # it may hold anything, also what ends a header
            stream=stream,
            include_usage=_switch(request, "include_usage", default=False),
            attached=True,
            from_token=from_token,
        )
        joining = attaching(parts.streams, request_id, begun=begun, may_begin=may_begin)
        clock = parts.life.clock
        return Telling(manner, [choice], joining, clock, parts.metrics, lifetime_s, clock.now())

    async def cancel(self, request: Request) -> Response:
        """Ask for the end of a stream; it ends shortly, if it has not yet. Raises ApiError."""
        request_id = self._id_of(request)
        await self._parts.streams.cancel_now(request_id, "its client cancelled it")
        told = {"id": request_id, "object": "stream", "status": "cancelling"}
        return Response(
            msgspec.json.encode(told), HTTPStatus.ACCEPTED, media_type="application/json"
        )

    def _id_of(self, request: Request) -> str:
        request_id: str = request.path_params["request_id"]
        if not 0 < len(request_id) <= LONGEST_ID:
            raise invalid(f"an id has 1 to {LONGEST_ID} characters", "request_id")
        self._parts.streams.check_id(request_id)
        return request_id


def _position(request: Request) -> int:
    name, given = "last-event-id", request.headers.get("last-event-id")
    if given is None:
        name, given = "from", request.query_params.get("from", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise invalid("a position is the number of tokens that were received", name)
    return int(given)


def _form(request: Request) -> Kind:
    form = _FORMS.get(request.query_params.get("form", "chat"))
    if form is None:
        raise invalid("one of: " + ", ".join(_FORMS), "form")
    return form


def _switch(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    switch = default if given is None else _SWITCHES.get(given.lower())
    if switch is None:
        raise invalid("true or false", name)
    return switch
