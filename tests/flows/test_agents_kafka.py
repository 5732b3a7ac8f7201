"""Tests of agents on a real Kafka: a call arrives once and whole, though its worker is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import anthropic
import openai
import pytest

from kvlane.app.gateway import Gateway
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.records import Fencing, Started
from kvlane.streams.topics import LEDGER
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "agent_script.json"
QUESTION = next(iter(json.loads(SCRIPT.read_text())))
LANES, STREAMS = 2, 6
TOOL = {"type": "function", "function": {"name": "weather"}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def streamed(client: openai.AsyncOpenAI, called: asyncio.Event) -> dict[str, str]:
    """The texts of a streamed answer; sets `called` with its first call."""
    texts = dict.fromkeys(("content", "reasoning", "id", "name", "arguments", "reason"), "")
    events = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], stream=True
    )  # type: ignore[call-overload]
    async for event in events:
        choice = event.choices[0]
        texts["content"] += choice.delta.content or ""
        texts["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        texts["reason"] += choice.finish_reason or ""
        for call in choice.delta.tool_calls or []:
            texts["id"] += call.id or ""
            texts["name"] += call.function.name or ""
            texts["arguments"] += call.function.arguments or ""
            called.set()
    return texts


async def streamed_message(
    client: anthropic.AsyncAnthropic, called: asyncio.Event
) -> dict[str, str]:
    """The same of a message of Anthropic's API."""
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    kinds, arguments = list[str](), ""
    async with client.messages.stream(
        model="demo", max_tokens=500, messages=[{"role": "user", "content": QUESTION}], tools=tools
    ) as stream:  # type: ignore[arg-type]
        async for event in stream:
            if event.type == "content_block_start":
                kinds.append(event.content_block.type)
            elif event.type == "input_json":
                arguments += event.partial_json
                called.set()
        message = await stream.get_final_message()
    assert kinds == ["thinking", "text", "tool_use"]
    thinking, text, call = message.content
    return {
        "content": text.text, "reasoning": thinking.thinking, "id": call.id, "name": call.name,
        "arguments": arguments, "reason": message.stop_reason.replace("use", "calls"),
    }  # fmt: skip


async def streamed_response(client: openai.AsyncOpenAI, called: asyncio.Event) -> dict[str, str]:
    """The same of a response of OpenAI's newer API."""
    tools = [{"type": "function", "name": "weather", "parameters": None, "strict": None}]
    arguments, numbers = "", list[int]()
    events = await client.responses.create(model="demo", input=QUESTION, tools=tools, stream=True)  # type: ignore[call-overload]
    async for event in events:
        numbers.append(event.sequence_number)
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
            called.set()
    assert numbers == sorted(set(numbers))
    reasoning, message, call = event.response.output
    assert event.response.status == "completed"
    return {
        "content": message.content[0].text, "reasoning": reasoning.content[0].text,
        "id": call.call_id, "name": call.name, "arguments": arguments, "reason": "tool_calls",
    }  # fmt: skip


async def ledger_of(log: KafkaLog) -> list[AnyRecord]:
    """All records of the ledger."""
    ends = await log.end_offsets(LEDGER, range(LANES))
    reader = log.reader()
    reader.assign({Partition(LEDGER, lane): 0 for lane in ends})
    found: list[AnyRecord] = []
    while any(reader.position(Partition(LEDGER, lane)) < end for lane, end in ends.items()):
        for records in (await reader.poll(1.0)).values():
            found += map(decode, records)
    await reader.close()
    return found


async def test_killed_worker_repeats_and_loses_no_part_of_a_call(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        router_id="r", status_port=None, http_port=0, hash_secret="tests", worker_timeout_s=3,
    )  # fmt: skip
    environment = os.environ | {
        "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": topic_prefix,
        "KVLANE_LANES": str(LANES),
        "KVLANE_ENGINE": "echo",
        "KVLANE_ECHO_SCRIPT": str(SCRIPT),
        "KVLANE_HASH_SECRET": "tests",
        "KVLANE_STATUS_PORT": "",
    }
    async with provisioned(settings) as log, AsyncExitStack() as parts:
        with ExitStack() as processes:
            workers = {
                name: processes.enter_context(
                    app_process(
                        "worker", tmp_path / f"{name}.log", environment | {"KVLANE_WORKER_ID": name}
                    )
                )
                for name in ("w1", "w2")
            }
            started: list[Router | Gateway] = []
            for kind in (Router, Gateway):
                own = KafkaLog(settings.kafka_connection(kind.__name__), prefix=topic_prefix)
                ctx = ProcessContext(kind.__name__)
                await own.start()
                parts.push_async_callback(own.close)
                parts.push_async_callback(ctx.cancel_tasks)
                started.append(kind(own, settings, ctx))
                await started[-1].start()
                parts.push_async_callback(started[-1].stop)
            client = openai.AsyncOpenAI(base_url=f"{started[1].url}/v1", api_key="-", max_retries=0)
            parts.push_async_callback(client.close)
            claude = anthropic.AsyncAnthropic(base_url=started[1].url, api_key="-", max_retries=0)
            parts.push_async_callback(claude.close)
            clock = SystemClock()
            async with asyncio.timeout(WAIT_S):
                while not (await client.models.list()).data:
                    await clock.sleep(0.1)
            called = [asyncio.Event() for _ in range(STREAMS)]
            forms = (
                partial(streamed, client),
                partial(streamed_message, claude),
                partial(streamed_response, client),
            )
            answers = [
                asyncio.create_task(forms[place % 3](event)) for place, event in enumerate(called)
            ]
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(event.wait() for event in called))
            victim = next(r.worker for r in await ledger_of(log) if isinstance(r, Started))
            workers[victim].kill()
            async with asyncio.timeout(WAIT_S):
                results = await asyncio.gather(*answers)
            assert any(isinstance(record, Fencing) for record in await ledger_of(log))
    for texts in results:
        assert len(texts.pop("id")) == len("call_") + 24
        assert texts == {
            "content": "I look at the weather first.\n",
            "reasoning": "The weather decides.",
            "name": "weather",
            "arguments": '{"city": "Köln"}',
            "reason": "tool_calls",
        }


async def test_agent_of_the_examples_calls_both_tools(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
        engine="echo", echo_script=SCRIPT, echo_itl_ms=1,
    )  # fmt: skip
    ctx = ProcessContext("standalone")
    async with provisioned(settings) as log:
        everything = StandaloneProcess(log, settings, ctx)
        await everything.start()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "examples/agent_with_tools.py", everything.gateway.url, cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
        await everything.stop()
        await ctx.cancel_tasks()
    assert out.decode().splitlines() == [
        "weather: rain in Köln",
        "trains: the train to Köln leaves at 9:41",
        "Yes: it rains in Köln, and the train leaves at 9:41.",
    ]
