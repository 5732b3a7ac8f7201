"""The answers under way: published, listened to, and cancelled when nobody wants them any more.

    ask ──► Replies listens ──► Request → requests ──► Reply: pieces, until the end
    leave ──► Cancel → requests, unless the request is over or may run on

One reader for all replies of the process. Owns ids (drawn such that they fall into the lanes that
this gateway reads), the count of answers under way, and their bound: beyond it requests are refused
at once, since nothing is gained by reading more answers than can be passed on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from app.http.errors import ApiError, of_error, overloaded, stopping, unknown_stream
from app.lifetime import Lifetime
from app.settings import Settings
from streams.errors import BrokerUnavailable, StreamError
from streams.ids import RequestIds, is_sealed
from streams.outbox import Outbox
from streams.patience import until_answered
from streams.ports import Log
from streams.records import Cancel, Request
from streams.replies import Replies
from streams.reply import Reply
from streams.topics import REQUESTS, RESPONSES, lane_of

log = logging.getLogger(__name__)

PUBLISH_S = 10.0
"""What a request gets to reach the log: an election of a leader, but no outage."""
CANCEL_S = 60.0
"""What its Cancel gets. Past it the request runs to its end, unread."""


class Streams:
    """All answers of this gateway. `start` before the rest; `close` ends what is under way."""

    def __init__(
        self, kafka: Log, settings: Settings, life: Lifetime, rng: random.Random | None = None
    ) -> None:
        """Without `rng`, ids are drawn so that they cannot be guessed."""
        self._log = kafka
        self._settings = settings
        self._life = life
        self._clock = life.clock
        self._outbox = Outbox(kafka, life.clock)
        self._ids = RequestIds(life.clock, rng or random.SystemRandom())
        self._seal = settings.seal()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cancels: set[asyncio.Task[None]] = set()
        self.open = 0
        """Answers under way."""
        self.stopping = False
        """Nothing new is taken."""

    async def start(self) -> None:
        """Begin to read the lanes of this gateway's share."""
        self._lanes = await self._log.partitions(RESPONSES)
        self._replies = Replies(self._log, self._clock, self._lanes)
        self._replies.start()
        self._life.spawn("replies", self._replies.watch())
        lanes = [lane for lane in range(self._lanes) if self._reads(lane)]
        await until_answered(self._clock, lambda: self._replies.keep(lanes))

    async def idle(self, within_s: float) -> bool:
        """Wait until nothing is under way; False when something still is after that time."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop reading, and give the last Cancels their time to reach the log.

        What is under way fails with LogClosed.
        """
        await self._replies.close()
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=PUBLISH_S)

    # --- one request -----------------------------------------------------------------------------

    def new_id(self, tenant: str = "") -> str:
        """A sealed id whose lane this gateway reads.

        Draws as often as there are gateways, on average.
        """
        while True:
            request_id = self._seal.sealed(self._ids.new(), tenant)
            if self._reads(lane_of(request_id, self._lanes)):
                return request_id

    def check_id(self, request_id: str, tenant: str = "") -> None:
        """Raises ApiError, 404, when the stream of this id is not this tenant's.

        Ids that no gateway drew belong to whoever publishes to Kafka. They can be had here as long
        as there is no secret, which means that all who reach this gateway are one.
        """
        if self._seal.is_of(request_id, tenant):
            return
        if is_sealed(request_id) or self._settings.stream_secret:
            raise unknown_stream()

    @property
    def stalled_s(self) -> float:
        """For how long the reader has not come back from its poll."""
        return self._clock.now() - self._replies.polled_at

    def check(self, answers: int) -> None:
        """Raises ApiError when so many more answers are too many, or none are taken any more."""
        if self.stopping:
            raise stopping()
        if self.open + answers > self._settings.http_streams:
            raise overloaded(f"this gateway has {self.open} answers under way already")

    def enter(self, answers: int) -> None:
        """Count answers that begin. Raises ApiError as `check`."""
        self.check(answers)
        self.open += answers
        self._idle.clear()

    def left(self, answers: int) -> None:
        """Count answers that were entered and are over."""
        self.open -= answers
        if not self.open:
            self._idle.set()

    async def publish(self, requests: Sequence[Request]) -> list[Reply]:
        """Publish requests; their replies, in order. Raises ApiError.

        Failed or cancelled, none of them is listened to, and what got to the log is cancelled.
        """
        replies: list[Reply] = []
        until = self._clock.now() + PUBLISH_S
        sending = False
        try:
            async with asyncio.timeout(PUBLISH_S):
                for request in requests:  # those before a failure are left again
                    replies.append(await self._replies.from_now(request.id))  # noqa: PERF401
            sending = True
            async with asyncio.TaskGroup() as sends:
                for request in requests:
                    sends.create_task(
                        self._outbox.persist(REQUESTS, request.id, request, until=until)
                    )
        except BaseException as e:
            for reply in replies:
                self._replies.leave(reply)
                if sending:
                    self.cancel(reply.request_id, "not all of it was published")
            if (failure := _failure(e)) is not None:
                raise failure from e
            raise
        return replies

    async def attach(self, request_id: str, *, begun: bool) -> Reply:
        """The reply of any request, from its beginning. Raises ApiError.

        `begun`: whoever asks has some of it already; it fails when the log has nothing of it.
        """
        try:
            async with asyncio.timeout(PUBLISH_S):
                return await self._replies.from_beginning(request_id, begun=begun)
        except (StreamError, TimeoutError) as e:
            raise _failure(e) or e from e

    def leave(self, reply: Reply) -> None:
        """Nobody listens to this reply any more."""
        self._replies.leave(reply)

    def cancel(self, request_id: str, reason: str) -> None:
        """Ask for the end of a request, in the background.

        Bound: as many as there may be answers. Beyond it (in an outage) requests run on, unread.
        """
        if len(self._cancels) >= self._settings.http_streams:
            log.warning("%s runs on: too many Cancels wait for the log", request_id)
            return
        cancel = self._life.spawn(f"cancel {request_id}", self._cancel(request_id, reason))
        self._cancels.add(cancel)
        cancel.add_done_callback(self._cancels.discard)

    async def cancel_now(self, request_id: str, reason: str) -> None:
        """Ask for the end of a request; returns when the log has it. Raises ApiError."""
        try:
            await self._send_cancel(request_id, reason, PUBLISH_S)
        except StreamError as e:
            raise of_error(e) from e

    async def _cancel(self, request_id: str, reason: str) -> None:
        try:
            await self._send_cancel(request_id, reason, CANCEL_S)
        except StreamError as e:
            log.warning("%s runs on, its Cancel was not acknowledged: %s", request_id, e)

    async def _send_cancel(self, request_id: str, reason: str, within_s: float) -> None:
        cancel = Cancel(id=request_id, reason=reason)
        until = self._clock.now() + within_s
        await self._outbox.persist(REQUESTS, request_id, cancel, until=until)

    def _reads(self, lane: int) -> bool:
        return lane % self._settings.gateways == self._settings.gateway_number


def _failure(error: BaseException) -> ApiError | None:
    """What a failed question to the log means to a client; None for anything else."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StreamError):
        return of_error(error)
    if isinstance(error, TimeoutError):
        return of_error(BrokerUnavailable("no answer in time"))
    return None
