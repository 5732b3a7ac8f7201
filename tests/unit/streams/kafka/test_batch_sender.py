"""Tests of the produce codec: the same bytes as aiokafka's classes."""

from __future__ import annotations

from io import BytesIO

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.api import RequestHeader_v1
from aiokafka.protocol.produce import ProduceRequest_v7, ProduceResponse_v7
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.kafka.client_patches.batch_sender import BatchRequest

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TOPIC = st.text(max_size=20)
BATCHES = st.dictionaries(
    st.builds(TopicPartition, TOPIC, INT32), st.binary(max_size=40), max_size=12
)
ACKNOWLEDGED = st.lists(
    st.tuples(TOPIC, st.lists(st.tuples(INT32, INT16, INT64, INT64, INT64), max_size=5)), max_size=4
)


def by_topic(batches: dict[TopicPartition, bytes]) -> list[tuple[str, list[tuple[int, bytes]]]]:
    found: dict[str, list[tuple[int, bytes]]] = {}
    for tp, data in batches.items():
        found.setdefault(tp.topic, []).append((tp.partition, data))
    return list(found.items())


@given(BATCHES, INT32)
def test_request_is_encoded_as_by_aiokafka(
    batches: dict[TopicPartition, bytes], timeout_ms: int
) -> None:
    theirs = ProduceRequest_v7(None, -1, timeout_ms, by_topic(batches))
    assert BatchRequest(batches, timeout_ms).encode() == theirs.encode()


@given(st.integers(0, 2**31 - 1), TOPIC)
def test_header_is_as_aiokafkas(correlation_id: int, client_id: str) -> None:
    theirs = RequestHeader_v1(ProduceRequest_v7, correlation_id, client_id)
    header = BatchRequest({}, 0).build_request_header(correlation_id, client_id)
    assert header.encode() == theirs.encode()


@given(ACKNOWLEDGED, INT32, INT32)
def test_response_is_decoded_as_by_aiokafka(
    topics: list[tuple[str, list[tuple[int, ...]]]], throttle_ms: int, correlation_id: int
) -> None:
    data = ProduceResponse_v7(topics=topics, throttle_time_ms=throttle_ms).encode()
    theirs = ProduceResponse_v7.decode(BytesIO(data))
    framed = BytesIO(correlation_id.to_bytes(4, signed=True) + data)
    request = BatchRequest({}, 0)
    assert request.parse_response_header(framed).correlation_id == correlation_id
    ours = request.decode(framed)
    assert ours.topics == theirs.topics
    assert ours.API_VERSION == theirs.API_VERSION


@pytest.mark.parametrize("versions", [(3, 6), (0, 4)])
def test_broker_of_other_versions_gets_aiokafkas_request(versions: tuple[int, int]) -> None:
    struct = BatchRequest({TopicPartition("t", 1): b"batch"}, 500).prepare({0: versions})
    assert versions[0] <= struct.API_VERSION <= versions[1]
    assert b"batch" in struct.encode()
