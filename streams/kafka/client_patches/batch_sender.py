"""aiokafka's sender with a codec and a loop of its own: batches to requests, responses to batches.

Retries, errors, idempotence and time-outs stay aiokafka's, and so do requests to a broker without
version 7. The layout (https://kafka.apache.org/protocol#The_Messages_Produce) is in structs instead
of a schema; tests compare it with aiokafka's classes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.producer.sender import Sender, SendProduceReqHandler
from aiokafka.protocol.produce import ProduceRequest

from kvlane.streams.kafka.client_patches.fetch_session import decode_header, encode_header
from kvlane.streams.kafka.client_patches.session_fetcher import DecodedHeader, EncodedHeader

_ALL_REPLICAS = -1
_REQUEST = struct.Struct(">hhii")  # no transactional id, acks, time-out, number of topics
_BATCH = struct.Struct(">ii")  # partition, size of the batch
_ACKNOWLEDGED = struct.Struct(">ihqqq")  # partition, error, offset, append time, start of the log
_COUNT = struct.Struct(">i")
_LENGTH = struct.Struct(">h")


class ProduceResponse(NamedTuple):
    """A decoded response: by topic the partitions, with error, offset, append time, log start."""

    topics: list[tuple[str, list[tuple[int, int, int, int, int]]]]
    API_VERSION: int


class BatchRequest:
    """A request and its response, in the forms of aiokafka's request, struct and decoder."""

    API_KEY, API_VERSION = 0, 7
    required_acks = _ALL_REPLICAS

    def __init__(self, batches: Mapping[TopicPartition, bytes], timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._by_topic: dict[str, list[tuple[int, bytes]]] = {}
        for (topic, partition), data in batches.items():
            self._by_topic.setdefault(topic, []).append((partition, data))

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        """The request to encode: this, or aiokafka's struct for a broker of other versions."""
        lowest, highest = versions.get(self.API_KEY, (0, 0))
        if lowest <= self.API_VERSION <= highest:
            return self
        return ProduceRequest(
            required_acks=_ALL_REPLICAS,
            timeout=self._timeout_ms,
            topics=list(self._by_topic.items()),
            transactional_id=None,
        ).prepare(versions)

    # --- the struct, for the connection ---

    @property
    def RESPONSE_TYPE(self) -> BatchRequest:  # noqa: N802  # aiokafka's name
        return self

    def build_request_header(self, correlation_id: int, client_id: str) -> EncodedHeader:
        return EncodedHeader(
            encode_header(correlation_id, client_id, self.API_KEY, self.API_VERSION)
        )

    def encode(self) -> bytes:
        pieces = [_REQUEST.pack(-1, _ALL_REPLICAS, self._timeout_ms, len(self._by_topic))]
        for topic, batches in self._by_topic.items():
            name = topic.encode()
            pieces += (_LENGTH.pack(len(name)), name, _COUNT.pack(len(batches)))
            for partition, data in batches:
                pieces += (_BATCH.pack(partition, len(data)), data)
        return b"".join(pieces)

    def parse_response_header(self, buffer: BytesIO) -> DecodedHeader:
        return DecodedHeader(decode_header(buffer.getvalue()))

    def decode(self, buffer: BytesIO) -> ProduceResponse:
        """The response behind its header. Raises struct.error, UnicodeDecodeError."""
        data, at = buffer.getvalue(), 2 * _COUNT.size
        (topic_count,) = _COUNT.unpack_from(data, _COUNT.size)
        topics = []
        for _ in range(topic_count):
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            topic = data[at : at + size].decode()
            at += size
            (count,) = _COUNT.unpack_from(data, at)
            at += _COUNT.size
            end = at + count * _ACKNOWLEDGED.size
            topics.append((topic, list(_ACKNOWLEDGED.iter_unpack(data[at:end]))))
            at = end
        return ProduceResponse(topics, self.API_VERSION)


class _BatchHandler(SendProduceReqHandler):  # type: ignore[misc]  # the package has no types
    def create_request(self) -> BatchRequest:
        batches = {tp: batch.get_data_buffer() for tp, batch in self._batches.items()}
        return BatchRequest(batches, self._sender._request_timeout_ms)


class BatchSender(Sender):  # type: ignore[misc]
    """The sender of one producer, whose accumulator is a `BatchQueue`."""

    @classmethod
    def install(cls, producer: AIOKafkaProducer) -> None:
        """Give a producer, which is not started yet, this sender in place of its own."""
        producer._sender.__class__ = cls

    async def _sender_routine(self) -> None:
        """Send the waiting batches to each broker without a request in flight, until cancelled."""
        queue, tasks = self._message_accumulator, set[asyncio.Task[None]]()
        try:
            while True:
                await self._maybe_wait_for_pid()
                found, _ = queue.drain_by_nodes(self._in_flight, self._muted_partitions)
                for node, batches in found.items():
                    self._in_flight.add(node)
                    self._muted_partitions.update(batches)
                    task = asyncio.create_task(self._send_produce_req(node, batches))
                    task.add_done_callback(queue.look_again)
                    tasks.add(task)
                await queue.waiter()
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
        except asyncio.CancelledError:
            for task in tasks:
                await task

    async def _send_produce_req(self, node: int, batches: Mapping[TopicPartition, Any]) -> None:
        await _BatchHandler(self, batches).do(node)
        self._in_flight.remove(node)
        self._muted_partitions.difference_update(batches)
