"""Tests of media that a server would fetch for a client."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.engine.attached.request_body import ServerDialect, passthrough_body
from kvlane.app.engine.interface import InvalidRequest
from kvlane.app.engine.media_urls import refuse_media
from kvlane.streams.request import OpenAiBody, Request

INSIDE = "http://169.254.169.254/latest/meta-data"
DATA = "data:image/png;base64,AAAA"


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": INSIDE}, *parts]}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": INSIDE}},
        {"type": "image_url", "image_url": INSIDE},
        {"image_url": INSIDE},
        {"type": "input_image", "image_url": INSIDE},
        {"type": "video_url", "video_url": {"url": INSIDE}},
        {"type": "audio_url", "audio_url": {"url": INSIDE}},
        {"type": "image", "image": INSIDE},
        {"type": "video", "video": [DATA, INSIDE]},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image_url", "image_url": {"url": "//a.example/x"}},
        {"type": "image_url", "image_url": {"url": "HTTP://b.example/x"}},
        {"type": "image_url", "image_url": {"url": "http://a.example@b.example/x"}},
        {"type": "image_url", "image_url": {"url": "http://a.example\\@b.example/x"}},
        {"type": "image_url", "image_url": {"url": "http://b.example#http://a.example/"}},
        {"type": "image_url", "image_url": {"url": " http://b.example/"}},
        {"type": "image_url", "image_url": {"url": "ftp://a.example/x"}},
        {"type": "image_url", "image_url": {"url": "http://[a.example/x"}},
        {"type": "image_url", "image_url": {"url": "http://x.a.example/x"}},
    ],
)
def test_media_of_other_hosts_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content\.1.*not allowed"):
        refuse_media(chat(part), ["a.example"])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA, "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "https://A.example:8443/x.png?y=1"}},
        {"type": "image", "image": "AAAA" * 100},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video", "video": [DATA]},
        {"type": "image_url", "image_url": {"url": DATA}, "uuid": "a-b.c"},
    ],
)
def test_media_in_the_body_or_of_an_allowed_host_passes(part: dict[str, Any]) -> None:
    refuse_media(chat(part), ["a.example"])


def test_any_host_is_allowed_by_a_star() -> None:
    refuse_media(chat({"type": "image_url", "image_url": {"url": INSIDE}}), ["*"])


def test_addresses_in_texts_and_calls_are_no_media() -> None:
    call = {"function": {"name": "f", "arguments": {"url": INSIDE}}}
    messages = [
        {"role": "user", "content": INSIDE},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    refuse_media({"messages": messages, "input": [INSIDE], "prompt": INSIDE}, [])


def test_media_of_an_embedding_is_checked() -> None:
    with pytest.raises(InvalidRequest, match=r"input\.0\.image"):
        refuse_media({"input": [{"text": "a", "image": INSIDE}]}, [])


def test_forwarded_body_is_checked() -> None:
    body = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"http://a"}]}]}'
    request = Request(id="a", body=OpenAiBody(kind="chat", json=body))
    with pytest.raises(InvalidRequest, match="not allowed"):
        passthrough_body(request, ServerDialect("m", "vllm"))
    assert passthrough_body(request, ServerDialect("m", "vllm"), ["a"])["model"] == "m"
