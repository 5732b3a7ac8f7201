"""Admission of a request: it waits until a worker can take it, or is refused, or deferred.

Owns the rules of refusal: which requests may wait, and for how long. Every wait ends with the
request's deadline, and at once by its Cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.handovers import HandOver, HandOvers
from kvlane.app.lanes.remaining_work import DeferredRequest, RemainingWork
from kvlane.app.lanes.termination import CancellableWaits, RequestWait
from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.selection.decision import Placement, Rejection, Wait
from kvlane.app.routing.selection.handover_rules import FirstPhase
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EndCode
from kvlane.streams.request import Request

RETRY_AFTER_S = 1.0
"""Retry-After for rejected clients: by then the queue has advanced by roughly the work that one
worker completes in a second."""
DECODE = FirstPhase("decode")
MAX_SPLIT_ATTEMPTS = 3
"""Attempts in which a prompt is handed over. With decode workers that are full for longer than a
hand-over lasts, prompts would be computed again and again."""
MAX_NAME_IN_MESSAGE = 64
"""Characters of a model's name in the message of an end."""

REJECTION_REASONS: Mapping[EndCode, str] = {
    "model_not_found": "no worker of this deployment serves the model",
    "queue_full": "the queue for workers is full",
    "deadline": "no worker had capacity for it in time",
    "no_workers": "its model has no worker, and none appeared in time",
    "none_eligible": "no worker satisfies the request's constraints",
    "all_busy": "all eligible workers are at capacity",
    "pinned_busy": "the worker that it is pinned to could not take it",
}
"""Messages of rejections."""


RETRY_AFTER_BY_CODE: Mapping[EndCode, float] = {
    "queue_full": RETRY_AFTER_S,
    "all_busy": RETRY_AFTER_S,
    "pinned_busy": RETRY_AFTER_S,
    "no_workers": 10.0,
}
"""Retry-After by rejection that may be over soon; an engine takes longer to start than to free
capacity."""


class RenewalDue(Exception):
    """A batch request has waited so long that its record in `requests` is to be appended again.
    `attempt`: above 0 for a request that has begun."""

    def __init__(self, request: Request, attempt: int) -> None:
        super().__init__(request.id)
        self.request = request
        self.attempt = attempt


class Admission:
    def __init__(
        self, context: RouterContext, lane: int, waits: CancellableWaits, handovers: HandOvers
    ) -> None:
        self._context = context
        self._lane = lane
        self._waits = waits
        self._handovers = handovers

    async def find_place(
        self, rest: RemainingWork, handover: HandOver | None = None, *, is_cancellable: bool = True
    ) -> Placement | Rejection | DeferredRequest:
        """Wait for a worker with capacity until the deadline; else the reason of the rejection. A
        full queue takes requests that have begun: there are no more of them than workers had
        runs."""
        s, request = self._context, rest.request
        wait = Wait("")
        until_ms = min(rest.deadline_ms, math.inf if handover is None else handover.until_ms)
        lane_request = self._lane_request_of(rest, handover)
        if handover is None and self._is_shed(rest, lane_request):
            return rejection("queue_full", "requests wait for every worker of its model")
        try:
            while s.broker_clock.now_ms() <= until_ms:
                first = DECODE if handover else self._first_phase(rest, lane_request)
                if first.phase != lane_request.phase:
                    lane_request = replace(lane_request, phase=first.phase)
                planned = (
                    s.queue.dry_run(lane_request, s.broker_clock.now_ms())
                    if request.is_query
                    else await s.scheduler.schedule(lane_request)
                )
                if isinstance(planned, Placement):
                    return replace(planned, choice=first.choice)
                if not isinstance(planned, Wait):
                    return planned
                wait = planned
                if refusal := self._refusal(rest, lane_request, wait):
                    return refusal
                if s.broker_clock.now_ms() >= rest.renewal_ms:
                    raise RenewalDue(request, rest.attempt)
                place = None if wait.reservation is None else wait.reservation.worker_rank
                current = RequestWait(
                    lane_request.since_ms, wait.reason, "" if place is None else place.worker,
                    lane_request.is_batch,
                )  # fmt: skip
                with self._waits.begin(request.id, current, is_cancellable=is_cancellable):
                    ends_ms = self._wait_ends_ms(until_ms, rest, lane_request, wait)
                    await s.scheduler.wait_for_change(lane_request, planned, ends_ms)
        finally:
            s.scheduler.leave(lane_request)
        if not s.model_availability.has_worker(request.model):
            return rejection("no_workers", wait.reason)
        code: EndCode = "deadline" if wait.code == "no_workers" else wait.code
        return rejection(code, wait.reason)

    def _wait_ends_ms(
        self, until_ms: float, rest: RemainingWork, lane_request: LaneRequest, wait: Wait
    ) -> float:
        """The broker time at which a wait ends: `until_ms`, or a renewal or refusal before it."""
        ends_ms = min(until_ms, rest.renewal_ms)
        if wait.code == "no_workers" and lane_request.phase != "decode" and not rest.has_begun:
            absent_until_ms = self._context.model_availability.absent_until_ms
            ends_ms = min(ends_ms, absent_until_ms(rest.request.model))
        return ends_ms

    def _lane_request_of(self, rest: RemainingWork, handover: HandOver | None) -> LaneRequest:
        """The request as the scheduler plans it; a decode keeps the place of its prefill."""
        s, request = self._context, rest.request
        lane_request = s.queue.waiting_of(request.service_class).new_request(
            RequestKey(self._lane, request.id),
            PromptHashes(request, pack_tokens(rest.emitted)),
            s.ctx.rng.getrandbits(32),
            s.broker_clock.now_ms(),
            rest.deadline_ms,
            rest.excluded,
        )
        if handover is None:
            return lane_request
        since_ms = min(handover.since_ms, lane_request.since_ms)
        return replace(lane_request, phase="decode", since_ms=since_ms)

    def _first_phase(self, rest: RemainingWork, lane_request: LaneRequest) -> FirstPhase:
        s, is_late = self._context, rest.attempt >= MAX_SPLIT_ATTEMPTS
        stays_whole = bool(rest.excluded) or is_late or not self._handovers.has_room
        return s.queue.first_phase(lane_request, s.broker_clock.now_ms(), stays_whole=stays_whole)

    def _is_shed(self, rest: RemainingWork, lane_request: LaneRequest) -> bool:
        """Load shedding: whether a new request over HTTP is refused before it is planned, since a
        plan would reserve a place, and change the order of the queue."""
        request = rest.request
        if rest.attempt or rest.has_begun or request.queued_ms or request.is_query:
            return False
        return not lane_request.is_batch and self._context.queue.is_backed_up(lane_request)

    def _refusal(
        self, rest: RemainingWork, lane_request: LaneRequest, wait: Wait
    ) -> Rejection | DeferredRequest | None:
        """Why a request may not wait; one that has begun is refused only for a missing model."""
        s, model = self._context, rest.request.model
        if wait.needs_new_worker and not rest.has_begun:
            return rejection(wait.code, wait.reason)
        waiting = s.queue.waiting_of(rest.request.service_class)
        is_new = lane_request.key not in waiting.keys
        if is_new and not s.model_availability.is_known(model):
            return rejection("model_not_found", repr(model[:MAX_NAME_IN_MESSAGE]))
        if rest.has_begun or lane_request.phase == "decode":
            return None
        now_ms = s.broker_clock.now_ms()
        if wait.code == "no_workers" and s.model_availability.is_timed_out(model, now_ms):
            return rejection("no_workers", wait.reason)
        return self._excess(rest, lane_request, wait) if is_new else None

    def _excess(
        self, rest: RemainingWork, lane_request: LaneRequest, wait: Wait
    ) -> Rejection | DeferredRequest | None:
        """The result if the queue is full: prompts from Kafka, and batch requests, are deferred; of
        the others those are refused of which no prompt was computed by a prefill worker."""
        waiting = self._context.queue.waiting_of(rest.request.service_class)
        if rest.request.queued_ms or lane_request.is_batch:
            return _reference(rest, lane_request) if waiting.must_defer(lane_request) else None
        split_attempts = 1 if lane_request.phase == "prefill" else MAX_SPLIT_ATTEMPTS
        is_full = rest.attempt < split_attempts and waiting.is_full(lane_request.queue_key)
        return rejection("queue_full", wait.reason) if is_full else None


def _reference(rest: RemainingWork, lane_request: LaneRequest) -> DeferredRequest:
    size = QueueSize(1, rest.prompt_tokens, rest.request.prompt_bytes)
    return DeferredRequest(
        rest.request.id, rest.attempt, rest.origin, rest.responses_from, rest.deadline_ms,
        rest.excluded, lane_request.queue_key, size, rest.request.service_class,
        rest.renewal_ms,
    )  # fmt: skip


def rejection(code: EndCode, why: str = "") -> Rejection:
    return Rejection(code, f"{REJECTION_REASONS[code]}: {why}" if why else REJECTION_REASONS[code])
