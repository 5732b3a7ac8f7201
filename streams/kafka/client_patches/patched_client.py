"""aiokafka with replaced parts: the queue, sender, fetcher and parser of this folder, and
connections: broken transports, closed clients, and lookups of names."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest

from kvlane.streams.kafka.client_patches.batch_queue import BatchQueue
from kvlane.streams.kafka.client_patches.producer_queue import ProducerQueue, TranslateError
from kvlane.streams.kafka.client_patches.record_batches import patch_parser
from kvlane.streams.kafka.client_patches.session_fetcher import SessionFetcher
from kvlane.streams.kafka.client_patches.stuck_broker import watch_connection

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
    transport.

    uvloop's transport raises a RuntimeError, which would end aiokafka's fetching task for good.
    """
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
    """A connection to a broker; None if the client is closed, or is closed meanwhile. aiokafka
    would connect all the same, and leak the connection."""
    if client._sync_task is None:  # there is one from its start until it is closed
        return None
    connection = await _get_conn(client, node, **options)
    if connection is not None and client._sync_task is None:
        connection.close(reason=CloseReason.SHUTDOWN)
        return None
    return connection


async def _connect_after_lookup(connection: AIOKafkaConnection) -> Any:
    """Connect to a broker by its name, with one lookup of a name at a time.

    An event loop has 4 to 6 threads for lookups, and one for the name of a dead container keeps its
    thread for up to 10 s, past the end of its caller's wait.
    """
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
        """Make aiokafka count polls that end by an error or by cancellation.

        It lacks a `finally`: after such a poll, a member that is never polled again stays in its
        group.
        """
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
