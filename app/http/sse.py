"""Server-sent events, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore; proxies see that the connection is in use."""

_encoder = msgspec.json.Encoder()


def event(data: dict[str, Any], position: int | None = None) -> bytes:
    """One event; `position` is what its client names to get what comes after it."""
    encoded = _encoder.encode(data)
    if position is None:
        return b"data: %b\n\n" % encoded
    return b"id: %d\ndata: %b\n\n" % (position, encoded)


def error_event(body: bytes) -> bytes:
    """An event that says what went wrong, for clients that have their status already."""
    return b"data: %b\n\n" % body
