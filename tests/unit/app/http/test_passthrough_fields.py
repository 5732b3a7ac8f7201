"""Tests of fields of servers besides text: streamed, and merged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvlane.app.http.openai.openai_responses import (
    Choice,
    ChunkEncoder,
    ResponseHeader,
    chunk,
    full_response,
    usage,
)
from kvlane.app.http.openai.passthrough_fields import merge_fields, split_chunk
from kvlane.streams.records import Chunk, End, PassthroughDelta, Usage
from kvlane.streams.responses.reply_stream import merge_chunks

CHAT = ResponseHeader("chat", "id-1", "demo", 1700000000)
COMPLETION = ResponseHeader("completion", "id-1", "demo", 1700000000)
CALLS = [
    {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}]},
    {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "", "arguments": "{"}}]},
    {
        "tool_calls": [
            {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": "}"}}]},
]


def piece(
    text: str = "", *asides: PassthroughDelta, before: int = 0, reason: str | None = None
) -> Chunk:
    return Chunk(
        id="id-1", attempt=0, run="1", seq=0, index=0, text=text, chars=before + len(text),
        finish_reason=reason, data=asides,
    )  # fmt: skip


def got(heading: ResponseHeader, *pieces: Chunk) -> list[dict[str, Any]]:
    choice, words, out = Choice(keep=False), ChunkEncoder(heading, 0, with_usage=False), []
    for each in pieces:
        for part in split_chunk(each):
            choice.add(part)
            event = chunk(heading, choice, part, with_usage=False)
            assert (words.encode(choice, part) is None) == (event is None)
            if event is not None:
                out.append(event)
    return out


def ended(*pieces: Chunk | End) -> Choice:
    choice = Choice()
    for each in pieces:
        choice.add(each)
    return choice


def test_tool_calls_are_put_together_by_their_index() -> None:
    known: dict[str, Any] = {}
    for delta in CALLS:
        known = merge_fields(known, delta)
    first, second = known["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": "{}"}
    assert (first["id"], second["id"]) == ("a", "b")


def call(index: int | None, **fields: Any) -> dict[str, Any]:
    function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    at = {} if index is None else {"index": index}
    return {"tool_calls": [at | fields | {"function": function}]}


def as_client(deltas: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, as a client of a stream puts them together."""
    calls: list[list[str]] = []
    for delta in deltas:
        for part in delta["tool_calls"]:
            if part.get("index", len(calls) if part.get("id") else len(calls) - 1) == len(calls):
                calls.append(["", "", ""])
            at = calls[part.get("index", -1)]
            function = part["function"]
            for n, piece in enumerate(
                (part.get("id"), function.get("name"), function.get("arguments"))
            ):
                at[n] += piece or "" if n == 2 or piece != at[n] else ""
    return [tuple(each) for each in calls]  # type: ignore[misc]


@pytest.mark.parametrize(
    "deltas",
    [
        [call(0, id="a", name="get_", arguments=""), call(0, name="weather"),
         call(0, arguments="{}")],
        [call(0, id="a", name="f", arguments="{"), call(0, id="a", name="f", arguments="}")],
        [call(0, id="a", name="ab"), call(0, name="ab"), call(0, name="c"), call(0, name="abc")],
        [call(0, id="a", name="f"), call(0, name="", arguments="{"),
         call(0, name=None, arguments="}")],
        [call(0, id="a", name="f", arguments="{}"), call(1, id="b", name="f", arguments="{}")],
        [call(0, id="a", name="f"), call(1, id="b", name="g"), call(0, arguments="1"),
         call(1, arguments="2")],
        [call(None, id="a", name="f", arguments="{}"),
         call(None, id="b", name="g", arguments="{}")],
        [call(None, id="a", name="get_"), call(None, name=None, arguments="{"),
         call(None, arguments="}")],
        [{"tool_calls": call(None, id="a", name="f")["tool_calls"]
          + call(None, id="b", name="g", arguments="1")["tool_calls"]}, call(None, arguments="2")],
    ],
    ids=["pieces", "repeated", "pieces_and_repeated", "empty", "several", "interleaved",
         "no_index", "no_index_in_pieces", "no_index_together"],
)  # fmt: skip
def test_whole_response_has_the_tool_calls_that_clients_of_a_stream_put_together(
    deltas: list[dict[str, Any]],
) -> None:
    expected = as_client(deltas)
    choice = ended(*[piece("", PassthroughDelta(delta=delta)) for delta in deltas])
    calls = full_response(CHAT, [choice])["choices"][0]["message"]["tool_calls"]
    functions = [(each.get("id", ""), each["function"]) for each in calls]
    assert expected == [
        (name, function.get("name") or "", function.get("arguments") or "")
        for name, function in functions
    ]
    step_by_step: dict[str, Any] = {}
    for delta in deltas:
        step_by_step = merge_fields(step_by_step, delta)
    assert step_by_step == merge_fields(*deltas)


def test_other_fields_merge_to_the_same_whole_in_any_grouping() -> None:
    step_by_step: dict[str, Any] = {}
    for delta in CALLS:
        step_by_step = merge_fields(step_by_step, delta)
    assert merge_fields(*CALLS) == step_by_step
    odd = ({"a": "x", "b": 1}, {"a": None}, {"a": {"c": "d"}, "b": 2}, {"a": {"c": "e"}})
    assert merge_fields(*odd) == {"a": {"c": "de"}, "b": 2}


def test_merge_does_not_change_earlier_values() -> None:
    known = merge_fields({}, CALLS[0])
    merge_fields(known, CALLS[1])
    assert "arguments" not in known["tool_calls"][0]["function"]


def test_text_and_other_fields_are_sent_in_order() -> None:
    asides = (
        PassthroughDelta(at=3, delta={"reasoning_content": "hm"}),
        PassthroughDelta(at=5, choice={"logprobs": {"a": 1}}),
        PassthroughDelta(at=5, event={"system_fingerprint": "fp"}),
    )
    events = got(CHAT, piece("one"), piece("two", *asides, before=3, reason="stop"))
    choices = [event["choices"][0] for event in events]
    assert [c["delta"].get("content") for c in choices] == ["one", None, "tw", None, "o"]
    assert choices[1]["delta"] == {"reasoning_content": "hm"}
    assert choices[3]["logprobs"] == {"a": 1}
    assert events[4]["system_fingerprint"] == "fp"
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
    for event in events:
        ChatCompletionChunk.model_validate(event)


def test_logprobs_are_sent_with_their_text() -> None:
    """As the server did, whose events these were; also when several came together."""
    output = [PassthroughDelta(at=at, choice={"logprobs": {"content": [at]}}) for at in (0, 2, 3)]
    events = got(CHAT, piece("abcd", *output, reason="length"))
    choices = [event["choices"][0] for event in events]
    assert [c["delta"]["content"] for c in choices] == ["ab", "c", "d"]
    assert [c["logprobs"]["content"] for c in choices] == [[0], [2], [3]]
    assert [c["finish_reason"] for c in choices] == [None, None, "length"]


def test_answer_may_begin_and_end_with_other_fields() -> None:
    events = got(CHAT, piece("", PassthroughDelta(delta=CALLS[0]), reason="tool_calls"))
    first, last = (event["choices"][0] for event in events)
    assert first["delta"] == {"role": "assistant", "content": ""} | CALLS[0]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_whole_chat_has_all_fields() -> None:
    asides = [PassthroughDelta(delta=delta) for delta in CALLS]
    choice = ended(
        piece("", *asides, PassthroughDelta(event={"system_fingerprint": "fp"}), reason="stop")
    )
    answer = ChatCompletion.model_validate(full_response(CHAT, [choice]))
    message = answer.choices[0].message
    assert message.content is None
    assert [(c.id, c.function.arguments) for c in message.tool_calls or ()] == [
        ("a", "{}"),
        ("b", ""),
    ]
    assert not any("index" in c.model_dump() for c in message.tool_calls or ())
    assert answer.system_fingerprint == "fp"


def test_whole_completion_has_its_log_probabilities() -> None:
    pieces = [
        piece("a",
            PassthroughDelta(choice={"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}})),
        piece("b",
            PassthroughDelta(
                at=1, choice={"logprobs": {"tokens": ["b"], "token_logprobs": [-2.0]}}),
            before=1, reason="length"),
    ]  # fmt: skip
    answer = Completion.model_validate(full_response(COMPLETION, [ended(*pieces)]))
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-1.0, -2.0]


def test_additional_usage_counts_are_summed() -> None:
    details = {
        "completion_tokens_details": {"reasoning_tokens": 3},
        "prompt_tokens_details": {"audio_tokens": 1},
    }
    counts = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2, details=details)
    choice = ended(
        Chunk(id="", attempt=0, run="", seq=0, index=0, finish_reason="stop", usage=counts)
    )
    one = usage([choice])
    assert one["prompt_tokens_details"] == {"cached_tokens": 2, "audio_tokens": 1}
    assert one["completion_tokens_details"] == {"reasoning_tokens": 3}
    two = usage([choice, choice], 2)
    assert two["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert two["prompt_tokens_details"] == {"cached_tokens": 2, "audio_tokens": 1}


def test_end_by_a_router_repeats_nothing() -> None:
    choice = Choice(keep=False)
    choice.add(piece("", PassthroughDelta(delta=CALLS[0])))
    end = End(id="id-1", code="stop")
    choice.add(end)
    event = chunk(CHAT, choice, end, with_usage=False)
    assert event is not None
    assert "tool_calls" not in event["choices"][0]["delta"]


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.integers(0, 3)), max_size=5), st.booleans())
def test_joined_pieces_have_the_same_positions_and_text(
    script: list[tuple[str, int]], at_once: bool
) -> None:
    pieces, chars = [], 0
    for text, asides in script:
        data = [
            PassthroughDelta(at=chars + n % (len(text) + 1), delta={"r": "x"})
            for n in range(asides)
        ]
        data.sort(key=lambda aside: aside.at)
        pieces.append(piece(text, *data, before=chars))
        chars += len(text)
    pieces.append(piece("", before=chars, reason="stop"))
    if at_once:
        pieces = [merge_chunks(pieces)]
    choice, seen, before = Choice(keep=False), "", -1
    for each in pieces:
        for part in split_chunk(each):
            choice.add(part)
            assert choice.position >= max(before, 0)
            before = choice.position
            seen += part.text
    assert seen == "".join(text for text, _ in script)
    assert choice.position == chars + sum(asides for _, asides in script)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("known", [None, "a", 1, {"a": 1}, [1]])
def test_any_server_fields_can_be_merged(known: Any) -> None:
    for more in (None, "a", 1, {"index": 0}, [{"index": 0}], [None]):
        merge_fields({"x": known}, {"x": more})
