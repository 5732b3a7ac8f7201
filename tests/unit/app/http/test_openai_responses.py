"""Tests of the response objects that OpenAI clients read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvlane.app.http.openai.openai_responses import (
    Choice,
    ChunkEncoder,
    EndpointKind,
    ResponseHeader,
    chunk,
    full_response,
    usage,
    usage_chunk,
)
from kvlane.streams.records import Chunk, DryRunResult, End, Usage

CHAT = ResponseHeader("chat", "id-1", "demo", 1700000000)
COMPLETION = ResponseHeader("completion", "id-1", "demo", 1700000000)


def piece(index: int, text: str, reason: str | None = None, **over: Any) -> Chunk:
    tokens = tuple(map(ord, text))
    return Chunk(
        id="id-1", attempt=0, run="1", seq=0, index=index, token_ids=tokens, text=text,
        chars=index + len(text), finish_reason=reason, **over,
    )  # fmt: skip


def got(
    heading: ResponseHeader, *pieces: Chunk | End, with_usage: bool = False
) -> list[dict[str, Any] | None]:
    choice = Choice()
    out = []
    for p in pieces:
        choice.add(p)
        out.append(chunk(heading, choice, p, with_usage=with_usage))
    return out


def ended(*pieces: Chunk | End, prompt_tokens: int = 0) -> Choice:
    choice = Choice(prompt_tokens)
    for p in pieces:
        choice.add(p)
    return choice


def test_chat_stream_has_the_role_in_its_first_chunk_only() -> None:
    first, second = got(CHAT, piece(0, "he"), piece(2, "llo"))
    assert first == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "he"},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    assert second is not None
    assert second["choices"][0]["delta"] == {"content": "llo"}


def test_completion_is_rendered_as_text() -> None:
    (first,) = got(COMPLETION, piece(0, "he", "length"))
    assert first is not None
    assert first["object"] == "text_completion"
    assert first["choices"] == [
        {"index": 0, "text": "he", "logprobs": None, "finish_reason": "length"}
    ]


def test_partial_character_is_not_sent() -> None:
    first, second = got(CHAT, half(), piece(1, "é"))
    assert first is None
    assert second is not None
    assert second["choices"][0]["delta"] == {"role": "assistant", "content": "é"}


def half() -> Chunk:
    return Chunk(id="id-1", attempt=0, run="1", seq=0, index=0, token_ids=(195,))


def test_last_chunk_may_have_no_text() -> None:
    _, last = got(CHAT, piece(0, "he"), piece(2, "", "stop"))
    assert last is not None
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_answer_of_nothing_still_has_a_role_and_an_end() -> None:
    (only,) = got(CHAT, piece(0, "", "stop"))
    assert only is not None
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("code", ["stop", "length"])
def test_answer_whose_last_chunk_was_lost_ends_as_it_would_have(code: str) -> None:
    _, last = got(CHAT, piece(0, "he"), End(id="id-1", code=code))
    assert last is not None
    assert last["choices"][0]["finish_reason"] == code


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("stop", "stop"),
        ("eos", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("tool_calls", "tool_calls"),
        ("of a newer writer", "of a newer writer"),
    ],
)
def test_finish_reasons(ours: str, theirs: str) -> None:
    assert ended(piece(0, "x", ours)).finish_reason == theirs


def test_usage_is_null_until_the_last_chunk() -> None:
    first, last = got(CHAT, piece(0, "he"), piece(2, "y", "stop"), with_usage=True)
    assert first is not None
    assert last is not None
    assert first["usage"] is last["usage"] is None
    choice = ended(
        piece(0, "hey", "stop", usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4))
    )
    total = usage_chunk(CHAT, [choice])
    assert total["choices"] == []
    assert total["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_without_counts_of_the_writer_tokens_are_counted_by_the_reader() -> None:
    choice = ended(piece(0, "hey"), End(id="id-1", code="stop"), prompt_tokens=9)
    assert usage([choice])["total_tokens"] == 12


def test_several_answers_share_their_prompt() -> None:
    counted = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=6)
    choices = [ended(piece(0, "ab", "stop", usage=counted)) for _ in range(4)]
    assert usage(choices, n=2) == {
        "prompt_tokens": 20,
        "completion_tokens": 8,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 12},
    }


def test_whole_chat() -> None:
    choices = [ended(piece(0, "he"), piece(2, "y", "stop")), ended(piece(0, "ho", "length"))]
    body = full_response(CHAT, choices, n=2)
    assert body["object"] == "chat.completion"
    assert [c["message"]["content"] for c in body["choices"]] == ["hey", "ho"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert [c["index"] for c in body["choices"]] == [0, 1]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_responses_validate_with_the_openai_types(kind: EndpointKind) -> None:
    heading = CHAT if kind == "chat" else COMPLETION
    stream_type = ChatCompletionChunk if kind == "chat" else Completion
    whole_type = ChatCompletion if kind == "chat" else Completion
    objects = got(heading, piece(0, "he"), piece(2, "", "stop"), with_usage=True)
    if kind == "completion":  # the type knows no chunk before the last, the service sends them
        objects = objects[-1:]
    for object_ in objects:
        stream_type.model_validate(object_, strict=True)
    choice = ended(piece(0, "he", "stop"))
    stream_type.model_validate(usage_chunk(heading, [choice]), strict=True)
    whole_type.model_validate(full_response(heading, [choice]), strict=True)


def test_position_is_the_end_of_the_sent_text() -> None:
    choice = ended(piece(0, "he"), piece(2, "llo"))
    assert choice.shown_tokens == 5
    assert ended(piece(0, "he"), End(id="id-1", code="stop")).shown_tokens == 2


@given(
    st.sampled_from(["chat", "completion"]),
    st.text(max_size=9),
    st.lists(st.text(max_size=9), max_size=4),
    st.booleans(),
    st.sampled_from([None, "stop", "eos"]),
)
def test_precomputed_encoding_equals_the_response(
    kind: EndpointKind, model: str, texts: list[str], with_usage: bool, reason: str | None
) -> None:
    heading = ResponseHeader(kind, 'id-"1', model, 1700000000)
    words = ChunkEncoder(heading, 3, with_usage=with_usage)
    one, other, index = Choice(before="so:"), Choice(before="so:"), 0
    for number, text in enumerate(texts):
        output = piece(index, text, reason if number == len(texts) - 1 else None)
        index += len(text)
        one.add(output)
        other.add(output)
        plain = chunk(heading, one, output, 3, with_usage=with_usage)
        encoded = words.encode(other, output)
        assert encoded == (None if plain is None else msgspec.json.encode(plain))


def test_dry_run_of_an_embedding_has_the_selected_worker() -> None:
    end = End(id="id-1", code="stop", placed=DryRunResult(worker_id="w1"))
    output = full_response(ResponseHeader("embedding", "id-1", "demo", 1), [ended(end)])
    assert output["nvext"]["worker_id"] == "w1"
    assert output["data"] == []
