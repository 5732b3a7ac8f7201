"""Active streams: requests that are published, read, and cancelled when their client disconnects.

    body ──► ReplyReader subscribes ──► Request → requests ──► Reply: pieces, until the end
    disconnect ──► Cancel → requests, unless the request is over or may run on

Owns the one reader of replies, ids (which fall into the lanes that this gateway reads), and the
bound of answers under way: beyond it requests are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kvlane.app.http.api_errors import (
    ApiError,
    error_of_stream,
    gateway_stopping,
    overloaded,
    unknown_stream,
)
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.clock import BrokerClock, Clock, retry_while_unavailable
from kvlane.streams.errors import BrokerUnavailable, StreamError
from kvlane.streams.ids import RequestIds, has_tenant_tag
from kvlane.streams.ports import Log
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Cancel
from kvlane.streams.request import Request
from kvlane.streams.responses.reply_reader import ReplyReader
from kvlane.streams.responses.reply_stream import Reply
from kvlane.streams.topics import REQUESTS, RESPONSES, lane_of

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 20.0
"""Time limit for publishing, in seconds: a cluster leaves a dead broker after 9 s by default
(`broker.session.timeout.ms`) and elects leaders then. An outage of all brokers ends it earlier."""
MAX_SEND_BYTES = 8 * 1024 * 1024
CANCEL_TIMEOUT_S = 60.0
"""Time limit for publishing a Cancel; after it the request runs to its end unread."""


class BrokerTimeClock:
    """A clock whose wall time is the broker's, so that ids of gateways can be compared. Before the
    first append or response it is this machine's, but not earlier than the newest record of the
    registry."""

    def __init__(
        self, clock: Clock, broker_clock: BrokerClock, registry_clock: BrokerClock
    ) -> None:
        self._clock = clock
        self._broker_clock = broker_clock
        self._registry_clock = registry_clock
        self.now = clock.now
        self.sleep = clock.sleep

    def wall_ms(self) -> int:
        if present_ms := self._broker_clock.now_ms():
            return present_ms
        return max(self._clock.wall_ms(), self._registry_clock.now_ms())


class ActiveStreams:
    """All streams of a gateway. Call `start` first; `close` ends open streams."""

    def __init__(
        self,
        kafka: Log,
        settings: Settings,
        ctx: ProcessContext,
        registry_clock: BrokerClock,
        rng: random.Random | None = None,
    ) -> None:
        """Without `rng`, ids cannot be guessed. `registry_clock` observes all records of the
        registry."""
        self._log = kafka
        self._settings = settings
        self._ctx = ctx
        self._clock = ctx.clock
        self._broker_clock = BrokerClock(ctx.clock)
        self._publisher = RecordPublisher(kafka, ctx.clock, self._broker_clock)
        self._registry_clock = registry_clock
        self._id_clock = BrokerTimeClock(ctx.clock, self._broker_clock, registry_clock)
        self._ids = RequestIds(self._id_clock, rng or random.SystemRandom())
        self.seal = settings.tenant_tag()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cancels: set[asyncio.Task[None]] = set()
        self.open_streams = 0
        self.is_stopping = False

    async def start(self) -> None:
        self._lanes = await self._log.partitions(RESPONSES)
        lanes = [lane for lane in range(self._lanes) if self._reads(lane)]
        self._replies = ReplyReader(
            self._log, self._clock, self._lanes, self._broker_clock, moving=len(lanes) < self._lanes
        )
        self._replies.start()
        self._ctx.spawn("replies", self._replies.wait_until_failed())
        await retry_while_unavailable(self._clock, lambda: self._replies.pin(lanes))

    async def wait_idle(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop reading, and give the last Cancels time to reach the log. Open streams fail with
        LogClosed."""
        await self._replies.close()
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=PUBLISH_TIMEOUT_S)

    # --- one request -----------------------------------------------------------------------------

    def new_id(self, tenant: str, *, is_stored: bool = False) -> str:
        """A sealed id whose lane this gateway reads: as many draws as gateways, on average."""
        while True:
            request_id = self.seal.tagged(self._ids.new(), tenant, is_stored=is_stored)
            if self._settings.gateway_count == 1 or self._reads(lane_of(request_id, self._lanes)):
                return request_id

    def check_id(self, request_id: str, tenant: str) -> None:
        """Raises ApiError, 404, when the stream of this id is not this tenant's. Without a secret
        all clients of this gateway are one tenant, and may read the streams of clients of Kafka."""
        if self.seal.matches(request_id, tenant):
            return
        if has_tenant_tag(request_id) or self._settings.stream_secret:
            raise unknown_stream()

    @property
    def now_ms(self) -> int:
        """The time by which ids have their age: of the broker's clock and this gateway's the
        earlier one, since the first ids of a gateway have the time of its own."""
        wall_ms = self._clock.wall_ms()
        broker_ms = self._broker_clock.now_ms() or self._registry_clock.now_ms()
        return min(broker_ms or wall_ms, wall_ms)

    @property
    def stalled_s(self) -> float:
        return self._clock.now() - self._replies.polled_at

    def check_capacity(self, answers: int) -> None:
        """Raises ApiError when this number of answers is too many, or the gateway stops."""
        if self.is_stopping:
            raise gateway_stopping()
        self._check_log()
        if self.open_streams + answers > self._settings.http_max_streams:
            raise overloaded(f"this gateway has {self.open_streams} answers under way already")

    def _check_log(self) -> None:
        """Raises ApiError while the log does not answer: waiting would end no better."""
        if not self._ctx.broker_answers:
            raise error_of_stream(BrokerUnavailable("the log does not answer"))

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Around waits for the log: raises ApiError where it does not answer, fails or is late."""
        try:
            self._check_log()
            async with self._limit():
                yield
        except (StreamError, TimeoutError) as e:
            raise _failure(e) or e from e

    def _limit(self) -> AbstractAsyncContextManager[object]:
        probe = self._ctx.broker_probe
        return (
            asyncio.timeout(PUBLISH_TIMEOUT_S)
            if probe is None
            else probe.timeout(PUBLISH_TIMEOUT_S)
        )

    def reserve(self, answers: int) -> None:
        """Count answers that begin. Raises ApiError as `check_capacity`."""
        self.check_capacity(answers)
        self.open_streams += answers
        self._idle.clear()

    def release(self, answers: int) -> None:
        self.open_streams -= answers
        if not self.open_streams:
            self._idle.set()

    async def publish(self, requests: Sequence[Request]) -> list[Reply]:
        """Publish requests; their replies, in order. Raises ApiError. Failed or cancelled, no
        reader follows them, and those in the log are cancelled."""
        replies: list[Reply] = []
        until = self._clock.now() + PUBLISH_TIMEOUT_S
        sending = False
        try:
            async with self._limit():
                for request in requests:  # those before a failure are left again
                    replies.append(await self._replies.subscribe(request.id))  # noqa: PERF401
                sending = True
                await self._send_all(requests, until)
        except BaseException as e:
            for reply in replies:
                self._replies.detach(reply)
                if sending:
                    self.cancel(reply.request_id, "not all of it was published")
            if (failure := _failure(e)) is not None:
                raise failure from e
            raise
        return replies

    async def _send_all(self, requests: Sequence[Request], until: float) -> None:
        async def send(request: Request) -> None:
            await self._publisher.publish(REQUESTS, request.id, request, until=until)

        async def send_in_turn(request: Request) -> None:
            async with turns:  # it is encoded only then
                await send(request)

        if len(requests) == 1:
            await send(requests[0])
            return
        longest = max(request.prompt_bytes for request in requests)
        turns = asyncio.Semaphore(max(1, MAX_SEND_BYTES // max(1, longest)))
        async with asyncio.TaskGroup() as sends:
            for request in requests:
                sends.create_task(send_in_turn(request))

    async def attach(
        self, request_id: str, *, begun: bool, after: int, may_begin_s: float
    ) -> Reply:
        """The reply of any request, from its beginning. Raises ApiError. `begun`: the client has
        some of it; `may_begin_s`: time in which it may still begin. It fails when the log has
        nothing of a request that has begun, or cannot begin any more."""
        async with self._answering():
            return await self._replies.attach(
                request_id, begun=begun, after=after, may_begin_s=may_begin_s
            )

    def unsubscribe(self, reply: Reply) -> None:
        self._replies.detach(reply)

    def cancel(self, request_id: str, reason: str) -> None:
        """Ask for the end of a request, in the background. Bound: as many as there may be answers;
        beyond it (in an outage) requests run on, unread."""
        if len(self._cancels) >= self._settings.http_max_streams:
            log.warning("%s keeps running: too many Cancels wait for Kafka", request_id)
            return
        cancel = self._ctx.spawn(f"cancel {request_id}", self._cancel(request_id, reason))
        self._cancels.add(cancel)
        cancel.add_done_callback(self._cancels.discard)

    async def cancel_now(self, request_id: str, reason: str) -> None:
        """Ask for the end of a request; returns when the log has it. Raises ApiError."""
        async with self._answering():
            await self._send_cancel(request_id, reason, PUBLISH_TIMEOUT_S)

    async def _cancel(self, request_id: str, reason: str) -> None:
        try:
            await self._send_cancel(request_id, reason, CANCEL_TIMEOUT_S)
        except StreamError as e:
            log.warning("%s keeps running: its Cancel was not acknowledged: %s", request_id, e)

    async def _send_cancel(self, request_id: str, reason: str, within_s: float) -> None:
        cancel = Cancel(id=request_id, reason=reason)
        until = self._clock.now() + within_s
        await self._publisher.publish(REQUESTS, request_id, cancel, until=until)

    def _reads(self, lane: int) -> bool:
        return lane % self._settings.gateway_count == self._settings.gateway_index


def _failure(error: BaseException) -> ApiError | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StreamError):
        return error_of_stream(error)
    if isinstance(error, TimeoutError):
        return error_of_stream(BrokerUnavailable("no answer in time"))
    return None
