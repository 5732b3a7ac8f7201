"""Tests of the watch of silent connections: when they are closed, by the cluster's members and
the clock."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import CloseReason
from aiokafka.protocol.metadata import MetadataResponse_v1

from kvlane.streams.kafka.client_patches import patched_client
from kvlane.streams.kafka.client_patches.patched_client import LATE_FRACTION, watch_connection

TIMEOUT_S = 0.4
SOON_S = 2 * LATE_FRACTION * TIMEOUT_S + 0.1
BROKERS = {1: "one", 2: "two", 3: "three"}


class Line:
    """A connection to a broker, as the client's own look from outside."""

    def __init__(self, client: AIOKafkaClient | None, host: str, cluster: Cluster) -> None:
        self.host, self.port = host, 9092
        self.sent = 0
        self.closed: CloseReason | None = None
        self._left = asyncio.Event()
        self.closed_after_s = 0.0
        self._began = self._last_action = time.monotonic()
        self._request_timeout = TIMEOUT_S
        self._requests: deque[object] = deque()
        transport = SimpleNamespace(abort=self._abort)
        self._writer = SimpleNamespace(transport=transport)
        self._on_close_cb = client and client._on_connection_closed
        self._cluster = cluster

    def connected(self) -> bool:
        return self.closed is None

    def close(self, reason: CloseReason) -> None:
        self.closed, self.closed_after_s = reason, time.monotonic() - self._began
        self._requests.clear()

    def _abort(self) -> None:
        self._left.set()

    async def left(self) -> CloseReason | None:
        """Wait until it is gone; why it was closed."""
        async with asyncio.timeout(10 * TIMEOUT_S):
            await self._left.wait()
        return self.closed

    def send_request(self) -> None:
        self._requests.append(object())
        watch_connection(self)

    def answer(self) -> None:
        self._requests.popleft()
        self._last_action = time.monotonic()

    async def send(self, _: object) -> Any:
        self.sent += 1
        self._cluster.on_query()
        if self.host in self._cluster.hanging:
            await asyncio.sleep(TIMEOUT_S)
            raise TimeoutError
        members = [(n, BROKERS[n], 9092, None) for n in self._cluster.members]
        return MetadataResponse_v1(members, 1, [])


class Cluster:
    """Three brokers and one client that is connected to all of them."""

    def __init__(self) -> None:
        self.members = [1, 2, 3]
        self.hanging: set[str] = set()
        self.on_query: Callable[[], object] = lambda: None
        self.client = AIOKafkaClient(bootstrap_servers="one")
        self.client._sync_task = asyncio.create_task(asyncio.sleep(60))
        self.lines = {n: Line(self.client, host, self) for n, host in BROKERS.items()}
        self.client._conns = {(n, 0): line for n, line in self.lines.items()}
        everybody = [(n, host, 9092, None) for n, host in BROKERS.items()]
        self.client.cluster.update_metadata(MetadataResponse_v1(everybody, 1, []))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(patched_client, "LATE_S", 0.0)
    cluster = Cluster()
    yield cluster
    assert cluster.client._sync_task is not None
    cluster.client._sync_task.cancel()


async def test_responsive_broker_is_kept_without_queries(cluster: Cluster) -> None:
    first, second, third = cluster.lines.values()
    cluster.members.remove(1)
    for _ in range(40):
        first.send_request()  # there is always something under way
        await asyncio.sleep(0.04)
        if len(first._requests) > 1:
            first.answer()
    assert (first.closed, second.sent, third.sent) == (None, 0, 0)


async def test_stuck_broker_is_abandoned_when_the_cluster_removed_it(cluster: Cluster) -> None:
    first = cluster.lines[1]
    cluster.members.remove(1)
    first.send_request()
    assert await first.left() is CloseReason.CONNECTION_BROKEN
    assert first.closed_after_s > LATE_FRACTION * TIMEOUT_S


async def test_other_connection_to_a_stuck_broker_is_abandoned_with_it(cluster: Cluster) -> None:
    first = cluster.lines[1]
    other = Line(cluster.client, first.host, cluster)
    cluster.members.remove(1)
    first.send_request()
    other.send_request()
    assert await first.left() is CloseReason.CONNECTION_BROKEN
    assert await other.left() is CloseReason.CONNECTION_BROKEN


async def test_stuck_broker_in_the_cluster_has_until_the_request_time_out(cluster: Cluster) -> None:
    first = cluster.lines[1]
    first.send_request()
    assert await first.left() is CloseReason.CONNECTION_TIMEOUT
    assert first.closed_after_s > TIMEOUT_S
    assert cluster.lines[2].sent + cluster.lines[3].sent > 1


@pytest.mark.parametrize("hanging", ["two", "three"])  # one of them is asked first
async def test_second_broker_is_queried_when_the_first_hangs_too(
    cluster: Cluster, hanging: str
) -> None:
    cluster.members.remove(1)
    cluster.hanging.add(hanging)
    first = cluster.lines[1]
    first._request_timeout = 4 * TIMEOUT_S
    first.send_request()
    assert await first.left() is CloseReason.CONNECTION_BROKEN
    assert [line.sent for line in cluster.lines.values() if line.host not in ("one", hanging)] == [
        1
    ]


async def test_suspended_client_does_not_count_its_own_pause(cluster: Cluster) -> None:
    first = cluster.lines[1]
    cluster.members.remove(1)
    first.send_request()
    time.sleep(2 * TIMEOUT_S)  # the loop too, as after SIGSTOP
    await asyncio.sleep(LATE_FRACTION * TIMEOUT_S / 2)  # then it reads what has come meanwhile
    first.answer()
    await asyncio.sleep(SOON_S)
    assert first.closed is None


async def test_server_that_need_not_be_a_broker_is_abandoned_by_the_clock_only(
    cluster: Cluster,
) -> None:
    """The address of a bootstrap server may be that of a balancer in front of the brokers."""
    server = Line(None, "balancer", cluster)
    server.send_request()
    assert await server.left() is CloseReason.CONNECTION_TIMEOUT


async def test_later_requests_are_watched_again(cluster: Cluster) -> None:
    first = cluster.lines[1]
    first.send_request()
    first.answer()
    await asyncio.sleep(SOON_S)
    cluster.members.remove(1)
    first.send_request()
    assert await first.left() is CloseReason.CONNECTION_BROKEN


async def test_answer_about_earlier_topics_is_ignored(cluster: Cluster) -> None:
    """The client would take the topics that came meanwhile for unknown ones."""
    first = cluster.lines[1]
    cluster.members.remove(1)
    topics = iter("ab")
    cluster.on_query = lambda: cluster.client._topics.add(next(topics, "b"))
    first._request_timeout = 4 * TIMEOUT_S
    first.send_request()
    await first.left()
    assert cluster.lines[2].sent + cluster.lines[3].sent == 3


async def test_overtaken_answer_is_ignored(cluster: Cluster) -> None:
    """Another one, to the client itself, came while this one was under way."""
    first, known = cluster.lines[1], cluster.client.cluster

    def overtake() -> None:
        known._last_successful_refresh_ms += 1

    cluster.members.remove(1)
    cluster.on_query = overtake
    first.send_request()
    assert await first.left() is CloseReason.CONNECTION_TIMEOUT
    assert len(known.brokers()) == 3


async def test_abandoned_connection_is_closed_despite_unsent_requests(cluster: Cluster) -> None:
    first = cluster.lines[1]
    first.send_request()
    first.close(CloseReason.CONNECTION_TIMEOUT)
    await first.left()


class Connecting:
    """Instead of the client's way to connect: who was asked for, and nobody is there."""

    def __init__(self, client: AIOKafkaClient) -> None:
        self.to: list[int] = []
        client._conns.clear()
        client._get_conn = self._get_conn

    async def _get_conn(self, node: int) -> None:
        self.to.append(node)


async def test_client_without_another_connection_opens_one(cluster: Cluster) -> None:
    connecting = Connecting(cluster.client)
    cluster.lines[1].send_request()
    assert await cluster.lines[1].left() is CloseReason.CONNECTION_TIMEOUT
    assert {*connecting.to} == {2, 3}


async def test_check_of_a_stuck_broker_does_not_wait_for_a_connection_in_progress(
    cluster: Cluster,
) -> None:
    """That may be to the broker that hangs."""
    connecting = Connecting(cluster.client)
    async with cluster.client._get_conn_lock:
        cluster.lines[1].send_request()
        assert await cluster.lines[1].left() is CloseReason.CONNECTION_TIMEOUT
    assert connecting.to == []
