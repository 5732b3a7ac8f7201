"""Tests of server-sent events, as the decoder of OpenAI's client reads them."""

from __future__ import annotations

import json

from openai._streaming import SSEDecoder

from kvlane.app.http.openai.event_encoder import DONE, KEEP_ALIVE, encode_event


def read(*written: bytes) -> list[str]:
    return [e.data for e in SSEDecoder().iter_bytes(iter(written))]


def test_keep_alives_between_events_are_no_events() -> None:
    one, two = b'{"n":1}', b'{"n":2}'
    written = [
        KEEP_ALIVE,
        encode_event(one, 3),
        KEEP_ALIVE,
        KEEP_ALIVE,
        encode_event(two),
        KEEP_ALIVE,
        DONE,
    ]
    assert read(*written) == ['{"n":1}', '{"n":2}', "[DONE]"]


def test_error_after_a_silence_is_read_as_an_error() -> None:
    got = read(encode_event(b"{}", 1), KEEP_ALIVE, encode_event(b'{"error":{"code":"x"}}'), DONE)
    assert json.loads(got[1])["error"]["code"] == "x"
