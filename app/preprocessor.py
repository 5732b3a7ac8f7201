"""The preprocessor process: prompts that clients publish become requests that routers read.

    prompts ──group──► read (pure) ──► requests: Request, Cancel, Refused
                                  └──► dead-letters: what has no id to answer to
    registry ────────► Models

At least once: everything a batch asks for is acknowledged before the batch is committed, and the
request id makes repeats harmless. Waiting belongs here: while the broker takes no appends, prompts
are not read; their lag is the backlog. Nothing is retried because of its content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.lifetime import Lifetime, serve
from app.preprocess.models import Models
from app.preprocess.prompts import Unreadable, read
from app.settings import Settings
from streams.codecs import decode
from streams.deadletters import DeadLetters
from streams.errors import AppendFailed, OwnershipLost, RecordError, RecordTooLarge
from streams.outbox import Outbox
from streams.ports import Log, Partition, Record
from streams.records import Cancel, Fact, Refused, Request
from streams.topics import PROMPTS, REGISTRY, REQUESTS, lane_of

if TYPE_CHECKING:
    from faststream import FastStream

log = logging.getLogger(__name__)

GROUP = "preprocessor"
POLL_S = 1.0
BATCH = 200
"""Prompts handled together: the most that is read again after a crash."""


class Preprocessor:
    """One preprocessor; any number of them share the prompts."""

    def __init__(self, log: Log, settings: Settings, life: Lifetime) -> None:
        self._log = log
        self._settings = settings
        self._life = life
        self._outbox = Outbox(log, life.clock)
        self._letters = DeadLetters(self._outbox, keep_prompts=settings.keep_prompts)
        self._models = Models()
        self._reading: asyncio.Task[Any] | None = None
        self._owned: set[int] = set()
        self._done: dict[int, int] = {}
        """What is published and not committed: next offsets by partition."""

    async def start(self) -> None:
        """Return when the registry is read; a prompt is checked against the models in it."""
        self._lanes = await self._log.partitions(REQUESTS)
        end = (await self._log.end_offsets(REGISTRY, [0]))[0]
        known = asyncio.Event()
        self._life.spawn("registry", self._follow_registry(end, known))
        await known.wait()
        self._reading = self._life.spawn("prompts", self._read())

    async def stop(self) -> None:
        """Stop reading; what was not committed is read again by another preprocessor."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def handle(self, records: Iterable[Record]) -> None:
        """Publish what these prompts ask for; returns when all of it is acknowledged.

        In order within a lane, so that a Cancel stays behind its Request.
        """
        lanes: dict[int, list[tuple[Record, Request | Cancel | Refused]]] = {}
        letters = []
        for record in records:
            asked = read(
                record.key, record.value, record.timestamp, self._models, self._settings.deadline_s
            )
            if isinstance(asked, Unreadable):
                letters.append(self._letters.persist(PROMPTS, record, asked.reason))
            else:
                lanes.setdefault(lane_of(asked.id, self._lanes), []).append((record, asked))
        await asyncio.gather(*letters, *(self._publish(lane, a) for lane, a in lanes.items()))

    async def _publish(
        self, lane: int, asked: Sequence[tuple[Record, Request | Cancel | Refused]]
    ) -> None:
        for _, record in asked:
            try:
                await self._outbox.persist(REQUESTS, record.id, record, lane)
            except RecordTooLarge as e:
                refusal = Refused(id=record.id, code="too_large", message=str(e))
                await self._outbox.persist(REQUESTS, record.id, refusal, lane)

    def assigned(self, starts: Mapping[int, int]) -> None:
        """Partitions of `prompts` are ours: they need no preparation."""
        self._owned |= starts.keys()
        for partition in starts:
            self._member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        """Partitions went to another preprocessor; what is not committed goes with them."""
        self._owned -= partitions
        for partition in partitions:
            self._done.pop(partition, None)

    async def _read(self) -> None:
        self._member = self._log.member(PROMPTS, GROUP, self)
        try:
            while True:
                batches = await self._member.poll(POLL_S, BATCH)
                await self.handle(r for records in batches.values() for r in records)
                # Not those that were revoked meanwhile: their next owner may be further by now.
                for name, records in batches.items():
                    if name.partition in self._owned:
                        self._done[name.partition] = records[-1].offset + 1
                await self._commit()
        finally:
            await self._member.close()

    async def _commit(self) -> None:
        """Commit what is done; what cannot be committed now is tried again after the next poll."""
        done, self._done = self._done, {}
        if not done:
            return
        try:
            await self._member.commit(done)
        except (OwnershipLost, AppendFailed) as e:
            log.info("prompts may be read again: %s", e)
            self._done = {p: n for p, n in done.items() if p in self._owned}

    async def _follow_registry(self, end: int, known: asyncio.Event) -> None:
        reader = self._log.reader()
        source = Partition(REGISTRY, 0)
        reader.assign({source: (await self._log.start_offsets(REGISTRY, [0]))[0]})
        try:
            while True:
                if reader.position(source) >= end:
                    known.set()
                for record in (await reader.poll(POLL_S)).get(source, ()):
                    try:
                        self._models.apply(Fact(record.offset, record.timestamp, decode(record)))
                    except RecordError as e:
                        log.warning("registry %d is skipped: %s", record.offset, e)
        finally:
            await reader.close()


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("preprocessor", Preprocessor)
    raise AttributeError(name)
