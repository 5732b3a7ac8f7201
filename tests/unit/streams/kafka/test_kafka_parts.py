"""Tests of small parts of the Kafka log that need no broker."""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer import group_coordinator
from aiokafka.errors import KafkaConnectionError

from kvlane.streams.errors import AccessDenied, BrokerUnavailable, LogClosed
from kvlane.streams.kafka.aiokafka_client import LazyConsumer, LogRateLimiter, limit_client_logs
from kvlane.streams.kafka.client_patches.record_batches import ReadRecord
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.kafka_reader import _LastResponse, _Tails
from kvlane.streams.kafka.provision import describe_topics
from kvlane.streams.ports import Appended, Entry

LANE, OTHER = TopicPartition("t.registry", 0), TopicPartition("t.kv-events", 3)


def record(size: int) -> ReadRecord:
    return ReadRecord(3, 0, 0, b"", bytes(size), ())


class TestTails:
    """When a reader may say that the rest of a partition is empty."""

    @pytest.fixture
    def tails(self) -> _Tails:
        """One that has seen the registry at offset 7 of 10 in two looks."""
        tails = _Tails()
        for _ in range(2):
            assert tails.look({LANE: _LastResponse(position=7, at_ms=100, end=10)}) == {}
        return tails

    def test_repeated_empty_response_confirms_the_end_offset(self, tails: _Tails) -> None:
        assert tails.look({LANE: _LastResponse(7, 200, 10)}) == {}
        assert tails.look({LANE: _LastResponse(7, 200, 10)}) == {LANE: 10}

    def test_repeated_response_gives_no_end_offset(self, tails: _Tails) -> None:
        assert [tails.look({LANE: _LastResponse(7, 100, 10)}) for _ in range(5)] == [{}] * 5

    def test_moving_position_restarts_the_check(self, tails: _Tails) -> None:
        tails.look({LANE: _LastResponse(7, 200, 10)})
        looks = [tails.look({LANE: _LastResponse(8, at_ms, 10)}) for at_ms in (300, 400, 500)]
        assert looks == [{}] * 3

    def test_end_offset_is_that_of_the_last_empty_response(self, tails: _Tails) -> None:
        tails.look({LANE: _LastResponse(7, 200, 10)})
        assert tails.look({LANE: _LastResponse(7, 300, 15)}) == {LANE: 10}

    @pytest.mark.parametrize(("size", "known"), [(1000, {LANE: 10}), (2_000_000, {})])
    def test_many_records_of_other_partitions_may_have_displaced_it(
        self, tails: _Tails, size: int, known: dict[TopicPartition, int]
    ) -> None:
        tails.read({OTHER: [record(size)]})
        tails.look({LANE: _LastResponse(7, 200, 10)})
        assert tails.look({LANE: _LastResponse(7, 300, 10)}) == known

    def test_displaced_partition_has_its_end_offset_later(self, tails: _Tails) -> None:
        tails.read({OTHER: [record(2_000_000)]})
        looks = [tails.look({LANE: _LastResponse(7, at_ms, 10)}) for at_ms in (200, 300, 400)]
        assert looks == [{}, {}, {LANE: 10}]


@pytest.fixture
def line() -> Callable[..., logging.LogRecord]:
    def make(level: int, message: str, at_s: float) -> logging.LogRecord:
        made = logging.LogRecord("aiokafka.conn", level, "", 0, message, ("1",), None)
        made.created = at_s
        return made

    return make


class TestCalm:
    """How much the client may write into the log of a process."""

    def test_repeated_error_is_shown_once_in_ten_seconds(
        self, line: Callable[..., logging.LogRecord]
    ) -> None:
        calm = LogRateLimiter()
        times = [0.0, 0.1, 9.9, 10.1, 10.2]
        shown = [at for at in times if calm.filter(line(logging.ERROR, "no node %s", at))]
        assert shown == [0.0, 10.1]

    def test_shown_line_counts_those_left_out(self, line: Callable[..., logging.LogRecord]) -> None:
        calm = LogRateLimiter()
        for at in (0.0, 0.1, 0.2):
            calm.filter(line(logging.ERROR, "no node %s", at))
        later = line(logging.ERROR, "no node %s", 11.0)
        calm.filter(later)
        assert later.getMessage() == "no node 1 (and 2 more like this)"

    def test_different_messages_do_not_suppress_one_another(
        self, line: Callable[..., logging.LogRecord]
    ) -> None:
        calm = LogRateLimiter()
        assert calm.filter(line(logging.ERROR, "no node %s", 0.0))
        assert calm.filter(line(logging.ERROR, "no leader %s", 0.1))

    def test_information_always_passes(self, line: Callable[..., logging.LogRecord]) -> None:
        calm = LogRateLimiter()
        assert all(calm.filter(line(logging.INFO, "joined %s", 0.0)) for _ in range(3))

    def test_message_of_an_ordinary_rebalance_is_information(
        self, line: Callable[..., logging.LogRecord]
    ) -> None:
        shown = line(logging.WARNING, LogRateLimiter.ORDINARY[0], 0.0)
        assert LogRateLimiter().filter(shown)
        assert (shown.levelno, shown.levelname) == (logging.INFO, "INFO")

    def test_assignments_are_not_logged(self) -> None:
        limit_client_logs()
        logger = logging.getLogger("aiokafka.consumer.subscription_state")
        shown = logger.makeRecord(logger.name, logging.INFO, "", 0, "Updating topics", (), None)
        assert not logger.filter(shown)

    def test_every_logger_of_the_client_is_limited_once(self) -> None:
        for _ in range(2):
            limit_client_logs()
        filters = logging.getLogger("aiokafka.consumer.fetcher").filters
        assert [type(f) for f in filters].count(LogRateLimiter) == 1

    def test_ordinary_messages_are_written_by_the_client(self) -> None:
        """A new version of the client may word them otherwise."""
        source = inspect.getsource(group_coordinator).replace('"\n', "").replace('"', "")
        source = " ".join(source.split())
        assert all(message in source for message in LogRateLimiter.ORDINARY)


class Refusing:
    """Stands for each of the client's classes; keeps its options and cannot connect."""

    options: list[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        self.options.append(options)
        self._subscription = SimpleNamespace()
        self._sender = type("SenderStub", (), {})()  # its class is replaced

    async def start(self) -> None:
        raise KafkaConnectionError("nobody there")

    async def stop(self) -> None:
        pass

    close = stop


class TestSecurity:
    """How a connection's secrets reach the client."""

    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        Refusing.options = []
        monkeypatch.setattr("kvlane.streams.kafka.producer.AIOKafkaProducer", Refusing)
        monkeypatch.setattr("kvlane.streams.kafka.aiokafka_client.AIOKafkaConsumer", Refusing)
        monkeypatch.setattr("kvlane.streams.kafka.provision.AIOKafkaAdminClient", Refusing)
        return Refusing.options

    async def test_options_reach_producer_consumer_and_admin(
        self, options: list[dict[str, Any]]
    ) -> None:
        connection = ConnectionOptions(
            "kafka:9093",
            "router",
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username="me",
            sasl_password="secret",
            request_timeout_ms=100,
        )
        log = KafkaLog(connection)
        with pytest.raises(BrokerUnavailable, match="no Kafka at kafka:9093"):
            await log.start()
        with pytest.raises(BrokerUnavailable):
            await describe_topics(log, lanes=1, replication=1, min_insync=1)
        consumer = LazyConsumer(log.options, grace_s=0.1)
        assert await consumer.ready(1.0) is None
        wanted = {
            "bootstrap_servers": ["kafka:9093"],
            "client_id": "router",
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": "me",
            "sasl_plain_password": "secret",
        }
        assert [wanted.items() <= given.items() for given in options] == [True] * 3
        assert all(isinstance(given["ssl_context"], ssl.SSLContext) for given in options)

    async def test_certificate_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        missing = tmp_path / "ca.pem"
        connection = ConnectionOptions("kafka:1", "x", security_protocol="SSL", ssl_cafile=missing)
        with pytest.raises(AccessDenied, match="security settings"):
            await KafkaLog(connection).start()


class Unheard(KafkaLog):
    """A log that gets to know a topic when it asks for the third time."""

    def __init__(self) -> None:
        super().__init__(ConnectionOptions("kafka:1", "x"))
        self.appended: list[bytes | None] = []
        self._producer: Any = SimpleNamespace(append=self._append, append_timeout_s=1.0)
        self._answers = iter(({}, {}, {"ledger": 4, "responses": 4}))

    async def _learn_partitions(self) -> dict[str, int]:
        async with self._query_lock:
            await asyncio.sleep(0)
            self._partitions |= next(self._answers, {})
        return self._partitions

    async def _append(self, to: TopicPartition, entries: Sequence[Entry]) -> Appended:
        self.appended += [entry.value for entry in entries]
        return Appended(to.partition, 0, 0)


class TestFirstAppends:
    """To a topic of which at first not even the broker has heard."""

    async def test_appends_keep_the_order_of_their_calls(self) -> None:
        log = Unheard()
        values = [b"%d" % n for n in range(20)]
        async with asyncio.TaskGroup() as tasks:
            for value in values:
                tasks.create_task(log.append("ledger", Entry(None, value), 1))
                await asyncio.sleep(0)
        assert log.appended == values

    async def test_append_to_a_newly_known_topic_follows_waiting_appends(self) -> None:
        log = Unheard()
        values = [b"%d" % n for n in range(40)]
        async with asyncio.TaskGroup() as tasks:
            for value in values[:20]:
                tasks.create_task(log.append("ledger", Entry(None, value), 1))
            await asyncio.sleep(0)
            while "ledger" not in log._partitions:  # whoever asks for another learns it, too
                await log.refresh_topics()
            for value in values[20:]:
                tasks.create_task(log.append("ledger", Entry(None, value), 1))
                await asyncio.sleep(0)
        assert log.appended == values

    async def test_concurrent_appends_keep_the_order_of_their_calls(self) -> None:
        log = Unheard()
        values = [b"%d" % n for n in range(20)]
        async with asyncio.TaskGroup() as tasks:
            for value in values:
                futures = log.append_many("ledger", {1: [Entry(None, value)]})
                tasks.create_task(asyncio.wait(futures.values()))
                await asyncio.sleep(0)
        assert log.appended == values

    async def test_cancelled_append_leaves_the_others(self) -> None:
        log = Unheard()
        first = asyncio.create_task(log.append("ledger", Entry(None, b"a"), 1))
        second = asyncio.create_task(log.append("ledger", Entry(None, b"b"), 1))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()
        assert log.appended == [b"b"]


async def test_topic_lookup_on_a_closed_log_raises() -> None:
    sent, gone = asyncio.Event(), asyncio.Event()

    async def fetch_all_metadata() -> None:
        sent.set()
        await gone.wait()
        raise KafkaConnectionError("no broker left to ask")

    async def ready() -> Any:
        return SimpleNamespace(client=SimpleNamespace(fetch_all_metadata=fetch_all_metadata))

    async def close() -> None:
        gone.set()

    log = KafkaLog(ConnectionOptions("kafka:1", "x"))
    log._producer = SimpleNamespace(ready=ready, close=close, append_timeout_s=1.0)  # type: ignore[assignment]
    search = asyncio.create_task(log.partitions("ledger"))
    await sent.wait()
    await log.close()
    with pytest.raises(LogClosed):
        await search
