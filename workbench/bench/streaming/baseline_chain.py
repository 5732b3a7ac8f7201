"""The front of a bare chain over Kafka: FastAPI and aiokafka, without a router or an engine.

    python -m workbench.bench.streaming.baseline_chain PORT

`POST /v1/chat/completions` appends the body to `requests`, waits for the record of the same key in
`responses`, and streams one event. Two echoes (`baseline_kafka.py`) copy the records in between: as
many appends and reads as a request of kvlane has on its way to its first token. Prints `ready`.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import uvicorn
from aiokafka import AIOKafkaConsumer
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from kvlane.app.settings import Settings
from kvlane.streams.ports import Entry
from kvlane.streams.topics import REQUESTS, RESPONSES
from workbench.bench.streaming.baseline_kafka import POLL_MS, BareProducer

ANSWER_TIMEOUT_S = 30.0


class ChainFront:
    """The client of Kafka behind the front; each request waits for its record."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._producer: BareProducer

    @asynccontextmanager
    async def run(self, _: FastAPI) -> AsyncIterator[None]:
        """From the start of the application to its end."""
        self._producer = BareProducer(self._settings, "front")
        await self._producer.start()
        topic = f"{self._settings.topic_prefix}{RESPONSES}"
        options = self._settings.kafka_connection("front").client_options()
        async with AIOKafkaConsumer(topic, auto_offset_reset="latest", **options) as consumer:
            while not consumer.assignment():
                await consumer.getmany(timeout_ms=POLL_MS)
            await consumer.seek_to_end()
            reading = asyncio.create_task(self._read(consumer))
            print("ready", flush=True)  # noqa: T201 - read by the parent process
            yield
            reading.cancel()
        await self._producer.close()

    async def answer(self, body: bytes) -> None:
        """Append a record, and wait for the record of the same key in the last topic."""
        key = uuid.uuid4().hex.encode()
        turn = self._waiting[key] = asyncio.get_running_loop().create_future()
        await self._producer.send(REQUESTS, None, [Entry(key, body)])
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await turn

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                for record in records:
                    if (turn := self._waiting.pop(record.key, None)) is not None:
                        turn.set_result(None)


def create_app(front: ChainFront) -> FastAPI:
    api = FastAPI(lifespan=front.run)

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        await front.answer(await request.body())
        return StreamingResponse(events(), media_type="text/event-stream")

    return api


async def events() -> AsyncIterator[bytes]:
    choice = {"index": 0, "delta": {"content": "word"}, "finish_reason": "length"}
    yield b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":
    uvicorn.run(
        create_app(ChainFront(Settings())), port=int(sys.argv[1]), http="httptools", loop="uvloop",
        log_level="warning",
    )  # fmt: skip
