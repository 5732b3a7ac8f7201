"""Asking and listening, for programs that speak Kafka rather than HTTP.

    async with Client(log, SystemClock()) as client:
        request_id = await client.publish(Prompt(id=client.new_request_id(), body={...}))
        async for piece in client.stream(request_id):
            print(piece.text, end="")

A client publishes to `prompts` and reads `responses`; it needs no rights on any other topic. What
it shows is what every reader shows (`streams/transcript.py`), however often workers, routers or
brokers failed on the way. It holds no state that matters: another client, or the same program
after a restart, goes on reading by the request id alone for as long as the log keeps the records.

It never ends the log it was given, and never reads more of `responses` than the lanes in use.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NamedTuple, Self

from streams.clock import Clock
from streams.errors import LogClosed
from streams.ids import RequestIds, is_sealed, issued_ms, new_request_id
from streams.outbox import Outbox
from streams.patience import until_answered
from streams.ports import Log
from streams.prompt import Prompt, encode_prompt
from streams.records import Aside, Chunk, End, Placed, Usage
from streams.replies import CLOCK_MARGIN_MS, LONGEST_LIFE_MS, Replies
from streams.reply import Reply
from streams.topics import BY_NAME, PROMPTS, RESPONSES

__all__ = ["Answer", "Client", "new_request_id"]

PUBLISH_TIMEOUT_S = 30.0
"""Long enough to outlast the election of a new leader several times."""
STREAM_TIMEOUT_S = 660.0
"""The longest that a request may take, and a minute for its way to a router and its end."""
UNCLAIMED = 1000
"""Replies that were published here and that nobody listens to yet. Beyond that the oldest are let
go: listening to one of those reads its lane again, so nothing is lost by it."""


class Answer(NamedTuple):
    """A whole reply. `code` and `message` are a router's, None and "" where the worker ended it.

    `placed`: of a dry run, where the request would go. `data`: what is no text, see `Chunk`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    code: str | None = None
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage | None = None
    placed: Placed | None = None
    data: tuple[Aside, ...] = ()


class Client:
    """Publishes requests and reads their replies, many at a time. `log` is started by its owner.

    Ids are idempotency keys: what may have been published is published again until the log has
    acknowledged it, and a request that stands there twice runs once.
    """

    def __init__(self, log: Log, clock: Clock, rng: random.Random | None = None) -> None:
        """Without `rng`, ids are drawn so that they cannot be guessed."""
        self._log = log
        self._clock = clock
        self._outbox = Outbox(log, clock)
        self._ids = RequestIds(clock, rng or random.SystemRandom())
        self._replies: Replies | None = None
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
        """Begin to listen. Raises BrokerUnavailable, TopicsDiffer."""
        assert self._replies is None, "a client is started once"
        self._replies = Replies(self._log, self._clock, await self._log.partitions(RESPONSES))
        self._replies.start()

    async def close(self) -> None:
        """Stop listening: open streams raise LogClosed. Requests run on. Idempotent."""
        if self._replies is not None:
            await self._replies.close()
        self._unclaimed.clear()

    def new_request_id(self) -> str:
        """An id that rises with time; replies to it are found quickly by anyone."""
        return self._ids.new()

    async def publish(
        self, prompt: Prompt, *, listen: bool = True, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> str:
        """Publish a prompt; its id, when the log has it.

        With `listen` its reply is listened to from now on, so that `stream` has it at once. Say
        False where nobody will ask here, and where the id may have been published before (by this
        program before a restart, say): `stream` reads the reply from the log then, all of it.

        Raises AppendFailed or BrokerUnavailable past the time-out: it may be in the log all the
        same, and publishing it again is harmless. RecordTooLarge, and what ended the listening.
        """
        deadline = self._clock.now() + timeout_s
        if listen:  # first, so that no part of the reply can be missed
            await self._listen(prompt.id, deadline)
        # A failure leaves the reply listened to: what was not acknowledged may be answered.
        await self._outbox.persist_entry(PROMPTS, encode_prompt(prompt), until=deadline)
        return prompt.id

    async def cancel(self, request_id: str, timeout_s: float = PUBLISH_TIMEOUT_S) -> None:
        """Ask for the end of a request; its stream ends with `cancelled`, or as it was about to.

        The wish goes through `prompts`, under the key of the request: so it cannot overtake a
        prompt that still waits there, and takes no other rights than publishing does. Cancelling
        what is over changes nothing. Raises AppendFailed past the time-out: cancel again.
        """
        entry = encode_prompt(Prompt(id=request_id, kind="cancel"))
        await self._outbox.persist_entry(PROMPTS, entry, until=self._clock.now() + timeout_s)

    async def stream(
        self, request_id: str, *, from_token: int = 0, timeout_s: float = STREAM_TIMEOUT_S
    ) -> AsyncGenerator[Chunk | End, None]:
        """The visible pieces of a request's reply; the last has a finish reason or is an End.

        Published here or elsewhere, now or before: a reply is read from its beginning, and what
        lies before `from_token` is left out. A position is where a piece ended that was received
        (`index + len(token_ids)`); for one in the middle of a piece that piece comes whole.
        To stop early is to break out of the loop; a later call reads from the log again.

        Raises TimeoutError when the end has not come in time (listen again), PositionLost when the
        log does not hold the beginning any more (at once also when nothing of an id is there that
        is too old to begin), UnknownType for records of a newer version,
        BrokerUnavailable, LogClosed.
        """
        deadline = self._clock.now() + timeout_s
        reply = await self._claim(request_id, deadline, begun=from_token > 0)
        received = 0
        try:
            while True:
                try:
                    piece = await reply.next(deadline - self._clock.now())
                except TimeoutError as e:
                    raise TimeoutError(
                        f"{request_id}: no end within {timeout_s:g} s, {received} tokens so far"
                    ) from e
                if isinstance(piece, End):
                    yield piece
                    return
                received = piece.index + len(piece.token_ids)
                if (rest := _from(piece, from_token)) is not None:
                    yield rest
                if piece.finish_reason is not None:
                    return
        finally:
            self._listening().leave(reply)

    async def result(self, request_id: str, timeout_s: float = STREAM_TIMEOUT_S) -> Answer:
        """The whole reply, when it is over. Raises as `stream`."""
        text: list[str] = []
        tokens: list[int] = []
        data: list[Aside] = []
        usage: Usage | None = None
        async for piece in self.stream(request_id, timeout_s=timeout_s):
            usage = piece.usage or usage
            if isinstance(piece, End):
                reason = piece.code if piece.code in ("stop", "length") else None
                return Answer(
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
                return Answer(
                    "".join(text),
                    tuple(tokens),
                    piece.finish_reason,
                    usage=usage,
                    data=tuple(data),
                )
        raise AssertionError("a stream ends with its last piece or with an error")

    async def _listen(self, request_id: str, deadline: float) -> None:
        replies = self._listening()
        if request_id in self._unclaimed:
            return
        reply = await until_answered(
            self._clock, lambda: replies.from_now(request_id), until=deadline
        )
        if request_id in self._unclaimed:  # published twice at the same time
            replies.leave(reply)
            return
        self._unclaimed[request_id] = reply
        while len(self._unclaimed) > UNCLAIMED:
            replies.leave(self._unclaimed.pop(next(iter(self._unclaimed))))

    async def _claim(self, request_id: str, deadline: float, *, begun: bool) -> Reply:
        """The reply that awaits its listener since it was published, or a new one from the log."""
        replies = self._listening()
        if request_id in self._unclaimed:
            return self._unclaimed.pop(request_id)
        return await until_answered(
            self._clock,
            lambda: replies.from_beginning(
                request_id, begun=begun, may_begin=_may_begin(request_id, self._clock.wall_ms())
            ),
            until=deadline,
        )

    def _listening(self) -> Replies:
        if self._replies is None:
            raise LogClosed("the client was not started")
        return self._replies


def _may_begin(request_id: str, now_ms: int) -> bool:
    """Whether a reply may still begin: the prompt may wait as long as `prompts` keeps it, what a
    gateway has asked for begins within its lifetime. An id without a time says nothing."""
    drawn_ms = issued_ms(request_id)
    waits_ms = 0 if is_sealed(request_id) else BY_NAME[PROMPTS].retention_ms or 0
    longest_ms = waits_ms + LONGEST_LIFE_MS + CLOCK_MARGIN_MS
    return drawn_ms is None or now_ms - drawn_ms < longest_ms


def _from(piece: Chunk, token: int) -> Chunk | None:
    """A piece as it is, without the tokens when they all lie before `token`, or None."""
    if piece.index >= token or piece.index + len(piece.token_ids) > token:
        return piece
    if piece.finish_reason is None:
        return None
    return Chunk(
        id=piece.id,
        attempt=piece.attempt,
        run=piece.run,
        seq=piece.seq,
        index=piece.index + len(piece.token_ids),
        chars=piece.chars,
        finish_reason=piece.finish_reason,
        usage=piece.usage,
        stop_reason=piece.stop_reason,
    )
