"""Tests of `/v1/messages` by Anthropic's client: events of an answer, errors, resumption."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

import anthropic
import httpx
import pytest

from kvlane.app.http.anthropic.message_requests import chat_of
from kvlane.testing import MemoryDeployment, ScriptedEngine, memory_deployment
from tests.flows.test_agents import SCRIPT, Breaking

WEATHER = {"name": "weather", "description": "now", "input_schema": {"type": "object"}}
MORE = {
    "rain": "Take a coat.",
    "both": f"First.\n{SCRIPT['one'].partition(chr(10))[2]} Then <tool_call>no call</tool_call>",
}
LARGE_FORM = {"type": "json_schema", "schema": {"type": "string", "pattern": "(a{1000}){1000}"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}


class Event(NamedTuple):
    number: int
    data: dict[str, Any]


def client_of(deployment: MemoryDeployment) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=deployment.url, api_key="-", max_retries=0)


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "scripted", "max_tokens": 500, "messages": messages, "tools": [WEATHER]} | more


def events_of(text: str) -> list[Event]:
    events, number = [], 0
    for line in text.splitlines():
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            events.append(Event(number, json.loads(line.removeprefix("data: "))))
    return events


def known_events(whole: list[Event], number: int) -> list[Event]:
    """The events of a stream up to a position, which may lie within a text."""
    known = [event for event in whole if event.number <= number]
    if len(known) == len(whole):
        return known
    rest = whole[len(known)]
    deltas = copy.deepcopy(rest.data)
    fields = deltas if isinstance(deltas.get("delta"), str) else deltas.get("delta", {})
    for name in ("delta", "text", "thinking", "partial_json"):
        if name in fields and (length := len(fields[name]) + number - rest.number) > 0:
            fields[name] = fields[name][:length]
            return [*known, Event(number, deltas)]
    return known


def joined(events: list[Event]) -> list[dict[str, Any]]:
    """The events, with successive deltas of a block as one, and without counts of tokens."""
    found: list[dict[str, Any]] = []
    for _, event in events:
        data = {name: value for name, value in event.items() if name != "usage"}
        if data["type"] == "message_start":
            data["message"] = data["message"] | {"usage": None, "model": None, "id": None}
        delta = data.get("delta", {})
        texts = [name for name in ("text", "thinking", "partial_json") if name in delta]
        if texts and found[-1].get("delta", {}).get("type") == delta["type"]:
            found[-1]["delta"][texts[0]] += delta[texts[0]]
        else:
            found.append(json.loads(json.dumps(data)))
    for data in found:
        data.get("delta", {}).pop("signature", None)
        data.get("content_block", {}).pop("id", None)
    return found


async def test_blocks_of_the_whole_answer_are_those_of_the_stream() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        whole = await ai.messages.create(**body("two"))
        kinds = [block.type for block in whole.content]
        assert kinds == ["thinking", "tool_use", "tool_use"]
        thinking, first, second = whole.content
        assert (thinking.thinking, thinking.signature) == ("\nboth\n", whole.id)
        assert (first.name, first.input) == ("weather", {"city": "Köln"})
        assert first.id != second.id
        assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
        assert whole.usage.output_tokens == len(SCRIPT["two"].encode())
        assert whole.usage.cache_read_input_tokens == 0
        async with ai.messages.stream(**body("two")) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert [block.type for block in streamed.content] == [b.type for b in whole.content]
        assert streamed.content[1].input == first.input
        assert streamed.content[0].signature == streamed.id
        assert streamed.usage == whole.usage
        assert streamed.stop_reason == "tool_use"


async def test_omitted_thinking_is_a_block_without_text() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        fields = body("two", thinking={"type": "adaptive", "display": "omitted"})
        whole = await ai.messages.create(**fields)
        async with ai.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert "thinking" not in kinds, "no delta of the text"
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "tool_use", "tool_use"]
        assert (answer.content[0].thinking, answer.content[0].signature) == ("", answer.id)


async def test_stream_has_its_events_in_order() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        response = await post(deployment, body("one", stream=True))
        events = joined(events_of(response.text))
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["request-id"] == response.headers["x-kvlane-id"]
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"] == {"type": "text_delta", "text": "I look it up.\n"}
    assert events[4] == {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "name": "weather", "input": {}},
    }
    assert events[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": "Köln"}'}
    assert events[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_text_behind_a_call_is_a_block_behind_it() -> None:
    async with memory_deployment(ScriptedEngine(MORE)) as deployment, client_of(deployment) as ai:
        whole = await ai.messages.create(**body("both"))
    assert [block.type for block in whole.content] == ["text", "tool_use", "text"]
    assert whole.content[2].text.endswith("<tool_call>no call</tool_call>")


async def test_results_of_tools_reach_the_model() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "rain"}],
        "cache_control": {"type": "ephemeral"},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, CALL]},
        {"role": "user", "content": [result]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with memory_deployment(ScriptedEngine(MORE)) as deployment, client_of(deployment) as ai:
        asked = body("", messages=messages, system=system)
        answer = await ai.messages.create(**asked)
        assert answer.content[0].text == "Take a coat."
        assert answer.stop_reason == "end_turn"
        asked.pop("max_tokens")
        counted = await ai.messages.count_tokens(**asked)
        assert counted.input_tokens == answer.usage.input_tokens


async def test_answer_names_the_reason_of_its_end() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        cut = await ai.messages.create(**body("text", max_tokens=4))
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "It r")
        stopped = await ai.messages.create(**body("text", stop_sequences=["rain"]))
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rain")
        assert stopped.content[0].text == "It "
        within = await ai.messages.create(**body("one", max_tokens=70))
        assert within.stop_reason == "max_tokens"
        single = await ai.messages.create(
            **body("two", tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        )
        assert [block.type for block in single.content] == ["thinking", "tool_use"]
        plain = await ai.messages.create(**body("one", tool_choice={"type": "none"}))
        assert plain.content[0].text == SCRIPT["one"]


async def test_stream_resumed_after_any_event_has_the_rest() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        response = await post(deployment, body("two", stream=True))
        whole = events_of(response.text)
        stream_id = response.headers["x-kvlane-id"]
        assert [e.number for e in whole] == sorted({e.number for e in whole})
        async with httpx.AsyncClient(base_url=deployment.url, timeout=20) as http:
            for place in (*range(0, len(whole), 9), len(whole) - 2, len(whole) - 1):
                resumed = await http.get(
                    f"/v1/streams/{stream_id}?form=message",
                    headers={"Last-Event-ID": str(whole[place].number)},
                )
                assert joined(whole[: place + 1] + events_of(resumed.text)) == joined(whole)
            for number in (1, 3, 4, 50):  # within a text, too
                resumed = await http.get(f"/v1/streams/{stream_id}?form=message&from={number}")
                known = known_events(whole, number)
                assert joined(known + events_of(resumed.text)) == joined(whole)
            for query in ("", "&stream=false"):
                late = await http.get(f"/v1/streams/{stream_id}?form=message&from=9999{query}")
                assert "before the one to go on from" in late.text
            again = await http.get(f"/v1/streams/{stream_id}?form=message&stream=false&from=9")
            kinds = [block["type"] for block in again.json()["content"]]
            assert kinds == ["thinking", "tool_use", "tool_use"]


async def test_answer_whose_worker_fails_has_the_same_events() -> None:
    breaks: list[int] = []
    async with memory_deployment(Breaking(breaks), Breaking(breaks)) as deployment:
        unbroken = events_of((await post(deployment, body("two", stream=True))).text)
        for tokens in (3, 30, 60, 110, 150):
            breaks += [tokens % 11, tokens]
            events = events_of((await post(deployment, body("two", stream=True))).text)
            assert not breaks
            assert joined(events) == joined(unbroken)
            assert events[-1].number == unbroken[-1].number


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": "It"}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"temperature": 1.5}, "temperature"),
        ({"nvext": {"kv_transfer_params": {"a": 1}}}, "nvext.kv_transfer_params"),
        ({"output_config": {"format": LARGE_FORM}}, "output_config.format"),
        ({"output_format": LARGE_FORM}, "output_format"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
    ],
)
async def test_field_that_is_not_honoured_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        response = await post(deployment, body("text", **fields))
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"].startswith(f"{named}: ")
    assert "image" not in response.json()["error"]["message"]


async def test_errors_have_the_classes_of_the_client() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await ai.messages.create(**body("text", model="other"))
        with pytest.raises(anthropic.BadRequestError, match="no answer to"):
            await ai.messages.create(**body("unknown"))
        with pytest.raises(anthropic.BadRequestError, match="no answer to"):
            async with ai.messages.stream(**body("unknown")) as stream:
                await stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
            await ai.messages.create(
                **body("text"), extra_headers={"anthropic-version": "2023-01-01"}
            )
        with pytest.raises(anthropic.NotFoundError, match="count_tokens"):
            await ai.messages.batches.list()


def test_strict_tools_and_earlier_names_of_formats_reach_the_model() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    chat = chat_of(body("text", tools=[WEATHER | {"strict": True}], output_format=form))
    assert chat["tools"][0]["function"]["strict"] is True
    assert chat["response_format"]["json_schema"]["schema"] == schema
    assert chat_of(body("text", output_config={"format": form})) == chat_of(
        body("text", output_format=form, output_config={"effort": "low", "format": None})
    )


async def post(deployment: MemoryDeployment, fields: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=20) as http:
        return await http.post("/v1/messages", json=fields)


async def test_models_have_the_form_of_the_api_whose_version_is_sent() -> None:
    async with (
        memory_deployment(ScriptedEngine(SCRIPT)) as deployment,
        anthropic.AsyncAnthropic(base_url=deployment.url, api_key="-", max_retries=0) as claude,
    ):
        listed = [model async for model in claude.models.list()]
        assert [(model.id, model.type, model.display_name) for model in listed] == [
            ("scripted", "model", "scripted")
        ]
        assert await claude.models.retrieve("scripted") == listed[0]
        assert listed[0].created_at.year > 2000
        with pytest.raises(anthropic.NotFoundError):
            await claude.models.retrieve("other")
        async with httpx.AsyncClient(base_url=deployment.url) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["object"] == "model"
