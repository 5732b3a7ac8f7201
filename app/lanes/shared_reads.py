"""Shared reads of the log: one scan or one request for all concurrent queries.

Scans find a moved request and the tokens that readers have of it. Many move when a worker is lost,
so one scan answers all queued queries about a partition; later ones wait for its end. Nothing is
kept between scans; time-outs are the caller's. Queries for end offsets that come while a request
for the topic is under way share the next one, since its answer may be older than they need.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlane.app.runtime.process import ProcessContext
from kvlane.streams import codecs
from kvlane.streams.clock import retry_while_unavailable
from kvlane.streams.errors import BrokerUnavailable, Malformed, PositionLost, RecordError
from kvlane.streams.ports import Log, Partition, Record
from kvlane.streams.records import Chunk, RequestOffset
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import VISIBLE, Transcript
from kvlane.streams.responses.unreadable import describe, place_of
from kvlane.streams.topics import REQUESTS, RESPONSES

POLL_TIMEOUT_S = 0.25
"""How long a query about another partition waits at most for its scan to begin."""


@dataclass(eq=False, slots=True)
class _Query:
    """A query for the records of a partition in [start, stop), which go to `feed`."""

    start: int
    stop: int
    feed: Callable[[Record], None]
    answer: asyncio.Future[None]
    key: bytes | None = None
    """Key of the records; None: any key."""


class SharedScanner:
    """Answers queries about the log with one reader. `run` must be running."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reader = log.reader()
        self._scans: dict[Partition, _Scan] = {}
        self._queued: dict[Partition, list[_Query]] = defaultdict(list)
        self._has_queries = asyncio.Event()

    async def visible_before(
        self,
        lane: int,
        request_id: str,
        attempt: int,
        start: int,
        stop: int,
        shown_piece: Chunk | None = None,
        on_piece: Callable[[Chunk], None] | None = None,
    ) -> Transcript:
        """The answer that readers have of a request before the first Fence of `attempt`. `start`:
        at or before its first Chunk behind `shown_piece`; `stop`: behind a Fence of that attempt.
        `on_piece`: called with each visible Chunk. Raises PositionLost for records not kept."""
        transcript = Transcript(request_id, until_attempt=attempt, shown_piece=shown_piece)

        def feed(record: Record) -> None:
            try:
                decoded = codecs.decode(record)
            except Malformed as e:
                transcript.apply_unreadable(place_of(record, request_id), describe(record, e))
                return
            except RecordError:  # readers stop at it
                return
            if isinstance(decoded, VISIBLE):
                piece = transcript.apply(decoded)
                if on_piece is not None and isinstance(piece, Chunk):
                    on_piece(piece)

        source = Partition(RESPONSES, lane)
        if not 0 <= start <= stop:  # of an Assigned that no router wrote
            raise PositionLost(*source, start, stop)
        await self._query(source, start, stop, feed, request_id.encode())
        return transcript

    async def fetch_request(self, origin: RequestOffset) -> Request:
        """The Request at its origin. Raises PositionLost when it is no longer kept, RecordError
        when it is no Request."""
        found: list[Record] = []
        source = Partition(origin.topic, origin.partition)
        await self._check_origin(source, origin.offset)
        await self._query(source, origin.offset, origin.offset + 1, found.append)
        if not found:
            raise PositionLost(*source, origin.offset, origin.offset + 1)
        request = codecs.decode(found[0])
        if not isinstance(request, Request):
            raise Malformed(f"{origin} is no Request")
        return request

    async def _check_origin(self, source: Partition, offset: int) -> None:
        """Raises Malformed for an origin that no request can have, which no router wrote."""
        known = source.topic == REQUESTS and (
            0 <= source.partition < await self._log.partitions(REQUESTS)
        )
        if known:
            try:
                ends = await self._log.end_offsets(REQUESTS, [source.partition])
            except BrokerUnavailable:  # then nothing is read beyond the end either
                return
            known = 0 <= offset < ends[source.partition]
        if not known:
            raise Malformed(
                f"there is no request at {source.topic[:100]!r}[{source.partition}]@{offset}"
            )

    async def run(self) -> None:
        try:
            while True:
                self._has_queries.clear()
                if self._start_scans():
                    self._reader.assign({source: p.position for source, p in self._scans.items()})
                if self._scans:
                    await self._advance()
                else:
                    await self._has_queries.wait()
        finally:
            await self._reader.close()

    async def _query(
        self,
        source: Partition,
        start: int,
        stop: int,
        feed: Callable[[Record], None],
        key: bytes | None = None,
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued[source].append(_Query(start, stop, feed, answer, key))
        self._has_queries.set()
        await answer  # cancelling it answers it, too: `_start_scans` drops the question

    def _start_scans(self) -> bool:
        """End scans without queries and begin those with; returns whether there were any."""
        over = [source for source, p in self._scans.items() if p.is_over()]
        for source in over:
            del self._scans[source]
        free = self._queued.keys() - self._scans.keys()
        begun = False
        for source in sorted(free):
            if questions := [q for q in self._queued.pop(source) if not q.answer.done()]:
                self._scans[source] = _Scan(questions)
                begun = True
        return begun or bool(over)

    async def _advance(self) -> None:
        try:
            batches = await self._reader.poll(POLL_TIMEOUT_S)
        except PositionLost as e:
            source = Partition(e.topic, e.partition)
            self._scans[source].lose(e)
            self._reader.assign({source: p.position for source, p in self._scans.items()})
            return
        for source, records in batches.items():
            self._scans[source].read(records)
        for source, p in self._scans.items():
            p.reach(self._reader.position(source))  # its last offsets may be gone from the log


class _Scan:
    """One scan of a partition, from the first to the last offset of its queries."""

    def __init__(self, questions: Sequence[_Query]) -> None:
        self.position = min(q.start for q in questions)
        self._questions = list(questions)
        self._by_key: dict[bytes, list[_Query]] = defaultdict(list)
        self._by_offset: dict[int, list[_Query]] = defaultdict(list)
        for question in questions:
            if question.key is not None:
                self._by_key[question.key].append(question)
            else:
                for offset in range(question.start, question.stop):
                    self._by_offset[offset].append(question)

    def is_over(self) -> bool:
        self._questions = [q for q in self._questions if not q.answer.done()]
        return not self._questions

    def read(self, records: Sequence[Record]) -> None:
        for record in records:
            for question in self._by_key.get(record.key or b"", ()):
                if question.start <= record.offset < question.stop:
                    question.feed(record)
            for question in self._by_offset.get(record.offset, ()):
                question.feed(record)
        self.reach(records[-1].offset + 1)

    def reach(self, position: int) -> None:
        """All records below this were read, or are gone from the end of the log."""
        self.position = max(self.position, position)
        for question in self._questions:
            if question.stop <= position and not question.answer.done():
                question.answer.set_result(None)

    def lose(self, lost: PositionLost) -> None:
        """The log begins after the start of some queries: they fail."""
        gone = [q for q in self._questions if q.start < lost.start]
        for question in gone or self._questions:
            if not question.answer.done():
                question.answer.set_exception(lost)
        self.position = max(self.position, lost.start)


class _EndsQuery(NamedTuple):
    """A request that is still to be sent: more partitions can be added."""

    partitions: set[int]
    answer: asyncio.Task[dict[int, int]]


class EndOffsets:
    """Fetches end offsets; at most one request per topic is under way."""

    def __init__(self, log: Log, ctx: ProcessContext) -> None:
        self._log = log
        self._ctx = ctx
        self._next: dict[str, _EndsQuery] = {}
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def fetch(self, source: Partition) -> int:
        """The next offset of a partition, as of now or later; repeated until the broker answers."""
        query = self._next.get(source.topic)
        if query is None:
            partitions: set[int] = set()
            answer = self._ctx.spawn("end offsets", self._fetch(source.topic, partitions))
            query = self._next[source.topic] = _EndsQuery(partitions, answer)
        query.partitions.add(source.partition)
        return (await asyncio.shield(query.answer))[source.partition]

    async def _fetch(self, topic: str, partitions: set[int]) -> dict[int, int]:
        async with self._locks[topic]:
            del self._next[topic]  # later queries may need a later end
            return await retry_while_unavailable(
                self._ctx.clock, lambda: self._log.end_offsets(topic, sorted(partitions))
            )
