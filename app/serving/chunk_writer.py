"""The writer of Chunks: runs fill streams, and the worker's writer appends them in batches.

One batch per engine step and lane, one per lane in flight. Tokens that arrive meanwhile become one
Chunk of the next batch, so a slow broker makes larger Chunks, not longer queues. A slow lane holds
up no other one.

Fail-stop: a batch without an acknowledgement may or may not be in the log, so a later Chunk could
leave a gap. Every run in that batch is broken, and no Chunk of it is ever sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.text.answer_parts import CHAR_BYTES, AnswerPart, JoinedParts
from kvlane.streams.errors import AppendFailed, RecordTooLarge
from kvlane.streams.ports import Appended
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Chunk, FinishReason, LogProb, PassthroughDelta, Usage
from kvlane.streams.topics import RESPONSES, lane_of

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 512 * 1024
"""Estimated size at which a batch is closed; the log accepts 1 MiB."""

MAX_PENDING_TOKENS = 512
MAX_PENDING_BYTES = 256 * 1024
"""Bounds of one stream, in tokens and in bytes of the next Chunk. Beyond them `push` waits, and
with it the engine's stream."""

_CHUNK_BYTES = 400  # field names, numbers, usage, record overhead
_TOKEN_BYTES = 11  # ten digits and a comma
_LOG_PROB_BYTES = 36  # an id, 18 digits, punctuation
_COUNT_BYTES = 4  # the characters of a token: seldom more than two digits
_encode = msgspec.json.Encoder().encode

LogProbs = Sequence[Sequence[LogProb]]
"""For each token its own log probability, then the most likely ones; empty if not requested."""


class StreamBroken(Exception):
    """A Chunk of this run was not acknowledged, so no further one may be sent."""


class FinalChunk(NamedTuple):
    """Fields of the last Chunk besides its tokens."""

    finish_reason: FinishReason
    usage: Usage | None
    stop_reason: int | str | None = None
    invalid_reason: str = ""
    invalid_status: int = 0

    def size_bytes(self) -> int:
        """Bytes of the unbounded fields: a server's own counts, a stop string, an error message."""
        details = self.usage.details if self.usage is not None else None
        counts = len(_encode(details)) if details else 0
        stop = self.stop_reason if isinstance(self.stop_reason, str) else ""
        return counts + CHAR_BYTES * (len(stop) + len(self.invalid_reason))


class ChunkStream:
    """The Chunks of one run, in order; made by `ChunkWriter.open`."""

    def __init__(
        self,
        writer: ChunkWriter,
        lane: int,
        request_id: str,
        attempt: int,
        run: str,
        index: int,
        chars: int,
        model: str,
    ) -> None:
        self.request_id = request_id
        self.lane = lane
        self._writer = writer
        self._attempt = attempt
        self._run = run
        self._model = model
        """Sent with the first Chunk only."""
        self._with_tokens = writer.with_tokens
        self._seq = 0
        self._index = index
        self._chars = chars
        self._tokens: list[int] = []
        self._text = ""
        self._log_probs: list[tuple[LogProb, ...]] = []
        self._token_chars: list[int] = []
        self._data = JoinedParts()
        self._last: FinalChunk | None = None
        self._released = False
        self._room = asyncio.Event()
        self._over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_broken(self) -> bool:
        return self._over.done() and not self._over.result()

    def release(self) -> None:
        """Allow Chunks to be sent; until then they are held back."""
        self._released = True
        if self._has_something:
            self._writer.wake(self)

    def discard(self) -> None:
        """Send nothing more and drop pending tokens. A batch in flight is not stopped.
        Idempotent."""
        if not self._over.done():
            self._over.set_result(False)
        self._clear()
        self._room.set()

    async def push(
        self,
        token_ids: Sequence[int],
        text: str,
        log_probs: LogProbs = (),
        data: Sequence[AnswerPart | PassthroughDelta] = (),
        token_chars: Sequence[int] = (),
    ) -> None:
        """Send tokens and the text they complete, or text with its fields; waits while the stream
        is full.

        Raises StreamBroken if they will not be sent.
        """
        if data:
            self._add_data(data)
        self._tokens += token_ids
        self._text += text
        if log_probs:
            self._log_probs += map(tuple, log_probs)
        self._token_chars += token_chars
        if self._released:
            self._writer.wake(self)
        while self._is_full and not self.is_broken:
            self._room.clear()
            await self._room.wait()
        if self.is_broken:
            raise StreamBroken

    async def finish(
        self, last: FinalChunk, text: str = "", data: Sequence[AnswerPart | PassthroughDelta] = ()
    ) -> None:
        """Send the last Chunk and wait for its acknowledgement. Raises StreamBroken on failure."""
        if data:
            self._add_data(data)
        self._text += text
        self._last = last
        if self._released:
            self._writer.wake(self)
        if not await asyncio.shield(self._over):
            raise StreamBroken

    # --- for the writer ---

    def next_chunk(self) -> Chunk | None:
        """The next Chunk, of everything pending; None if there is nothing to send."""
        if self._over.done() or not self._has_something:
            return None
        last = self._last
        self._chars += len(self._text)
        chunk = Chunk(
            id=self.request_id,
            attempt=self._attempt,
            run=self._run,
            seq=self._seq,
            index=self._index,
            token_ids=tuple(self._tokens) if self._with_tokens else (),
            text=self._text,
            chars=self._chars,
            finish_reason=last.finish_reason if last else None,
            usage=last.usage if last else None,
            stop_reason=last.stop_reason if last else None,
            log_probs=tuple(self._log_probs) or None,
            invalid=last.invalid_reason if last else "",
            data=self._data.take(),
            model=self._model,
            invalid_status=last.invalid_status if last else 0,
            token_chars=tuple(self._token_chars),
        )
        self._model = ""
        self._seq += 1
        self._index += len(chunk.token_ids)
        self._clear()
        self._last = None
        self._room.set()
        return chunk

    def size_bytes(self) -> int:
        """An upper bound on the bytes of the next Chunk."""
        fixed = _CHUNK_BYTES + CHAR_BYTES * (len(self.request_id) + len(self._model))
        content = _TOKEN_BYTES * len(self._tokens) + CHAR_BYTES * len(self._text)
        content += self._data.size_bytes + (self._last.size_bytes() if self._last else 0)
        if self._log_probs:
            content += _LOG_PROB_BYTES * sum(map(len, self._log_probs))
        content += _COUNT_BYTES * len(self._token_chars)
        return fixed + content

    def on_acknowledged(self, chunk: Chunk) -> None:
        if chunk.finish_reason is not None and not self._over.done():
            self._over.set_result(True)

    # --- pending ---

    @property
    def _has_something(self) -> bool:
        return bool(self._tokens or self._text or self._data or self._last)

    @property
    def _is_full(self) -> bool:
        if len(self._tokens) > MAX_PENDING_TOKENS:
            return True
        return CHAR_BYTES * len(self._text) + self._data.size_bytes > MAX_PENDING_BYTES

    def _add_data(self, data: Iterable[AnswerPart | PassthroughDelta]) -> None:
        before = self._chars + len(self._text)
        for item in data:
            if isinstance(item, AnswerPart):
                self._data.add(item, before + item.at)
            else:
                self._data.add_item(replace(item, at=before + item.at) if before else item)

    def _clear(self) -> None:
        self._tokens.clear()
        self._text = ""
        self._log_probs.clear()
        self._token_chars.clear()
        self._data.take()


_Batch = list[tuple[ChunkStream, Chunk]]


class ChunkWriter:
    """The writer of all Chunks of one worker: in each lane one batch at a time, streams in the
    order of `wake`.

    Without `with_tokens` Chunks carry text only: no other worker must continue from their tokens.
    """

    def __init__(
        self,
        publisher: RecordPublisher,
        ctx: ProcessContext,
        lanes: int,
        *,
        with_tokens: bool = True,
    ) -> None:
        self.with_tokens = with_tokens
        self._publisher = publisher
        self._ctx = ctx
        self._ready: list[dict[ChunkStream, None]] = [{} for _ in range(lanes)]
        """Streams with something to send, by lane."""
        self._due: dict[int, None] = {}
        """Lanes with such streams and no batch in flight."""
        self._in_flight: set[int] = set()
        self._is_writing = False

    def open(
        self, request_id: str, attempt: int, run: str, *, index: int, chars: int, model: str = ""
    ) -> ChunkStream:
        """The stream of a new run, which starts at token `index` and character `chars`."""
        lane = lane_of(request_id, len(self._ready))
        return ChunkStream(self, lane, request_id, attempt, run, index, chars, model)

    def wake(self, stream: ChunkStream) -> None:
        self._ready[stream.lane][stream] = None
        if stream.lane not in self._in_flight:
            self._schedule(stream.lane)

    def _schedule(self, lane: int) -> None:
        self._due[lane] = None
        if not self._is_writing:
            self._is_writing = True  # it begins after the other outputs of this engine step
            self._ctx.spawn("chunks", self._write())

    async def _write(self) -> None:
        """Append one batch to each lane that is due."""
        self._is_writing = False
        batches = {lane: batch for lane in self._due if (batch := self._take(lane))}
        self._due.clear()
        self._in_flight |= batches.keys()
        records = {
            lane: [(stream.request_id, chunk) for stream, chunk in batch]
            for lane, batch in batches.items()
        }
        appending = self._publisher.publish_many_once(RESPONSES, records)
        for lane, appended in appending.items():
            appended.add_done_callback(partial(self._on_end, lane, batches[lane]))

    def _take(self, lane: int) -> _Batch:
        """The next batch of a lane; empty if nothing is left to send."""
        ready = self._ready[lane]
        batch: _Batch = []
        room = MAX_BATCH_BYTES
        for stream in list(ready):
            room -= stream.size_bytes()
            if room < 0 and batch:
                break
            del ready[stream]
            if (chunk := stream.next_chunk()) is not None:
                batch.append((stream, chunk))
        return batch

    def _on_end(self, lane: int, batch: _Batch, appended: asyncio.Future[Appended]) -> None:
        """A batch was acknowledged, or its append failed."""
        if appended.cancelled():  # the process ends
            return
        self._in_flight.discard(lane)
        if self._ready[lane]:
            self._schedule(lane)
        error = appended.exception()
        if error is None:
            for stream, chunk in batch:
                stream.on_acknowledged(chunk)
            return
        for stream, _ in batch:
            stream.discard()
        if isinstance(error, AppendFailed | RecordTooLarge):
            log.warning(
                "lane %d: an append failed, which breaks %d runs: %s", lane, len(batch), error
            )
        else:
            self._ctx.fail(error)
