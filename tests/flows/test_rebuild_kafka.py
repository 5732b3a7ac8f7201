"""Tests of indexers on a real broker: replicas agree, share snapshots, and start from them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.settings import Settings
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, encode_events
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Blocks, SnapshotPointer
from kvlane.streams.topics import KV_EVENTS, REGISTRY, TOPICS_BY_NAME, partition_of
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned

WORKERS = [f"w{n}" for n in range(12)]
PARTITIONS = TOPICS_BY_NAME[KV_EVENTS].partitions
FILLED = {partition_of(name.encode(), PARTITIONS) for name in WORKERS}

pytestmark = pytest.mark.slow


class Caches:
    """What the caches of all workers say."""

    def __init__(self, log: KafkaLog, fingerprint: str) -> None:
        self._publisher = RecordPublisher(log, SystemClock())
        self._fingerprint = fingerprint
        self._rng = random.Random(3)
        self._next = dict.fromkeys(WORKERS, 0)

    async def say(self, records: int) -> None:
        """So many records of each worker: blocks come and go."""
        for name in WORKERS:
            records_of = [(name, self._record(name)) for _ in range(records)]
            await self._publisher.publish_batch_once(
                KV_EVENTS, partition_of(name.encode(), PARTITIONS), records_of
            )

    def _record(self, name: str) -> Blocks:
        at = self._next[name]
        first, count = self._rng.randrange(1, 5000), self._rng.randrange(1, 128)
        keys = tuple(range(first, first + count))
        kind = self._rng.choice([EventKind.STORED, EventKind.STORED, EventKind.REMOVED])
        events = [CacheEvent(kind, keys=keys)] if at else [CLEARED]
        self._next[name] += len(events)
        return Blocks(
            worker=name, epoch=1, first_event_id=at, hash_fingerprint=self._fingerprint,
            **encode_events(events)._asdict(),
        )  # fmt: skip


class Replica:
    def __init__(self, process: subprocess.Popen[bytes], port: int, output: Path) -> None:
        self.process = process
        self.output = output
        self._url = f"http://127.0.0.1:{port}"

    async def page(self) -> dict[str, float]:
        """Its metrics; none while it does not listen yet."""
        assert self.process.poll() is None, self.output.read_text()
        async with httpx.AsyncClient(base_url=self._url) as http:
            try:
                text = (await http.get("/metrics")).text
            except httpx.TransportError:
                return {}
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def state(self) -> tuple[dict[int, float], dict[int, float]]:
        """Positions and hashes by partition."""
        page = await self.page()
        return _of(page, "kvlane_view_offset"), _of(page, "kvlane_view_state_hash")

    async def owned(self) -> int:
        return int((await self.page()).get("kvlane_indexer_snapshot_partitions", 0))

    @property
    def restored(self) -> int:
        found = re.search(r"index caught up: .* (\d+) partitions from", self.output.read_text())
        assert found is not None
        return int(found[1])


def _of(page: dict[str, float], name: str) -> dict[int, float]:
    found = {}
    for series, value in page.items():
        if series.startswith(f"{name}{{") and 'view="index"' in series:
            found[int(series.split('partition="')[1].split('"')[0])] = value
    return found


@pytest.fixture
async def log(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KafkaLog]:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", "2")
    monkeypatch.setenv("KVLANE_SNAPSHOT_INTERVAL_S", "2")
    async with provisioned(Settings()) as log:
        yield log


@pytest.fixture
def start(log: KafkaLog, tmp_path: Path) -> Iterator[Callable[[str], Replica]]:
    with ExitStack() as cleanup:

        def start(name: str) -> Replica:
            port, output = free_ports(1)[0], tmp_path / f"{name}.log"
            env = os.environ | {"KVLANE_INDEXER_PORT": str(port)}
            process = cleanup.enter_context(app_process("indexer", output, env))
            return Replica(process, port, output)

        yield start


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is asked for in some way."""
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    while True:
        met = condition()
        if await met if asyncio.iscoroutine(met) else met:
            return
        assert clock.now() < deadline, "it never came true"
        await clock.sleep(0.2)


async def snapshots(log: KafkaLog) -> dict[int, int]:
    """The position of the newest snapshot of each partition that has one."""
    source = Partition(REGISTRY, 0)
    end = (await log.end_offsets(REGISTRY, [0]))[0]
    found = {}
    async for piece in read_range(log, SystemClock(), {source: 0}, {source: end}):
        for record in piece.records:
            if isinstance(pointer := decode(record), SnapshotPointer):
                found[pointer.partition] = pointer.position
    return found


async def ends(log: KafkaLog) -> dict[int, int]:
    return await log.end_offsets(KV_EVENTS, range(PARTITIONS))


async def agree(log: KafkaLog, *replicas: Replica) -> dict[int, float]:
    """The state hashes of replicas at the end of the log, which must be the same."""
    hashes: list[dict[int, float]] = []

    async def at_the_end() -> bool:
        end = {p: float(at) for p, at in (await ends(log)).items()}
        states = [await replica.state() for replica in replicas]
        hashes[:] = [hashed for _, hashed in states]
        return all(positions == end for positions, _ in states)

    await until(at_the_end)
    assert all(each == hashes[0] for each in hashes)
    assert len(set(hashes[0].values())) > len(FILLED) / 2, "it is about nothing"
    return hashes[0]


async def replayed(file: Path, *arguments: str) -> dict[int, float]:
    """What `kvlane replay` finds: state hashes as replicas tell them."""
    command = ("replay", "--view", "index", "--json", str(file), *arguments)
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    partitions = json.loads(file.read_bytes())["partitions"]
    return {each["partition"]: float(int(each["state_hash"], 16) >> 11) for each in partitions}


async def test_replicas_agree_share_snapshots_and_replace_each_other(
    log: KafkaLog, start: Callable[[str], Replica], tmp_path: Path, kafka: Broker
) -> None:
    caches = Caches(log, Settings().block_key_secret().fingerprint)
    await caches.say(100)
    one, two = start("one"), start("two")

    async def shared() -> bool:
        owned = sorted([await one.owned(), await two.owned()])
        return owned == [PARTITIONS // 2, PARTITIONS // 2]

    await until(shared)
    before = await agree(log, one, two)

    async def all_written() -> bool:
        return (await snapshots(log)).keys() >= FILLED

    await until(all_written)
    at = await ends(log)
    await caches.say(30)
    three = start("three")
    now = await agree(log, one, two, three)
    assert three.restored == len(FILLED)
    assert await replayed(tmp_path / "now.json") == now
    offsets = ",".join(f"{KV_EVENTS}/{p}:{offset}" for p, offset in at.items())
    assert await replayed(tmp_path / "then.json", "--at", offsets) == before != now

    one.process.kill()

    async def taken_over() -> bool:
        return await two.owned() + await three.owned() == PARTITIONS

    await until(taken_over)
    await caches.say(30)

    async def written_again() -> bool:
        newest, end = await snapshots(log), await ends(log)
        return all(newest[p] == end[p] for p in FILLED)

    await until(written_again)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    topic, end = log.prefix + KV_EVENTS, await ends(log)
    cuts = {TopicPartition(topic, p): RecordsToDelete(before_offset=end[p]) for p in FILLED}
    await admin.delete_records(cuts)
    await admin.close()
    four = start("four")  # what it knows was in no log that it could read
    await agree(log, two, three, four)
    assert four.restored == len(FILLED)
