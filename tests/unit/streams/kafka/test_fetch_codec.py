"""Tests of the fetch codec: the same bytes as aiokafka's classes."""

from __future__ import annotations

import struct
from io import BytesIO

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.api import RequestHeader_v1, ResponseHeader_v0
from aiokafka.protocol.fetch import FetchRequest_v11, FetchResponse_v11
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.kafka.client_patches.fetch_session import (
    FetchOptions,
    decode_header,
    decode_response,
    encode_header,
    encode_request,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
INT16 = st.integers(-(2**15), 2**15 - 1)
TOPIC = st.text(max_size=20)
OPTIONS = st.builds(
    FetchOptions, INT32, INT32, INT32, st.integers(-128, 127), INT32, st.text(max_size=10)
)
POSITIONS = st.lists(st.tuples(st.builds(TopicPartition, TOPIC, INT32), INT64), max_size=12)
ABORTED = st.none() | st.lists(st.tuples(INT64, INT64), max_size=3)
PARTITION = st.tuples(
    INT32, INT16, INT64, INT64, INT64, ABORTED, INT32, st.none() | st.binary(max_size=40)
)
TOPICS = st.lists(st.tuples(TOPIC, st.lists(PARTITION, max_size=5)), max_size=4)


def grouped(pairs: list[tuple[str, object]]) -> list[tuple[str, list[object]]]:
    found: dict[str, list[object]] = {}
    for topic, item in pairs:
        found.setdefault(topic, []).append(item)
    return list(found.items())


@given(OPTIONS, INT32, INT32, POSITIONS, st.lists(st.builds(TopicPartition, TOPIC, INT32)))
def test_request_is_encoded_as_by_aiokafka(
    options: FetchOptions,
    session_id: int,
    epoch: int,
    positions: list[tuple[TopicPartition, int]],
    forgotten: list[TopicPartition],
) -> None:
    size = options.max_partition_bytes
    theirs = FetchRequest_v11(
        -1, options.max_wait_ms, options.min_bytes, options.max_bytes, options.isolation_level,
        session_id, epoch,
        grouped([(tp.topic, (tp.partition, -1, at, -1, size)) for tp, at in positions]),
        grouped([(tp.topic, tp.partition) for tp in forgotten]),
        options.rack,
    )  # fmt: skip
    assert encode_request(options, session_id, epoch, positions, forgotten) == theirs.encode()


@given(st.integers(0, 2**31 - 1), TOPIC)
def test_headers_are_as_aiokafkas(correlation_id: int, client_id: str) -> None:
    theirs = RequestHeader_v1(FetchRequest_v11, correlation_id, client_id)
    assert encode_header(correlation_id, client_id) == theirs.encode()
    assert decode_header(ResponseHeader_v0(correlation_id).encode()) == correlation_id


@given(INT32, INT16, INT32, TOPICS)
def test_response_is_decoded_as_by_aiokafka(
    throttle_ms: int, error: int, session_id: int, topics: list[tuple[str, list[object]]]
) -> None:
    data = FetchResponse_v11(throttle_ms, error, session_id, topics).encode()
    theirs = FetchResponse_v11.decode(BytesIO(data))
    ours = decode_response(data, 0)
    assert (ours.throttle_ms, ours.error_code, ours.session_id) == (throttle_ms, error, session_id)
    assert ours.topics == [
        (topic, [(*fields, records or b"") for *fields, records in partitions])
        for topic, partitions in theirs.topics
    ]


@given(TOPICS, st.data())
def test_response_that_is_cut_off_is_an_error(
    topics: list[tuple[str, list[object]]], data: st.DataObject
) -> None:
    whole = FetchResponse_v11(0, 0, 0, topics).encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((struct.error, UnicodeDecodeError)):
        decode_response(whole[:cut], 0)
