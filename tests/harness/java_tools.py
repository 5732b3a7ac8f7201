"""Kafka's own command line tools, as clients in another language."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence

from kvlane.streams.brokers.broker_factory import Broker, java_tool
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.responses.transcript import Transcript

TOOL_TIMEOUT_S = 50.0


async def tool(command: Sequence[str], given: str = "") -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        input=given.encode(),
        capture_output=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


async def java_publishes(
    kafka: Broker, topic: str, lines: Mapping[str, str], *options: str
) -> None:
    """Records by key, each with its JSON; the console producer's defaults choose partitions."""
    command = java_tool(
        "org.apache.kafka.tools.ConsoleProducer",
        *("--bootstrap-server", kafka.bootstrap_servers, "--topic", topic),
        *("--reader-property", "parse.key=true", "--reader-property", "key.separator=|"),
        *options,
    )
    await tool(command, "".join(f"{key}|{value}\n" for key, value in lines.items()))


async def java_reads(kafka: Broker, topic: str, partition: int, n: int) -> list[tuple[str, str]]:
    """Keys and values of the first `n` records of a partition."""
    command = java_tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", kafka.bootstrap_servers, "--topic", topic),
        *("--partition", str(partition), "--offset", "earliest"),
        *("--max-messages", str(n), "--timeout-ms", "30000"),
        *("--formatter-property", "print.key=true", "--formatter-property", "key.separator=|"),
    )
    return pairs(await tool(command))


def pairs(output: str) -> list[tuple[str, str]]:
    found = [line.partition("|") for line in output.splitlines()]
    return [(key, value) for key, _, value in found]


def transcript_of(values: Sequence[str]) -> Transcript:
    """The transcript of printed JSON records; the type is in their field `t`."""
    types = {"Chunk": Chunk, "Fence": Fence, "End": End}
    transcript = Transcript()
    for value in values:
        fields = json.loads(value)
        transcript.apply(types[fields.pop("t")](**fields))
    return transcript
