"""Times of the fetch codec beside aiokafka's: `python -m tests.fetch_times`."""

from __future__ import annotations

import time
from collections.abc import Callable
from io import BytesIO

from aiokafka import TopicPartition
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v11

from streams.kafka.fetch_codec import FetchOptions, decode_response, encode_request

PARTITIONS = (0, 1, 8, 32)
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


def table() -> str:
    """All times, a row each."""
    columns = {count: fetch_times(count) for count in PARTITIONS}
    lines = [f"{'us; partitions listed':24}" + "".join(f"{count:8}" for count in PARTITIONS)]
    lines += [
        f"{row:24}" + "".join(f"{columns[count][row]:8.1f}" for count in PARTITIONS)
        for row in columns[0]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
