"""Stored responses on a real Kafka: a conversation over two gateways, one of which is killed."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import openai
import pytest

from kvlane.app.local.processes import free_port
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned, wait_answered

LANES = 2

pytestmark = pytest.mark.slow


async def test_conversation_continues_at_another_gateway_when_its_own_is_killed(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
        engine="echo", echo_itl_ms=20, status_port=None, hash_secret="tests",
    )  # fmt: skip
    port, ctx = free_port(), ProcessContext("standalone")
    environment = os.environ | {
        "KVLANE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": topic_prefix,
        "KVLANE_LANES": str(LANES),
        "KVLANE_HASH_SECRET": "tests",
        "KVLANE_HTTP_PORT": str(port),
    }
    async with provisioned(settings) as log, AsyncExitStack() as parts:
        everything = StandaloneProcess(log, settings, ctx)
        await everything.start()
        parts.push_async_callback(ctx.cancel_tasks)
        parts.push_async_callback(everything.stop)
        urls = (everything.gateway.url, f"http://127.0.0.1:{port}")
        process = parts.enter_context(app_process("gateway", tmp_path / "g2.log", environment))
        async with httpx.AsyncClient(base_url=urls[1]) as http:
            await wait_answered(process, http, "/v1/models", lambda answer: answer.json()["data"])
        kept, lost = [
            await parts.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
            )
            for url in urls
        ]
        first = await lost.responses.create(model="demo", input="one two three")
        second = await kept.responses.create(
            model="demo", input="four", previous_response_id=first.id
        )
        history = [
            {"role": "user", "content": "one two three"},
            *(item.to_dict() for item in first.output),
            {"role": "user", "content": "four"},
        ]
        in_full = await kept.responses.create(model="demo", input=history, store=False)  # type: ignore[arg-type]
        assert second.usage is not None
        assert in_full.usage is not None
        assert second.usage.input_tokens == in_full.usage.input_tokens
        begun = await lost.responses.create(
            model="demo", input="five six seven", background=True, previous_response_id=second.id
        )
        process.kill()
        async with asyncio.timeout(WAIT_S):
            while (ended := await kept.responses.retrieve(begun.id)).status != "completed":
                assert ended.status in ("queued", "in_progress")
        assert (ended.previous_response_id, ended.background) == (second.id, True)
        last = await kept.responses.create(
            model="demo", input="eight", previous_response_id=ended.id
        )
        items = [item async for item in kept.responses.input_items.list(last.id, order="asc")]
        assert [getattr(item, "role", "") for item in items] == ["user", "assistant"] * 3 + ["user"]
        await kept.responses.delete(ended.id)
        with pytest.raises(openai.BadRequestError, match="deleted"):
            await kept.responses.create(model="demo", input="nine", previous_response_id=ended.id)
