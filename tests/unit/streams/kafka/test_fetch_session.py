"""Tests of fetch sessions: client and broker agree, with any lost message."""

from __future__ import annotations

import pytest
from aiokafka import TopicPartition
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvlane.streams.kafka.client_patches.fetch_session import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    MAX_EPOCH,
    REQUESTS_WITHOUT_SESSION,
    FetchSession,
)
from tests.harness.session_broker import Answer, SessionBroker

PARTITIONS = [TopicPartition(topic, p) for topic in ("a", "b") for p in range(3)]


class Client:
    """A consumer of one broker: positions, ends as they were reported, one session."""

    def __init__(self, broker: SessionBroker) -> None:
        self.broker = broker
        self.session = FetchSession()
        self.positions: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self.session_id = 0
        self.listed = 0

    def send(self) -> Answer:
        """Let the broker take a request; the number of partitions that it lists is kept."""
        request = self.session.request(dict(self.positions))
        self.listed = len(request.positions) + len(request.forgotten)
        return self.broker.fetch(*request)

    def take(self, answer: Answer) -> None:
        """Take a response: records move positions."""
        if answer.error:
            self.session.restart()
            self.session_id = 0
            return
        records = sum(reported.records for reported in answer.partitions.values())
        self.session.answered(answer.session_id, records)
        self.session_id = answer.session_id
        for tp, reported in answer.partitions.items():
            assert tp in self.positions
            self.ends[tp] = reported.end
            self.positions[tp] += reported.records

    def fetch(self) -> None:
        self.take(self.send())

    def assign(self, positions: dict[TopicPartition, int]) -> None:
        """A new assignment, which knows no ends."""
        self.positions, self.ends = dict(positions), {}
        self.session.restart()


class SessionMachine(RuleBasedStateMachine):
    """Random requests, losses, seeks and restarts, of a broker with little room."""

    partitions = st.sampled_from(PARTITIONS)

    @initialize(slots=st.integers(0, 2), room=st.integers(1, 4))
    def start(self, slots: int, room: int) -> None:
        self.broker = SessionBroker(slots, room)
        self.broker.ends = dict.fromkeys(PARTITIONS, 5)
        self.client = Client(self.broker)
        self.client.positions = {PARTITIONS[0]: 5}

    @rule(tp=partitions, count=st.integers(1, 3))
    def produce(self, tp: TopicPartition, count: int) -> None:
        self.broker.ends[tp] += count

    @rule(tp=partitions, back=st.integers(0, 5))
    def seek_or_resume(self, tp: TopicPartition, back: int) -> None:
        self.client.positions[tp] = self.broker.ends[tp] - back

    @rule(tp=partitions)
    def pause(self, tp: TopicPartition) -> None:
        self.client.positions.pop(tp, None)

    @rule(tps=st.sets(partitions, min_size=1))
    def assign(self, tps: set[TopicPartition]) -> None:
        self.client.assign({tp: self.broker.ends[tp] - 1 for tp in tps})

    @rule()
    def fetch(self) -> None:
        client, broker = self.client, self.broker
        if not (wanted := dict(client.positions)):
            return
        answer = client.send()
        client.take(answer)
        if not answer.error:
            assert {tp: client.ends[tp] for tp in wanted} == {tp: broker.ends[tp] for tp in wanted}
        if client.session_id:
            assert broker.positions(client.session_id) == wanted

    @rule(count=st.integers(2, 5))
    def fetch_often(self, count: int) -> None:
        for _ in range(count):
            self.fetch()

    @rule()
    def lose_request(self) -> None:
        self.client.session.request(dict(self.client.positions))
        self.client.session.restart()

    @rule()
    def lose_response(self) -> None:
        self.client.send()
        self.client.session.restart()

    @rule()
    def restart_broker(self) -> None:
        self.broker.sessions.clear()

    def teardown(self) -> None:
        """No partition starves, both sides agree, and nothing is listed when nothing changes."""
        if not hasattr(self, "client") or not self.client.positions:
            return
        client, broker = self.client, self.broker
        missing = sum(broker.ends[tp] - at for tp, at in client.positions.items())
        for _ in range(missing + REQUESTS_WITHOUT_SESSION + 3):
            client.fetch()
        assert client.positions == {tp: broker.ends[tp] for tp in client.positions}
        assert {tp: client.ends[tp] for tp in client.positions} == client.positions
        if client.session_id:
            assert broker.positions(client.session_id) == client.positions
            assert client.listed == 0
        else:
            assert len(broker.sessions) >= broker.slots


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def opened(client: Client) -> Client:
    for _ in range(REQUESTS_WITHOUT_SESSION + 1):
        client.fetch()
    assert client.session_id
    return client


def consumer(count: int = 6, **broker: int) -> Client:
    there = SessionBroker(**broker)
    there.ends = dict.fromkeys(PARTITIONS, 5)
    client = Client(there)
    client.assign(dict.fromkeys(PARTITIONS[:count], 5))
    return client


def test_short_reader_opens_no_session() -> None:
    client = consumer()
    for _ in range(REQUESTS_WITHOUT_SESSION):
        client.fetch()
    assert not client.broker.sessions


def test_unchanged_session_lists_no_partitions() -> None:
    client = opened(consumer())
    client.fetch()
    assert client.listed == 0


def test_only_the_partition_that_moved_is_listed() -> None:
    client = opened(consumer())
    client.broker.ends[PARTITIONS[2]] += 1
    client.fetch()
    assert client.session.request(dict(client.positions)).positions == [(PARTITIONS[2], 6)]


def test_paused_partition_leaves_the_session_and_its_records_stay_at_the_broker() -> None:
    client = opened(consumer())
    del client.positions[PARTITIONS[1]]
    client.broker.ends[PARTITIONS[1]] += 1
    answer = client.send()
    assert (client.listed, answer.partitions) == (1, {})


def test_session_that_the_broker_has_lost_is_replaced() -> None:
    client = opened(consumer())
    client.broker.sessions.clear()
    client.fetch()
    opened(client)


def test_request_after_a_lost_response_closes_the_old_session() -> None:
    client = opened(consumer())
    client.send()
    client.session.restart()
    opened(client)
    assert len(client.broker.sessions) == 1


def test_broker_without_a_free_session_gets_full_requests() -> None:
    client = consumer(slots=0)
    for _ in range(10):
        client.fetch()
        assert client.listed == 6
    client.broker.slots = 1
    opened(client)


@pytest.mark.parametrize("slots", [0, 1])
def test_busy_partition_leaves_room_for_others(slots: int) -> None:
    client = consumer(2, slots=slots, room=2)
    busy, other = PARTITIONS[:2]
    client.broker.ends[other] += 2
    for _ in range(REQUESTS_WITHOUT_SESSION + 3):
        client.broker.ends[busy] += 2
        client.fetch()
        client.broker.ends[other] += client.positions[other] == client.broker.ends[other]
    assert client.positions[other] > 7


def test_epoch_begins_again_at_one() -> None:
    session = FetchSession()
    epochs = [session.request({PARTITIONS[0]: 1}).epoch]
    for number in range(REQUESTS_WITHOUT_SESSION + 1):
        session.answered(7 if number >= REQUESTS_WITHOUT_SESSION else 0, 0)
        epochs.append(session.request({PARTITIONS[0]: 1}).epoch)
    assert epochs == [FINAL_EPOCH] * REQUESTS_WITHOUT_SESSION + [INITIAL_EPOCH, 1]
    session._epoch = MAX_EPOCH
    session.answered(7, 0)
    assert session.request({PARTITIONS[0]: 1}).epoch == 1


def test_size_of_a_response_is_known_unless_it_is_one_of_the_first() -> None:
    session = FetchSession()
    sizes = []
    for number in range(REQUESTS_WITHOUT_SESSION + 1):
        session.answered(7 if number >= REQUESTS_WITHOUT_SESSION else 0, 0)
        sizes.append(session.record_bytes)
    assert sizes == [None] * (REQUESTS_WITHOUT_SESSION - 1) + [0, 0]
    session.answered(7, 300)
    assert session.record_bytes == 300
    session.restart()
    assert session.record_bytes is None
