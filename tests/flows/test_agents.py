"""Tests of chats with tools and reasoning, by OpenAI's client: each call arrives once and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai

from kvlane import EngineError, EngineOutput, GenerateContext, Prompt, Request
from kvlane.testing import MemoryDeployment, ScriptedEngine, memory_deployment

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCRIPT = {
    "one": f"I look it up.\n{CALL}",
    "two": f"<think>\nboth\n</think>\n{CALL}\n{CALL}",
    "text": "It rains.",
    "json": '{"city": "Köln"}',
}


class Breaking(ScriptedEngine):
    """Fails each run after the next of these numbers of tokens, if there is one."""

    def __init__(self, breaks: list[int]) -> None:
        super().__init__(SCRIPT)
        self._breaks = breaks

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        left = self._breaks.pop() if self._breaks and not request.is_probe else None
        async for output in super().generate(request, context):
            if left == 0 and output.token_ids:
                raise EngineError("out of memory", retryable=True)
            if left is not None:
                left -= len(output.token_ids)
            yield output


def client_of(deployment: MemoryDeployment) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="-", max_retries=0)


def body(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": "scripted", "messages": [message], "tools": [WEATHER]} | more


async def streamed(deployment: MemoryDeployment, text: str, **more: Any) -> dict[str, Any]:
    """A streamed answer, put together as clients do."""
    content, reasoning, calls, reason = "", "", dict[int, dict[str, Any]](), None
    async with client_of(deployment) as client:
        async for event in await client.chat.completions.create(**body(text, **more), stream=True):
            choice = event.choices[0]
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"arguments": ""})
                if call.id:
                    assert "id" not in known, "a call has one beginning"
                    assert call.function is not None
                    known |= {"id": call.id, "name": call.function.name}
                known["arguments"] += (call.function and call.function.arguments) or ""
            reason = choice.finish_reason or reason
    return {
        "content": content,
        "reasoning": reasoning,
        "reason": reason,
        "calls": [calls[index] for index in sorted(calls)],
    }


async def test_calls_and_reasoning_reach_the_client_apart_from_the_content() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        whole = await ai.chat.completions.create(**body("two"))
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]
        assert len({call.id for call in message.tool_calls}) == 2
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
        assert message.reasoning_content == "\nboth\n"
        assert not (message.content or "").strip()
        assert whole.usage.completion_tokens_details.reasoning_tokens > len("both")
        events = await streamed(deployment, "two")
        assert events["calls"][0]["arguments"] == '{"city": "Köln"}'
        assert (len(events["calls"]), events["reason"]) == (2, "tool_calls")
        assert events["reasoning"] == message.reasoning_content
        first = await streamed(deployment, "two", parallel_tool_calls=False)
        assert (len(first["calls"]), first["reason"]) == (1, "tool_calls")
        hidden = await streamed(deployment, "two", extra_body={"include_reasoning": False})
        assert (hidden["reasoning"], hidden["calls"][0]["name"]) == ("", "weather")


async def test_chat_without_tools_keeps_the_text_of_calls() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment, client_of(deployment) as ai:
        for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
            plain = await ai.chat.completions.create(**body("one", **more))
            assert plain.choices[0].message.content == SCRIPT["one"]
            assert plain.choices[0].finish_reason == "stop"
        answer = await ai.chat.completions.create(**body("text"))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            "It rains.",
            "stop",
        )


async def test_answer_whose_worker_fails_continues_within_a_call() -> None:
    breaks: list[int] = []
    async with memory_deployment(Breaking(breaks), Breaking(breaks)) as deployment:
        unbroken = await streamed(deployment, "two")
        for tokens in range(2, 170, 14):
            breaks += [tokens % 11, tokens]
            answer = await streamed(deployment, "two")
            assert not breaks
            for call in (*answer["calls"], *unbroken["calls"]):
                call.pop("id", None)
            assert answer == unbroken


async def test_stream_resumed_at_any_event_has_the_rest_of_the_calls() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        http = httpx.AsyncClient(base_url=deployment.url, timeout=20)
        async with http:
            response = await http.post(
                "/v1/chat/completions", json=body("two", stream=True), timeout=20
            )
            whole = events_of(response.text)
            request_id = response.headers["x-kvlane-id"]
            for place in range(0, len(whole) - 1, max(1, len(whole) // 12)):
                resumed = await http.get(
                    f"/v1/streams/{request_id}",
                    headers={"Last-Event-ID": whole[place][0]},
                    timeout=20,
                )
                rest = events_of(resumed.text)
                assert fields(whole[: place + 1] + rest) == fields(whole)


async def test_result_on_kafka_has_the_calls() -> None:
    async with memory_deployment(ScriptedEngine(SCRIPT)) as deployment:
        client = deployment.client
        request_id = await client.publish(
            Prompt(id=client.new_request_id(), body=body("one", model=""))
        )
        reply = await client.result(request_id, timeout_s=20)
        assert (reply.text, reply.finish_reason) == ("I look it up.\n", "tool_calls")
        names = [
            call["function"].get("name")
            for item in reply.data
            for call in item.delta.get("tool_calls", [])
        ]
        assert [name for name in names if name] == ["weather"]


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The ids and the choices' deltas of server-sent events."""
    events, last_id = [], ""
    for line in text.splitlines():
        if line.startswith("id: "):
            last_id = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            events.append((last_id, json.loads(line.removeprefix("data: "))["choices"][0]))
    return events


def fields(events: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """The texts of the fields of all events."""
    texts: dict[str, str] = {}
    for _, choice in events:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            texts[name] = texts.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls", []):
            for name in ("id", "name", "arguments"):
                value = call.get(name) or call["function"].get(name) or ""
                key = f"{call['index']}.{name}"
                texts[key] = texts.get(key, "") + value
    return texts
