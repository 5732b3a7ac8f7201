"""How a worker is known to the fleet: its card in the registry, and what others do to it there.

Owns one life after the other of a worker. A life is an *epoch*: the offset of its first card, so
epochs are unique and rise. Whoever sees a newer card of a worker takes the older epochs for dead,
so a worker that finds its own name used by a newer life must stop at once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from app.lifetime import Lifetime
from streams.outbox import Outbox
from streams.records import EngineConfig, Fact, Tombstone, WorkerCard
from streams.topics import REGISTRY

REGISTER_S = 60.0
"""How long a process that starts tries to register before it gives up and ends. Later it tries for
as long as it takes: an engine that is loaded outlasts an outage of the broker."""

Verdict = Literal["fine", "rewrite", "renew", "yield"]
"""What a record means for us: nothing; our card was overwritten; this epoch is over, take a new
one; another process has our name."""


def key_of(worker: str) -> str:
    """The registry key of a worker."""
    return f"worker/{worker}"


def judge(fact: Fact, card: WorkerCard, written_at: int) -> Verdict:
    """What a registry record says about us; our newest card stands at offset `written_at`."""
    record = fact.record
    if isinstance(record, WorkerCard) and record.id == card.id:
        epoch = fact.offset if record.epoch is None else record.epoch
        own = record.life == card.life
    elif isinstance(record, Tombstone) and record.key == key_of(card.id):
        epoch = fact.offset if record.epoch is None else record.epoch
        own = True  # a tombstone ends an epoch, it does not claim the name
    else:
        return "fine"
    assert card.epoch is not None, "judged before it was registered"
    if epoch > card.epoch:
        return "renew" if own else "yield"
    if isinstance(record, Tombstone) and epoch == card.epoch:
        return "renew"
    return "rewrite" if epoch < card.epoch and fact.offset > written_at else "fine"


class Registration:
    """Writes the card of one process; every life of it has the same random `life`."""

    def __init__(self, outbox: Outbox, life: Lifetime, card: WorkerCard) -> None:
        self._outbox = outbox
        self.card = msgspec.structs.replace(card, life=f"{life.rng.getrandbits(64):016x}")
        self.written_at = -1

    @property
    def epoch(self) -> int:
        """The epoch of the present life. Only after `begin`."""
        assert self.card.epoch is not None, "not registered yet"
        return self.card.epoch

    async def begin(self, until: float | None = None) -> int:
        """Start a life: the first card has no epoch, its offset is the epoch, the second says so.

        Raises AppendFailed past `until`.
        """
        unborn = msgspec.structs.replace(self.card, epoch=None)
        first = await self._outbox.persist(REGISTRY, key_of(unborn.id), unborn, until=until)
        self.card = msgspec.structs.replace(unborn, epoch=first.offset)
        await self.rewrite(until)
        return first.offset

    async def rewrite(self, until: float | None = None) -> None:
        """Write the card again, as it is. Raises AppendFailed past `until`."""
        key = key_of(self.card.id)
        self.written_at = (await self._outbox.persist(REGISTRY, key, self.card, until=until)).offset

    async def tell(self, config: EngineConfig, until: float) -> None:
        """Say what the engine is now; the life goes on. Raises AppendFailed past `until`."""
        before, self.card = self.card, msgspec.structs.replace(self.card, config=config)
        try:
            await self.rewrite(until)
        except BaseException:
            self.card = msgspec.structs.replace(self.card, config=before.config)
            raise

    async def leave(self, until: float) -> None:
        """Say that this epoch is over for good. Raises AppendFailed past `until`."""
        key = key_of(self.card.id)
        await self._outbox.persist(REGISTRY, key, Tombstone(key=key, epoch=self.epoch), until=until)
