"""Tests of `/v1/responses` by OpenAI's client: events of an answer, errors, resumption."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from kvlane import EngineOutput, Request
from kvlane.app.engine.interface import GenerateContext
from kvlane.testing import MemoryDeployment, ScriptedEngine, memory_deployment
from tests.flows.test_agents import SCRIPT, Breaking, client_of
from tests.flows.test_messages import Event, events_of, known_events

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
MORE = SCRIPT | {"rain": "Take a coat."}
MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": text, "tools": [TOOL]} | more


async def post(deployment: MemoryDeployment, fields: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=20) as http:
        return await http.post("/v1/responses", json=fields)


def joined(events: list[Event]) -> list[dict[str, Any]]:
    """The events with successive deltas of an item as one, without ids, counts and the model."""
    found: list[dict[str, Any]] = []
    for _, event in events:
        if event["type"].endswith(".delta") and found[-1]["type"] == event["type"]:
            found[-1]["delta"] += event["delta"]
            continue
        found.append(dict(event))
        found[-1].pop("sequence_number")
    text = json.dumps(found)
    for event in found:
        response = event.get("response", {})
        for value in (response.get("id", ""), *_call_ids(event)):
            text = text.replace(value, "") if value else text
    shown = json.loads(text)
    for event in shown:
        if "response" in event:
            kept = ("status", "output", "error", "incomplete_details")
            event["response"] = {name: event["response"][name] for name in kept}
    return shown


def _call_ids(event: dict[str, Any]) -> list[str]:
    item = event.get("item", {})
    return [item["call_id"]] if "call_id" in item else []


async def test_items_of_the_whole_answer_are_those_of_the_stream() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        whole = await ai.responses.create(**body("two"))
        assert [item.type for item in whole.output] == [REASONING, CALL, CALL]
        assert whole.output[0].content[0].text == "\nboth\n"
        assert json.loads(whole.output[1].arguments) == {"city": "Köln"}
        assert whole.output[1].call_id != whole.output[2].call_id
        assert (whole.status, whole.tools[0].name) == ("completed", "weather")
        assert whole.usage.output_tokens == len(SCRIPT["two"].encode())
        assert whole.usage.output_tokens_details.reasoning_tokens > len("both")
        async with ai.responses.stream(**body("two")) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert kinds[-1] == "response.completed"
        assert [item.type for item in streamed.output] == [item.type for item in whole.output]
        assert streamed.output[1].arguments == whole.output[1].arguments
        assert streamed.usage == whole.usage


async def test_stream_has_its_events_in_order() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        response = await post(deployment, body("one", stream=True))
    whole = events_of(response.text)
    numbers = [event.data["sequence_number"] for event in whole]
    assert numbers == [event.number - 1 for event in whole] == sorted(set(numbers))
    added, done = "response.output_item.added", "response.output_item.done"
    assert [event["type"] for event in joined(whole)] == [
        "response.created", "response.in_progress",
        added, "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", done,
        added, "response.function_call_arguments.delta", "response.function_call_arguments.done",
        done, "response.completed",
    ]  # fmt: skip
    assert whole[0].data["response"]["output"] == []
    assert whole[-1].data["response"]["output"][0]["content"][0]["text"] == "I look it up.\n"


async def test_items_of_earlier_responses_reach_the_model() -> None:
    async with memory_deployment(ScriptedEngine(MORE)) as deployment, client_of(deployment) as ai:
        first = await ai.responses.create(**body("one"))
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        history = [{"role": "user", "content": "one"}, *(item.to_dict() for item in first.output)]
        answer = await ai.responses.create(
            **body("", input=[*history, result], instructions="Be brief.")
        )
        assert answer.output_text == "Take a coat."
        assert answer.instructions == "Be brief."


async def test_call_of_a_function_in_a_namespace_names_it() -> None:
    tools = [{"type": "namespace", "name": "now", "description": "", "tools": [TOOL]}]
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        whole = await ai.responses.create(**body("one", tools=tools))
    assert (whole.output[1].name, whole.output[1].namespace) == ("weather", "now")


async def test_response_names_the_reason_of_its_end() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        cut = await ai.responses.create(**body("text", max_output_tokens=4))
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output_text, cut.output[0].status) == ("It r", "incomplete")
        events = events_of(
            (await post(deployment, body("one", max_output_tokens=70, stream=True))).text
        )
        assert events[-1].data["type"] == "response.incomplete"
        statuses = [item["status"] for item in events[-1].data["response"]["output"]]
        assert statuses == ["completed", "incomplete"]


async def test_stream_resumed_after_any_event_has_the_rest() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        response = await post(deployment, body("two", stream=True))
        whole = events_of(response.text)
        url = f"/v1/streams/{response.headers['x-kvlane-id']}?form=response"
        async with httpx.AsyncClient(base_url=deployment.url, timeout=20) as http:
            for number in (*(e.number for e in whole[::11]), 7, 9, whole[-2].number):
                resumed = await http.get(url, headers={"Last-Event-ID": str(number)})
                known = known_events(whole, number)
                assert joined(known + events_of(resumed.text)) == joined(whole)


async def test_answer_whose_worker_fails_has_the_same_events() -> None:
    breaks: list[int] = []
    async with memory_deployment(Breaking(breaks), Breaking(breaks)) as deployment:
        unbroken = events_of((await post(deployment, body("two", stream=True))).text)
        for tokens in (5, 60, 110, 150):
            breaks += [tokens % 11, tokens]
            events = events_of((await post(deployment, body("two", stream=True))).text)
            assert not breaks
            assert joined(events) == joined(unbroken)
            assert events[-1].number == unbroken[-1].number


class Slow(ScriptedEngine):
    """Takes a while for each token."""

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        async for output in super().generate(request, context):
            await asyncio.sleep(0.02)
            yield output


async def test_response_in_the_background_is_retrieved_by_its_id() -> None:
    async with memory_deployment(Slow(SCRIPT)) as deployment, client_of(deployment) as ai:
        begun = await ai.responses.create(**body("one"), background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        states = [begun.status]
        while states[-1] in ("queued", "in_progress"):
            response = await ai.responses.retrieve(begun.id)
            states.append(response.status)
        assert states[-1] == "completed"
        assert "in_progress" in states
        assert [item.type for item in response.output] == [MESSAGE, CALL]
        events = [event async for event in await ai.responses.retrieve(begun.id, stream=True)]
        assert events[-1].response.output == response.output
        place = len(events) // 2
        rest = await ai.responses.retrieve(
            begun.id, stream=True, starting_after=events[place].sequence_number
        )
        assert [event async for event in rest] == events[place + 1 :]


async def test_cancelled_response_keeps_its_part() -> None:
    async with memory_deployment(Slow(SCRIPT)) as deployment, client_of(deployment) as ai:
        begun = await ai.responses.create(**body("one"), background=True)
        assert (await ai.responses.cancel(begun.id)).status == "cancelled"
        async with asyncio.timeout(20):
            while (ended := await ai.responses.retrieve(begun.id)).status != "cancelled":
                assert ended.status in ("queued", "in_progress")
        assert ended.error is None
        assert (await ai.responses.cancel(begun.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await ai.responses.retrieve("01900000-0000-7000-8000-000000000000")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": ""}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
async def test_field_that_is_not_honoured_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.responses.create(**body("text"), extra_body=fields)
    assert refused.value.param.startswith(named)


async def test_body_that_is_nested_too_deep_is_refused() -> None:
    call = '{"type": "tool_use", "id": "a", "name": "b", "input": %s}'
    turns = (
        '{"role": "user", "content": "a"}',
        '{"role": "assistant", "content": [%s]}' % call,  # noqa: UP031 - braces are JSON's
        '{"role": "user", "content": "text"}',
    )
    bodies = {
        "responses": '{"model": "scripted", "input": "text", "user": %s}',
        "messages": f'{{"model": "scripted", "max_tokens": 5, "messages": [{",".join(turns)}]}}',
    }
    kind = {"content-type": "application/json"}
    async with (
        memory_deployment(ScriptedEngine(SCRIPT)) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=20, headers=kind) as http,
    ):
        for levels in (400, 800, 1500, 5000):
            nested = levels * '{"a":' + "1" + levels * "}"
            for path, text in bodies.items():
                answer = await http.post(f"/v1/{path}", content=text % nested)
                assert answer.status_code in (200, 400), (path, levels, answer.text)


async def test_errors_have_the_classes_of_the_client() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        with pytest.raises(openai.NotFoundError, match="other"):
            await ai.responses.create(**body("text", model="other"))
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": []}
        with pytest.raises(openai.BadRequestError, match="allowed_tools is not supported"):
            await ai.responses.create(**body("text"), extra_body={"tool_choice": allowed})
        with pytest.raises(openai.BadRequestError, match="no answer to"):
            await ai.responses.create(**body("unknown"), stream=True)
