"""Tests of aiokafka's fetcher with sessions: positions, pauses, errors, leaders and brokers that
change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import OffsetOutOfRangeError

from kvlane.streams.kafka.client_patches.fetch_session import REQUESTS_WITHOUT_SESSION
from kvlane.streams.kafka.client_patches.session_fetcher import (
    FEW_BYTES,
    IDLE_WAIT_MS,
    MIN_SPARSE_WAIT_MS,
    SPARSE_WAIT_FACTOR,
    SessionFetcher,
)
from tests.harness.fetch_cluster import ANSWER_S, FetchCluster

LANES = [TopicPartition("lanes", p) for p in range(4)]


class Consumer:
    """Fetcher and subscription of a consumer that was told its positions."""

    def __init__(self, cluster: FetchCluster, **options: Any) -> None:
        self.cluster = cluster
        self.node = cluster.nodes[1]
        self.subscription = SubscriptionState()
        self.fetcher = Fetcher(
            cluster, self.subscription, prefetch_backoff=0.0, retry_backoff_ms=20, **options
        )
        self.client = SimpleNamespace(_fetcher=self.fetcher)
        SessionFetcher.install(self.client)
        self.values: Counter[tuple[TopicPartition, int]] = Counter()

    def assign(self, positions: dict[TopicPartition, int]) -> None:
        self.subscription.assign_from_user(set(positions))
        for tp, at in positions.items():
            self.fetcher.seek_to(tp, at)

    def state(self, tp: TopicPartition) -> Any:
        return self.subscription.subscription.assignment.state_value(tp)

    async def read(self) -> None:
        for tp, records in (await self.fetcher.fetched_records((), timeout=0.02)).items():
            for record in records:
                assert record.value == b"%d" % record.offset
                self.values[tp, record.offset] += 1

    async def until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not so():
                await self.read()

    async def assign_steady(self) -> None:
        """Assign all lanes from offset 5, and wait until fetches are steady."""
        self.assign(dict.fromkeys(LANES, 5))
        await self.until_steady()

    async def until_steady(self) -> None:
        """Until a session is open and nothing changes."""
        await self.until(lambda: len(self.node.requests) > REQUESTS_WITHOUT_SESSION + 2)
        await self.until(lambda: not self.node.requests[-1])


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    made = Consumer(FetchCluster(LANES))
    yield made
    await made.fetcher.close()


async def test_steady_fetches_list_no_partition(consumer: Consumer) -> None:
    await consumer.assign_steady()
    before = len(consumer.node.requests)
    await consumer.until(lambda: len(consumer.node.requests) >= before + 5)
    assert consumer.node.requests[before:] == [[]] * (len(consumer.node.requests) - before)


async def test_records_of_one_partition_list_that_one_alone(consumer: Consumer) -> None:
    await consumer.assign_steady()
    before = len(consumer.node.requests)
    consumer.cluster.ends[LANES[2]] = 8
    await consumer.until(lambda: len(consumer.values) == 3)
    answered = len(consumer.node.requests)
    await consumer.until(lambda: len(consumer.node.requests) > answered)
    await consumer.until_steady()
    assert {tp for listed in consumer.node.requests[before:] for tp in listed} == {LANES[2]}
    assert set(consumer.values) == {(LANES[2], at) for at in (5, 6, 7)}
    assert set(consumer.values.values()) == {1}
    assert consumer.state(LANES[2]).highwater == 8


async def test_batching_consumer_waits_longer_for_the_first_record_than_for_more() -> None:
    consumer = Consumer(FetchCluster(LANES), fetch_min_bytes=1000, fetch_max_wait_ms=20)
    node = consumer.node
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(node.waits) > REQUESTS_WITHOUT_SESSION + 2)
    gathering, idle = (1000, 20), (1, IDLE_WAIT_MS)
    assert node.waits[: REQUESTS_WITHOUT_SESSION + 1] == [
        *[gathering] * REQUESTS_WITHOUT_SESSION,
        idle,
    ]
    for _ in range(2):
        node.answers.clear()
        at = len(node.waits)
        await asyncio.sleep(2 * ANSWER_S)
        consumer.cluster.ends[LANES[2]] += 1
        node.answers.set()
        await consumer.until(lambda at=at: len(node.waits) > at + 2)
        assert (1000, 20 * SPARSE_WAIT_FACTOR) in node.waits[at:]
        assert node.waits[-1] == idle
    await consumer.fetcher.close()


async def test_batching_consumer_does_not_wait_longer_after_many_records() -> None:
    consumer = Consumer(FetchCluster(LANES), fetch_min_bytes=1000, fetch_max_wait_ms=20)
    node = consumer.node
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(node.waits) > REQUESTS_WITHOUT_SESSION + 2)
    at = len(node.waits)
    consumer.cluster.ends[LANES[2]] += FEW_BYTES
    await consumer.until(lambda: (1000, 20) in node.waits[at:])
    await consumer.until(lambda: node.waits[-1] == (1, IDLE_WAIT_MS))
    assert set(node.waits[at:]) == {(1000, 20), (1, IDLE_WAIT_MS)}
    await consumer.fetcher.close()


async def test_consumer_that_gathers_for_a_shorter_time_waits_as_before_for_the_first() -> None:
    consumer = Consumer(FetchCluster(LANES), fetch_min_bytes=1000, fetch_max_wait_ms=20)
    node = consumer.node
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(node.waits) > REQUESTS_WITHOUT_SESSION + 2)
    for gather_ms in (3, 20):
        SessionFetcher.set_gather_s(consumer.client, gather_ms / 1000)
        at = len(node.waits)
        consumer.cluster.ends[LANES[2]] += FEW_BYTES
        few = (1000, gather_ms * (1 if gather_ms < MIN_SPARSE_WAIT_MS else SPARSE_WAIT_FACTOR))
        await consumer.until(lambda at=at, ms=gather_ms: (1000, ms) in node.waits[at:])
        await consumer.until(lambda: node.waits[-1] == (1, IDLE_WAIT_MS))
        assert set(node.waits[at:]) <= {(1000, gather_ms), few, (1, IDLE_WAIT_MS)}
    await consumer.fetcher.close()


async def test_consumer_that_awaits_records_does_not_wait_longer_after_few() -> None:
    consumer = Consumer(FetchCluster(LANES), fetch_min_bytes=1000, fetch_max_wait_ms=20)
    node = consumer.node
    SessionFetcher.set_gather_s(consumer.client, (MIN_SPARSE_WAIT_MS - 1) / 1000)
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(node.waits) > REQUESTS_WITHOUT_SESSION + 2)
    at = len(node.waits)
    consumer.cluster.ends[LANES[2]] += 1
    await consumer.until(lambda: (1000, MIN_SPARSE_WAIT_MS - 1) in node.waits[at:])
    await consumer.until(lambda: node.waits[-1] == (1, IDLE_WAIT_MS))
    assert set(node.waits[at:]) == {(1000, MIN_SPARSE_WAIT_MS - 1), (1, IDLE_WAIT_MS)}
    await consumer.fetcher.close()


async def test_seek_while_a_fetch_is_under_way_reads_from_there(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.fetcher.seek_to(LANES[0], 2)
    await consumer.until(lambda: (LANES[0], 4) in consumer.values)
    assert {at for _, at in consumer.values} == {2, 3, 4}


async def test_paused_partition_is_not_fetched_until_it_is_resumed(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.state(LANES[1]).pause()
    before = len(consumer.node.requests)
    await consumer.until(lambda: any(consumer.node.requests[before:]))
    consumer.cluster.ends[LANES[1]] = 6
    before = len(consumer.node.requests)
    await consumer.until(lambda: len(consumer.node.requests) >= before + 5)
    assert not consumer.values
    assert not any(consumer.node.requests[before:])
    consumer.state(LANES[1]).resume()
    await consumer.until(lambda: (LANES[1], 5) in consumer.values)


async def test_new_assignment_reads_the_ends_again(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.assign(dict.fromkeys(LANES[:2], 5))
    await consumer.until(lambda: all(consumer.state(tp).highwater == 5 for tp in LANES[:2]))


async def test_new_assignment_gets_the_end_reported_in_between(consumer: Consumer) -> None:
    consumer.assign({LANES[0]: 5})
    await consumer.until_steady()
    consumer.cluster.ends[LANES[0]] = 6
    await asyncio.sleep(0.2)
    assert consumer.fetcher._records
    consumer.assign({LANES[0]: 6})
    await consumer.until(lambda: consumer.state(LANES[0]).highwater == 6)


async def test_end_in_a_response_for_an_older_position_is_kept(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.node.answers.clear()
    consumer.cluster.ends[LANES[0]] = 6
    await asyncio.sleep(4 * ANSWER_S)
    consumer.fetcher.seek_to(LANES[0], 6)
    consumer.node.answers.set()
    await consumer.until(lambda: consumer.state(LANES[0]).highwater == 6)
    assert not consumer.values


async def test_response_for_an_older_position_does_not_confirm_the_new_one(
    consumer: Consumer,
) -> None:
    await consumer.assign_steady()
    answers = consumer.node.answers
    answers.clear()
    await asyncio.sleep(4 * ANSWER_S)
    known_ms = {tp: consumer.state(tp).timestamp for tp in LANES}
    consumer.fetcher.seek_to(LANES[0], 2)
    answers.set()
    await asyncio.sleep(0)
    answers.clear()  # for the request behind it, which lists the new position
    await consumer.until(lambda: consumer.state(LANES[1]).timestamp != known_ms[LANES[1]])
    assert consumer.state(LANES[0]).timestamp == known_ms[LANES[0]]
    answers.set()
    await consumer.until(lambda: (LANES[0], 4) in consumer.values)


async def test_position_in_a_lost_request_is_listed_again(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.node.is_away = True
    consumer.fetcher.seek_to(LANES[1], 3)
    await consumer.until(lambda: LANES[1] in consumer.node.requests[-1])
    consumer.node.is_away = False
    await consumer.until(lambda: (LANES[1], 4) in consumer.values)


async def test_partition_that_another_broker_leads_is_fetched_there(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: 2})
    consumer.cluster.ends[LANES[3]] = 7
    await consumer.until(lambda: (LANES[3], 6) in consumer.values)
    await consumer.until_steady()
    [session] = consumer.node.broker.sessions.values()
    assert LANES[3] not in session.partitions


async def test_partition_without_a_leader_waits_for_one(consumer: Consumer) -> None:
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: -1})
    consumer.cluster.ends[LANES[3]] = 6
    await consumer.assign_steady()
    assert not consumer.values
    consumer.cluster.lead(dict.fromkeys(LANES, 1))
    await consumer.until(lambda: (LANES[3], 5) in consumer.values)


@pytest.mark.parametrize("loses", ["session", "epoch", "connection"])
async def test_lost_session_is_replaced(consumer: Consumer, loses: str) -> None:
    await consumer.assign_steady()
    if loses == "session":
        consumer.node.broker.sessions.clear()
    elif loses == "epoch":
        next(iter(consumer.node.broker.sessions.values())).epoch += 1
    else:
        consumer.node.is_away = True
        await asyncio.sleep(0.1)
        consumer.node.is_away = False
    consumer.cluster.ends[LANES[0]] = 6
    await consumer.until(lambda: (LANES[0], 5) in consumer.values)
    consumer.node.requests.clear()
    await consumer.until_steady()
    assert len(consumer.node.broker.sessions) == 1
    assert consumer.values.total() == 1


async def test_error_of_a_whole_response_is_retried_with_a_pause(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.node.error = 56  # KAFKA_STORAGE_ERROR
    before = len(consumer.node.requests)
    await asyncio.sleep(0.2)
    assert len(consumer.node.requests) - before < 12
    consumer.node.error = 0
    consumer.cluster.ends[LANES[0]] = 6
    await consumer.until(lambda: (LANES[0], 5) in consumer.values)


async def test_position_outside_the_log_is_an_error_of_the_poll(consumer: Consumer) -> None:
    consumer.fetcher._default_reset_strategy = 0
    await consumer.assign_steady()
    consumer.node.errors = {LANES[1]: 1}
    with pytest.raises(OffsetOutOfRangeError):
        await consumer.until(lambda: False)


async def test_response_of_one_broker_does_not_affect_partitions_of_another(
    consumer: Consumer,
) -> None:
    consumer.cluster.lead(dict.fromkeys(LANES, 1) | {LANES[3]: 2})
    await consumer.assign_steady()
    consumer.cluster.nodes[2].answers.clear()
    await asyncio.sleep(4 * ANSWER_S)
    known_ms = {tp: consumer.state(tp).timestamp for tp in LANES}
    await asyncio.sleep(0.1)
    later = [tp for tp in LANES if consumer.state(tp).timestamp != known_ms[tp]]
    assert later == LANES[:3]


async def test_throttled_response_affects_no_partition(consumer: Consumer) -> None:
    await consumer.assign_steady()
    consumer.node.throttle_ms = 100
    await asyncio.sleep(4 * ANSWER_S)
    known_ms = consumer.state(LANES[0]).timestamp
    await asyncio.sleep(0.1)
    assert consumer.state(LANES[0]).timestamp == known_ms


async def test_broker_without_version_11_uses_aiokafkas_fetcher(consumer: Consumer) -> None:
    consumer.node.versions = (4, 10)
    consumer.cluster.ends[LANES[0]] = 8
    consumer.assign(dict.fromkeys(LANES, 5))
    await consumer.until(lambda: len(consumer.values) == 3)
    await consumer.until(lambda: consumer.state(LANES[1]).highwater == 5)
    assert consumer.state(LANES[1]).timestamp
    assert not consumer.node.broker.sessions
