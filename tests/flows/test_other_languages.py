"""Tests of a program in another language: it asks and reads with Kafka's own tools, and a key
alone.

The Java console producer and consumer belong to the broker's release; their partitioner is the one
that decides for every Java client. kcat stands for everything that is built on librdkafka.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator

import pytest

from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import encode
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.topics import PROMPTS, REQUESTS, RESPONSES, lane_of, partition_of
from tests.harness.java_tools import java_publishes, java_reads, tool, transcript_of

LANES = 8
WAIT_S = 120.0
KEYS = [f"job-{n}" for n in range(40)] + ["018f2d3c-0000-7000-8000-000000000001", "grüße", "请求"]

pytestmark = pytest.mark.kafka


@pytest.fixture
async def log(kafka: Broker, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(ConnectionOptions(kafka.bootstrap_servers, "test"), topic_prefix)
    await log.start()
    await create_topics(log, lanes=LANES, replication=1, min_insync=1)
    yield log
    await log.close()


async def everything(log: KafkaLog, topic: str, n: int) -> list[Record]:
    """The `n` records of a topic, from all its partitions."""
    reader = log.reader()
    reader.assign({Partition(topic, p): 0 for p in range(await log.partitions(topic))})
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < n:
            for records in (await reader.poll(0.5)).values():
                found += records
    await reader.close()
    return found


def chunk(request_id: str, seq: int, text: str, finish_reason: str | None = None) -> Chunk:
    return part(request_id, 0, "11", seq, seq * len(text), text, finish_reason)


def part(
    request_id: str,
    attempt: int,
    run: str,
    seq: int,
    index: int,
    text: str,
    finish_reason: str | None = None,
) -> Chunk:
    return Chunk(
        id=request_id,
        attempt=attempt,
        run=run,
        seq=seq,
        index=index,
        token_ids=tuple(map(ord, text)),
        text=text,
        chars=index + len(text),
        finish_reason=finish_reason,
    )


def reply(request_id: str) -> list[Chunk | Fence | End]:
    """A worker dies in the middle, comes back as a zombie, and a producer repeats itself."""
    return [
        part(request_id, 0, "11", 0, 0, "grü"),
        part(request_id, 0, "11", 0, 0, "grü"),
        Fence(id=request_id, attempt=1, reason="lost"),
        part(request_id, 0, "11", 1, 3, "XXX", "stop"),
        part(request_id, 1, "22", 0, 3, "ße"),
        part(request_id, 1, "22", 1, 5, " 😀", "stop"),
        End(id=request_id, code="cancelled"),
    ]


async def test_java_and_kvlane_agree_on_the_partition_of_every_key(
    kafka: Broker, log: KafkaLog, topic_prefix: str
) -> None:
    end = encode(End(id="x", code="cancelled"), "x").value
    assert end is not None
    await java_publishes(kafka, topic_prefix + RESPONSES, dict.fromkeys(KEYS, end.decode()))
    landed = {
        record.key.decode(): record.partition
        for record in await everything(log, RESPONSES, len(KEYS))
        if record.key
    }
    assert landed == {key: lane_of(key, LANES) for key in KEYS}
    assert len(set(landed.values())) == LANES, "the keys must tell all lanes apart"


async def test_java_program_publishes_a_prompt(
    kafka: Broker, log: KafkaLog, topic_prefix: str
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "grüße"}]}
    value = json.dumps({"id": "job-17", "kind": "chat", "body": body}, ensure_ascii=False)
    await java_publishes(kafka, topic_prefix + PROMPTS, {"job-17": value})
    (record,) = await everything(log, PROMPTS, 1)
    assert record.key == b"job-17"
    assert record.partition == partition_of(b"job-17", await log.partitions(PROMPTS))
    assert Prompt.model_validate_json(record.value or b"") == Prompt(
        id="job-17", kind="chat", body=body
    )


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_records_compressed_by_java_are_read(
    kafka: Broker, log: KafkaLog, topic_prefix: str, codec: str
) -> None:
    lines = {f"job-{n}": json.dumps({"text": f"{n} river " * 200}) for n in range(8)}
    await java_publishes(kafka, topic_prefix + PROMPTS, lines, "--compression-codec", codec)
    records = await everything(log, PROMPTS, len(lines))
    assert {r.key.decode(): r.value.decode() for r in records if r.key and r.value} == lines


async def test_java_program_reads_a_reply_by_its_key_alone(
    kafka: Broker, log: KafkaLog, topic_prefix: str
) -> None:
    """Where Java puts a record of that key on a topic of as many lanes, there it looks."""
    request_id = "018f2d3c-0000-7000-8000-000000000001"
    await java_publishes(kafka, topic_prefix + REQUESTS, {request_id: "{}"})
    lane = (await everything(log, REQUESTS, 1))[0].partition
    stranger = next(key for key in KEYS if key != request_id and lane_of(key, LANES) == lane)
    records: list[Entry] = []
    for line in reply(request_id):
        records += [encode(line, request_id), encode(chunk(stranger, len(records), "?"), stranger)]
    await log.append_batch(RESPONSES, lane_of(request_id, LANES), records)

    printed = await java_reads(kafka, topic_prefix + RESPONSES, lane, len(records))

    transcript = transcript_of([value for key, value in printed if key == request_id])
    assert transcript.text == "grüße 😀"
    assert transcript.finish_reason == "stop"
    assert transcript.gaps == 0


# --- librdkafka -----------------------------------------------------------------------------------

kcat = shutil.which("kcat")
needs_kcat = pytest.mark.skipif(kcat is None, reason="kcat is not installed: apt-get install kcat")


def kcat_command(kafka: Broker, *arguments: str) -> list[str]:
    return [kcat or "", "-q", "-b", kafka.bootstrap_servers, *arguments]


@needs_kcat
async def test_librdkafka_with_the_java_partitioner_and_kvlane_agree_on_every_partition(
    kafka: Broker, log: KafkaLog, topic_prefix: str
) -> None:
    command = kcat_command(
        kafka,
        *("-P", "-t", topic_prefix + RESPONSES, "-K", "|"),
        *("-X", "partitioner=murmur2_random"),
    )
    await tool(command, "".join(f"{key}|{{}}\n" for key in KEYS))
    landed = {
        record.key.decode(): record.partition
        for record in await everything(log, RESPONSES, len(KEYS))
        if record.key
    }
    assert landed == {key: lane_of(key, LANES) for key in KEYS}


@needs_kcat
async def test_librdkafka_reads_a_reply_and_its_headers(
    kafka: Broker, log: KafkaLog, topic_prefix: str
) -> None:
    request_id = "job-17"
    lines = reply(request_id)
    for line in lines:
        await log.append(RESPONSES, encode(line, request_id))
    lane = str(lane_of(request_id, LANES))
    command = kcat_command(
        kafka,
        *("-C", "-t", topic_prefix + RESPONSES, "-p", lane, "-o", "beginning", "-e"),
        *("-f", "%k|%h|%s\n"),
    )
    printed = [line.split("|", 2) for line in (await tool(command)).splitlines()]
    assert [(key, headers) for key, headers, _ in printed] == [
        (request_id, f"t={type(line).__name__}") for line in lines
    ]
    assert transcript_of([value for _, _, value in printed]).text == "grüße 😀"
