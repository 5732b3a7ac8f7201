"""Shared parts of all aiokafka clients: permanent errors, consumers, the rate of log messages.

Never here: topics and records, and private names of aiokafka (`client_patches/`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.conn import collect_hosts, create_conn
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

from kvlane.streams.errors import AccessDenied
from kvlane.streams.kafka.client_patches.client_parts import (
    client_parts,
    close_connections,
    tasks_of,
)
from kvlane.streams.kafka.connection_options import KeyFilter
from kvlane.streams.topics import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

REFUSAL_ERRORS: tuple[type[KafkaError], ...] = (
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
"""Errors that need an operator (`AccessDenied`): credentials, rights, names, versions."""

RETRY_S = 0.1

SILENT_TIMEOUTS = 5
"""A consumer is replaced after this many request time-outs without any response."""

READER_OPTIONS: Mapping[str, Any] = {
    "enable_auto_commit": False,
    # A position outside the log must be reported; every other policy jumps silently.
    "auto_offset_reset": "none",
    # One partition's answer must hold the largest batch; the whole answer bounds the memory that
    # a consumer takes for records fetched ahead, for each broker.
    "max_partition_fetch_bytes": MAX_RECORD_BYTES + 64 * 1024,
    "fetch_max_bytes": 32 * 1024 * 1024,
    # The broker answers at once when there is something. This is how long a new position may wait
    # behind a request that is already under way. A consumer asks every broker that leads one of its
    # partitions so often when nothing happens, which a cluster of three feels in every process.
    "fetch_max_wait_ms": 250,
}
"""Options of all consumers, next to those of the connection."""
MOVING_READER_OPTIONS: Mapping[str, Any] = {**READER_OPTIONS, "fetch_max_wait_ms": 50}
"""Options of consumers whose positions change while a caller waits for existing records."""


_OF_A_CONNECTION = frozenset(inspect.signature(create_conn).parameters)


def to_access_denied(error: BaseException, what: str) -> AccessDenied:
    """Translate a refusal for code outside of `streams/kafka`."""
    correction = ""
    if isinstance(error, SaslAuthenticationFailed | UnsupportedSaslMechanismError):
        correction = (
            "Check KVLANE_SASL_MECHANISM, KVLANE_SASL_USERNAME and KVLANE_SASL_PASSWORD (or the "
            "token's file)."
        )
    return AccessDenied(f"{what}: the broker refuses: {error!r}", correction=correction)


async def start_client(client: Any, options: Mapping[str, Any]) -> None:
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
    """The reason if the servers refuse authentication, which aiokafka only logs."""
    if options.get("sasl_mechanism") is None:
        return None
    same = {k: v for k, v in options.items() if k in _OF_A_CONNECTION}
    for host, port, _ in collect_hosts(options["bootstrap_servers"]):
        try:
            connection = await create_conn(host, port, **same)
        except REFUSAL_ERRORS as e:
            return e
        except (OSError, KafkaError, TimeoutError):
            continue
        connection.close()
    return None


class LazyConsumer:
    """A consumer that connects on first use, and again after `drop`. Connecting continues past the
    time of `ready`: a cancelled connect leaks its socket."""

    def __init__(self, options: Mapping[str, Any], grace_s: float) -> None:
        """`options` are aiokafka's; `grace_s` bounds how long ending one may take."""
        self._options = dict(options)
        self._grace_s = grace_s
        self._consumer: AIOKafkaConsumer | None = None
        self._starting: asyncio.Task[AIOKafkaConsumer] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_used(self) -> bool:
        return self._consumer is not None or self._starting is not None

    async def ready(self, timeout_s: float) -> AIOKafkaConsumer | None:
        """The connected consumer; None if connecting did not succeed in time. Raises KafkaError
        only for refusals; other errors are retried at the next call."""
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
            if not isinstance(error, KafkaError | OSError) or isinstance(error, REFUSAL_ERRORS):
                raise error
            log.warning("cannot connect to Kafka, retrying: %s", error)
            await asyncio.sleep(min(RETRY_S, timeout_s))
            return None
        return self._consumer

    def drop(self) -> None:
        """Drop the consumer; it stops in the background, and the next `ready` reconnects."""
        if (consumer := self._consumer) is not None:
            self._consumer = None
            self._end(consumer)

    async def close(self) -> None:
        """Stop the consumer, within little more than the grace period. Idempotent."""
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
        # The replaced parser reads for consumers with a filter.
        consumer = AIOKafkaConsumer(**{"key_deserializer": KeyFilter(), **self._options})
        parts = client_parts()
        parts.prepare(consumer)
        await start_client(consumer, self._options)
        parts.fetch_in_sessions(consumer)
        return consumer

    def _end(self, consumer: AIOKafkaConsumer) -> None:
        task = asyncio.create_task(stop_consumer(consumer, self._grace_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def stop_consumer(consumer: AIOKafkaConsumer, grace_s: float) -> None:
    """Stop a consumer in any state; after the grace period, cancel its tasks. In a task of its own,
    since `stop` may raise an internal CancelledError, which leaks tasks and connections."""
    stopping = asyncio.create_task(consumer.stop())
    await asyncio.wait({stopping}, timeout=grace_s)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return
    tasks = {stopping, *tasks_of(consumer)}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=grace_s)
    closing = asyncio.create_task(close_connections(consumer))
    await asyncio.wait({closing}, timeout=grace_s)


class LogRateLimiter(logging.Filter):
    """Passes one warning or error of a kind every ten seconds; of a rebalance, as INFO."""

    PERIOD_S = 10.0
    ORDINARY = (
        "Heartbeat failed for group %s because it is rebalancing",
        "OffsetCommit failed for group %s due to group error (%s), will rejoin",
        "Group Coordinator Request failed: %s",
    )

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # last shown, suppressed since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log this record; may change its level and its text."""
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


_calm = LogRateLimiter()


def limit_client_logs() -> None:
    """Filter every logger of the client, and those of this folder. Idempotent."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("aiokafka", "kvlane.streams.kafka")):
            logging.getLogger(name).addFilter(_calm)
