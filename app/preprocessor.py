"""The preprocessor process: prompts that clients publish become requests that routers read.

    prompts ──group──► read ──► answered ──► requests: Request, Cancel, Refused
                         └─────────────────► dead-letters: what has no id to answer to
    registry ──► Models   artifacts ──► Loader: tokenizers and templates

At least once: everything a batch asks for is acknowledged before the batch is committed, and the
request id makes repeats harmless. Waiting belongs here: while there is no model yet, or the broker
takes no appends, prompts are not read; their lag is the backlog. Nothing is retried because of its
content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.lifetime import Lifetime, serve
from app.preprocess.artifacts import Artifacts
from app.preprocess.byte_model import ByteModel, Model
from app.preprocess.loader import RETRY_S, Loader
from app.preprocess.models import Models
from app.preprocess.pool import Pool, Threads
from app.preprocess.prompts import Question, Unreadable, answered, read
from app.routing.fleet import Fleet
from app.settings import Settings
from streams.deadletters import DeadLetters
from streams.errors import AppendFailed, OwnershipLost, RecordTooLarge, StreamError
from streams.follow import Follower
from streams.outbox import Outbox
from streams.ports import Log, Partition, Record
from streams.records import Cancel, Fact, Refused, Request, WorkerCard
from streams.topics import PROMPTS, REGISTRY, REQUESTS, lane_of

if TYPE_CHECKING:
    from faststream import FastStream

log = logging.getLogger(__name__)

GROUP = "preprocessor"
POLL_S = 1.0
BATCH = 200
"""Prompts handled together: the most that is read again after a crash."""
THREADS = 2

Asked = Request | Cancel | Refused


class Preprocessor:
    """One preprocessor; any number of them share the prompts."""

    def __init__(
        self, log: Log, settings: Settings, life: Lifetime, pool: Pool | None = None
    ) -> None:
        """`pool`: for tokenising; by default threads, with room for a whole batch."""
        self._log = log
        self._settings = settings
        self._life = life
        self._outbox = Outbox(log, life.clock)
        self._letters = DeadLetters(self._outbox, keep_prompts=settings.keep_prompts)
        fleet = Fleet()
        self._models = Models(fleet)
        self._registry = Follower(log, fleet, [REGISTRY], life.clock, on_applied=self._applied)
        self._threads = Threads(THREADS, BATCH)
        pool = pool or self._threads
        artifacts = Artifacts(log, life.clock, pool, settings.cache_dir / "artifacts")
        self._loader = Loader(artifacts, pool, life)
        self._has_models = asyncio.Event()
        self._reading: asyncio.Task[Any] | None = None
        self._owned: set[int] = set()
        self._done: dict[int, int] = {}
        """What is published and not committed: next offsets by partition."""

    async def start(self) -> None:
        """Return when the registry is read; a prompt is checked against the models in it."""
        self._lanes = await self._log.partitions(REQUESTS)
        self._life.spawn("registry", self._registry.run())
        await self._registry.wait_caught_up()
        self._look_for_models()
        self._reading = self._life.spawn("prompts", self._read())

    async def stop(self) -> None:
        """Stop reading; what was not committed is read again by another preprocessor."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._threads.close()

    async def handle(self, records: Iterable[Record]) -> None:
        """Publish what these prompts ask for; returns when all of it is acknowledged.

        In order within a lane, so that a Cancel stays behind its Request.
        """
        letters = []
        answers: list[Coroutine[Any, Any, Asked]] = []
        for record in records:
            said = read(record.key, record.value, record.timestamp, self._models.passes_on)
            if isinstance(said, Unreadable):
                letters.append(self._letters.persist(PROMPTS, record, said.reason))
            else:
                answers.append(self._answered(said))
        lanes: dict[int, list[Asked]] = {}
        for asked in await asyncio.gather(*answers):
            lanes.setdefault(lane_of(asked.id, self._lanes), []).append(asked)
        await asyncio.gather(*letters, *(self._publish(lane, a) for lane, a in lanes.items()))

    async def _answered(self, said: Question | Cancel | Refused) -> Asked:
        if not isinstance(said, Question):
            return said

        async def find(name: str) -> Model:
            return await self._find(said.prompt.kind, name)

        return await answered(said, find, self._settings.deadline_s)

    async def _find(self, kind: str, name: str) -> Model:
        """The model of a prompt; an outage is waited out. Raises InvalidPrompt, BadModel."""
        card = self._models.find(kind, name)
        if card.tokenizer is None:
            return ByteModel(card.name, card.context_length)
        while True:
            try:
                return await self._loader.model(card)
            except StreamError as e:
                log.warning("the files of %s cannot be read now: %s", card.name, e)
                await self._life.clock.sleep(RETRY_S)

    async def _publish(self, lane: int, asked: Sequence[Asked]) -> None:
        """In order, and together where that fits: one at a time, what has piled up in an outage
        would be worked off no faster than new prompts come."""
        if len(asked) > 1:
            try:
                pairs = [(record.id, record) for record in asked]
                await self._outbox.persist_batch(REQUESTS, lane, pairs)
            except RecordTooLarge:
                middle = len(asked) // 2
                await self._publish(lane, asked[:middle])
                await self._publish(lane, asked[middle:])
            return
        (record,) = asked
        try:
            await self._outbox.persist(REQUESTS, record.id, record, lane)
        except RecordTooLarge as e:
            refusal = Refused(id=record.id, code="too_large", message=str(e))
            await self._outbox.persist(REQUESTS, record.id, refusal, lane)

    def _applied(self, _: Partition, facts: Sequence[Fact]) -> None:
        """Records of the registry were folded."""
        for fact in facts:
            if isinstance(fact.record, WorkerCard):
                self._models.saw(fact.record)
        if self._registry.caught_up:  # before, most of what is read is over already
            self._look_for_models()

    def _look_for_models(self) -> None:
        self._loader.keep(self._models.with_files())
        if self._models.has_any:
            self._has_models.set()

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
        await self._has_models.wait()
        self._member = self._log.member(PROMPTS, GROUP, self)
        committing: asyncio.Task[Any] | None = None
        try:
            while True:
                batches = await self._member.poll(POLL_S, BATCH)
                await self.handle(r for records in batches.values() for r in records)
                # Not those that were revoked meanwhile: their next owner may be further by now.
                for name, records in batches.items():
                    if name.partition in self._owned:
                        self._done[name.partition] = records[-1].offset + 1
                # Beside what is read next: a coordinator that hangs holds up nobody's prompts.
                if self._done and (committing is None or committing.done()):
                    committing = self._life.spawn("commit", self._commit())
        finally:
            if committing is not None:
                committing.cancel()
                await asyncio.gather(committing, return_exceptions=True)
            await self._member.close()

    async def _commit(self) -> None:
        """Commit what is done; what cannot be committed now is tried again after the next poll."""
        done, self._done = self._done, {}
        try:
            await self._member.commit(done)
        except (OwnershipLost, AppendFailed) as e:
            log.info("prompts may be read again: %s", e)
            self._done = {p: n for p, n in done.items() if p in self._owned} | self._done


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("preprocessor", Preprocessor)
    raise AttributeError(name)
