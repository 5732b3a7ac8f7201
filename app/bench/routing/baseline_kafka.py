"""Baseline of a hop over Kafka: a record in, the same record out, no decision.

    python -m app.bench.routing.baseline_kafka: consumes `requests` in a group, produces to
    `assignments`

The bare client with the settings that measured best: uvloop, one poll after the other, concurrent
appends, acknowledged by all replicas, no linger. The baseline of the router. Prints `ready` when it
owns its partitions.
"""

from __future__ import annotations

import asyncio
import signal

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from app.settings import Settings
from streams.topics import ASSIGNMENTS, REQUESTS

POLL_MS = 500


async def run_echo(settings: Settings) -> None:
    """Until it is ended."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    options = settings.kafka_connection("echo").client_options()
    prefix = settings.topic_prefix
    consumer = AIOKafkaConsumer(
        f"{prefix}{REQUESTS}", group_id=f"{prefix}echo", auto_offset_reset="earliest",
        fetch_min_bytes=1, **options,
    )  # fmt: skip
    producer = AIOKafkaProducer(acks="all", enable_idempotence=True, linger_ms=0, **options)
    async with producer, consumer:
        while not consumer.assignment():
            await consumer.getmany(timeout_ms=POLL_MS)
        print("ready", flush=True)  # noqa: T201 - read by the parent process
        while not ended.is_set():
            found = await consumer.getmany(timeout_ms=POLL_MS)
            for records in found.values():
                for record in records:
                    await producer.send(f"{prefix}{ASSIGNMENTS}", record.value, key=record.key)


if __name__ == "__main__":
    uvloop.run(run_echo(Settings()))
