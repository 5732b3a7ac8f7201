"""A period of the log as the lines of a capture (`app/captured.py` says what they hold).

Reads the registry for the workers, `requests` for what was asked, then `ledger` for what was
decided and became of it. Lines come as they are read: what is remembered between them is the lives
of workers, and the ids of decided requests that are still open. Belongs to no group, writes
nothing to the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from app.audit.moments import LONGEST_MS, Period
from app.captured import (
    BLOCK_NAME,
    FORMAT,
    AnyLine,
    Asked,
    Capture,
    Counted,
    Decided,
    Ended,
    Prefilled,
    Ran,
    Worker,
)
from app.routing.eligibility import block_size_of
from app.routing.fleet import Fleet, FleetWorker
from app.routing.prompt import Prompt
from indexer.keys import KeySecret, prompt_keys
from streams import records
from streams.clock import Clock
from streams.codecs import decode
from streams.errors import Malformed
from streams.ports import Log, Partition
from streams.records import (
    Assigned,
    Fact,
    Finished,
    PrefillDone,
    Request,
    Tombstone,
    WorkerCard,
)
from streams.stretch import Progress, stretch
from streams.topics import LEDGER, REGISTRY, REQUESTS

_FINAL = frozenset({"stop", "length", "cancelled", "handed_off"})
"""After a run with one of these codes, nothing follows that a capture asks for."""


async def capture(
    log: Log,
    clock: Clock,
    period: Period,
    secret: KeySecret,
    progress: Progress = lambda _done, _total: None,
) -> AsyncGenerator[AnyLine, None]:
    """The lines of a period; `secret` is one that nothing else uses.

    Close it (`aclosing`) when leaving it early. Raises BrokerUnavailable, PositionLost and
    UnknownType.
    """
    reading, counts = _Reading(log, clock, period, secret), Counter[str]()
    async with aclosing(reading.lines(progress)) as lines:
        async for line in lines:
            counts[type(line).__name__] += 1
            yield line
    yield Counted(
        lines=dict(counts), unread=reading.unread, without_request=reading.without_request
    )


class _Bounds(NamedTuple):
    """A stretch of a topic: next offsets."""

    starts: dict[Partition, int]
    ends: dict[Partition, int]

    @property
    def size(self) -> int:
        return sum(end - self.starts[source] for source, end in self.ends.items())


class _Life(NamedTuple):
    """Of a worker. `until_ms`: when its tombstone or the card of its next life was written."""

    card: WorkerCard
    epoch: int
    since_ms: int
    until_ms: int | None = None


class _Reading:
    """One capture under way. For its counters see `Counted`."""

    def __init__(self, log: Log, clock: Clock, period: Period, secret: KeySecret) -> None:
        self.unread = 0
        self.without_request = 0
        self._log = log
        self._clock = clock
        self._period = period
        self._secret = secret
        self._fleet = Fleet()
        self._lives: dict[str, list[_Life]] = {}
        self._sizes: dict[str, int] = {}
        self._kept: dict[Partition, int] = {}
        self._open: dict[str, None] = {}
        """Requests with a decision of the period, of which more may come."""

    async def lines(self, progress: Progress) -> AsyncGenerator[AnyLine, None]:
        """All but the last line."""
        from_ms, to_ms = self._period
        lanes = await self._log.partitions(LEDGER)
        yield Capture(format=FORMAT, from_ms=from_ms, to_ms=to_ms, lanes=lanes)
        await self._read_registry()
        for worker in self._workers():
            yield worker
        asked = await self._bounds(REQUESTS, from_ms, to_ms)
        decided = await self._bounds(LEDGER, from_ms, to_ms)
        later = await self._bounds(LEDGER, to_ms, to_ms + LONGEST_MS)
        self._kept = await self._oldest(REQUESTS)
        total = asked.size + decided.size
        async with aclosing(self._facts(asked, partial(_later, progress, 0, total))) as facts:
            async for _, fact in facts:
                if isinstance(fact.record, Request):
                    yield self._asked(fact, fact.record)
        heard = partial(_later, progress, asked.size, total)
        async with aclosing(self._facts(decided, heard)) as facts:
            async for source, fact in facts:
                if isinstance(fact.record, Assigned):
                    yield self._decided(source, fact, fact.record)
                elif (line := self._followed(fact)) is not None:
                    yield line
        async with aclosing(self._facts(later)) as facts:
            async for _, fact in facts:
                if not self._open:
                    break
                if (line := self._followed(fact)) is not None:
                    yield line

    # --- the log ---------------------------------------------------------------------------------

    async def _facts(
        self, bounds: _Bounds, progress: Progress = lambda _done, _total: None
    ) -> AsyncGenerator[tuple[Partition, Fact], None]:
        reading = stretch(self._log, self._clock, *bounds, progress=progress)
        async with aclosing(reading) as pieces:
            async for source, some, _ in pieces:
                for record in some:
                    try:
                        yield source, Fact(record.offset, record.timestamp, decode(record))
                    except Malformed:
                        self.unread += 1

    async def _bounds(self, topic: str, from_ms: int, to_ms: int) -> _Bounds:
        starts, ends = await self._oldest(topic), {}
        for source, oldest in starts.items():
            partition = source.partition
            starts[source] = max(oldest, await self._log.offset_at(topic, partition, from_ms))
            ends[source] = await self._log.offset_at(topic, partition, to_ms)
        return _Bounds(starts, {s: max(end, starts[s]) for s, end in ends.items()})

    async def _oldest(self, topic: str) -> dict[Partition, int]:
        partitions = range(await self._log.partitions(topic))
        oldest = await self._log.start_offsets(topic, partitions)
        return {Partition(topic, p): offset for p, offset in oldest.items()}

    async def _read_registry(self) -> None:
        source = Partition(REGISTRY, 0)
        ends = await self._log.end_offsets(REGISTRY, [0])
        async with aclosing(
            self._facts(_Bounds(await self._oldest(REGISTRY), {source: ends[0]}))
        ) as facts:
            async for _, fact in facts:
                self._fleet.apply(source, [fact], fact.offset + 1)
                self._live(fact)

    # --- workers ---------------------------------------------------------------------------------

    def _live(self, fact: Fact) -> None:
        """A record of the registry: a life of a worker goes on, begins or ends."""
        record = fact.record
        if isinstance(record, WorkerCard):
            epoch = fact.offset if record.epoch is None else record.epoch
            lives, since_ms = self._lives.setdefault(record.id, []), fact.timestamp_ms
            if lives and lives[-1].epoch == epoch:
                since_ms = lives.pop().since_ms
            self._end_life(record.id, since_ms)
            lives.append(_Life(record, epoch, since_ms))
        elif isinstance(record, Tombstone) and record.key.startswith("worker/"):
            self._end_life(record.key.removeprefix("worker/"), fact.timestamp_ms)

    def _end_life(self, worker: str, at_ms: int) -> None:
        lives = self._lives.get(worker)
        if lives and lives[-1].until_ms is None:
            lives[-1] = lives[-1]._replace(until_ms=at_ms)

    def _present(self) -> Iterator[_Life]:
        """The lives that there were in the period."""
        for lives in self._lives.values():
            for life in lives:
                ended = life.until_ms is not None and life.until_ms <= self._period.from_ms
                if life.since_ms < self._period.to_ms and not ended:
                    yield life

    def _workers(self) -> Iterator[Worker]:
        for card, epoch, since_ms, _ in self._present():
            config = replace(card.config, bootstrap_host=None, bootstrap_port=None)
            yield Worker(
                id=card.id, epoch=epoch, since_ms=since_ms, model=card.model, config=config,
                role=card.role, ranks=card.ranks, taints=card.taints,
            )  # fmt: skip

    def _block_size(self, model: str) -> int:
        size = self._sizes.get(model)
        if size is None:
            serving = [
                FleetWorker(life.card, life.epoch, life.since_ms)
                for life in self._present()
                if model in ("", life.card.model)
            ]
            size = self._sizes[model] = block_size_of(self._fleet, model, serving)
        return size

    # --- lines -----------------------------------------------------------------------------------

    def _asked(self, fact: Fact, request: Request) -> Asked:
        size = self._block_size(request.model)
        names = prompt_keys(Prompt(request).local(size), self._secret)
        return Asked(
            id=request.id, at_ms=fact.timestamp_ms, model=request.model, block_size=size,
            prompt_tokens=request.prompt_tokens, blocks=names.astype(BLOCK_NAME).tobytes(),
            max_tokens=request.stop.max_tokens, hints=request.hints,
            router_config_override=request.router_config_override,
        )  # fmt: skip

    def _decided(self, source: Partition, fact: Fact, decision: Assigned) -> Decided:
        self._open[decision.id] = None
        origin = decision.origin
        kept = self._kept.get(Partition(origin.topic, origin.partition))
        self.without_request += kept is not None and origin.offset < kept
        return Decided(
            at_ms=fact.timestamp_ms, lane=source.partition, offset=fact.offset, decision=decision
        )

    def _followed(self, fact: Fact) -> AnyLine | None:
        """What became of a decision of the period; None for anything else."""
        at_ms, record = fact.timestamp_ms, fact.record
        if not isinstance(record, PrefillDone | Finished | records.Ended):
            return None
        is_open = record.id in self._open
        if isinstance(record, records.Ended):
            self._open.pop(record.id, None)
            if not is_open and not self._period.from_ms <= at_ms < self._period.to_ms:
                return None
            return Ended(at_ms=at_ms, id=record.id, code=record.code)
        if not is_open:
            return None
        if isinstance(record, PrefillDone):
            return Prefilled(at_ms=at_ms, done=replace(record, handoff=b""))
        if record.code in _FINAL or (record.code == "error" and not record.retryable):
            del self._open[record.id]
        return Ran(at_ms=at_ms, end=replace(record, message=""))


def _later(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    """Progress of a stretch that is part of more."""
    progress(before + done, total)
