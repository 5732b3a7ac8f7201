"""Tests of the publisher in vLLM's cores: it never holds up a step, and dropped events are
noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlane.app.engine.kv_events import END_OF_REPLAY, EngineEventBatch, decode_batch
from kvlane.app.engine.vllm.plugin import ENDPOINT_PREFIX, register
from tests.vllm.servers import free_ports

WITHIN_MS = 10_000


def cleared() -> Any:
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

    return KVEventBatch(ts=0.0, events=[AllBlocksCleared()])


@contextmanager
def published(rank: int, tmp_path: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A publisher, and a reader that it has heard of."""
    import zmq

    from kvlane.app.engine.vllm.zmq_publisher import NonBlockingPublisher

    endpoint = f"ipc://{tmp_path / 'events'}"
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.set_hwm(1)
        reader.subscribe(b"")
        reader.bind(endpoint)
        publisher = NonBlockingPublisher(rank, endpoint, **options)
        try:
            while not reader.poll(50):  # a subscription says nothing when it stands
                publisher.publish(cleared())
            yield publisher, reader
        finally:
            publisher.shutdown()


def taken(reader: Any) -> EngineEventBatch:
    assert reader.poll(WITHIN_MS)
    batch = decode_batch(reader.recv_multipart())
    assert batch is not None
    return batch


def test_batches_carry_their_number_and_rank(tmp_path: Path) -> None:
    with published(1, tmp_path) as (publisher, reader):
        first = taken(reader)
        publisher.publish(cleared())
        second = taken(reader)
        while second.number == first.number:
            second = taken(reader)
    assert (second.number, second.rank) == (first.number + 1, 1)


def test_stuck_reader_blocks_no_others_and_sees_a_gap(tmp_path: Path) -> None:
    with published(0, tmp_path, hwm=1) as (publisher, reader):
        for _ in range(5000):
            publisher.publish(cleared())
        numbers = []
        while reader.poll(500):
            numbers.append(taken(reader).number)
        publisher.publish(cleared())
        numbers.append(taken(reader).number)
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > len(numbers), "some are missing"


def test_missed_messages_are_replayed(tmp_path: Path) -> None:
    import zmq

    (port,) = free_ports(1)
    replay = f"tcp://*:{port}"
    with published(0, tmp_path, replay_endpoint=replay, buffer_steps=3) as (publisher, reader):
        last = taken(reader).number
        for _ in range(5):
            publisher.publish(cleared())
            last = max(last, publisher._number - 1)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sending:
            sending.connect(f"tcp://127.0.0.1:{port}")
            sending.send_multipart((b"", (last - 1).to_bytes(8, "big")))
            got = [taken(sending).number]
            while got[-1] != END_OF_REPLAY:
                got.append(taken(sending).number)
    assert got == [last - 1, last, END_OF_REPLAY]


def test_vllm_selects_the_publisher_by_its_endpoint(tmp_path: Path) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

    from kvlane.app.engine.vllm.zmq_publisher import NonBlockingPublisher

    register()
    register()
    kinds = []
    for name, scheme in (("a", ENDPOINT_PREFIX), ("b", "")):
        endpoint = f"{scheme}ipc://{tmp_path / name}"
        config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        publisher = EventPublisherFactory.create(config)
        kinds.append(type(publisher))
        publisher.shutdown()
    assert kinds == [NonBlockingPublisher, ZmqEventPublisher]
