"""Looking things up in the log: what a reader was shown of a request, and the request itself.

Needed when a request changes hands. Many change hands at once when a worker dies, so all questions
about a partition that wait together are answered by one pass over it. Questions that come during a
pass wait for its end; other partitions are read beside it, so that one that cannot be read keeps
only its own questions from their answers. Nothing is kept between passes, and a question whose
asker has gone is dropped; how long one waits is the asker's own matter.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streams import codecs
from streams.errors import Malformed, PositionLost, RecordError
from streams.ports import Log, Partition, Record
from streams.records import Chunk, End, Fence, Origin, Request
from streams.topics import RESPONSES
from streams.transcript import Transcript

POLL_S = 0.25
"""How long a question about another partition waits at most for its pass to begin."""


@dataclass(eq=False, slots=True)
class _Question:
    """What stands in a partition on [start, stop)? Records go to `feed`, the end to `answer`."""

    start: int
    stop: int
    feed: Callable[[Record], None]
    answer: asyncio.Future[None]
    key: bytes | None = None
    """Of the records that are asked for; None: of any."""


class Scanner:
    """Answers questions about the log from one reader. `run` must be running."""

    def __init__(self, log: Log) -> None:
        self._reader = log.reader()
        self._passes: dict[Partition, _Pass] = {}
        self._queued: dict[Partition, list[_Question]] = defaultdict(list)
        self._asked = asyncio.Event()

    async def shown(
        self, lane: int, request_id: str, attempt: int, start: int, stop: int
    ) -> Transcript:
        """What a reader was shown of a request before the first Fence of `attempt`.

        `start` is at or before its first Chunk, `stop` behind a Fence of that attempt.
        Raises PositionLost when records between them are no longer kept.
        """
        transcript = Transcript(request_id, until_attempt=attempt)

        def feed(record: Record) -> None:
            try:
                shown = codecs.decode(record)
            except RecordError:  # readers skip what they cannot read
                return
            if isinstance(shown, Chunk | Fence | End):
                transcript.feed(shown)

        source = Partition(RESPONSES, lane)
        await self._ask(source, start, stop, feed, request_id.encode())
        return transcript

    async def fetch(self, origin: Origin) -> Request:
        """The Request at its origin.

        Raises PositionLost when it is no longer kept, RecordError when it is no Request.
        """
        found: list[Record] = []
        source = Partition(origin.topic, origin.partition)
        await self._ask(source, origin.offset, origin.offset + 1, found.append)
        if not found:
            raise PositionLost(*source, origin.offset, origin.offset + 1)
        request = codecs.decode(found[0])
        if not isinstance(request, Request):
            raise Malformed(f"{origin} is no Request")
        return request

    async def run(self) -> None:
        """Answer questions until cancelled. Raises what the reader does."""
        try:
            while True:
                self._asked.clear()
                if self._turn():
                    self._reader.assign({source: p.position for source, p in self._passes.items()})
                if self._passes:
                    await self._advance()
                else:
                    await self._asked.wait()
        finally:
            await self._reader.close()

    async def _ask(
        self,
        source: Partition,
        start: int,
        stop: int,
        feed: Callable[[Record], None],
        key: bytes | None = None,
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued[source].append(_Question(start, stop, feed, answer, key))
        self._asked.set()
        await answer  # cancelling it answers it, too: `_turn` drops the question

    def _turn(self) -> bool:
        """End passes without questions, begin those that are asked for; whether there were any."""
        over = [source for source, p in self._passes.items() if p.is_over()]
        for source in over:
            del self._passes[source]
        free = self._queued.keys() - self._passes.keys()
        begun = False
        for source in sorted(free):
            if questions := [q for q in self._queued.pop(source) if not q.answer.done()]:
                self._passes[source] = _Pass(questions)
                begun = True
        return begun or bool(over)

    async def _advance(self) -> None:
        try:
            batches = await self._reader.poll(POLL_S)
        except PositionLost as e:
            source = Partition(e.topic, e.partition)
            self._passes[source].lose(e)
            self._reader.assign({source: p.position for source, p in self._passes.items()})
            return
        for source, records in batches.items():
            self._passes[source].read(records)
        for source, p in self._passes.items():
            p.reach(self._reader.position(source))  # its last offsets may be gone from the log


class _Pass:
    """One reading of a partition, from the first to the last offset that is asked for."""

    def __init__(self, questions: Sequence[_Question]) -> None:
        self.position = min(q.start for q in questions)
        self._questions = list(questions)
        self._by_key: dict[bytes, list[_Question]] = defaultdict(list)
        self._by_offset: dict[int, list[_Question]] = defaultdict(list)
        for question in questions:
            if question.key is not None:
                self._by_key[question.key].append(question)
            else:
                for offset in range(question.start, question.stop):
                    self._by_offset[offset].append(question)

    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        self._questions = [q for q in self._questions if not q.answer.done()]
        return not self._questions

    def read(self, records: Sequence[Record]) -> None:
        """Show the next records to those who asked for them."""
        for record in records:
            for question in self._by_key.get(record.key or b"", ()):
                if question.start <= record.offset < question.stop:
                    question.feed(record)
            for question in self._by_offset.get(record.offset, ()):
                question.feed(record)
        self.reach(records[-1].offset + 1)

    def reach(self, position: int) -> None:
        """Everything below this was read, or is gone from the end of the log."""
        self.position = max(self.position, position)
        for question in self._questions:
            if question.stop <= position and not question.answer.done():
                question.answer.set_result(None)

    def lose(self, lost: PositionLost) -> None:
        """The log begins later than this was to be read from: who asked for that gets no answer."""
        gone = [q for q in self._questions if q.start < lost.start]
        for question in gone or self._questions:
            if not question.answer.done():
                question.answer.set_exception(lost)
        self.position = max(self.position, lost.start)
