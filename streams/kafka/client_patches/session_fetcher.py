"""aiokafka's fetcher with fetch sessions: it lists only the partitions that have changed.

Owns the sessions of one consumer, one per broker. A broker whose response is awaited is skipped as
a whole; one without version 11 is asked by aiokafka's own code. Buffers, wake-ups, resets, errors
of partitions and preferred read replicas stay aiokafka's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import KafkaError
from aiokafka.protocol.fetch import FetchRequest

from kvlane.streams.kafka.client_patches.fetch_session import (
    API_KEY,
    API_VERSION,
    FetchOptions,
    FetchResponse,
    FetchSession,
    decode_header,
    decode_response,
    encode_header,
    encode_request,
)

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 250
"""Wait of a broker without records for a consumer that gathers them (`fetch_min_bytes` above 1)."""

FEW_BYTES, SPARSE_WAIT_FACTOR = 1024, 3
"""Bytes of records in a response below which a consumer that gathers them waits longer for the
next: a few heartbeats. A decision of a router alone has more bytes."""

MIN_SPARSE_WAIT_MS = 10
"""Time of gathering below which no wait is longer: records are awaited then."""

SESSION_ERRORS = frozenset({70, 71})
"""FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH: expected after a restart of the broker,
or after it has evicted the session."""


class EncodedHeader(NamedTuple):
    """The header of a request, in the form that a connection encodes."""

    data: bytes

    def encode(self) -> bytes:
        return self.data


class DecodedHeader(NamedTuple):
    """The header of a response, as a connection reads it."""

    correlation_id: int


class SessionFetch:
    """One request and its response, in the forms of aiokafka's request, struct and decoder."""

    API_KEY = API_KEY
    API_VERSION = API_VERSION

    def __init__(
        self, session: FetchSession, wanted: dict[TopicPartition, int], options: FetchOptions
    ) -> None:
        self.wanted = wanted
        self.response: FetchResponse | None = None
        """Of version 11 only."""
        self._session = session
        self._options = options

    # --- the request, for the fetcher ---

    @property
    def topics(self) -> list[tuple[str, list[tuple[int, int, int]]]]:
        """Positions by topic: of the partitions in the response, of all before there is one."""
        by_topic: dict[str, list[tuple[int, int, int]]] = {}
        if self.response is not None:
            for topic, partitions in self.response.topics:
                found = by_topic.setdefault(topic, [])
                for partition, *_ in partitions:
                    found.append((partition, self.wanted[TopicPartition(topic, partition)], 0))
            return list(by_topic.items())
        for (topic, partition), offset in self.wanted.items():
            wanted = (partition, offset, self._options.max_partition_bytes)
            by_topic.setdefault(topic, []).append(wanted)
        return list(by_topic.items())

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        """The request to encode: this, or aiokafka's struct for a broker of other versions."""
        lowest, highest = versions.get(API_KEY, (0, 0))
        if lowest <= API_VERSION <= highest:
            return self
        options = self._options
        return FetchRequest(
            options.max_wait_ms,
            options.min_bytes,
            options.max_bytes,
            options.isolation_level,
            self.topics,
            rack_id=options.rack,
        ).prepare(versions)

    # --- the struct, for the connection ---

    @property
    def RESPONSE_TYPE(self) -> SessionFetch:  # noqa: N802  # aiokafka's name
        return self

    def build_request_header(self, correlation_id: int, client_id: str) -> EncodedHeader:
        return EncodedHeader(encode_header(correlation_id, client_id))

    def encode(self) -> bytes:
        return encode_request(self._options, *self._session.request(self.wanted))

    def parse_response_header(self, buffer: BytesIO) -> DecodedHeader:
        return DecodedHeader(decode_header(buffer.getvalue()))

    def decode(self, buffer: BytesIO) -> FetchResponse:
        """Called unless the request for the response was cancelled."""
        response = decode_response(buffer.getvalue())
        wanted = self.wanted
        topics = [
            (topic, [p for p in partitions if (topic, p[0]) in wanted])
            for topic, partitions in response.topics
        ]
        self.response = response = response._replace(topics=topics)
        if response.error_code:
            self._session.restart()
        else:
            record_bytes = sum(len(p[-1]) for _, partitions in topics for p in partitions)
            self._session.answered(response.session_id, record_bytes)
        return response


class _Plan(NamedTuple):
    """The partitions of an assignment by the broker that serves them; None: none does."""

    assignment: Any
    metadata: Any
    """The partitions of the cluster; each update of the metadata makes another object."""
    by_node: dict[int | None, list[tuple[TopicPartition, Any]]]


class SessionFetcher(Fetcher):  # type: ignore[misc]  # the package has no types
    _sessions: dict[int, FetchSession]
    _plan: _Plan | None
    _options: FetchOptions
    _ended: list[asyncio.Task[bool]]
    """Requests that have ended since the loop looked last."""
    _idle_options: FetchOptions
    """Those of a request after a response without records: the next ones are sent at once."""
    _sparse_options: FetchOptions
    """Those of a request after a response with few records."""

    @classmethod
    def install(cls, consumer: AIOKafkaConsumer) -> None:
        """Give a started consumer fetch sessions, before it has an assignment."""
        fetcher = consumer._fetcher
        fetcher._sessions, fetcher._plan = {}, None
        fetcher._options = options = FetchOptions(
            fetcher._fetch_max_wait_ms,
            fetcher._fetch_min_bytes,
            fetcher._fetch_max_bytes,
            fetcher._isolation_level,
            fetcher._max_partition_fetch_bytes,
            fetcher._client_rack or "",
        )
        fetcher._idle_options = fetcher._sparse_options = options
        fetcher.__class__ = cls
        if options.min_bytes > 1:
            cls.set_gather_s(consumer, options.max_wait_ms / 1000)
        fetcher._ended = []
        fetcher._fetch_task.cancel()  # it waits for an assignment
        fetcher._fetch_task = asyncio.create_task(fetcher._fetch_requests_routine())

    @staticmethod
    def set_gather_s(consumer: AIOKafkaConsumer, gather_s: float) -> None:
        fetcher, wait_ms = consumer._fetcher, int(1000 * gather_s)
        options = fetcher._options._replace(max_wait_ms=wait_ms)
        fetcher._options = options
        fetcher._idle_options = options._replace(min_bytes=1, max_wait_ms=IDLE_WAIT_MS)
        factor = SPARSE_WAIT_FACTOR if wait_ms >= MIN_SPARSE_WAIT_MS else 1
        fetcher._sparse_options = options._replace(max_wait_ms=factor * wait_ms)

    async def _fetch_requests_routine(self) -> None:
        """As aiokafka's, but all events complete one future, that of a poll which has taken
        records."""
        try:
            while True:
                await self._fetch(await self._next_assignment())
        except Exception:
            log.exception("the loop of fetch requests has failed")
            raise

    async def _next_assignment(self) -> Any:
        while True:
            subscription = self._subscriptions.subscription
            if subscription is not None and subscription.assignment is not None:
                return subscription.assignment
            with suppress(KafkaError):  # of the coordinator: the next poll raises it
                await self._subscriptions.wait_for_assignment()

    async def _fetch(self, assignment: Any) -> None:
        """Send requests for an assignment until there is another one."""
        assignment.unassign_future.add_done_callback(self._wake)
        while assignment.active:
            woken = self._wait_consume_future = self._loop.create_future()
            fetches, resets, timeout_s, has_leaderless, events = self._get_actions_per_node(
                assignment
            )
            for node, request in fetches:
                self._start(node, self._proc_fetch_request(assignment, node, request))
            for node, tps in resets.items():
                self._start(node, self._update_fetch_positions(assignment, node, tps))
            if has_leaderless:
                events.append(self._client.force_metadata_update())
            for event in events:
                event.add_done_callback(self._wake)
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await woken
            finally:
                timer.cancel()
                for event in events:
                    event.remove_done_callback(self._wake)
            self._take_ended()
        for task in self._pending_tasks:
            task.cancel()
        if self._pending_tasks:
            await asyncio.wait(self._pending_tasks)
        self._take_ended()
        self._records.clear()

    def _take_ended(self) -> None:
        """Wake the polls if one of the requests that have ended brought something for them."""
        ended, self._ended = self._ended, []
        self._pending_tasks.difference_update(ended)
        brought = [task.result() for task in ended if not task.cancelled()]
        if any(brought):
            for waiter in self._fetch_waiters:
                self._notify(waiter)

    def _start(self, node: int, work: Coroutine[Any, Any, bool]) -> None:
        """Begin a request to a broker, which has no other meanwhile."""
        task = asyncio.create_task(work)
        self._pending_tasks.add(task)
        self._in_flight.add(node)

        def end(_: object) -> None:
            self._in_flight.discard(node)
            self._ended.append(task)
            self._wake()

        task.add_done_callback(end)

    def _wake(self, _event: object = None) -> None:
        self._notify(self._wait_consume_future)

    async def fetched_records(
        self, partitions: Any, timeout: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """As aiokafka's, which waits for a set of one future."""
        deadline = self._loop.time() + timeout
        while True:
            found: dict[TopicPartition, list[Any]] = await super().fetched_records(
                partitions, 0, max_records
            )
            left_s = deadline - self._loop.time()
            if found or left_s <= 0:
                return found
            waiter = self._create_fetch_waiter()
            timer = self._loop.call_later(left_s, self._notify, waiter)
            try:
                await waiter  # raises errors of the coordinator
            finally:
                timer.cancel()
            if self._closed:
                return {}

    def _get_actions_per_node(self, assignment: Any) -> tuple[Any, ...]:
        """As aiokafka's: fetches, resets by node, time-out, whether to refresh, resumptions."""
        by_node = self._planned(assignment).by_node
        buffered, backoff_s = self._records, self._backoff_s()
        fetches: list[tuple[int, dict[TopicPartition, int]]] = []
        resets: dict[int, list[TopicPartition]] = defaultdict(list)
        resumptions: list[Any] = []
        has_leaderless = any(tp not in buffered for tp, _ in by_node.get(None, ()))
        for node, rows in by_node.items():
            if node is None or node in self._in_flight:
                continue
            wanted: dict[TopicPartition, int] = {}
            for tp, state in rows:
                if tp in buffered:
                    continue
                if (position := state._position) is None:
                    # Only a leader has the offsets; a follower may serve the records.
                    leader = self._node(self._client.cluster.leader_for_partition(tp))
                    has_leaderless |= leader is None
                    if leader is not None:
                        resets[leader].append(tp)
                elif state.paused:
                    resumptions.append(state.resume_fut)
                else:
                    wanted[tp] = position
            if wanted and node not in backoff_s:
                fetches.append((node, wanted))
        requests = [
            (node, self._request(self._session(node), wanted))
            for node, wanted in fetches
            if node not in resets  # first the positions, then the next records
        ]
        timeout_s = min(backoff_s.values(), default=self._fetcher_timeout)
        return requests, resets, timeout_s, has_leaderless, resumptions

    def _request(self, session: FetchSession, wanted: dict[TopicPartition, int]) -> SessionFetch:
        options, received = self._options, session.record_bytes
        if received is not None and received < FEW_BYTES:
            options = self._sparse_options if received else self._idle_options
        return SessionFetch(session, wanted, options)

    def _backoff_s(self) -> dict[int | None, float]:
        """Time by node for which its records in the buffer keep it from being asked for others."""
        found: dict[int | None, float] = {}
        for tp, result in self._records.items():
            if left_s := result.calculate_backoff():
                node = self._node(self._select_read_replica(tp))
                found[node] = max(left_s, found.get(node, 0.0))
        return found

    @staticmethod
    def _node(node: int | None) -> int | None:
        """A node id, None for both forms of no leader."""
        return None if node == -1 else node

    def _session(self, node: int) -> FetchSession:
        if node not in self._sessions:
            self._sessions[node] = FetchSession()
        return self._sessions[node]

    def _planned(self, assignment: Any) -> _Plan:
        plan, metadata = self._plan, self._client.cluster._partitions
        if plan is not None and plan.assignment is not assignment:
            for session in self._sessions.values():  # ends of partitions are reported once
                session.restart()
        elif plan is not None and plan.metadata is metadata and not self._preferred_read_replica:
            return plan
        by_node: dict[int | None, list[tuple[TopicPartition, Any]]] = defaultdict(list)
        for tp in assignment.tps:
            node = self._node(self._select_read_replica(tp))
            by_node[node].append((tp, assignment.state_value(tp)))
        self._plan = plan = _Plan(assignment, metadata, by_node)
        return plan

    async def _proc_fetch_request(self, assignment: Any, node: int, fetch: SessionFetch) -> bool:
        """Send a request and take its response; whether there is something for a poll."""
        try:
            has_news: bool = await super()._proc_fetch_request(assignment, node, fetch)
        finally:
            if fetch.response is None:
                self._session(node).restart()
        response = fetch.response
        if response is None:  # or aiokafka's own, of another version
            return has_news
        if response.error_code:
            if response.error_code not in SESSION_ERRORS:
                log.warning("broker %s answers a fetch with error %d", node, response.error_code)
                await asyncio.sleep(self._retry_backoff)
            return False
        if assignment.active:
            self._note(assignment, fetch, response)
        return has_news

    def _note(self, assignment: Any, fetch: SessionFetch, response: FetchResponse) -> None:
        """Note ends of partitions, and the time of the response. An end is reported once, so it
        counts even if the position has changed. A throttled response is about nothing."""
        for topic, partitions in response.topics:
            for partition, error_code, high, stable, *_ in partitions:
                if not error_code:
                    state = assignment.state_value(TopicPartition(topic, partition))
                    state.highwater, state.lso = high, stable
        if response.throttle_ms:
            return
        now_ms = int(1000 * time.time())
        for tp, offset in fetch.wanted.items():
            state = assignment.state_value(tp)
            if state._position == offset:
                state.timestamp = now_ms
