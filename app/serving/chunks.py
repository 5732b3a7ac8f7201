"""How tokens get into the log: runs fill streams, one writer per lane appends them as Chunks.

A writer has one batch on its way at a time. What arrives meanwhile waits in its run's stream and
becomes one Chunk in the next batch; so a slow broker makes larger Chunks, not longer queues. An
idle lane costs nothing: a writer lives while there is something to write.

Fail-stop: a batch without an acknowledgement may be in the log or not, so whatever follows it could
leave a hole. Every run in it is broken, and no Chunk of a broken run is ever sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from app.lifetime import Lifetime
from streams.errors import AppendFailed, RecordTooLarge
from streams.outbox import Outbox
from streams.records import Aside, Chunk, FinishReason, LogProb, Usage
from streams.topics import RESPONSES, lane_of

log = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
"""Estimated size at which a batch is closed; the log takes 1 MiB."""

PENDING_TOKENS = 512
PENDING_BYTES = 256 * 1024
"""What may wait in one stream, in tokens and in bytes of the next Chunk; beyond, `push` waits, and
so does the engine's stream."""

_CHUNK_BYTES = 400  # field names, numbers, usage, record overhead
_TOKEN_BYTES = 11  # ten digits and a comma
_CHAR_BYTES = 6  # an escaped control character; anything else is shorter
_LOG_PROB_BYTES = 36  # an id, 18 digits, punctuation
_ASIDE_BYTES = 20  # its place
_encode = msgspec.json.Encoder().encode

LogProbs = Sequence[Sequence[LogProb]]
"""For each token its own and the likeliest ones; empty where none were asked for."""


class StreamBroken(Exception):
    """A Chunk of this run was not acknowledged; none may follow it."""


class Last(NamedTuple):
    """What the last Chunk says besides tokens."""

    finish_reason: FinishReason
    usage: Usage | None
    stop_reason: int | str | None = None
    invalid: str = ""


class ChunkStream:
    """The Chunks of one run, in order; made by `ChunkWriters.open`."""

    def __init__(
        self, writer: _LaneWriter, request_id: str, attempt: int, run: str, index: int, chars: int
    ) -> None:
        self.request_id = request_id
        self._writer = writer
        self._attempt = attempt
        self._run = run
        self._with_tokens = writer.with_tokens
        self._seq = 0
        self._index = index
        self._chars = chars
        self._tokens: list[int] = []
        self._text = ""
        self._log_probs: list[tuple[LogProb, ...]] = []
        self._asides: list[Aside] = []
        self._aside_bytes = 0
        self._last: Last | None = None
        self._released = False
        self._room = asyncio.Event()
        self._over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def broken(self) -> bool:
        """Whether no Chunk may be sent any more."""
        return self._over.done() and not self._over.result()

    def release(self) -> None:
        """From now on Chunks may go out; before, they are kept back."""
        self._released = True
        if self._has_something:
            self._writer.wake(self)

    def abandon(self) -> None:
        """Send nothing more, whatever waits. Idempotent; too late for what is on its way."""
        if not self._over.done():
            self._over.set_result(False)
        self._clear()
        self._room.set()

    async def push(
        self,
        token_ids: Sequence[int],
        text: str,
        log_probs: LogProbs = (),
        data: Sequence[Aside] = (),
    ) -> None:
        """Send tokens and the text they complete, or text with what belongs to it; waits while too
        much waits already.

        Raises StreamBroken when it will not be sent.
        """
        self._add_asides(data)
        self._tokens += token_ids
        self._text += text
        self._log_probs += map(tuple, log_probs)
        if self._released:
            self._writer.wake(self)
        while self._is_full and not self.broken:
            self._room.clear()
            await self._room.wait()
        if self.broken:
            raise StreamBroken

    async def finish(self, last: Last, text: str = "") -> None:
        """Send the last Chunk and wait for its acknowledgement. Raises StreamBroken without one."""
        self._text += text
        self._last = last
        if self._released:
            self._writer.wake(self)
        if not await asyncio.shield(self._over):
            raise StreamBroken

    # --- for the writer ---

    def take(self) -> Chunk | None:
        """The next Chunk: everything that waits; None when there is nothing to send."""
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
            invalid=last.invalid if last else "",
            data=tuple(self._asides),
        )
        self._seq += 1
        self._index += len(chunk.token_ids)
        self._clear()
        self._last = None
        self._room.set()
        return chunk

    def size(self) -> int:
        """How many bytes the next Chunk has at most."""
        fixed = _CHUNK_BYTES + _CHAR_BYTES * len(self.request_id)
        content = _TOKEN_BYTES * len(self._tokens) + _CHAR_BYTES * len(self._text)
        content += self._aside_bytes
        return fixed + content + _LOG_PROB_BYTES * sum(map(len, self._log_probs))

    def landed(self, chunk: Chunk) -> None:
        """The Chunk was acknowledged."""
        if chunk.finish_reason is not None and not self._over.done():
            self._over.set_result(True)

    # --- what waits ---

    @property
    def _has_something(self) -> bool:
        return bool(self._tokens or self._text or self._asides or self._last)

    @property
    def _is_full(self) -> bool:
        if len(self._tokens) > PENDING_TOKENS:
            return True
        return _CHAR_BYTES * len(self._text) + self._aside_bytes > PENDING_BYTES

    def _add_asides(self, data: Sequence[Aside]) -> None:
        before = self._chars + len(self._text)
        for aside in data:
            self._asides.append(replace(aside, at=before + aside.at))
            self._aside_bytes += _ASIDE_BYTES + len(_encode(aside))

    def _clear(self) -> None:
        self._tokens.clear()
        self._text = ""
        self._log_probs.clear()
        self._asides.clear()
        self._aside_bytes = 0


class ChunkWriters:
    """The writers of all lanes of one worker.

    Without `with_tokens` Chunks bring text only: their tokens are not the engine's own, and must
    not be continued from.
    """

    def __init__(
        self, outbox: Outbox, life: Lifetime, lanes: int, *, with_tokens: bool = True
    ) -> None:
        self.with_tokens = with_tokens
        self._lanes = lanes
        self._writers = [
            _LaneWriter(outbox, life, lane, with_tokens=with_tokens) for lane in range(lanes)
        ]

    def open(
        self, request_id: str, attempt: int, run: str, *, index: int, chars: int
    ) -> ChunkStream:
        """The stream of a new run, which continues at token `index` and character `chars`."""
        writer = self._writers[lane_of(request_id, self._lanes)]
        return ChunkStream(writer, request_id, attempt, run, index, chars)


class _LaneWriter:
    """Appends the Chunks of one lane, one batch at a time; streams go in the order of waking."""

    def __init__(self, outbox: Outbox, life: Lifetime, lane: int, *, with_tokens: bool) -> None:
        self.with_tokens = with_tokens
        self._outbox = outbox
        self._life = life
        self._lane = lane
        self._ready: dict[ChunkStream, None] = {}
        self._writing = False
        self._is_large = False
        """Whether the present batch is one Chunk that is more than a batch may have."""

    def wake(self, stream: ChunkStream) -> None:
        """This stream has something to send."""
        self._ready[stream] = None
        if not self._writing:
            self._writing = True  # it begins after the other outputs of this engine step
            self._life.spawn(f"chunks of lane {self._lane}", self._write())

    async def _write(self) -> None:
        try:
            while self._ready:
                await self._append(self._take())
        finally:
            self._writing = False

    def _take(self) -> list[tuple[ChunkStream, Chunk]]:
        batch: list[tuple[ChunkStream, Chunk]] = []
        room, self._is_large = BATCH_BYTES, False
        for stream in list(self._ready):
            room -= stream.size()
            if room < 0 and batch:
                break
            self._is_large = room < 0
            del self._ready[stream]
            if (chunk := stream.take()) is not None:
                batch.append((stream, chunk))
        return batch

    async def _append(self, batch: Sequence[tuple[ChunkStream, Chunk]]) -> None:
        if not batch:
            return
        try:
            if self._is_large:  # batches have 1 MiB, records by themselves 8
                ((stream, chunk),) = batch
                await self._outbox.send(RESPONSES, stream.request_id, chunk, self._lane)
            else:
                await self._outbox.send_batch(
                    RESPONSES, self._lane, [(stream.request_id, chunk) for stream, chunk in batch]
                )
        except (AppendFailed, RecordTooLarge) as e:
            log.warning("lane %d: %d runs are broken: %s", self._lane, len(batch), e)
            for stream, _ in batch:
                stream.abandon()
        else:
            for stream, chunk in batch:
                stream.landed(chunk)
