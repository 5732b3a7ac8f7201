"""The client library: publish requests and read replies over Kafka (`Client` has an example).

A client publishes to `prompts` and reads `responses`, and needs no rights on any other topic. It
has no durable state: any client continues with the request id alone while the log has the records.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NamedTuple, Self

from kvlane.streams.clock import Clock, retry_while_unavailable
from kvlane.streams.errors import BeyondEnd, LogClosed
from kvlane.streams.ids import RequestIds, new_request_id
from kvlane.streams.ports import Log
from kvlane.streams.prompt import Prompt, encode_prompt
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Chunk, DryRunResult, End, PassthroughDelta, Usage
from kvlane.streams.responses.reply_reader import ReplyReader, may_begin
from kvlane.streams.responses.reply_stream import Reply
from kvlane.streams.responses.transcript import Position, rest_after
from kvlane.streams.topics import BATCH, PROMPTS, RESPONSES

__all__ = ["Client", "ReplyResult", "new_request_id"]

PUBLISH_TIMEOUT_S = 30.0
"""Long enough to outlast the election of a new leader several times."""
STREAM_TIMEOUT_S = 660.0
"""The longest duration of a request, and a minute for routing and its end."""
MAX_UNCLAIMED_REPLIES = 1000
"""Bound of subscribed replies without a `stream` call; older ones are read again from the log."""


class ReplyResult(NamedTuple):
    """A reply that is over: whole if `error` is None, else as far as it came.

    `finish_reason`: "stop", "length", "cancelled", "error" (its engine failed or refused),
    "tool_calls"; of attached servers also "content_filter", "function_call"; None: ended by a
    router, with `code`. `message`: of that end, or of the engine's refusal. `placed`: the result of
    a dry run. `data`: see `Chunk`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    code: str | None = None
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None
    placed: DryRunResult | None = None
    data: tuple[PassthroughDelta, ...] = ()

    @property
    def error(self) -> str | None:
        """Why the answer is not whole, for people; None if it is."""
        reason = self.finish_reason or self.code
        if self.finish_reason is not None and reason not in ("error", "cancelled"):
            return None
        return f"{reason}: {self.message}" if self.message else reason


class Client:
    """Publishes prompts and reads their replies, many at a time.

    Request ids are idempotency keys: a prompt is published again until the log has acknowledged it,
    and runs once. Any client can read a reply by its id as long as the log retains it (an hour).

    Args:
        log: the connection, already started; its owner closes it.
        clock: `SystemClock()` outside of tests.
        rng: source of request ids; default: one whose ids cannot be guessed.

    Raises (all derive from `StreamError`):
        BrokerUnavailable: no broker answers within the time limit; try again.
        LogClosed: the client or its log was closed.
        PositionLost, NotFound: the reply is no longer retained, or there was none.
        BeyondEnd: the reply has ended before the position to read it from.

    Example:
        log = KafkaLog(KafkaConnection("127.0.0.1:9092", "my-program"))
        await log.start()
        async with Client(log, SystemClock()) as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            request_id = await client.publish(Prompt(id=client.new_request_id(), body=body))
            async for piece in client.stream(request_id, timeout_s=60):
                print(piece.text if isinstance(piece, Chunk) else piece.code, end="")
        await log.close()
    """

    def __init__(self, log: Log, clock: Clock, rng: random.Random | None = None) -> None:
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)
        self._ids = RequestIds(clock, rng or random.SystemRandom())
        self._replies: ReplyReader | None = None
        self._unclaimed: dict[str, Reply] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start reading replies. Raises BrokerUnavailable, TopicMismatch."""
        assert self._replies is None, "a client is started once"
        self._replies = ReplyReader(self._log, self._clock, await self._log.partitions(RESPONSES))
        self._replies.start()

    async def close(self) -> None:
        """Stop reading: open streams raise LogClosed. Requests keep running. Idempotent."""
        if self._replies is not None:
            await self._replies.close()
        self._unclaimed.clear()

    def new_request_id(self) -> str:
        return self._ids.new()

    async def publish(
        self, prompt: Prompt, *, subscribe: bool = True, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> str:
        """Publish a prompt; returns its id once acknowledged.

        `subscribe`: `stream` has the reply at once. False for a client that will not stream it, or
        an id that may have been published before. Raises AppendFailed or BrokerUnavailable past the
        time-out (the prompt may be in the log; publishing it again is harmless), RecordTooLarge.
        """
        deadline = self._clock.now() + timeout_s
        if subscribe:  # first, so that no part of the reply can be missed
            await self._listen(prompt.id, deadline)
        # After a failure the subscription stays: an unacknowledged prompt may be answered.
        topic = BATCH if prompt.service_class == "batch" else PROMPTS
        await self._publisher.publish_entry(topic, encode_prompt(prompt), until=deadline)
        return prompt.id

    async def cancel(
        self,
        request_id: str,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        *,
        service_class: ServiceClass = "interactive",
    ) -> None:
        """Cancel a request; its stream ends with `cancelled`, unless it ends otherwise first.
        Behind its prompt in the same topic. Raises AppendFailed past the time-out: cancel again."""
        entry = encode_prompt(Prompt(id=request_id, kind="cancel"))
        until = self._clock.now() + timeout_s
        for topic in (PROMPTS, BATCH) if service_class == "batch" else (PROMPTS,):
            await self._publisher.publish_entry(topic, entry, until=until)

    async def stream(
        self, request_id: str, *, from_token: int = 0, timeout_s: float = STREAM_TIMEOUT_S
    ) -> AsyncGenerator[Chunk | End, None]:
        """The visible pieces of a request's reply, of any client; the last has a finish reason or
        is an End.

        `from_token`: leave out the part before it, `index + len(token_ids)` of the last received
        piece; for other pieces see `Position` (`streams/responses/transcript.py`). Leave the loop
        to stop early. Raises TimeoutError if the end does not come in time (stream again);
        PositionLost if the beginning is no longer in the log; NotFound if there was none;
        BeyondEnd if the reply ends before `from_token`; NewerRecord, BrokerUnavailable, LogClosed.
        """
        deadline = self._clock.now() + timeout_s
        reply = await self._claim(request_id, deadline, from_token)
        position, received = Position(), 0
        try:
            while True:
                try:
                    piece = await reply.next_piece(deadline - self._clock.now())
                except TimeoutError as e:
                    raise TimeoutError(
                        f"{request_id}: no end within {timeout_s:g} s, "
                        f"{max(received, from_token)} tokens so far"
                    ) from e
                if isinstance(piece, Chunk):
                    received = position.pass_over(piece)
                if received < from_token and _is_whole(piece):
                    raise BeyondEnd(
                        f"{request_id} has ended at position {received}, before {from_token}"
                    )
                if isinstance(piece, End):
                    yield piece
                    return
                if (rest := rest_after(piece, received, from_token)) is not None:
                    yield rest
                if piece.finish_reason is not None:
                    return
        finally:
            self._listening().detach(reply)

    async def result(self, request_id: str, timeout_s: float = STREAM_TIMEOUT_S) -> ReplyResult:
        """Wait for the complete reply. Raises as `stream`."""
        text: list[str] = []
        tokens: list[int] = []
        data: list[PassthroughDelta] = []
        usage: Usage | None = None
        async for piece in self.stream(request_id, timeout_s=timeout_s):
            usage = piece.usage or usage
            if isinstance(piece, End):
                reason = piece.code if piece.code in ("stop", "length") else None
                return ReplyResult(
                    "".join(text),
                    tuple(tokens),
                    reason,
                    piece.code,
                    piece.message,
                    piece.retry_after_s,
                    usage,
                    piece.placed,
                    tuple(data),
                )
            text.append(piece.text)
            tokens += piece.token_ids
            data += piece.data
            if piece.finish_reason is not None:
                return ReplyResult(
                    "".join(text), tuple(tokens), piece.finish_reason, message=piece.invalid,
                    usage=usage, data=tuple(data),
                )  # fmt: skip
        raise AssertionError("a stream ends with its last piece or with an error")

    async def _listen(self, request_id: str, deadline: float) -> None:
        replies = self._listening()
        if request_id in self._unclaimed:
            return
        reply = await retry_while_unavailable(
            self._clock, lambda: replies.subscribe(request_id), until=deadline
        )
        if request_id in self._unclaimed:  # published twice at the same time
            replies.detach(reply)
            return
        self._unclaimed[request_id] = reply
        while len(self._unclaimed) > MAX_UNCLAIMED_REPLIES:
            replies.detach(self._unclaimed.pop(next(iter(self._unclaimed))))

    async def _claim(self, request_id: str, deadline: float, from_token: int) -> Reply:
        """The subscribed reply of a published request, or a new one from the log."""
        replies = self._listening()
        if (reply := self._unclaimed.pop(request_id, None)) is not None:
            if not from_token:
                return reply
            replies.detach(reply)
        may_begin_s = math.inf if may_begin(request_id, self._clock.wall_ms()) else 0.0
        return await retry_while_unavailable(
            self._clock,
            lambda: replies.attach(
                request_id, begun=from_token > 0, after=from_token, may_begin_s=may_begin_s
            ),
            until=deadline,
        )

    def _listening(self) -> ReplyReader:
        if self._replies is None:
            raise LogClosed("the client was not started")
        return self._replies


def _is_whole(piece: Chunk | End) -> bool:
    """True for the last piece of an answer that has not failed."""
    if isinstance(piece, End):
        return piece.code in ("stop", "length")
    return piece.finish_reason not in (None, "error", "cancelled")
