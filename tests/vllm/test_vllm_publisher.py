"""The publisher in vLLM's cores never holds up a step, and what it drops is seen to be missing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from app.engine.kv_events import Unread, read
from app.engine.vllm.plugin import SCHEME, register


def test_a_full_queue_drops_batches_and_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zmq
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

    from app.engine.vllm.publisher import Publisher

    held, plain = threading.Event(), Publisher._publisher_thread
    monkeypatch.setattr(Publisher, "_publisher_thread", lambda self: held.wait() and plain(self))
    endpoint = f"ipc://{tmp_path / 'events'}"
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.bind(endpoint)
        publisher = Publisher(1, SCHEME + endpoint, max_queue_size=2)
        try:
            for _ in range(5):
                publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            assert publisher.dropped == 3
            held.set()
            for _ in range(200):  # a subscription says nothing when it stands
                if reader.poll(50):
                    break
                publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            batch = read(reader.recv_multipart(zmq.NOBLOCK), Unread())
        finally:
            held.set()
            publisher.shutdown()
    assert batch is not None
    assert batch.number >= 3, "the numbers of what was dropped are missing"
    assert batch.rank == 1


def test_vllm_finds_it_by_its_endpoint_and_others_as_before(tmp_path: Path) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

    from app.engine.vllm.publisher import Publisher

    register()
    register()
    kinds = []
    for name, scheme in (("a", SCHEME), ("b", "")):
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"{scheme}ipc://{tmp_path / name}",
        )
        publisher = EventPublisherFactory.create(config)
        kinds.append(type(publisher))
        publisher.shutdown()
    assert kinds == [Publisher, ZmqEventPublisher]
