"""Looking things up in the log: what a reader was shown of a request, and the request itself.

Needed when a request changes hands. Many change hands at once when a worker dies, so all questions
that are waiting are answered by one pass over their lanes. Nothing is kept between passes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from streams import codecs
from streams.errors import Malformed, PositionLost, RecordError
from streams.ports import Log, Partition, Record
from streams.records import Chunk, End, Fence, Origin, Request
from streams.topics import RESPONSES
from streams.transcript import Transcript

POLL_S = 1.0


@dataclass(slots=True)
class _Question:
    """What was request `id` shown before `attempt`, on offsets [start, stop) of a lane?"""

    id: str
    attempt: int
    start: int
    stop: int
    answer: asyncio.Future[Transcript]
    transcript: Transcript = field(default_factory=Transcript)
    fenced: bool = False


class Scanner:
    """Answers questions about the log from one reader. `run` must be running."""

    def __init__(self, log: Log) -> None:
        self._scanner, self._fetcher = log.reader(), log.reader()
        self._questions: dict[int, list[_Question]] = defaultdict(list)
        self._asked = asyncio.Event()
        self._fetching = asyncio.Lock()

    async def shown(
        self, lane: int, request_id: str, attempt: int, start: int, stop: int
    ) -> Transcript:
        """What a reader was shown of a request before the first Fence of `attempt`.

        `start` is at or before its first Chunk, `stop` behind a Fence of that attempt.
        Raises PositionLost when records between them are no longer kept.
        """
        answer: asyncio.Future[Transcript] = asyncio.get_running_loop().create_future()
        self._questions[lane].append(_Question(request_id, attempt, start, stop, answer))
        self._asked.set()
        return await answer

    async def fetch(self, origin: Origin) -> Request:
        """The Request at its origin. Raises PositionLost when it is no longer kept."""
        source = Partition(origin.topic, origin.partition)
        async with self._fetching:
            self._fetcher.assign({source: origin.offset})
            while not (batches := await self._fetcher.poll(POLL_S, max_records=1)):
                pass
        record = batches[source][0]
        if record.offset != origin.offset:
            raise PositionLost(origin.topic, origin.partition, origin.offset, record.offset)
        request = codecs.decode(record)
        if not isinstance(request, Request):
            raise Malformed(f"{origin} is no Request")
        return request

    async def run(self) -> None:
        """Answer questions until cancelled."""
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                pending, self._questions = self._questions, defaultdict(list)
                while pending:
                    await self._pass(pending)
        finally:
            await self._scanner.close()
            await self._fetcher.close()

    async def _pass(self, pending: dict[int, list[_Question]]) -> None:
        """Read the lanes of all questions until each has its answer or a lane is lost."""
        starts = {Partition(RESPONSES, k): min(q.start for q in qs) for k, qs in pending.items()}
        self._scanner.assign(starts)
        try:
            while pending:
                for source, records in (await self._scanner.poll(POLL_S)).items():
                    _read(pending, source.partition, records)
        except PositionLost as e:
            for question in pending.pop(e.partition, []):
                if not question.answer.done():
                    question.answer.set_exception(e)


def _read(pending: dict[int, list[_Question]], lane: int, records: Sequence[Record]) -> None:
    """Show the records to the lane's questions; drop the lane when all of them are answered."""
    questions = pending.get(lane)
    if questions is None:
        return
    by_key: dict[bytes, list[_Question]] = defaultdict(list)
    for question in questions:
        by_key[question.id.encode()].append(question)
    for record in records:
        asked = by_key.get(record.key or b"")
        if asked:
            _show(record, asked)
    position = records[-1].offset + 1
    for question in questions:
        if position >= question.stop and not question.answer.done():
            question.answer.set_result(question.transcript)
    pending[lane] = [q for q in questions if not q.answer.done()]
    if not pending[lane]:
        del pending[lane]


def _show(record: Record, questions: list[_Question]) -> None:
    try:
        shown = codecs.decode(record)
    except RecordError:  # readers skip what they cannot read
        return
    if not isinstance(shown, Chunk | Fence | End):
        return
    for question in questions:
        if record.offset < question.start or question.fenced:
            continue
        if isinstance(shown, Fence) and shown.attempt >= question.attempt:
            question.fenced = True
        else:
            question.transcript.feed(shown)
