"""The bare Kafka client that benchmarks measure against: a producer, and an echo of records.

    python -m workbench.bench.streaming.baseline_kafka [topic target]

The echo consumes a topic in a group, by default `requests`, and produces to another one, by default
`assignments`. It is the baseline of the router: a record in, the same record out, no decision. The
client has the settings that measured best: uvloop, one poll after the other, records sent without
waiting for their acknowledgement, acknowledged by all replicas, no linger. Prints `ready` when it
owns its partitions.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from kvlane.app.settings import Settings
from kvlane.streams.ports import Entry
from kvlane.streams.topics import ASSIGNMENTS, REQUESTS

POLL_MS = 500
BATCH_BYTES = 256 * 1024
"""With the client's default of 16 KiB a batch would hold one request of 2000 tokens."""


class BareProducer:
    """aiokafka's producer for encoded records: no task, no wait and no retry of our own.

    A record costs about 25 us; one that is not acknowledged is lost, which the reader notices.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._prefix = settings.topic_prefix
        self._producer = AIOKafkaProducer(
            acks="all", enable_idempotence=True, linger_ms=0, max_batch_size=BATCH_BYTES,
            **settings.kafka_connection(name).client_options(),
        )  # fmt: skip

    async def start(self) -> None:
        """Connect. Raises KafkaError."""
        await self._producer.start()

    async def send(self, topic: str, partition: int | None, entries: Iterable[Entry]) -> None:
        """Queue records of one partition, or each by its key; waits only for a full queue."""
        for entry in entries:
            await self._producer.send(
                f"{self._prefix}{topic}", entry.value, entry.key, partition,
                headers=list(entry.headers),
            )  # fmt: skip

    async def close(self) -> None:
        await self._producer.stop()


async def run_echo(settings: Settings, topic: str = REQUESTS, target: str = ASSIGNMENTS) -> None:
    """Until it is ended."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    prefix = settings.topic_prefix
    consumer = AIOKafkaConsumer(
        f"{prefix}{topic}", group_id=f"{prefix}echo-{topic}", auto_offset_reset="earliest",
        fetch_min_bytes=1, **settings.kafka_connection("echo").client_options(),
    )  # fmt: skip
    producer = BareProducer(settings, "echo")
    await producer.start()
    async with consumer:
        while not consumer.assignment():
            await consumer.getmany(timeout_ms=POLL_MS)
        print("ready", flush=True)  # noqa: T201 - read by the parent process
        while not ended.is_set():
            found = await consumer.getmany(timeout_ms=POLL_MS)
            for records in found.values():
                await producer.send(
                    target, None, (Entry(record.key, record.value) for record in records)
                )
    await producer.close()


if __name__ == "__main__":
    uvloop.run(run_echo(Settings(), *sys.argv[1:]))
