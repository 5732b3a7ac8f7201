"""A FastStream broker over a `Log`: members of its groups read, its producer appends.

    subscribe  Member.poll ──► middlewares ──► handler
    append     middlewares ──► Log.append

Groups, positions and connections are the log's, so handlers run in memory too; FastStream's own
consumers jump silently from a position outside of the log. A batch is handed out as soon as there
are records. An error of a handler or middleware, which FastStream logs and forgets, ends `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, Self, cast

from aiokafka.errors import ConsumerStoppedError
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage
from faststream.kafka.message import FAKE_CONSUMER
from faststream.kafka.publisher.producer import AioKafkaFastProducer
from faststream.kafka.response import KafkaPublishCommand
from faststream.message import encode_message

from kvlane.streams.errors import LogClosed
from kvlane.streams.ports import POLL_S, Appended, Batches, Entry, Log, Member

LINKS = frozenset({"traceparent", "correlation_id"})
"""Headers that middlewares get, for links between spans. Clients may write anything into others."""


class ReceivedRecord(NamedTuple):
    """A `Record` with the whole name of its topic, by which middlewares label it."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class LogBroker(KafkaBroker):
    """The broker of one process, which calls `run`. `prefix`: of the names of topics and groups.
    `servers`: for the description."""

    def __init__(self, log: Log, prefix: str, servers: Sequence[str] = ()) -> None:
        super().__init__(
            list(servers) or "localhost:9092",
            apply_types=False,
            logger=None,
            graceful_timeout=None,
            id_generator=str,  # of headers that no record of the log has
        )
        self._log = log
        self._prefix = prefix
        self._members: dict[str, Callable[[], Member]] = {}
        self._subscribed: list[Any] = []
        """In order of declaration; FastStream's own set has none."""
        self._unhandled: set[str] = set()
        self._failure: asyncio.Future[None] | None = None
        config = self.config.broker_config
        config.builder = partial(_MemberConsumer, self)
        config.producer = _LogProducer(log, prefix)

    def subscribe(
        self,
        topic: str,
        group: str,
        handle: Callable[[Any], Awaitable[None]],
        open_member: Callable[[], Member],
        *,
        max_records: int,
        description: str,
    ) -> None:
        """Hand the records of a topic to `handle`, as a sequence of `ReceivedRecord`. The
        annotation of its parameter describes one record."""
        whole_name = self._prefix + topic
        subscriber = self.subscriber(
            whole_name,
            group_id=self._prefix + group,
            batch=True,
            max_records=max_records,
            ack_policy=AckPolicy.MANUAL,
            no_reply=True,
            parser=partial(_parse, whole_name),
            decoder=_records,
            title=topic,
            description=description,
        )

        @wraps(handle)
        async def handle_or_fail(records: Any) -> None:
            try:
                await handle(records)
            except Exception as e:
                self.fail(e)
                raise

            self._unhandled.discard(whole_name)

        subscriber(handle_or_fail)
        self._members[whole_name] = open_member
        self._subscribed.append(subscriber)

    async def __aenter__(self) -> Self:
        """Connect, to append only: `faststream publish` does so in a process of its own."""
        await self._log.start()
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._log.close()

    async def start(self) -> None:
        """Nothing: subscribers start with `run`, when the process is ready for their records."""

    async def stop(self, *_: object) -> None:
        """Nothing: they stop with `run`, when the process stops."""

    async def run(self) -> None:
        """Run the subscribers; cancel it to stop them. Raises the error of one that fails."""
        self._failure = asyncio.get_running_loop().create_future()
        try:
            await self.connect()
            for subscriber in self._subscribed:
                await subscriber.start()
            await self._failure
        finally:
            tasks = [task for subscriber in self._subscribed for task in subscriber.tasks]
            for subscriber in self._subscribed:
                await subscriber.stop()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fail(self, error: Exception) -> None:
        """End `run` with this error; only the first one counts."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def open_member(self, topic: str) -> Member:
        return self._members[topic]()

    async def next_batches(self, topic: str, member: Member, max_records: int) -> Batches:
        """The next records of a topic. Raises ConsumerStoppedError when nothing more is read."""
        try:
            if topic in self._unhandled:
                raise RuntimeError(f"a middleware has dropped records of {topic}")  # noqa: TRY301
            while self._failure is not None and not self._failure.done():
                if batches := await member.poll(POLL_S, max_records):
                    self._unhandled.add(topic)
                    return batches
        except LogClosed:
            pass
        except Exception as e:  # noqa: BLE001 - FastStream would poll again for ever
            self.fail(e)
        raise ConsumerStoppedError

    # --- appending, as `Log` does ---

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        answer: Any = await self.publish(entry, self._prefix + topic, partition=partition)
        appended: Appended = answer
        return appended

    async def append_batch(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        answer: Any = await self.publish_batch(
            *entries, topic=self._prefix + topic, partition=partition
        )
        appended: Appended = answer
        return appended

    def append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> Mapping[int, asyncio.Future[Appended]]:
        """As `Log.append_many`; not through the middlewares, which wait for the answer."""
        return self._log.append_many(topic, batches)

    async def _connect(self) -> Callable[..., Any]:
        builder: Callable[..., Any] = self.config.broker_config.builder
        return builder


class _MemberConsumer:
    """The part of a Kafka client's consumer that FastStream uses."""

    def __init__(self, broker: LogBroker, **_: object) -> None:
        self._broker = broker

    def subscribe(self, topics: Sequence[str], **_: object) -> None:
        [self._topic] = topics
        self._member = self._broker.open_member(self._topic)

    async def start(self) -> None:
        """Nothing: a member joins at its first poll, and waits for a broker there."""

    async def getmany(self, max_records: int, **_: object) -> Batches:
        return await self._broker.next_batches(self._topic, self._member, max_records)

    async def stop(self) -> None:
        await self._member.close()


class _LogProducer(AioKafkaFastProducer):
    """Appends the entries of FastStream's commands. Headers of middlewares are not among them."""

    _parser = _decoder = codec = cast("Any", None)  # of requests with a reply; there are none

    def __init__(self, log: Log, prefix: str) -> None:
        self._log = log
        self._prefix = prefix

    async def publish(self, cmd: KafkaPublishCommand) -> Any:
        topic = cmd.destination.removeprefix(self._prefix)
        return await self._log.append(topic, _entry_of(cmd), cmd.partition)

    async def publish_batch(self, cmd: KafkaPublishCommand) -> Any:
        topic = cmd.destination.removeprefix(self._prefix)
        assert cmd.partition is not None, "a batch goes to one partition"
        return await self._log.append_batch(topic, cmd.partition, cmd.batch_bodies)


def _entry_of(command: KafkaPublishCommand) -> Entry:
    """The entry of a command; of a message of `faststream publish`, its id is the key."""
    body = command.body
    if isinstance(body, Entry):
        return body
    value, _ = encode_message(body, serializer=None)
    key = command.key or (body.get("id") if isinstance(body, dict) else None)
    if isinstance(key, int):
        key = str(key)
    return Entry(key.encode() if isinstance(key, str) else key, value)


async def _parse(topic: str, records: Sequence[Any]) -> KafkaMessage:
    """A message of FastStream. Its own parser fails for headers without a value, or not UTF-8."""
    received = tuple(
        ReceivedRecord(topic, r.partition, r.offset, r.timestamp, r.key, r.value, r.headers)
        for r in records
    )
    links = [
        {key: value.decode(errors="replace") for key, value in r.headers if value and key in LINKS}
        for r in received
    ]
    name = f"{received[0].offset}-{received[-1].offset}-{received[0].timestamp}"
    return KafkaMessage(
        raw_message=received,
        body=[r.value or b"" for r in received],
        batch_headers=links,
        message_id=name,
        correlation_id=name,
        consumer=FAKE_CONSUMER,
    )


async def _records(message: KafkaMessage) -> Sequence[ReceivedRecord]:
    records: Sequence[ReceivedRecord] = message.raw_message
    return records
