"""Tests of a server's cache events: lost, repeated, late, or of an earlier process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
import zmq

from kvlane.app.engine.attached import zmq_events as events_module
from kvlane.app.engine.attached.zmq_events import ZmqEventFollower
from kvlane.app.engine.interface import EngineError
from kvlane.indexer.block_hashes import derive_secret
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
)
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer, NormalizerCounters
from tests.conformance import WITHIN_S
from tests.harness.model_servers import EventPublisher

SIZE = 2


def block(name: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored([name], parent, [name, name], SIZE)


class Follower:
    """Follows a publisher, and holds what a worker would."""

    def __init__(self, publisher: EventPublisher, *, replay: bool = True) -> None:
        self.publisher, self._replays = publisher, replay
        self.normalizer = EventNormalizer(SIZE, derive_secret(b"s"))
        self.got: list[EngineEvent] = []
        self.events = ZmqEventFollower(
            publisher.endpoint, publisher.replay if replay else "", self._listen
        )

    def _listen(self, events: object, rank: int = 0, /) -> None:
        assert isinstance(events, list | tuple)
        self.got += events
        self.normalizer.on_events(events, 0.0)

    async def begin(self) -> Follower:
        await self.events.connect()
        await self.publisher.wait_subscribed()
        self._running = asyncio.create_task(self.events.run())
        if self._replays:
            await until(lambda: bool(self.got))  # the past was read
        return self

    async def holds(self, blocks: int) -> None:
        await until(lambda: self.normalizer.held_blocks == blocks)

    async def end(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.events.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - sockets decide
            await asyncio.sleep(0.005)


@pytest.fixture
async def publisher() -> AsyncIterator[EventPublisher]:
    publisher = EventPublisher()
    yield publisher
    await publisher.close()


@pytest.fixture
async def follower(publisher: EventPublisher) -> AsyncIterator[Follower]:
    follower = await Follower(publisher).begin()
    yield follower
    await follower.end()


async def test_blocks_cached_before_the_start_are_replayed(publisher: EventPublisher) -> None:
    publisher.publish([block(1)])
    publisher.publish([block(2, 1)])
    follower = await Follower(publisher).begin()
    await follower.holds(2)
    publisher.publish([block(3, 2)])
    await follower.holds(3)
    assert follower.normalizer.counters.gaps == 0
    await follower.end()


async def test_without_replays_only_received_events_are_applied(publisher: EventPublisher) -> None:
    publisher.publish([block(1)])
    follower = await Follower(publisher, replay=False).begin()
    publisher.publish([block(2, 1)])
    publisher.publish([block(3)])
    await follower.holds(1)
    assert follower.normalizer.counters.orphans == 1
    await follower.end()


async def test_lost_message_is_requested_again(
    publisher: EventPublisher, follower: Follower
) -> None:
    publisher.dropped = {1, 2}
    for number in range(4):
        publisher.publish([block(number + 1, number or None)])
    await follower.holds(4)
    assert publisher.replays[-1] == 1
    assert follower.normalizer.counters == NormalizerCounters()


async def test_loss_of_the_last_message_is_detected(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "IDLE_CHECK_S", 0.05)
    follower = await Follower(publisher).begin()
    publisher.dropped = {1}
    publisher.publish([block(1)])
    publisher.publish([block(2, 1)])
    await follower.holds(2)
    await follower.end()


async def test_failed_replay_drops_all_blocks_in_doubt(
    publisher: EventPublisher, follower: Follower
) -> None:
    publisher.publish([block(1), block(2, 1), block(9)])
    await follower.holds(3)
    publisher.dropped = publisher.forgotten = {1}
    publisher.publish([BlocksRemoved([9])])
    publisher.publish([block(3, 2)])
    await until(lambda: follower.normalizer.counters.gaps == 1)
    await follower.holds(3)  # 3, and 1 and 2, which it continues


async def test_gap_without_replays_drops_all_blocks_in_doubt(publisher: EventPublisher) -> None:
    follower = await Follower(publisher, replay=False).begin()
    publisher.publish([block(1), block(9)])
    await follower.holds(2)
    publisher.dropped = {1}
    publisher.publish([BlocksRemoved([9])])
    publisher.publish([block(2)])
    await until(lambda: follower.normalizer.counters.gaps == 1)
    await follower.holds(1)
    await follower.end()


async def test_replay_that_never_ends_is_abandoned(
    publisher: EventPublisher, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "REPLAY_TIMEOUT_S", 0.05)
    publisher.publish([block(1)])
    await follower.holds(1)
    publisher.answers, publisher.dropped = False, {1}
    publisher.publish([block(2)])
    publisher.publish([block(3)])
    await until(lambda: follower.normalizer.counters.gaps == 1)
    await follower.holds(1)


async def test_event_received_twice_by_a_replay_is_applied_once(
    publisher: EventPublisher, follower: Follower
) -> None:
    publisher.dropped = {0}
    for number in range(50):
        publisher.publish([block(number + 1)])
    await follower.holds(50)
    assert not follower.normalizer._copies


async def test_restarted_server_has_an_empty_cache(publisher: EventPublisher) -> None:
    follower = await Follower(publisher).begin()
    publisher.publish([block(1), block(2, 1)])
    await follower.holds(2)
    port, replay_port = (int(e.rsplit(":", 1)[1]) for e in (publisher.endpoint, publisher.replay))
    await publisher.close()
    await follower.holds(0)
    again = await rebound(port, replay_port)
    await again.wait_subscribed()
    again.publish([block(7)])
    await follower.holds(1)
    again.publish([AllCleared()])
    await follower.holds(0)
    await follower.end()
    await again.close()


async def rebound(port: int, replay_port: int) -> EventPublisher:
    async with asyncio.timeout(WITHIN_S):
        while True:
            with suppress(zmq.ZMQError):
                return EventPublisher(port, replay_port)
            await asyncio.sleep(0.05)


async def test_unreadable_messages_are_skipped_counted_and_logged_once(
    publisher: EventPublisher, follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await publisher._pub.send_multipart([b"kv", b"short", b"\xc1"])
    publisher.publish([block(1)])
    await follower.holds(1)
    assert follower.normalizer.counters == NormalizerCounters(malformed=3)
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize("missing", ["publisher", "replay"])
async def test_address_without_a_publisher_is_reported_with_a_remedy(
    publisher: EventPublisher, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(events_module, "REPLAY_TIMEOUT_S", 0.2)
    if missing == "publisher":
        publisher.endpoint = "tcp://127.0.0.1:1"
    else:
        publisher.replay = "tcp://127.0.0.1:1"
    follower = Follower(publisher)
    with pytest.raises(EngineError, match=r"--kv-events-config.*KVLANE_ATTACH_REPLAY_ENDPOINT"):
        await follower.events.connect()
    follower.events.close()
