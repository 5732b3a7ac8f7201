"""Server-sent events, as bytes."""

from __future__ import annotations

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment, which clients ignore; proxies see that the connection is in use. No empty line: after
an event with a position, OpenAI's client takes that for an event without data, and fails."""


def encode_event(data: bytes, position: int | None = None) -> bytes:
    """One event. `data` is JSON; `position` is the id that a client sends to resume after it."""
    if position is None:
        return b"data: %b\n\n" % data
    return b"id: %d\ndata: %b\n\n" % (position, data)


def encode_error(body: bytes) -> bytes:
    """An error event, for responses whose status was already sent."""
    return b"data: %b\n\n" % body
