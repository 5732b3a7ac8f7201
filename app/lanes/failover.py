"""Failover of one request: move it to another worker, or find out whether its run is lost.

The order of appends and barriers is the contract: after a crash between two steps
`app/routing/reconcile.py` finds the rest. Whether an answer is complete follows from its last token
alone (`app/text/stop_conditions.py`): the Chunk with the last character of a stop string has the
finish reason too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.dispatch import Dispatcher, look_up_s
from kvlane.app.lanes.remaining_work import (
    RemainingWork,
    continuation_blocker,
    deadline_of,
    renewal_of,
)
from kvlane.app.lanes.termination import CancellableWaits, RequestTermination, RequestWait
from kvlane.app.routing.reconcile import Restart, RestartReason, is_run_listed
from kvlane.app.routing.state.request_state import OPEN, RequestState, RunId
from kvlane.streams.errors import Malformed, PositionLost, RecordError, RecordTooLarge
from kvlane.streams.ports import Partition
from kvlane.streams.records import Chunk, EndCode, Fence, Fencing, RequestOffset, Usage
from kvlane.streams.request import Request
from kvlane.streams.responses.reply_stream import merge_chunks
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES

log = logging.getLogger(__name__)

MAX_STALLS = 2
"""Engines that may stall with a request before its first token. The request may be the cause, so it
is moved once and not to a third engine."""
LEAVING = "its record is being read, to find another worker for it"
READING_TOKENS = "the tokens that readers have are being read, to continue after them"


NOTHING_SHOWN = Chunk(id="", attempt=0, run="", seq=0, index=0)


class RequestHistory(NamedTuple):
    """The visible part of an answer, and its request; none if the answer is over, or too many
    workers have failed. `shown`: the visible part, if the request is to be appended again."""

    emitted: Transcript
    request: Request | None
    shown: Chunk | None = None


class Failover:
    """The failover of the requests of one lane. `fenced`: the attempts whose Fence stands, of the
    requests that are being restarted."""

    def __init__(
        self,
        context: RouterContext,
        termination: RequestTermination,
        lane: int,
        dispatcher: Dispatcher,
        waits: CancellableWaits,
    ) -> None:
        self.fenced: dict[str, int] = {}
        self._context = context
        self._termination = termination
        self._lane = lane
        self._dispatcher = dispatcher
        self._waits = waits

    async def restart(self, request_id: str, action: Restart) -> None:
        """Move a request to another worker, in a safe order: Fencing (the intent, for another
        owner), Fence (readers ignore the old attempt), ledger to its end, tokens emitted up to the
        first Fence, assignment of the rest. It stops if the attempt has begun, or the request
        ended."""
        s, attempt = self._context, action.attempt
        old_runs = self._termination.active_runs(request_id)
        if action.reason != "resume":
            intent = Fencing(id=request_id, attempt=attempt, reason=action.reason)
            await s.publisher.publish(LEDGER, request_id, intent, self._lane)
            if action.reason == "preempted":
                s.metrics.on_preempted()
        fence = Fence(id=request_id, attempt=attempt, reason=action.reason)
        fenced = await s.publisher.publish(RESPONSES, request_id, fence, self._lane)
        self.fenced[request_id] = attempt
        try:
            await self._termination.catch_up_with_ledger()
            state = s.ledger.request(self._lane, request_id)
            if state is None or state.origin is None or state.ended:
                return
            if state.attempt > attempt or state.runs:
                return
            await self._termination.cancel_runs(request_id, old_runs, action.reason)
            await self._resume_after_fence(request_id, attempt, state, fenced.offset + 1)
        finally:
            self.fenced.pop(request_id, None)

    async def _resume_after_fence(
        self, request_id: str, attempt: int, state: RequestState, stop: int
    ) -> None:
        """Determine the rest of a fenced request, and assign it. `stop`: behind the Fence."""
        try:
            wait = RequestWait(self._context.broker_clock.now_ms(), READING_TOKENS)
            with self._waits.begin(request_id, wait):
                async with asyncio.timeout(
                    look_up_s(state.deadline_ms, self._context.broker_clock)
                ):
                    found = await self._look_up(request_id, attempt, state, stop)
        except (PositionLost, TimeoutError) as e:
            why = str(e) or "the log could not be read in time"
            await self._termination.end(request_id, "lost", f"cannot continue: {why}")
        else:
            await self._continue(request_id, attempt, state, found)

    async def _look_up(
        self, request_id: str, attempt: int, state: RequestState, stop: int
    ) -> RequestHistory:
        """Read the history of a request from the log. Raises PositionLost, RecordError."""
        s, request, shown = self._context, None, None
        assert state.origin is not None
        if state.renewed_at >= 0:
            request = await s.scanner.fetch_request(state.origin)
            if (shown := request.shown) is None:
                raise Malformed(f"{state.origin} lacks the part of the answer that readers have")
        read = partial(
            s.scanner.visible_before, self._lane, request_id, attempt, state.responses_from, stop,
            shown,
        )  # fmt: skip
        emitted = await read()
        may_go_on = state.failures < s.settings.max_attempts
        if emitted.is_over or not may_go_on or state.stalls >= MAX_STALLS:
            return RequestHistory(emitted, None)
        request = request or await s.scanner.fetch_request(state.origin)
        if s.broker_clock.now_ms() < renewal_of(request, state.deadline_ms, s.settings):
            return RequestHistory(emitted, request)
        pieces = [] if shown is None else [shown]
        await read(pieces.append)
        merged = merge_chunks(pieces or [NOTHING_SHOWN])
        shown = replace(merged, id=request_id, attempt=attempt, run="", seq=0)
        return RequestHistory(emitted, request, shown)

    async def _continue(
        self, request_id: str, attempt: int, state: RequestState, found: RequestHistory
    ) -> None:
        """Assign the rest of the request to a worker, or end it if that is impossible."""
        shown, request, _ = found
        if shown.is_over:
            await self._termination.write_terminal(request_id, "seen")
            return
        if request is None:
            what = f"failed on {state.failures} workers"
            if state.stalls >= MAX_STALLS:
                what = f"the engines of {state.stalls} workers stalled before its first token"
            await self._termination.end(request_id, "attempts", f"{what}{_reason(state)}")
            return
        assert state.origin is not None
        rest = RemainingWork(
            replace(request, shown=None), attempt, state.origin, state.responses_from,
            state.deadline_ms, frozenset(state.failed_workers), shown.tokens, shown.chars,
            shown.data_chars,
            renewal_of(request, state.deadline_ms, self._context.settings),
        )  # fmt: skip
        # A worker parses the end of an answer with calls again.
        if request.parsing is None and (code := finish_reason_of(request, shown.tokens)):
            usage = Usage(prompt_tokens=rest.prompt_tokens, completion_tokens=len(rest.emitted))
            await self._termination.end(request_id, code, usage=usage)
        elif why := migration_blocker(request, shown):
            why += _reason(state)
            await self._termination.end(request_id, "lost", f"cannot continue: {why}")
        elif (renewed := await self._renewed(rest, found.shown)) is not None:
            await self._dispatcher.assign(renewed)

    async def _renewed(
        self, rest: RemainingWork, shown_piece: Chunk | None
    ) -> RemainingWork | None:
        """A request with new time limits, once its record is appended again with the answer so far:
        the record, then a Fence that names it (for collectors), then a Fencing (for routers). None
        if the attempt has begun or the request ended. With a record too large the limits stay."""
        if shown_piece is None:
            return rest
        s, request_id, attempt = self._context, rest.request.id, rest.attempt
        record = replace(rest.request, is_renewed=True, shown=shown_piece)
        deadline_ms = deadline_of(record, s.broker_clock.now_ms(), s.settings)
        try:
            appended = await s.publisher.publish(REQUESTS, request_id, record, self._lane)
        except RecordTooLarge as e:
            log.warning("%s has to end within its present time limit: %s", request_id, e)
            return rest._replace(renewal_ms=math.inf)
        fence = Fence(id=request_id, attempt=attempt, reason="renewed", origin=appended.offset)
        fenced = await s.publisher.publish(RESPONSES, request_id, fence, self._lane)
        fencing = Fencing(
            id=request_id, attempt=attempt, reason="renewed",
            origin=RequestOffset(topic=REQUESTS, partition=self._lane, offset=appended.offset),
            responses_from=fenced.offset, deadline_ms=deadline_ms,
            base_tokens=len(shown_piece.token_ids),
        )  # fmt: skip
        moved = await s.publisher.publish(LEDGER, request_id, fencing, self._lane)
        await s.wait_for_ledger(Partition(LEDGER, self._lane), moved.offset + 1)
        state = s.ledger.request(self._lane, request_id)
        if state is None or state.ended or state.attempt > attempt or state.runs:
            return None
        assert state.origin is not None, "the Fencing has one"
        return rest._replace(
            origin=state.origin, responses_from=state.responses_from, deadline_ms=state.deadline_ms,
            renewal_ms=renewal_of(record, state.deadline_ms, s.settings),
        )  # fmt: skip

    async def evacuate(self, request_id: str, run: RunId) -> None:
        """Let another worker continue a run, if one can, and has room now; else it stays."""
        s, evacuation = self._context, self._context.queue.evacuation
        if (state := self._open_request(request_id, run)) is None or state.origin is None:
            return
        with evacuation.moving(request_id, run, state, s.broker_clock.now_ms()) as has_room:
            if not has_room:
                return
            try:
                wait = RequestWait(s.broker_clock.now_ms(), LEAVING, run.worker)
                with self._waits.begin(request_id, wait):
                    async with asyncio.timeout(look_up_s(state.deadline_ms, s.broker_clock)):
                        request = await s.scanner.fetch_request(state.origin)
            except (PositionLost, RecordError, TimeoutError) as e:
                log.warning("%s stays at %s: %s", request_id, run.worker, e)
                evacuation.stay(request_id, run)
                return
            member = s.fleet.members.get(run.worker)
            gives_tokens = member is not None and member.card.config.gives_tokens
            if not gives_tokens or continuation_blocker(request):
                evacuation.stay(request_id, run)
            elif (state := self._open_request(request_id, run)) is None:
                return
            elif not evacuation.take_room(request, state, now_ms := s.broker_clock.now_ms()):
                evacuation.stay_for_now(request_id, run, now_ms)
            else:
                await self.restart(request_id, Restart(state.attempt + 1, "evacuated"))

    async def verify(self, request_id: str, run: RunId) -> None:
        """Find out whether a worker has a run that it should have; restart the request if not. A
        heartbeat after the worker has read its slot to the present end lists the run, unless it is
        finished or was never taken: so the ledger is read to its end before the verdict."""
        s, worker, epoch = self._context, run.worker, run.epoch
        since_ms = s.broker_clock.now_ms()
        read_to = await s.end_offset(s.assignments_partition(worker))
        while (state := self._open_request(request_id, run)) is not None:
            beat = s.fleet.heartbeats.get(worker)
            if s.fleet.is_lost(worker, epoch) or s.broker_clock.now_ms() > state.deadline_ms:
                return
            if beat is not None and beat.epoch == epoch:
                if is_run_listed(s.fleet, request_id, run):
                    return
                if beat.slot_offset >= read_to:
                    break
            wait = RequestWait(since_ms, f"its worker does not list it any more: {worker}")
            with self._waits.begin(request_id, wait):
                await s.heartbeat_read.wait(timeout_s=1.0)
        await self._termination.catch_up_with_ledger()
        state = self._open_request(request_id, run)
        if state is not None:
            run_state = state.runs[run].state
            reason: RestartReason = "not_started" if run_state == "assigned" else "broken"
            await self.restart(request_id, Restart(state.attempt + 1, reason))

    def _open_request(self, request_id: str, run: RunId) -> RequestState | None:
        """The state of a request, if this run of it is open."""
        state = self._context.ledger.request(self._lane, request_id)
        known = state.runs.get(run) if state is not None else None
        return state if known is not None and known.state in OPEN else None


def _reason(state: RequestState) -> str:
    """The reason of the last failure, behind a message for the client."""
    return f"; the last reason: {state.failure_reason}" if state.failure_reason else ""


def finish_reason_of(request: Request, emitted: Sequence[int]) -> EndCode | None:
    """The finish reason if these tokens are the whole answer: only its last Chunk was lost."""
    stop = request.stop
    if emitted and len(emitted) >= stop.min_tokens:
        hidden = () if stop.ignore_eos else (*request.eos_token_ids, *stop.stop_token_ids_hidden)
        if emitted[-1] in hidden or emitted[-1] in stop.stop_token_ids:
            return "stop"
    if stop.max_tokens is not None and len(emitted) >= stop.max_tokens:
        return "length"
    return None


def migration_blocker(request: Request, emitted: Transcript) -> str:
    """Why no engine can continue this answer; "" when one can."""
    if (emitted.chars or emitted.passthrough_count) and not emitted.tokens:
        return "its engine gives no token ids to continue from"
    return continuation_blocker(request) if emitted.tokens else ""
