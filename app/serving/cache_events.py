"""What the engine's cache holds, told to everybody: from engine events to records of kv-events.

    engine ──listener──► Bridge ──a batch is due──► Blocks, one record each, acknowledged in order

The bridge (`indexer/bridge.py`) decides what a batch is and when it is due, and it is the only
queue: what an outage keeps back is bounded there. A record that is not acknowledged is repeated
until it is, and nothing goes out before it; the index skips what stands twice.

Each epoch begins with `cleared`, before the first heartbeat makes the worker routable, and then
announces what the cache holds by then. All of it is announced again every quarter of the topic's
retention, piece by piece, so that the records that are kept always say everything.

Of one rank. Not here: heartbeats, which repeat `last_event_id`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.bell import Bell
from app.lifetime import Lifetime
from indexer.bridge import Batch, Bridge
from indexer.engine_events import EngineEvent
from indexer.events import encode
from indexer.keys import KeySecret
from streams.outbox import Outbox
from streams.records import Blocks
from streams.topics import KV_EVENTS, TOPICS

PIECE_BLOCKS = 4096
PIECE_S = 0.05
"""A piece of an announcement, and the time to the next one: a million blocks take 12 s, 0.7 MB/s
of records, and hold up what is new by one record at most."""
AGAIN_PER_RETENTION = 4
IDLE_S = 3600.0


class CacheEvents:
    """The cache events of one rank of a worker, over all its epochs.

    `block_size` is the model's; 0 for an engine that tells nothing of its cache: then there is
    nothing but the `cleared` of each epoch.
    """

    def __init__(
        self,
        outbox: Outbox,
        life: Lifetime,
        worker: str,
        model: str,
        block_size: int,
        secret: KeySecret,
        rank: int = 0,
    ) -> None:
        self.bridge = Bridge(block_size, secret)
        self.last_event_id = -1
        """The last event of this epoch that stands in the log; -1 for none."""
        self._outbox = outbox
        self._life = life
        self._worker = worker
        self._model = model
        self._rank = rank
        self._tells = block_size > 0
        self._fingerprint = secret.fingerprint
        self._epoch = -1
        self._changed = Bell()
        self._telling: asyncio.Task[None] | None = None
        retention_ms = next(topic.retention_ms for topic in TOPICS if topic.name == KV_EVENTS)
        assert retention_ms is not None
        self._again_s = retention_ms / 1000 / AGAIN_PER_RETENTION

    @property
    def complaint(self) -> str:
        """What makes the cache of this engine useless to routers; "" for nothing."""
        wrong = self.bridge.wrong_block_size
        return "" if wrong is None else f"the engine has blocks of {wrong} tokens, its card not"

    def feed(self, events: Sequence[EngineEvent]) -> None:
        """The engine's listener. Returns at once: 1 µs a block that is stored, 2 µs if removed."""
        self.bridge.feed(events, self._life.clock.now())
        self._changed.ring()

    async def begin(self, epoch: int, until: float | None = None) -> None:
        """Begin an epoch: returns when its `cleared` stands. Raises AppendFailed past `until`."""
        self.end()
        self._epoch = epoch
        self.last_event_id = -1
        self.bridge.begin_epoch(self._life.clock.now())
        cleared = self.bridge.take(1)
        assert cleared is not None
        await self._append(cleared, until)
        if self._tells:
            self._telling = self._life.spawn("cache events", self._tell())

    def end(self) -> None:
        """Say nothing more of this epoch."""
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()

    async def _tell(self) -> None:
        clock, bridge = self._life.clock, self.bridge
        next_piece_at = clock.now()
        # Workers that were started together need not announce together.
        again_at = clock.now() + self._again_s * (0.5 + self._life.rng.random() / 2)
        while True:
            now = clock.now()
            if now >= again_at:
                bridge.announce(now, clear=False)
                again_at = now + self._again_s
            if bridge.announcing and now >= next_piece_at:
                bridge.announce_some(PIECE_BLOCKS, now)
                next_piece_at = now + PIECE_S
            due_at = bridge.due_at()
            if due_at is not None and due_at <= now:
                batch = bridge.take()
                assert batch is not None
                await self._append(batch)
                continue
            ends = [again_at, now + IDLE_S]
            if due_at is not None:
                ends.append(due_at)
            if bridge.announcing:
                ends.append(next_piece_at)
            await self._changed.wait(min(ends) - now)

    async def _append(self, batch: Batch, until: float | None = None) -> None:
        columns = encode(batch.events)
        blocks = Blocks(
            worker=self._worker,
            epoch=self._epoch,
            first_event_id=batch.first_event_id,
            rank=self._rank,
            model=self._model,
            hash_fingerprint=self._fingerprint,
            **columns._asdict(),
        )
        await self._outbox.persist(KV_EVENTS, self._worker, blocks, until=until)
        self.last_event_id = batch.first_event_id + len(batch.events) - 1
