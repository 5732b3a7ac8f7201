"""Dispatch of one request: when a worker has room for it (`admission.py`), write decision
(`Assigned`) and work (`Assignment`).

The order of appends and barriers is the contract: after a crash between two steps
`app/routing/reconcile.py` finds the rest. The lane's owner (`owner.py`) runs one procedure at a
time per request. Every wait ends with the request's deadline, and at once by its Cancel.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace
from opentelemetry.trace import Span

from kvlane.app.lanes.admission import REJECTION_REASONS, RETRY_AFTER_BY_CODE, Admission, RenewalDue
from kvlane.app.lanes.context import RouterContext, ViewStopped
from kvlane.app.lanes.handovers import HandOver, HandOvers, bootstrap_info
from kvlane.app.lanes.remaining_work import DeferredRequest, RemainingWork, continuation_blocker
from kvlane.app.lanes.scheduler import wait_for_room
from kvlane.app.lanes.termination import CancellableWaits, RequestTermination, RequestWait
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.selection.decision import Placement, Rejection
from kvlane.app.routing.selection.handover_rules import prefill_request
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.request_state import RunId
from kvlane.app.runtime import spans
from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.errors import PositionLost, RecordError, RecordTooLarge, StreamError
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import OutgoingRecord
from kvlane.streams.records import Assigned, Assignment, DryRunResult, Phase, SessionUse, Usage
from kvlane.streams.request import BootstrapInfo, Request
from kvlane.streams.topics import ASSIGNMENTS, LEDGER

LOG_LOOKUP_TIMEOUT_S = 10.0
"""Least time-out to read the emitted tokens from the log, also near the deadline."""


def look_up_s(deadline_ms: int, clock: BrokerClock) -> float:
    """Time-out of a read of the log: the rest of the request's time, but enough to read."""
    return max(LOG_LOOKUP_TIMEOUT_S, (deadline_ms - clock.now_ms()) / 1000)


DEFERRED = "deferred: prompts fill their share of the router's queue"


class RequestDeferred(Exception):
    """A prompt from Kafka waits for room without its body; see `resume_deferred`."""

    def __init__(self, reference: DeferredRequest) -> None:
        super().__init__(reference.id)
        self.deferred = reference


def is_request_fault(error: Exception) -> bool:
    """Whether an error is the fault of the request, not of the router or the broker. Unexpected
    ones count as the request's: a router that ended for one would get it again."""
    if isinstance(error, StreamError):
        return isinstance(error, RecordError | PositionLost)
    return not isinstance(error, ViewStopped)


class Dispatcher:
    def __init__(
        self,
        context: RouterContext,
        termination: RequestTermination,
        lane: int,
        waits: CancellableWaits,
    ) -> None:
        self._context = context
        self._termination = termination
        self._lane = lane
        self._ledger = Partition(LEDGER, lane)
        self._waits = waits
        self.handovers = HandOvers(
            int(1000 * context.settings.handover_timeout_s), context.count_awaited
        )
        self._admission = Admission(context, lane, waits, self.handovers)

    async def resume_deferred(self, deferred: DeferredRequest) -> None:
        """Dispatch a deferred prompt when there is room for it; or end it. Raises RenewalDue."""
        s, key = self._context, RequestKey(self._lane, deferred.id)
        waiting = s.queue.waiting_of(deferred.service_class).deferred
        request = None
        try:
            wait = RequestWait(
                s.broker_clock.now_ms(), DEFERRED, is_batch=deferred.service_class == "batch"
            )
            with self._waits.begin(deferred.id, wait):
                until_ms = min(deferred.deadline_ms, deferred.renewal_ms)
                left_s = (until_ms - s.broker_clock.now_ms()) / 1000
                has_room = await wait_for_room(
                    waiting, key, deferred.queue_key, deferred.size, left_s
                )
                if has_room or deferred.renewal_ms < deferred.deadline_ms:
                    async with asyncio.timeout(look_up_s(deferred.deadline_ms, s.broker_clock)):
                        request = await s.scanner.fetch_request(deferred.origin)
            if request is None:
                await self._termination.end(deferred.id, "deadline", REJECTION_REASONS["deadline"])
                return
            if not has_room:
                raise RenewalDue(request, deferred.attempt)
            await self.assign(
                RemainingWork(
                    request, deferred.attempt, deferred.origin, deferred.responses_from,
                    deferred.deadline_ms, deferred.excluded, renewal_ms=deferred.renewal_ms,
                )
            )  # fmt: skip
        except TimeoutError:
            await self._termination.end(deferred.id, "deadline", "the log was not read in time")
        except PositionLost as e:
            await self._termination.end(deferred.id, "lost", f"cannot be read again: {e}")
        finally:
            waiting.release(key)

    async def assign(self, rest: RemainingWork) -> None:
        """Queue a request until a worker can take it, then dispatch it; or end it. Raises
        RequestDeferred for a prompt from Kafka for which there is no room, RenewalDue."""
        s, request = self._context, rest.request
        began_at = s.ctx.clock.now()
        if not request.is_query:
            s.metrics.requests.on_accepted(
                request, is_served=s.model_availability.has_worker(request.model)
            )
        span = spans.NO_SPAN
        if request.traceparent:
            span = spans.start_span("router.select_worker", request, {}, rest.attempt)
        try:
            choice = await self._admission.find_place(rest)
        finally:
            span.end()
        if isinstance(choice, DeferredRequest):
            raise RequestDeferred(choice)
        if isinstance(choice, Rejection):
            await self._reject(request.id, choice)
        elif request.is_query:
            await self._answer_dry_run(rest, choice)
        else:
            await self._dispatch_if_due(rest, choice, began_at)

    async def _find_decode_place(
        self, rest: RemainingWork, choice: Placement
    ) -> Placement | Rejection | DeferredRequest:
        """The place of the decode of a dry run whose prefill would go to this place."""
        if choice.phase != "prefill":
            return choice
        run = RunId(rest.attempt, "prefill", choice.worker_rank.worker, choice.worker_rank.epoch)
        handover = HandOver(rest, run, self._context.broker_clock.now_ms(), b"{}", rest.deadline_ms)
        return await self._admission.find_place(self._decode_work(handover), handover)

    async def assign_decode(self, handover: HandOver) -> bool:
        """Dispatch the decode of a prompt that a prefill worker holds, or computes; or end it.
        False past the time of the hand-over, and after the death of that worker."""
        s, prefill = self._context, handover.prefill
        began_at = s.ctx.clock.now()
        rest = self._decode_work(handover)
        choice = await self._admission.find_place(rest, handover)
        now_ms = s.broker_clock.now_ms()
        if isinstance(choice, Placement):
            is_lost = s.fleet.is_lost(prefill.worker, prefill.epoch)
            if now_ms > handover.until_ms or is_lost:
                return False
            await self._dispatch_if_due(rest, choice, began_at, handover)
        elif isinstance(choice, Rejection):
            if handover.until_ms < now_ms <= rest.deadline_ms:
                return False
            await self._reject(rest.request.id, choice)
        return True

    async def release(self, request_id: str) -> None:
        """Let a decode worker fetch the blocks that are held for a request whose End is written,
        which frees them before the end of their lease. It generates one token, which no reader
        sees: engines have no other call for it. Best effort."""
        state = self._context.ledger.request(self._lane, request_id)
        handover = None if state is None else self.handovers.usable(request_id, state.attempt)
        if handover is None:
            return
        rest = self._decode_work(handover)
        stop = replace(rest.request.stop, max_tokens=len(rest.emitted) + 1, min_tokens=0)
        rest = rest._replace(request=replace(rest.request, stop=stop))
        choice = await self._admission.find_place(rest, handover, is_cancellable=False)
        if isinstance(choice, Placement) and self._is_due(rest, "decode"):
            await self._dispatch(rest, choice, handover.until_ms)

    def _decode_work(self, handover: HandOver) -> RemainingWork:
        rules = self._context.queue.handover_rules
        member = self._context.fleet.members.get(handover.prefill.worker)
        return handover.decode_work(() if member is None else member.card.taints, rules)

    async def _reject(self, request_id: str, why: Rejection) -> None:
        again_s = RETRY_AFTER_BY_CODE.get(why.code)
        await self._termination.end(request_id, why.code, why.message, retry_after_s=again_s)

    async def _dispatch_if_due(
        self,
        rest: RemainingWork,
        choice: Placement,
        began_at: float,
        handover: HandOver | None = None,
    ) -> None:
        """Dispatch a request to its place, unless the ledger shows that this was done."""
        s, request = self._context, rest.request
        if not self._is_due(rest, choice.phase):
            return
        if handover is not None:
            s.metrics.on_handover("used")
        waited_s = s.ctx.clock.now() - began_at
        s.metrics.on_dispatched(rest.attempt, PromptHashes(request), choice, waited_s)
        span = _route_span(rest, choice) if request.traceparent else spans.NO_SPAN
        try:
            await self._dispatch(rest, choice, 0 if handover is None else handover.until_ms)
        finally:
            span.end()

    def _is_due(self, rest: RemainingWork, phase: Phase) -> bool:
        """Whether the ledger has no run of this phase, no later attempt and no end. A worker's
        refusal without our Assigned does not make an id known: its Assigned is due."""
        now = self._context.ledger.request(self._lane, rest.request.id)
        if now is None or not now.is_known:
            return True
        runs = [run for run in now.runs if phase != "decode" or run.phase != "prefill"]
        return not (now.ended or now.attempt > rest.attempt or runs)

    async def _answer_dry_run(self, rest: RemainingWork, choice: Placement) -> None:
        """Answer a dry run. It counts in no load, no session and no cache."""
        s, request = self._context, rest.request
        s.metrics.on_dry_run(PromptHashes(request), choice)
        decode = await self._find_decode_place(rest, choice)
        if isinstance(decode, Rejection):
            await self._reject(request.id, decode)
            return
        assert isinstance(decode, Placement), "decode is never deferred"
        placed = DryRunResult(
            worker_id=decode.worker_rank.worker,
            dp_rank=decode.worker_rank.rank,
            token_ids=tuple(unpack_tokens(request.token_ids)),
        )
        if decode is not choice:
            worker, _, rank = choice.worker_rank
            placed = replace(placed, prefill_worker_id=worker, prefill_dp_rank=rank)
        usage = Usage(prompt_tokens=rest.prompt_tokens, cached_tokens=choice.cached_tokens)
        try:
            await self._termination.end(request.id, "stop", usage=usage, placed=placed)
        except RecordTooLarge:
            message = "the tokens do not fit into one record"
            await self._termination.end(request.id, "too_large", message)

    async def _dispatch(
        self, rest: RemainingWork, choice: Placement, handover_until_ms: int
    ) -> None:
        """Write the decision to the ledger and the work to the worker's slot, and read the decision
        back. No transaction: a decision without work is found as not started, work without a
        decision announces itself by Started."""
        s, request = self._context, rest.request
        worker, epoch, _ = choice.worker_rank
        run = RunId(rest.attempt, choice.phase, worker, epoch)
        bootstrap = None
        if run.phase == "prefill":
            bootstrap = self._bootstrap_of(choice.worker_rank)
            begun = self.handovers.begin(
                rest, run, s.broker_clock.now_ms(), bootstrap, choice.forecast.ttft_ms
            )
            handover_until_ms = begun.until_ms
        member = s.fleet.members.get(worker)
        assigned = decision_record(
            rest, run, choice, s.name, s.ledger.last_append_ms,
            continues_guided=member is not None and member.card.config.continues_guided,
            routing_order=s.routing.order_in_use,
        )  # fmt: skip
        assignment = assignment_record(
            rest, run, choice, bootstrap, s.broker_clock.now_ms(), handover_until_ms
        )
        slot = s.assignments_partition(run.worker).partition
        try:
            with s.count_unconfirmed(run, request, choice):
                decision, _ = await s.publisher.publish_together(
                    OutgoingRecord(LEDGER, self._lane, request.id, assigned),
                    OutgoingRecord(ASSIGNMENTS, slot, run.worker, assignment),
                )
                await s.wait_for_ledger(self._ledger, decision.offset + 1)
        except RecordTooLarge:
            await self._termination.end(
                request.id, "too_large", "the request does not fit into one record"
            )

    def _bootstrap_of(self, place: WorkerRank) -> BootstrapInfo | None:
        member = self._context.fleet.members.get(place.worker)
        if member is None:
            return None
        return bootstrap_info(member.card, place.rank, self._context.ctx.rng)


def _route_span(rest: RemainingWork, choice: Placement) -> Span:
    attributes: dict[str, str | int] = {
        "worker_id": choice.worker_rank.worker,
        "dp_rank": choice.worker_rank.rank,
        "overlap_blocks": choice.overlap_blocks,
        "phase": choice.phase,
    }
    return spans.start_span(
        "router.route_request",
        rest.request,
        attributes,
        rest.attempt,
        own_id=spans.route_of(choice.phase),
    )


def decision_record(
    rest: RemainingWork, run: RunId, choice: Placement, router: str, known_ms: int,
    *, continues_guided: bool, routing_order: int | None = None,
) -> Assigned:  # fmt: skip
    """The decision for a run. `known_ms`: append time of the youngest record of the ledger read.
    `continues_guided`: as in the config of the run's engine. `routing_order`: as in `Assigned`."""
    request = rest.request
    is_guided = request.sampling.guided_decoding is not None
    can_continue = (continues_guided or not is_guided) and not continuation_blocker(request)
    return Assigned(
        id=request.id, attempt=run.attempt, phase=run.phase, worker=run.worker, epoch=run.epoch,
        origin=rest.origin, responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
        rank=choice.worker_rank.rank, base_tokens=len(rest.emitted),
        prompt_tokens=rest.prompt_tokens,
        policy=choice.policy, params=choice.params, seed=choice.seed,
        block_size=choice.block_size, cached_tokens_predicted=choice.cached_tokens,
        prefill_tokens=choice.prefill_tokens, router=router,
        held_ms=choice.forecast.waited_ms, ttft_ms_predicted=choice.forecast.ttft_ms,
        session=_session_use(request, choice), lora_name=request.hints.lora_name or "",
        known_ms=known_ms,
        service_class=request.service_class, is_preemptible=can_continue,
        choice=choice.choice, candidate_rows=choice.record, is_prompt=request.queued_ms > 0,
        itl_ms_predicted=choice.forecast.itl_ms, prefix_marks=choice.prefix_marks,
        account=request.account, routing_order=routing_order,
    )  # fmt: skip


def assignment_record(
    rest: RemainingWork, run: RunId, choice: Placement, bootstrap: BootstrapInfo | None,
    now_ms: int, handover_until_ms: int,
) -> Assignment:  # fmt: skip
    return Assignment(
        worker=run.worker, epoch=run.epoch, rank=choice.worker_rank.rank, attempt=run.attempt,
        phase=run.phase, request=_request_of(rest, choice, bootstrap), origin=rest.origin,
        responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
        budget_s=(rest.deadline_ms - now_ms) / 1000,
        taken=pack_tokens(rest.emitted), taken_chars=rest.emitted_chars,
        handoff_until_ms=handover_until_ms, taken_data_chars=rest.emitted_data_chars,
    )  # fmt: skip


def _request_of(rest: RemainingWork, choice: Placement, bootstrap: BootstrapInfo | None) -> Request:
    """The request as its worker gets it: with the rank that was chosen."""
    request, place = rest.request, choice.worker_rank
    if request.result is not None and request.result.stored is not None:
        request = replace(request, result=None)  # no worker reads it
    if choice.phase == "prefill":
        return prefill_request(request, place, len(rest.emitted), bootstrap)
    if place.rank == (request.hints.dp_rank or 0):
        return request
    return replace(request, hints=replace(request.hints, dp_rank=place.rank))


def _session_use(request: Request, choice: Placement) -> SessionUse | None:
    control = request.hints.session_control
    if control is None:
        return None
    bound = choice.session_rank or WorkerRank("", 0)
    return SessionUse(
        id=control.session_id, timeout_s=control.timeout, closes=control.action == "close",
        bound_worker=bound.worker, bound_epoch=bound.epoch, bound_rank=bound.rank,
    )  # fmt: skip
