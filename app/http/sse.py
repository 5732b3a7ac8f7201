"""Server-sent events, as bytes."""

from __future__ import annotations

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment, which clients ignore; proxies see that the connection is in use. No empty line: after
an event with a position, OpenAI's client takes that for an event without data, and fails."""


def event(data: bytes, position: int | None = None) -> bytes:
    """One event; `data` is JSON, `position` what its client names to get what comes after it."""
    if position is None:
        return b"data: %b\n\n" % data
    return b"id: %d\ndata: %b\n\n" % (position, data)


def error_event(body: bytes) -> bytes:
    """An event that says what went wrong, for clients that have their status already."""
    return b"data: %b\n\n" % body
