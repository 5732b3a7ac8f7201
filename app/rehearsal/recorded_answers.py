"""Answers of requests with their times, from `responses` and `ledger`, as readers have them.

Owns no group and writes nothing. Memory holds the answers that are not over, each at most once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvlane.app.http.openai.answer_items import AnswerItem, AnswerItems
from kvlane.streams.clock import Clock
from kvlane.streams.ports import POLL_S, Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.records import Assigned, Chunk, Ended, Finished, LogRecord
from kvlane.streams.responses.transcript import VISIBLE, Transcript
from kvlane.streams.topics import LEDGER, RESPONSES

SOURCES = (LEDGER, RESPONSES)
WHOLE_ENDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of answers that are compared."""
_FINAL = frozenset({"stop", "length", "cancelled"})


class RecordedAnswer(NamedTuple):
    """An answer that is over. `tokens`: empty for engines that give none. `text`: with reasoning
    and calls of engines and parsers that separate them. `code`: the finish reason, or the code of a
    router's `End`. `ttft_ms`, `itl_ms`: as the worker measured them, without any wait in a queue of
    the router; None for an answer of several runs."""

    id: str
    tokens: tuple[int, ...]
    text: str
    code: str
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    itl_ms: float | None

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return 8 * len(self.tokens) + len(self.text)


class _AnswerHistory:
    """The records of one request so far."""

    def __init__(self, request_id: str) -> None:
        self._transcript = Transcript(request_id)
        self._items = AnswerItems()
        self._runs: set[tuple[int, str]] = set()
        self._prompt_tokens = 0
        self._last: Finished | None = None
        self.is_ended = False
        """Whether the ledger has its end."""

    @property
    def is_over(self) -> bool:
        return self._transcript.is_over and self.is_ended

    def apply(self, log_record: LogRecord) -> None:
        record = log_record.record
        if isinstance(record, VISIBLE):
            piece = self._transcript.apply(record)
            if isinstance(piece, Chunk):
                for _ in self._items.add(piece):
                    pass
        elif isinstance(record, Assigned):
            self._runs.add((record.attempt, record.phase))
            self._prompt_tokens = self._prompt_tokens or record.prompt_tokens
        elif isinstance(record, Ended):
            self.is_ended = True
        elif isinstance(record, Finished) and record.phase != "prefill":
            is_final = record.code in _FINAL or (record.code == "error" and not record.retryable)
            if is_final:
                self._last, self.is_ended = record, True

    def answer(self) -> RecordedAnswer:
        shown, last = self._transcript, self._last
        end = shown.end
        usage, tokens = shown.usage, tuple(shown.tokens)
        is_timed = last is not None and len(self._runs) == 1
        return RecordedAnswer(
            id=shown.request_id,
            tokens=tokens,
            text="\n".join(map(_text_of, self._items.items)),
            code=shown.finish_reason or ("lost" if end is None else end.code),
            output_tokens=len(tokens) or (0 if usage is None else usage.completion_tokens),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0 if last is None else last.cached_tokens,
            ttft_ms=last.ttft_ms if is_timed and last is not None and last.ttft_ms else None,
            itl_ms=last.itl_ms if is_timed and last is not None and last.itl_ms else None,
        )


class AnswerFollower:
    """Follows the answers of requests from these offsets on. To be closed."""

    def __init__(self, log: Log, clock: Clock, starts: Mapping[Partition, int]) -> None:
        self._decoding = RecordDecoder(log, clock)
        self._histories: dict[str, _AnswerHistory] = {}
        self._keys: set[bytes | None] = set()
        self._reader = log.reader()
        self._reader.assign(starts, self._keys)

    def add(self, request_id: str) -> None:
        """Follow a request, from the next record that is read on."""
        self._histories[request_id] = _AnswerHistory(request_id)
        self._keys.add(request_id.encode())

    def drop(self, request_id: str) -> RecordedAnswer:
        """Follow a request no more; the answer so far."""
        self._keys.discard(request_id.encode())
        return self._histories.pop(request_id).answer()

    def is_ended(self, request_id: str) -> bool:
        """Whether the ledger has the end of a request that is followed."""
        return self._histories[request_id].is_ended

    def remaining(self, ends: Mapping[Partition, int]) -> int:
        """The number of offsets below these ends that are not read yet."""
        return sum(max(0, end - self._reader.position(source)) for source, end in ends.items())

    async def poll(self, timeout_s: float = POLL_S) -> list[RecordedAnswer]:
        """The answers that are over by the next records. Raises PositionLost, NewerRecord."""
        over: list[RecordedAnswer] = []
        for source, records in (await self._reader.poll(timeout_s)).items():
            for log_record in await self._decoding.decode_records(source, records):
                name: str = log_record.record.id  # type: ignore[union-attr]
                if (history := self._histories.get(name)) is None:
                    continue
                history.apply(log_record)
                if history.is_over:
                    over.append(self.drop(name))
        return over

    async def close(self) -> None:
        await self._reader.close()


def _text_of(item: AnswerItem) -> str:
    return item.text if item.kind == "text" else f"[{item.kind} {item.name}] {item.text}"
