"""What all clients of a Kafka broker have in common here, whatever they are for.

Owns four things: which of the client's errors mean that repeating cannot help, what is mended in
the client itself, the life of a consumer (connected when first needed, ended for sure), and how
much the client may write into the log of a process. Knows nothing of topics and records.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason, collect_hosts, create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    InvalidSessionTimeoutError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
    UnsupportedVersionError,
)

from streams.errors import Denied
from streams.kafka.hangs import watch
from streams.topics import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

REFUSALS: tuple[type[KafkaError], ...] = (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    IncompatibleBrokerVersion,
    InconsistentGroupProtocolError,
    InvalidGroupIdError,
    InvalidSessionTimeoutError,
    InvalidTopicError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
    UnsupportedVersionError,
)
"""A person must change something before these go away (`Denied`): credentials, rights, names,
versions."""

RETRY_S = 0.1
"""Pause before the same broker is asked again."""

SILENCE = 5
"""After so many request time-outs without any answer a consumer is replaced."""

READING: Mapping[str, Any] = {
    "enable_auto_commit": False,
    # A position outside the log must be heard of; every other policy jumps without a word.
    "auto_offset_reset": "none",
    # One partition's answer must hold the largest batch; the whole answer bounds the memory that
    # a consumer takes for what it has fetched ahead, for each broker.
    "max_partition_fetch_bytes": MAX_RECORD_BYTES + 64 * 1024,
    "fetch_max_bytes": 32 * 1024 * 1024,
    # The broker answers at once when there is something. This is how long a new position may wait
    # behind a request that is already under way. A consumer asks every broker that leads one of its
    # partitions so often when nothing happens, which a cluster of three feels in every process.
    "fetch_max_wait_ms": 250,
}
"""Options of all consumers, next to those of the connection."""
MOVING: Mapping[str, Any] = {**READING, "fetch_max_wait_ms": 50}
"""Options of consumers whose positions change while somebody waits for what is there."""


_OF_A_CONNECTION = frozenset(inspect.signature(create_conn).parameters)
_COORDINATOR_TASKS = (
    "_coordination_task",
    "_heartbeat_task",
    "_commit_refresh_task",
    "_reset_committed_task",
)


def denied(error: BaseException, what: str) -> Denied:
    """A refusal, as it is called outside of `streams/kafka`."""
    return Denied(f"{what}: the broker refuses: {error!r}")


_send = AIOKafkaConnection.send


def _send_and_watch(connection: AIOKafkaConnection, *request: Any, **options: Any) -> Any:
    """Send a request, and watch for the answer.

    Raises KafkaConnectionError where the transport is closed already. That of uvloop says so by a
    RuntimeError before the connection has heard of it. The client knows none, and the task that
    fetches, or sends, would end for good, and the process with it.
    """
    try:
        answer = _send(connection, *request, **options)
    except RuntimeError as e:
        connection.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"the connection is broken: {e}") from e
    watch(connection)
    return answer


AIOKafkaConnection.send = _send_and_watch

_get_conn = AIOKafkaClient._get_conn  # noqa: SLF001


async def _get_conn_while_open(
    client: AIOKafkaClient, node: int, **options: Any
) -> AIOKafkaConnection | None:
    """A connection to a broker; none of a client that is closed, or is closed meanwhile.

    The client connects all the same, and nobody would close what it gets.
    """
    if client._sync_task is None:  # noqa: SLF001  # there is one from its start until it is closed
        return None
    connection = await _get_conn(client, node, **options)
    if connection is not None and client._sync_task is None:  # noqa: SLF001
        connection.close(reason=CloseReason.SHUTDOWN)
        return None
    return connection


AIOKafkaClient._get_conn = _get_conn_while_open  # noqa: SLF001


async def connect(client: Any, options: Mapping[str, Any]) -> None:
    """Start a client; one that does not start is stopped. Raises KafkaError, refusals as such."""
    try:
        await client.start()
    except KafkaConnectionError as e:
        await client.stop()
        if (refusal := await _refusal(options)) is not None:
            raise refusal from e
        raise
    except BaseException:
        await client.stop()
        raise


async def _refusal(options: Mapping[str, Any]) -> KafkaError | None:
    """Why the servers do not take us, if that is what they say.

    The client tries one server after the other, writes the answer to its log, and then says of
    all of them that they cannot be reached.
    """
    if options.get("sasl_mechanism") is None:
        return None
    same = {k: v for k, v in options.items() if k in _OF_A_CONNECTION}
    for host, port, _ in collect_hosts(options["bootstrap_servers"]):
        try:
            connection = await create_conn(host, port, **same)
        except REFUSALS as e:
            return e
        except (OSError, KafkaError, TimeoutError):
            continue
        connection.close()
    return None


class LazyConsumer:
    """A consumer that connects when it is first needed, and again after `drop`.

    The connecting goes on in the background when `ready` is given less time than it takes, since
    a connect that is broken off leaks its socket.
    """

    def __init__(self, options: Mapping[str, Any], grace_s: float) -> None:
        """`options` are aiokafka's; `grace_s` bounds how long ending one may take."""
        self._options = dict(options)
        self._grace_s = grace_s
        self._consumer: AIOKafkaConsumer | None = None
        self._starting: asyncio.Task[AIOKafkaConsumer] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def ready(self, timeout_s: float) -> AIOKafkaConsumer | None:
        """The consumer, connected; None when that did not succeed in the time given.

        Raises KafkaError only for refusals; anything else is tried again at the next call.
        """
        if self._consumer is not None:
            return self._consumer
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        starting = self._starting
        await asyncio.wait({starting}, timeout=timeout_s)
        if not starting.done():
            return None
        if self._starting is starting:
            self._starting = None
            if not starting.cancelled() and starting.exception() is None:
                self._consumer = starting.result()
        if starting.cancelled():
            return None
        if (error := starting.exception()) is not None:
            if not isinstance(error, KafkaError | OSError) or isinstance(error, REFUSALS):
                raise error
            log.warning("no connection to Kafka yet: %s", error)
            await asyncio.sleep(min(RETRY_S, timeout_s))
            return None
        return self._consumer

    def drop(self) -> None:
        """Part with the consumer; it ends in the background, and the next `ready` connects anew."""
        if (consumer := self._consumer) is not None:
            self._consumer = None
            self._end(consumer)

    async def close(self) -> None:
        """End what there is, at most a little longer than the grace. Idempotent."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            await asyncio.wait({starting}, timeout=self._grace_s)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting}, timeout=RETRY_S)
            elif not starting.cancelled() and starting.exception() is None:
                self._consumer = starting.result()
        self.drop()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _start(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(**self._options)
        _mend(consumer)
        await connect(consumer, self._options)
        return consumer

    def _end(self, consumer: AIOKafkaConsumer) -> None:
        task = asyncio.create_task(end_consumer(consumer, self._grace_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _mend(consumer: AIOKafkaConsumer) -> None:
    """Make the client notice polls that end by an error or by cancellation.

    It counts those under way without a `finally`: after one of these, a member that is never
    polled again would stay in its group for ever.
    """
    state = consumer._subscription  # noqa: SLF001

    @contextmanager
    def fetch_context() -> Iterator[None]:
        state._fetch_count += 1  # noqa: SLF001
        try:
            yield
        finally:
            state._fetch_count -= 1  # noqa: SLF001
            if state._fetch_count == 0:  # noqa: SLF001
                state._last_fetch_ended = time.monotonic()  # noqa: SLF001  # the client's clock

    state.fetch_context = fetch_context


async def end_consumer(consumer: AIOKafkaConsumer, grace_s: float) -> None:
    """Stop a consumer, whatever state it is in; after the grace, break its work off.

    During an outage `stop` waits for answers one after the other, and may raise CancelledError
    from within (the fetcher does not expect to be cancelled in a back-off), which leaves tasks
    and connections behind. So it runs apart from the caller, and what it leaves is ended here.
    """
    stopping = asyncio.create_task(consumer.stop())
    await asyncio.wait({stopping}, timeout=grace_s)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return
    tasks = {stopping}
    if (fetcher := consumer._fetcher) is not None:  # noqa: SLF001
        tasks |= {fetcher._fetch_task, *fetcher._pending_tasks}  # noqa: SLF001
    for name in _COORDINATOR_TASKS:
        if (task := getattr(consumer._coordinator, name, None)) is not None:  # noqa: SLF001
            tasks.add(task)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=grace_s)
    closing = asyncio.create_task(consumer._client.close())  # noqa: SLF001
    await asyncio.wait({closing}, timeout=grace_s)


class Calm(logging.Filter):
    """Lets one warning or error of a kind through every ten seconds, and says how many it left out.

    Without it an outage writes about 30 lines a second. Messages that belong to an ordinary
    rebalance, or to the first group of a new cluster, are shown as information. A line for every
    assignment is left out: gateways make one for every request.
    """

    PERIOD_S = 10.0
    ORDINARY = (
        "Heartbeat failed for group %s because it is rebalancing",
        "OffsetCommit failed for group %s due to group error (%s), will rejoin",
        "Group Coordinator Request failed: %s",
    )

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # last shown, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write this line; may change its level and its text."""
        if record.levelno < logging.WARNING:
            return record.name != "aiokafka.consumer.subscription_state"
        if record.msg in self.ORDINARY:
            record.levelno, record.levelname = logging.INFO, "INFO"
        kind = (record.name, str(record.msg))
        shown, left_out = self._seen.get(kind, (float("-inf"), 0))
        if shown <= record.created < shown + self.PERIOD_S:
            self._seen[kind] = (shown, left_out + 1)
            return False
        self._seen[kind] = (record.created, 0)
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like this)"
        return True


_calm = Calm()


def calm_client_logs() -> None:
    """Filter every logger of the client, and ours around it. Idempotent.

    One by one, since a filter on their parent would see nothing.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("aiokafka", "streams.kafka")):
            logging.getLogger(name).addFilter(_calm)
