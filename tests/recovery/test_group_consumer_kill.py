"""Tests of a group consumer on a real broker, killed between any two of its steps: no effect is
lost.

A child process (`group_consumer_child.py`) reads requests and writes an effect for each. It is
stopped at a point, killed with SIGKILL, and started again. All points run at once, each in topics
of its own, because most of the time passes until the session of the killed process ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, REQUESTS
from tests.recovery.group_consumer_child import GROUP, POINTS

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[2]
CHILD = ROOT / "tests/recovery/group_consumer_child.py"
LANES = 2
REQUESTS_AT_ONCE = 24
PLAYED_AT_ONCE = 4
DEADLINE_S = 120.0
MALFORMED = Entry(b"k", b"\xc1", (("t", b"Request"),))
LATER = {"received": 9, "sending": 9, "appended": 9, "acknowledged": 9, "done": 9, "committing": 2}
"""Points that are passed a few times first, so that something has been committed before."""


class Place(NamedTuple):
    """Where a request lies."""

    partition: int
    offset: int


class Deployment:
    """The topics of one play, what was published there, and what became of it."""

    def __init__(self, bootstrap_servers: str, tmp: Path) -> None:
        self.prefix = f"kill{uuid.uuid4().hex[:8]}."
        self.published: dict[Place, str] = {}
        self.unreadable: set[Place] = set()
        self.effects: list[str] = []
        self.buried: list[Place] = []
        self._servers = bootstrap_servers
        self._tmp = tmp
        self._admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
        self._log = KafkaLog(ConnectionOptions(bootstrap_servers, "witness"), self.prefix)
        self._positions: dict[Partition, int] = {}
        self._children: list[Process] = []

    async def __aenter__(self) -> Self:
        await self._admin.start()
        names = {REQUESTS: LANES, LEDGER: LANES, DEAD_LETTERS: 1}
        topics = [NewTopic(self.prefix + name, count, 1) for name, count in names.items()]
        await self._admin.create_topics(topics)
        await self._log.start()
        for name in (LEDGER, DEAD_LETTERS):
            for partition in range(await self._log.partitions(name)):
                self._positions[Partition(name, partition)] = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children:
            await self.kill(child)
        await self._log.close()
        await self._admin.delete_topics(
            [self.prefix + name for name in (REQUESTS, LEDGER, DEAD_LETTERS)]
        )
        await self._admin.close()

    async def publish(self, count: int = REQUESTS_AT_ONCE) -> None:
        """Append requests to every lane, and one record among them that cannot be read."""
        publisher = RecordPublisher(self._log, SystemClock())
        for number in range(count):
            lane = number % LANES
            request_id = f"r{len(self.published)}"
            if number == count // 2:
                entry = MALFORMED._replace(key=request_id.encode())
                appended = await self._log.append(REQUESTS, entry, lane)
                self.unreadable.add(Place(appended.partition, appended.offset))
            else:
                request = Request(id=request_id)
                appended = await publisher.publish_once(REQUESTS, request_id, request, lane)
            self.published[Place(appended.partition, appended.offset)] = request_id

    async def start(self, point: str = "", number: int = 1) -> Process:
        command = (str(CHILD), self._servers, self.prefix, *([point, str(number)] if point else ()))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self._stderr.open("ab") as stderr:
            child = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=PIPE, stderr=stderr, env=environment
            )
        self._children.append(child)
        return child

    async def sends(self, child: Process, line: str) -> None:
        """Wait for a line of a child."""
        assert child.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (output := (await child.stdout.readline()).decode().strip()) != line:
                    assert output, f"ended without saying {line!r}:\n{self.complaints()}"
        except TimeoutError:
            pytest.fail(f"never said {line!r}:\n{self.complaints()}", pytrace=False)

    async def kill(self, child: Process) -> None:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()

    async def check(self) -> dict[int, int]:
        """No commit has passed a record without effect. Returns what is committed, by lane."""
        offsets = await self._admin.list_consumer_group_offsets(self.prefix + GROUP)
        committed = {tp.partition: o.offset for tp, o in offsets.items() if o.offset >= 0}
        await self._read()  # after the commits: what they claim must be there by now
        missing = [
            place
            for place, request_id in self.published.items()
            if place.offset < committed.get(place.partition, 0)
            and (
                request_id not in self.effects
                or (place in self.unreadable and place not in self.buried)
            )
        ]
        assert not missing, f"committed {committed}, but no effect of {missing}"
        return committed

    async def settled(self) -> None:
        """Wait until everything is committed, checking all the while."""
        ends = await self._log.end_offsets(REQUESTS, range(LANES))
        deadline = time.monotonic() + DEADLINE_S
        while (committed := await self.check()) != ends:
            if time.monotonic() > deadline:
                complaints = self.complaints()
                pytest.fail(f"committed {committed} of {ends}:\n{complaints}", pytrace=False)
            await asyncio.sleep(0.1)
        assert set(self.published.values()) == set(self.effects)

    def complaints(self) -> str:
        return self._stderr.read_text()[-5000:]

    @property
    def _stderr(self) -> Path:
        return self._tmp / f"{self.prefix}stderr"

    async def _read(self) -> None:
        ends = {}
        for name in (LEDGER, DEAD_LETTERS):
            partitions = [p.partition for p in self._positions if p.topic == name]
            answer = await self._log.end_offsets(name, partitions)
            ends |= {Partition(name, p): end for p, end in answer.items()}
        reader = self._log.reader()
        try:
            reader.assign(self._positions)
            async with asyncio.timeout(DEADLINE_S):
                while any(self._positions[p] < end for p, end in ends.items()):
                    for source, records in (await reader.poll(1.0)).items():
                        self._positions[source] = records[-1].offset + 1
                        for record in records:
                            self._note(source, dict(record.headers), record.key)
        finally:
            await reader.close()

    def _note(self, source: Partition, headers: dict[str, bytes], key: bytes | None) -> None:
        if source.topic == DEAD_LETTERS:
            place = Place(int(headers["origin_partition"]), int(headers["origin_offset"]))
            self.buried.append(place)
        else:
            assert key is not None
            self.effects.append(key.decode())


async def play(point: str, bootstrap_servers: str, tmp: Path) -> None:
    """Kill a child at a point, and let the next one finish the work."""
    async with Deployment(bootstrap_servers, tmp) as deployment:
        await deployment.publish()
        child = await deployment.start(point, LATER.get(point, 1))
        rival = None
        if point == "revoked":  # somebody else joins, and takes over when the first one is dead
            for lane in range(LANES):
                await deployment.sends(child, f"owns {lane}")
            rival = await deployment.start()
        await deployment.sends(child, f"at {point}")
        await deployment.check()
        await deployment.kill(child)
        await deployment.check()
        await deployment.publish()
        if rival is None:
            await deployment.start()
        await deployment.settled()


async def play_all(bootstrap_servers: str, tmp: Path) -> dict[str, BaseException | None]:
    turns = asyncio.Semaphore(PLAYED_AT_ONCE)

    async def one(point: str) -> None:
        async with turns:
            await play(point, bootstrap_servers, tmp)

    ends = await asyncio.gather(*map(one, POINTS), return_exceptions=True)
    return dict(zip(POINTS, ends, strict=True))


@pytest.fixture(scope="module")
def ends(
    kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, BaseException | None]:
    """How each play ended."""
    return asyncio.run(play_all(kafka.bootstrap_servers, tmp_path_factory.mktemp("intake")))


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_any_point_loses_nothing(ends: dict[str, BaseException | None], point: str) -> None:
    if (error := ends[point]) is not None:
        raise error


async def test_kills_at_random_moments_lose_nothing(kafka: Broker, tmp_path: Path) -> None:
    rng = random.Random(7)
    async with Deployment(kafka.bootstrap_servers, tmp_path) as deployment:
        await deployment.publish()
        first, second = await deployment.start(), await deployment.start()
        for _ in range(6):
            await deployment.publish()
            await asyncio.sleep(rng.uniform(0.2, 2.5))
            await deployment.check()
            await deployment.kill(first)
            first, second = second, await deployment.start()
        await deployment.settled()
