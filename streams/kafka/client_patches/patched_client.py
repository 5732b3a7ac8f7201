"""aiokafka with replaced parts: the queue, sender, fetcher and parser of this folder, and
connections: broken transports, closed clients, lookups of names, hung brokers.

If a connection has no response for a while, other brokers are asked for the members of the cluster:
one that is none loses its connections. aiokafka alone waits for the request time-out, then may ask
the same broker for the new leader.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from kvlane.streams.kafka.client_patches.batch_queue import BatchQueue
from kvlane.streams.kafka.client_patches.producer_queue import ProducerQueue, TranslateError
from kvlane.streams.kafka.client_patches.record_batches import patch_parser
from kvlane.streams.kafka.client_patches.session_fetcher import SessionFetcher

log = logging.getLogger(__name__)

LATE_FRACTION = 0.25
"""Fraction of a request time-out: without a response for that long, others are asked."""

LATE_S = 0.5
"""Lower bound of that time: a broker without new records answers a reader after 250 ms."""

_watched: WeakSet[AIOKafkaConnection] = WeakSet()
_looks: set[asyncio.Task[None]] = set()


def watch_connection(connection: AIOKafkaConnection) -> None:
    """Watch a connection with a pending request until all of them are answered."""
    if connection not in _watched:
        _watched.add(connection)
        _Watch(connection).go_on()


class _Watch:
    """A connection with pending requests. Times are on the clock of the client."""

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection
        writer = connection._writer
        self._transport = None if writer is None else writer.transport
        self._timeout_s: float = connection._request_timeout
        self._late_s = max(self._timeout_s * LATE_FRACTION, LATE_S)
        self._every_s = self._late_s / 2
        self._waits_from = self._looked_at = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._turn = 0

    def go_on(self) -> None:
        asyncio.get_running_loop().call_later(self._every_s, self._check)

    def _check(self) -> None:
        connection = self._connection
        if connection._requests:  # none are left of a connection that is closed
            try:
                self._judge(connection, time.monotonic())
            finally:
                self.go_on()
            return
        _watched.discard(connection)
        if self._transport is not None and not connection.connected():
            # Else the socket stays open until all pending data are sent, and blocks the close of
            # the client.
            self._transport.abort()

    def _judge(self, connection: AIOKafkaConnection, now: float) -> None:
        if now - self._looked_at > 2 * self._every_s:
            # this process was stopped: responses may be buffered
            self._waits_from = now
        self._looked_at = now
        silent_s = now - max(self._waits_from, connection._last_action)
        if silent_s > self._timeout_s + self._every_s:  # the caller has timed out by now
            self._leave(CloseReason.CONNECTION_TIMEOUT, f"has not answered for {silent_s:.1f} s")
        elif silent_s > self._late_s and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._probe_others())
            _looks.add(self._look)
            self._look.add_done_callback(_looks.discard)

    async def _probe_others(self) -> None:
        """Close the connection if the broker is not, or no longer, a member of its cluster."""
        client = getattr(self._connection._on_close_cb, "__self__", None)
        if not isinstance(client, AIOKafkaClient):
            return  # to an address that need not be that of a broker
        if self._is_member(client):
            try:
                async with asyncio.timeout(self._late_s):
                    await self._refresh(client)
            except (KafkaError, TimeoutError):
                return  # another one is asked at the next look
        if not self._is_member(client):
            self._leave(CloseReason.CONNECTION_BROKEN, "hangs and has left its cluster")

    def _is_member(self, client: AIOKafkaClient) -> bool:
        here = (self._connection.host, self._connection.port)
        return any((b.host, b.port) == here for b in client.cluster.brokers())

    async def _refresh(self, client: AIOKafkaClient) -> None:
        """Refresh the cluster metadata from another broker. Raises KafkaError, TimeoutError."""
        other = await self._other(client)
        if other is None:
            return
        cluster, topics = client.cluster, set(client._topics)
        known_ms = cluster._last_successful_refresh_ms
        question = MetadataRequest(list(topics) or None, allow_auto_topic_creation=False)
        answer = await other.send(question)
        is_latest = cluster._last_successful_refresh_ms == known_ms
        if answer.brokers and is_latest and topics == client._topics:
            cluster.update_metadata(answer)

    async def _other(self, client: AIOKafkaClient) -> AIOKafkaConnection | None:
        """A connection to another broker, to each of them in turn; None if there is none."""
        here = (self._connection.host, self._connection.port)
        ids = [b.nodeId for b in client.cluster.brokers() if (b.host, b.port) != here]
        known = [client._conns.get((node, ConnectionGroup.DEFAULT)) for node in ids]
        others = [other for other in known if other is not None and other.connected()]
        self._turn += 1
        if others:
            return others[self._turn % len(others)]
        # A task that connects, maybe to the broker that hangs, holds the lock until that is done.
        if not ids or client._get_conn_lock.locked():
            return None
        return await client._get_conn(ids[self._turn % len(ids)])

    def _leave(self, reason: CloseReason, why: str) -> None:
        connection = self._connection
        if not connection.connected():
            return
        log.warning("broker %s:%d %s", connection.host, connection.port, why)
        connection.close(reason=reason)


_send = AIOKafkaConnection.send
_connect = AIOKafkaConnection.connect
_get_conn = AIOKafkaClient._get_conn
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Any]]] = (
    WeakKeyDictionary()
)


def patch_connections() -> None:
    """Replace the methods of all connections in this process. Idempotent."""
    AIOKafkaConnection.send = _send_and_watch
    AIOKafkaConnection.connect = _connect_after_lookup
    AIOKafkaClient._get_conn = _get_conn_while_open


def _send_and_watch(connection: AIOKafkaConnection, *request: Any, **options: Any) -> Any:
    """Send a request, and watch for the response. Raises KafkaConnectionError for a closed
    transport, of which uvloop's RuntimeError would end aiokafka's fetching task."""
    try:
        answer = _send(connection, *request, **options)
    except RuntimeError as e:
        connection.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"the connection is broken: {e}") from e
    watch_connection(connection)
    return answer


async def _get_conn_while_open(
    client: AIOKafkaClient, node: int, **options: Any
) -> AIOKafkaConnection | None:
    """A connection to a broker; None if the client is closed meanwhile, which aiokafka would
    leak."""
    if client._sync_task is None:  # there is one from its start until it is closed
        return None
    connection = await _get_conn(client, node, **options)
    if connection is not None and client._sync_task is None:
        connection.close(reason=CloseReason.SHUTDOWN)
        return None
    return connection


async def _connect_after_lookup(connection: AIOKafkaConnection) -> Any:
    """Connect to a broker by its name, with one lookup of a name at a time: that of a dead
    container keeps one of few threads for up to 10 s."""
    loop, host = asyncio.get_running_loop(), connection.host
    lookups = _lookups.setdefault(loop, {})
    if (lookup := lookups.get(host)) is None:
        lookup = lookups[host] = asyncio.ensure_future(
            loop.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM)
        )
        lookup.add_done_callback(lambda done: _end_lookup(lookups, host, done))
    async with asyncio.timeout(connection._request_timeout):
        await asyncio.shield(lookup)
    return await _connect(connection)


def _end_lookup(
    lookups: dict[str, asyncio.Future[Any]], host: str, done: asyncio.Future[Any]
) -> None:
    del lookups[host]
    if not done.cancelled():
        done.exception()  # retrieved, so that asyncio does not log it


class PatchedClient:
    """Implements `ClientParts`. Replaces connections and parser in the whole process."""

    def __init__(self) -> None:
        patch_connections()
        patch_parser()

    def new_queue(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,
    ) -> ProducerQueue:
        return BatchQueue(translate, on_broken, leader_timeout_s)

    def prepare(self, consumer: AIOKafkaConsumer) -> None:
        """Make aiokafka count polls that end by an error or by cancellation: else a member that is
        never polled again stays in its group."""
        state = consumer._subscription

        @contextmanager
        def fetch_context() -> Iterator[None]:
            state._fetch_count += 1
            try:
                yield
            finally:
                state._fetch_count -= 1
                if state._fetch_count == 0:
                    state._last_fetch_ended = time.monotonic()  # the client's clock

        state.fetch_context = fetch_context

    def fetch_in_sessions(self, consumer: AIOKafkaConsumer) -> None:
        SessionFetcher.install(consumer)

    def set_gather_s(self, consumer: AIOKafkaConsumer, gather_s: float) -> None:
        SessionFetcher.set_gather_s(consumer, gather_s)

    def observe_answers(
        self, consumer: AIOKafkaConsumer, on_answer: Callable[[str, float], None]
    ) -> bool:
        coordinator, clock = consumer._coordinator, asyncio.get_running_loop()
        send = coordinator._send_req

        async def send_and_report(request: Any) -> Any:
            sent_at = clock.time()
            answer = await send(request)
            if isinstance(request, HeartbeatRequest | SyncGroupRequest) and answer.error_code == 0:
                kind = "heartbeat" if isinstance(request, HeartbeatRequest) else "sync"
                on_answer(kind, sent_at)
            return answer

        coordinator._send_req = send_and_report
        return True

    def position(self, consumer: AIOKafkaConsumer, tp: TopicPartition) -> int | None:
        assignment = consumer._subscription.subscription.assignment
        if assignment is None or not assignment.active:
            return None
        state = assignment.state_value(tp)
        if state is None or not state.has_valid_position:
            return None
        return int(state.position)

    async def committed(
        self, consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """With one request; `consumer.committed` asks for each partition by itself."""
        found = await consumer._coordinator.fetch_committed_offsets(list(tps))
        return {tp: found[tp].offset for tp in tps if tp in found}

    def transaction_error(self, producer: AIOKafkaProducer) -> BaseException | None:
        end = producer._txn_manager.wait_for_transaction_end()
        if end is None or not end.done():
            return None
        error: BaseException | None = end.exception()
        return error
