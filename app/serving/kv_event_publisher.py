"""Publisher of the engine's cache events: from events of one rank to records of kv-events.

    engine ──listener──► EventNormalizer ──batch due──► Blocks, one record each, in order

The normalizer (`indexer/cache_events/event_normalizer.py`) is the only queue, with a bound that
holds during an outage, and decides when a batch is due. A record is repeated until it is
acknowledged, and the next one is sent only then.

Each epoch begins with `cleared`, before the first heartbeat makes the worker routable, and the
contents of the cache. These are published again every quarter of the topic's retention, in pieces,
so that the retained records are always complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.wait_queue import WaitQueue
from kvlane.indexer.block_hashes import KeySecret
from kvlane.indexer.cache_events.engine_events import EngineEvent
from kvlane.indexer.cache_events.event_normalizer import EventBatch, EventNormalizer
from kvlane.indexer.events import encode_events
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Blocks
from kvlane.streams.topics import KV_EVENTS, TOPICS

REPUBLISH_CHUNK_BLOCKS = 4096
REPUBLISH_CHUNK_INTERVAL_S = 0.05
"""Size of a piece of a complete publication, and the time to the next one: a million blocks take
12 s at 0.7 MB/s of records, and delay new events by one record at most."""
REPUBLISHES_PER_RETENTION = 4
IDLE_WAIT_S = 3600.0


class KvEventPublisher:
    """Publishes the cache events of one rank of a worker, over all its epochs.

    `block_size`: of the model; 0 for an engine without cache events: an epoch is its `cleared`
    alone.
    """

    def __init__(
        self,
        publisher: RecordPublisher,
        ctx: ProcessContext,
        worker: str,
        model: str,
        block_size: int,
        secret: KeySecret,
        rank: int = 0,
    ) -> None:
        self.normalizer = EventNormalizer(block_size, secret)
        self.last_event_id = -1
        """The last event of this epoch that the log has acknowledged; -1 for none."""
        self._publisher = publisher
        self._ctx = ctx
        self._worker = worker
        self._model = model
        self._rank = rank
        self._has_events = block_size > 0
        self._fingerprint = secret.fingerprint
        self._epoch = -1
        self._changed = WaitQueue()
        self._publishing: asyncio.Task[None] | None = None
        retention_ms = next(topic.retention_ms for topic in TOPICS if topic.name == KV_EVENTS)
        assert retention_ms is not None
        self._republish_s = retention_ms / 1000 / REPUBLISHES_PER_RETENTION

    @property
    def unusable_reason(self) -> str:
        """Why routers cannot use the cache of this engine; "" if they can."""
        wrong = self.normalizer.mismatched_block_size
        return (
            "" if wrong is None else f"the engine reports blocks of {wrong} tokens, unlike its card"
        )

    def on_engine_events(self, events: Sequence[EngineEvent]) -> None:
        """The engine's listener. Does not block: 1 µs per stored block, 2 µs per removed one."""
        self.normalizer.on_events(events, self._ctx.clock.now())
        self._changed.notify_all()

    async def begin_epoch(self, epoch: int, until: float | None = None) -> None:
        """Begin an epoch and append its `cleared`. Raises AppendFailed past `until`."""
        self.end_epoch()
        self._epoch = epoch
        self.last_event_id = -1
        self.normalizer.start_epoch(self._ctx.clock.now())
        cleared = self.normalizer.take_batch(1)
        assert cleared is not None
        await self._append(cleared, until)
        if self._has_events:
            self._publishing = self._ctx.spawn("cache events", self._publish_loop())

    def end_epoch(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.cancel()

    async def _publish_loop(self) -> None:
        clock, normalizer = self._ctx.clock, self.normalizer
        next_piece_at = clock.now()
        # Spread over time, so that workers started together do not publish together.
        republish_at = clock.now() + self._republish_s * (0.5 + self._ctx.rng.random() / 2)
        while True:
            now = clock.now()
            if now >= republish_at:
                normalizer.start_announcement(now, clear=False)
                republish_at = now + self._republish_s
            if normalizer.is_announcing and now >= next_piece_at:
                normalizer.continue_announcement(REPUBLISH_CHUNK_BLOCKS, now)
                next_piece_at = now + REPUBLISH_CHUNK_INTERVAL_S
            due_at = normalizer.batch_due_at()
            if due_at is not None and due_at <= now:
                batch = normalizer.take_batch()
                assert batch is not None
                await self._append(batch)
                continue
            ends = [republish_at, now + IDLE_WAIT_S]
            if due_at is not None:
                ends.append(due_at)
            if normalizer.is_announcing:
                ends.append(next_piece_at)
            await self._changed.wait(min(ends) - now)

    async def _append(self, batch: EventBatch, until: float | None = None) -> None:
        columns = encode_events(batch.events)
        blocks = Blocks(
            worker=self._worker,
            epoch=self._epoch,
            first_event_id=batch.first_event_id,
            rank=self._rank,
            model=self._model,
            hash_fingerprint=self._fingerprint,
            **columns._asdict(),
        )
        await self._publisher.publish(KV_EVENTS, self._worker, blocks, until=until)
        self.last_event_id = batch.first_event_id + len(batch.events) - 1
