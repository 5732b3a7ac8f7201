"""Writer of a response's body to its connection without ASGI: by a call, not an awaited message.

A part that is sent by ASGI passes all middleware and a coroutine of the server; the event of a
token needs neither: from its record to the transport it takes 2.8 us. `http_protocol.py`
offers the writer in the scope of each request; under another server, and in tests without one,
there is none. Head and end of a response are always sent by ASGI. The bytes on the wire are the
same either way.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from kvlane.app.http.server.exchange import Exchange

_EXTENSION = "kvlane.body_writer"


class BodyWriter:
    """The body of one response of uvicorn's."""

    def __init__(self, cycle: Exchange) -> None:
        self._cycle = cycle

    def offer(self, scope: Any) -> None:
        """Offer this writer to the application, as an extension of ASGI."""
        scope.setdefault("extensions", {})[_EXTENSION] = self

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now. Otherwise ASGI's `send` handles it: it waits
        for a full socket, drops data for a disconnected client, or raises.
        """
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not (cycle.chunked_encoding or cycle.ends_by_close)  # neither until the head is sent
        )

    def write(self, body: bytes) -> None:
        """Write a part that is not empty, by HTTP/1.1 as a chunk (7.1); only if `is_ready`."""
        cycle = self._cycle
        framed = body if cycle.ends_by_close else b"%x\r\n%b\r\n" % (len(body), body)
        cycle.transport.write(framed)


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """The writer of a request's response; None if its server offers none."""
    writer = scope.get("extensions", {}).get(_EXTENSION)
    return writer if isinstance(writer, BodyWriter) else None
