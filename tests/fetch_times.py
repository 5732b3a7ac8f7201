"""Times of the codecs and the fetch loop beside aiokafka's: `python -m tests.fetch_times`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import uvloop
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v11
from aiokafka.protocol.produce import ProduceRequest, ProduceResponse_v7

from kvlane.streams.kafka.client_patches.batch_sender import BatchRequest
from kvlane.streams.kafka.client_patches.fetch_session import (
    REQUESTS_WITHOUT_SESSION,
    FetchOptions,
    decode_response,
    encode_request,
)
from kvlane.streams.kafka.client_patches.session_fetcher import SessionFetch, SessionFetcher
from tests.harness.fetch_cluster import FetchCluster

PARTITIONS = (0, 1, 8, 32)
LOOP_S = 2.0
OPTIONS = FetchOptions(250, 1, 32 * 1024 * 1024, 0, 8 * 1024 * 1024, "")
RECORDS = bytes(300)


def least_us(call: Callable[[], object], repeats: int = 2000) -> float:
    """The least of many times, in microseconds."""
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return 1e6 * least


def fetch_times(count: int) -> dict[str, float]:
    """Times for requests and responses that list `count` partitions, in microseconds."""
    positions = [(TopicPartition("kvlane.requests", p), 1000 + p) for p in range(count)]
    rows = [(p, at, OPTIONS.max_partition_bytes) for (_, p), at in positions]
    topics = [("kvlane.requests", rows)] if rows else []
    found = [(p, 0, 2000, 2000, 0, None, -1, RECORDS) for p in range(count)]
    answered = [("kvlane.requests", found)] if found else []
    data = FetchResponse_v11(0, 0, 1, answered).encode()

    def encode_theirs() -> bytes:
        request = FetchRequest(250, 1, OPTIONS.max_bytes, 0, topics)
        encoded: bytes = request.prepare({1: (11, 11)}).encode()
        return encoded

    return {
        "encode, aiokafka": least_us(encode_theirs),
        "encode": least_us(lambda: encode_request(OPTIONS, 1, 1, positions, [])),
        "decode, aiokafka": least_us(lambda: FetchResponse_v11.decode(BytesIO(data))),
        "decode": least_us(lambda: decode_response(data, 0)),
    }


def produce_times(count: int) -> dict[str, float]:
    """Times for requests and responses with batches of `count` partitions, in microseconds."""
    batches = {TopicPartition("kvlane.responses", p): RECORDS for p in range(count)}
    topics = [("kvlane.responses", [(p, RECORDS) for p in range(count)])]
    data = ProduceResponse_v7([("kvlane.responses", [(p, 0, 5, -1, 0) for p in range(count)])], 0)
    answer = bytes(4) + data.encode()
    ours, versions = BatchRequest(batches, 4000), {0: (0, 7)}

    def encode_theirs() -> bytes:
        request = ProduceRequest(
            required_acks=-1, timeout=4000, topics=topics, transactional_id=None
        )
        encoded: bytes = request.prepare(versions).encode()
        return encoded

    return {
        "produce encode, aiokafka": least_us(encode_theirs),
        "produce encode": least_us(lambda: BatchRequest(batches, 4000).encode()),
        "produce decode, aiokafka": least_us(
            lambda: ProduceResponse_v7.decode(BytesIO(answer[4:]))
        ),
        "produce decode": least_us(lambda: ours.decode(BytesIO(answer))),
    }


class SteadyCluster(FetchCluster):
    """Brokers that always give the response of an hour without records, at once."""

    def __init__(self, lanes: list[TopicPartition]) -> None:
        super().__init__(lanes)
        self.fetches = 0
        rows = [(tp.partition, 0, 5, 5, 0, None, -1, b"") for tp in lanes]
        self._full = FetchResponse_v11(0, 0, 0, [("lanes", rows)]).encode()
        self._opened = FetchResponse_v11(0, 0, 1, [("lanes", rows)]).encode()
        self._empty = FetchResponse_v11(0, 0, 1, []).encode()

    async def send(self, node: int, request: Any) -> Any:
        struct = request.prepare({1: (4, 17)})
        struct.build_request_header(1, "router").encode() + struct.encode()
        self.fetches += 1
        await asyncio.sleep(0)
        if not isinstance(request, SessionFetch):
            return FetchResponse_v11.decode(BytesIO(self._full))
        has_session = self.fetches > REQUESTS_WITHOUT_SESSION
        is_open = self.fetches > REQUESTS_WITHOUT_SESSION + 1
        data = self._empty if is_open else self._opened if has_session else self._full
        return struct.RESPONSE_TYPE.decode(BytesIO(bytes(4) + data))


async def loop_us(count: int, *, sessions: bool) -> float:
    """CPU time of the whole fetch loop for a fetch without news, with `count` partitions."""
    lanes = [TopicPartition("lanes", p) for p in range(count)]
    cluster, subscription = SteadyCluster(lanes), SubscriptionState()
    fetcher = Fetcher(cluster, subscription)
    if sessions:
        SessionFetcher.install(SimpleNamespace(_fetcher=fetcher))
    subscription.assign_from_user(set(lanes))
    for tp in lanes:
        fetcher.seek_to(tp, 5)
    await asyncio.sleep(0.2)
    before, began_s = cluster.fetches, time.process_time()
    await asyncio.sleep(LOOP_S)
    took_s = time.process_time() - began_s
    await fetcher.close()
    return 1e6 * took_s / (cluster.fetches - before)


def table() -> str:
    """All times, a row each."""
    columns = {count: fetch_times(count) for count in PARTITIONS}
    for count, column in columns.items():
        if count:
            column.update(produce_times(count))
            column["fetch loop, aiokafka"] = uvloop.run(loop_us(count, sessions=False))
            column["fetch loop"] = uvloop.run(loop_us(count, sessions=True))
    rows = list(columns[PARTITIONS[-1]])
    lines = [f"{'us; partitions':24}" + "".join(f"{count:8}" for count in PARTITIONS)]
    for row in rows:
        cells = (f"{column[row]:8.1f}" if row in column else " " * 8 for column in columns.values())
        lines.append(f"{row:24}" + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
