"""uvicorn's HTTP protocol with bounds on the head of a request, which it has none of.

A client that sends its head slowly, or without end, is cut off. Bodies are `app/http/front.py`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Several times what clients and proxies send. One read of the socket more may be in memory."""
HEAD_S = 20.0
"""What a head gets to come, from the opening of the connection or from its first byte."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0
        """Bytes read since the head began; None while a body is read."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has so long for its first head."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Read on, unless it is more of a head than there may be."""
        if self._head is not None:
            if self._head > HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
                return
            self._head += len(data)
            self._arm()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._head = None
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head may begin."""
        super().on_message_complete()
        self._head = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
