"""Tests of answers as items, in the shapes of the deltas that attached servers send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvlane.app.http.anthropic.message_events import MessageEncoder
from kvlane.app.http.openai.answer_items import ItemEncoder
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.openai_responses import Choice, ResponseHeader
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.streams.records import Chunk, PassthroughDelta, Usage

Delta = dict[str, Any]


def call(index: Any = None, name: str | None = None, arguments: Any = None, **more: str) -> Delta:
    """A delta with one part of a tool call."""
    given = {"name": name, "arguments": arguments}
    function = {key: value for key, value in given.items() if value is not None}
    numbered = {} if index is None else {"index": index}
    return {"tool_calls": [{"function": function} | numbered | more]}


def pieces(deltas: Sequence[Delta], usage: Usage | None) -> Iterator[Chunk]:
    for number, delta in enumerate(deltas):
        is_last = number == len(deltas) - 1
        yield Chunk(
            id="r", attempt=0, run="a", seq=number, index=0, data=(PassthroughDelta(delta=delta),),
            finish_reason="stop" if is_last else None, usage=usage if is_last else None,
        )  # fmt: skip


def encoded(
    kind: type[ItemEncoder], *deltas: Delta, usage: Usage | None = None, after: int = 0
) -> tuple[Delta, list[Delta]]:
    """The whole answer, and the data of its events."""
    header = ResponseHeader("chat", "r", "m", 0)
    options = ResponseOptions(header=header, ids=["r"], stream=True, from_tokens=[after])
    encoder = kind(options, [Choice(None)], ())
    text = b"".join(encoder.encode(0, piece) for piece in pieces(deltas, usage))
    text += encoder.encode_ending()
    events = [line[6:] for line in text.splitlines() if line.startswith(b"data: ")]
    return encoder.whole(), [msgspec.json.decode(event) for event in events]


CALLS = {
    "name in pieces": [call(0, "get_", id="a"), call(0, "weather", ""), call(0, None, '{"x":1}')],
    "name again": [call(0, "get_weather", '{"x"', id="a"), call(0, "get_weather", ":1}")],
    "name again at first": [call(0, "get_weather"), call(0, "get_weather", '{"x":1}')],
    "neither index nor id": [call(None, "get_weather", '{"x"'), call(None, None, ":1}")],
    "id in place of an index": [
        call(None, "get_weather", '{"x"', id="a"), call(None, "get_weather", ":1}", id="a"),
    ],
    "arguments as an object": [call(0, "get_weather", {"x": 1}, id="a")],
    "arguments as an object at last": [call(0, "get_weather", "", id="a"), call(0, None, {"x": 1})],
}  # fmt: skip


@pytest.mark.parametrize("deltas", CALLS.values(), ids=CALLS)
def test_message_has_the_tool_call_of_all_its_pieces(deltas: list[Delta]) -> None:
    whole, events = encoded(MessageEncoder, *deltas)
    (block,) = whole["content"]
    assert (block["name"], block["input"]) == ("get_weather", {"x": 1})
    (begun,) = (event["content_block"] for event in events if "content_block" in event)
    assert begun["name"] == "get_weather"
    parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(part["partial_json"] for part in parts) == '{"x":1}'


@pytest.mark.parametrize("deltas", CALLS.values(), ids=CALLS)
def test_response_has_the_tool_call_of_all_its_pieces(deltas: list[Delta]) -> None:
    whole, events = encoded(ResponseEncoder, *deltas)
    (item,) = whole["output"]
    assert (item["name"], item["arguments"]) == ("get_weather", '{"x":1}')
    (added,) = (e["item"] for e in events if e["type"] == "response.output_item.added")
    assert (added["name"], added["arguments"]) == ("get_weather", "")


@pytest.mark.parametrize("deltas", CALLS.values(), ids=CALLS)
def test_events_after_a_number_are_the_rest(deltas: list[Delta]) -> None:
    _, events = encoded(MessageEncoder, *deltas)
    for after in range(1, 5):
        _, rest = encoded(MessageEncoder, *deltas, after=after)
        assert [e["type"] for e in rest][-3:] == [e["type"] for e in events][-3:]
        assert len(rest) <= len(events)
    _, rest = encoded(MessageEncoder, *deltas, after=2)  # message and block have begun
    assert rest == events[2:]


def test_call_without_arguments_begins_at_its_end() -> None:
    _, events = encoded(MessageEncoder, call(0, "now"), call(1, "later", "{}"))
    names = [e["content_block"]["name"] for e in events if e["type"] == "content_block_start"]
    assert names == ["now", "later"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert stops == [0, 1]


def test_refusal_of_a_server_is_text() -> None:
    whole, _ = encoded(MessageEncoder, {"refusal": "I can"}, {"refusal": "not"})
    assert whole["content"] == [{"type": "text", "text": "I cannot"}]
    whole, _ = encoded(ResponseEncoder, {"refusal": "no"})
    assert whole["output"][0]["content"][0]["text"] == "no"


UNKNOWN = Usage(
    prompt_tokens=7, unknown=("completion_tokens", "cached_tokens")
)  # the server reports those of the prompt only


@pytest.mark.parametrize(("usage", "prompt_tokens"), [(None, None), (UNKNOWN, 7)])
def test_unknown_counts_are_no_zeros(usage: Usage | None, prompt_tokens: int | None) -> None:
    whole, events = encoded(MessageEncoder, {"reasoning": "hm"}, usage=usage)
    counts = whole["usage"]
    assert counts["input_tokens"] == prompt_tokens
    assert (counts["output_tokens"], counts["cache_read_input_tokens"]) == (None, None)
    assert next(e for e in events if e["type"] == "message_delta")["usage"] == counts
    assert encoded(ResponseEncoder, {"reasoning": "hm"}, usage=usage)[0]["usage"] is None


@pytest.mark.parametrize("details", [[1], "many", {"reasoning_tokens": "three"}, {}, 7])
def test_details_of_another_shape_count_no_reasoning(details: Any) -> None:
    usage = Usage(
        prompt_tokens=7, completion_tokens=3, details={"completion_tokens_details": details}
    )
    whole, _ = encoded(MessageEncoder, {"reasoning": "hm"}, usage=usage)
    assert whole["usage"]["output_tokens"] == 3
    assert "output_tokens_details" not in whole["usage"]
    of_response = encoded(ResponseEncoder, {"reasoning": "hm"}, usage=usage)[0]["usage"]
    assert of_response["output_tokens_details"] == {"reasoning_tokens": 0}
