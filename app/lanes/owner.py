"""The owner of a lane, responsible for every request in it.

A `LaneOwner` exists from the assignment of a lane to this router until its revocation. It accepts
requests (each is done when its decision or end is in the ledger, or its record was appended again),
and executes the actions that `app/routing/reconcile.py` finds due, also for requests of the owner
before it. At most one job per request runs at a time (`dispatch.py`, `failover.py`,
`termination.py`); all are cancelled with the ownership, at any step: the next owner finds the same
actions due by the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvlane.app.lanes.admission import RenewalDue
from kvlane.app.lanes.context import RouterContext
from kvlane.app.lanes.dispatch import Dispatcher, RequestDeferred, is_request_fault
from kvlane.app.lanes.failover import NOTHING_SHOWN, Failover
from kvlane.app.lanes.lane_backpressure import LaneBackpressure
from kvlane.app.lanes.remaining_work import RemainingWork, deadline_of, renewal_of
from kvlane.app.lanes.termination import (
    CancellableWaits,
    RequestCancelled,
    RequestTermination,
    RequestWait,
)
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.reconcile import (
    Action,
    ActionTimes,
    Decode,
    Evacuate,
    Finish,
    RequestTimers,
    Restart,
    Verify,
    next_action,
    next_action_times,
)
from kvlane.app.routing.state.fleet import LastHeartbeat
from kvlane.app.routing.state.request_state import (
    OPEN,
    LedgerRecord,
    RequestState,
    RunId,
    WorkerEpoch,
)
from kvlane.streams.clock import LeaderClock
from kvlane.streams.codecs import TOKEN_BYTES
from kvlane.streams.errors import RecordError, StreamError
from kvlane.streams.ports import Partition
from kvlane.streams.reading.group_consumer import PartitionClaim
from kvlane.streams.records import Cancel, LogRecord, Refused, RequestOffset, RunKey, RunProgress
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS, RESPONSES, lane_of

log = logging.getLogger(__name__)

JobFactory = Callable[[], Coroutine[Any, Any, None]]
"""A job to be begun. Called when its task runs: one that is cancelled before leaves nothing."""


class LaneOwner:
    def __init__(self, context: RouterContext, claim: PartitionClaim) -> None:
        self.claim = claim
        self.serving = False
        self._context = context
        self._lane = claim.partition
        self._termination = RequestTermination(context, claim.partition)
        self._waits = waits = CancellableWaits(self._has_cancel)
        self._dispatcher = Dispatcher(context, self._termination, self._lane, waits)
        self._failover = Failover(context, self._termination, self._lane, self._dispatcher, waits)
        self._deadlines = RequestTimers()
        self._run_timers = RequestTimers()
        """By the clock of the ledger's leader (`ActionTimes`)."""
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._records_behind: dict[str, deque[LogRecord]] = {}
        self._arrived: dict[str, int] = {}  # offsets of the requests being admitted
        self._batch_arrived: set[str] = set()  # those of them that are batch requests
        self._renewed: dict[str, set[int]] = {}
        """Requests that were appended again, and not read since: the offsets of their records."""
        self._backpressure = LaneBackpressure(context, claim)
        self._requests_clock = LeaderClock(context.ctx.clock, context.broker_clock)
        self._ledger_clock = LeaderClock(context.ctx.clock, context.broker_clock)
        self._unread_end = 0
        """Requests before it waited in the log when this lane was assigned."""
        self.take_over = context.ctx.spawn(f"take over lane {self._lane}", self._begin())

    # --- from outside ----------------------------------------------------------------------------

    def on_request_record(self, log_record: LogRecord) -> None:
        """A record of `requests` arrived in this lane. Raises RecordError for one of another
        lane."""
        record = log_record.record
        assert isinstance(record, Request | Cancel | Refused), "the intake lets no other types pass"
        if log_record.offset >= self._unread_end:
            self._requests_clock.observe(log_record.timestamp_ms)
        if (lane := lane_of(record.id, self._context.partitions[REQUESTS])) != self._lane:
            raise RecordError(
                f"{record.id!r} belongs in lane {lane}, not in {self._lane}: "
                "its producer does not partition keys by murmur2"
            )
        job = self._jobs.get(record.id)
        if job is None:
            self._start(record.id, partial(self._take, log_record), log_record)
            self._backpressure.pause_if_clogged(self._appending_jobs)
            return
        self._put_behind(log_record, record)
        if isinstance(record, Cancel) and record.id in self._waits.cancellable_ids:
            job.cancel()  # `_ended` goes on with the Cancel

    def _put_behind(self, log_record: LogRecord, record: Request | Cancel | Refused) -> None:
        """Let a record wait for the job of its request. One of each kind waits; another one, or a
        Request whose first is being admitted or known, is done at once. Of renewals of a request
        that has begun the last one waits, so that the next owner reads it."""
        waiting = self._records_behind.setdefault(record.id, deque())
        again = isinstance(record, Request) and (
            record.id in self._arrived or self._is_known(log_record, record.id)
        )
        if isinstance(record, Request) and record.shown is not None:
            for before in [w for w in waiting if isinstance(w.record, Request)]:
                waiting.remove(before)
                self.claim.mark_done(before.offset)
            light = Request(id=record.id, queued_ms=record.queued_ms, shown=NOTHING_SHOWN)
            waiting.append(LogRecord(log_record.offset, log_record.timestamp_ms, light))
        elif again or any(type(w.record) is type(record) for w in waiting):
            self.claim.mark_done(log_record.offset)
        else:
            waiting.append(log_record)

    def _has_cancel(self, request_id: str) -> bool:
        return any(isinstance(w.record, Cancel) for w in self._records_behind.get(request_id, ()))

    def on_record(self, log_record: LogRecord, *, is_replay: bool) -> None:
        if not is_replay:
            self._ledger_clock.observe(log_record.timestamp_ms)
        if isinstance(log_record.record, LedgerRecord):
            self._dispatcher.handovers.on_record(log_record, self._ledger_clock.lag_ms)
            self.reconcile(log_record.record.id)

    def reconcile(self, request_id: str) -> None:
        """Find the action that is due for one request, if any, and start it."""
        if not self.serving or request_id in self._jobs:
            return  # it is looked at when the job is over
        s = self._context
        now_ms = s.broker_clock.now_ms()
        state = s.ledger.request(self._lane, request_id)
        if state is None or state.ended:
            state = None  # nothing is due any more
            s.queue.evacuation.forget(request_id)
        self._drop_handover(request_id, state)
        action = None if state is None else self._next_action(request_id, state, now_ms)
        times = ActionTimes()
        if state is not None and action is None:
            lag_ms = self._ledger_clock.lag_ms
            times = next_action_times(request_id, state, now_ms, s.timeouts, lag_ms)
        self._deadlines.set(request_id, times.deadline_ms)
        self._run_timers.set(request_id, times.run_ms)
        self._set_back_off(request_id, state if action is None else None)
        match action:
            case Restart():
                self._start(request_id, partial(self._failover.restart, request_id, action))
            case Finish(code):
                self._start(request_id, partial(self._termination.end, request_id, code))
            case Decode(attempt):
                self._start(request_id, partial(self._decode, request_id, attempt))
            case Verify(run):
                self._start(request_id, partial(self._failover.verify, request_id, run))
            case Evacuate(run):
                self._start(request_id, partial(self._failover.evacuate, request_id, run))
            case None:
                pass

    def _next_action(self, request_id: str, state: RequestState, now_ms: int) -> Action | None:
        s = self._context
        lag_ms = self._ledger_clock.lag_ms
        action = next_action(request_id, state, s.fleet, now_ms, s.timeouts, lag_ms)
        if action is None and s.queue.batch.gives_way(request_id, state, now_ms):
            return Restart(state.attempt + 1, "preempted")
        if action is None and self._is_decode_due(request_id, state):
            return Decode(state.attempt)
        if action is None and (run := s.queue.evacuation.due(request_id, state, now_ms)):
            return Evacuate(run)
        return action

    def _is_decode_due(self, request_id: str, state: RequestState) -> bool:
        """Whether decode begins beside a prefill that this owner has dispatched. For another owner,
        which has no hand-over to use, nothing is due before that prefill ends."""
        has_prefill = any(run.state in OPEN for run in state.runs.values())
        has_decode = any(run_id.phase != "prefill" for run_id in state.runs)
        handovers = self._dispatcher.handovers
        is_begun = handovers.has_bootstrap(request_id, state.attempt)
        return is_begun and has_prefill and not has_decode

    def _drop_handover(self, request_id: str, state: RequestState | None) -> None:
        handovers = self._dispatcher.handovers
        if state is None or state.is_finished:
            handovers.drop(request_id)
        else:
            handovers.drop_others(request_id, state.attempt)

    async def _decode(self, request_id: str, attempt: int) -> None:
        """Dispatch the decode of an attempt; begin the next one without a usable hand-over."""
        handovers = self._dispatcher.handovers
        handover = handovers.usable(request_id, attempt)
        if handover is None:
            self._context.metrics.on_handover("unused")
            await self._failover.restart(request_id, Restart(attempt + 1, "handover_unused"))
        elif await self._dispatcher.assign_decode(handover):
            handovers.drop(request_id)
        else:
            handovers.give_up(request_id)

    def _set_back_off(self, request_id: str, state: RequestState | None) -> None:
        """A request that backs off waits, in the queue of its class."""
        key = RequestKey(self._lane, request_id)
        for service_class in ("interactive", "batch"):
            keys = self._context.queue.waiting_of(service_class).keys
            is_its = state is not None and state.is_batch == (service_class == "batch")
            if state is not None and is_its and _backs_off(state):
                keys.add(key)
            else:
                keys.discard(key)

    @property
    def admitted_requests(self) -> int:
        """How many requests were handed to this lane and are neither assigned nor ended."""
        return len(self._arrived)

    @property
    def admitted_batch_requests(self) -> int:
        """How many of them are batch requests."""
        return len(self._batch_arrived)

    @property
    def waits(self) -> Mapping[str, RequestWait]:
        """The waits of its requests for a worker, for room, or for records, by request id."""
        return self._waits.latest

    def reconcile_all(self) -> None:
        for request_id in list(self._context.ledger.lane(self._lane).unfinished):
            self.reconcile(request_id)

    def reconcile_due(self) -> None:
        """Reconcile the requests for which time or the fleet may have made an action due. Ledger
        records reconcile their own request, and heartbeats the runs that they fail to list."""
        if not self.serving:
            return
        now_ms = self._context.broker_clock.now_ms()
        due = self._deadlines.due(now_ms) + self._run_timers.due(now_ms - self._ledger_clock.lag_ms)
        for request_id in due:
            self.reconcile(request_id)
        fleet, evacuated = self._context.fleet, self._context.queue.evacuation.workers
        for (worker, epoch), runs in list(self._open_runs.items()):
            beat = fleet.heartbeats.get(worker)
            is_dubious = beat is None or beat.epoch != epoch or fleet.is_lost(worker, epoch)
            if is_dubious or worker in evacuated:
                self._check_each(runs)

    def reconcile_unlisted(self, worker: str, epoch: int, beat: LastHeartbeat) -> None:
        if beat.epoch == epoch and (runs := self._open_runs.get((worker, epoch))):
            self._check_each(sorted(runs.keys() - beat.running.keys()))

    @property
    def _open_runs(self) -> Mapping[WorkerEpoch, Mapping[RunKey, None]]:
        return self._context.ledger.lane(self._lane).open_runs

    def _check_each(self, runs: Iterable[RunKey]) -> None:
        for request_id in dict.fromkeys(run.id for run in runs):
            self.reconcile(request_id)

    def on_heartbeat_run(self, worker: str, epoch: int, key: RunProgress) -> None:
        """A heartbeat lists a run of this lane: cancel it when readers do not see it any more.
        Until the Fence after a Fencing is in the log, which a run of the new attempt proves,
        readers take the last Chunk of a cancelled run as the end. Runs without a known Assigned are
        left alone."""
        state = self._context.ledger.request(self._lane, key.id)
        if not self.serving or state is None or not state.is_known:
            return
        run_id = RunId(key.attempt, key.phase, worker, epoch)
        run = state.runs.get(run_id)
        closed = run is not None and run.state not in OPEN
        fenced = bool(state.runs) or self._failover.fenced.get(key.id) == state.attempt
        if state.ended or closed or (key.attempt < state.attempt and fenced):
            self._context.ctx.spawn(
                "cancel run", self._termination.cancel_runs(key.id, [run_id], "superseded")
            )

    def close(self) -> None:
        """The lane was revoked: stop everything at once."""
        self.serving = False
        self.take_over.cancel()
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()
        self._records_behind.clear()
        self._dispatcher.handovers.clear()
        for waiting in (self._context.queue.waiting, self._context.queue.batch.waiting):
            keys = waiting.keys
            keys -= {key for key in keys if key.lane == self._lane}

    @property
    def _appending_jobs(self) -> int:
        """Jobs that do not wait for a worker: they append to topics."""
        return len(self._jobs) - len(self._waits.waiting_ids)

    def resume_if_relieved(self) -> None:
        if self.serving:
            self._backpressure.resume_if_relieved(self._appending_jobs)

    # --- jobs ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Serve only when the ledger, as it was after the assignment, has been read. The fleet has
        been read already: before that a router joins no group."""
        s = self._context
        await self._termination.catch_up_with_ledger()
        s.response_end_offsets[self._lane] = await s.end_offset(Partition(RESPONSES, self._lane))
        self._unread_end = await s.end_offset(Partition(REQUESTS, self._lane))
        self.serving = True
        s.resume(self.claim)
        self.reconcile_all()

    def _start(
        self, request_id: str, work: JobFactory, log_record: LogRecord | None = None
    ) -> None:
        """Begin a job; `log_record` is the record that it handles, done when the job is."""
        if log_record is not None and isinstance(log_record.record, Request):
            self._backpressure.add_prompt(request_id, log_record.record.prompt_bytes)
        job = self._context.ctx.spawn(
            f"lane {self._lane} {request_id}",
            self._run(request_id, work, None if log_record is None else log_record.offset),
        )
        self._jobs[request_id] = job
        job.add_done_callback(lambda _: self._ended(request_id, job))

    async def _run(self, request_id: str, work: JobFactory, offset: int | None) -> None:
        """Run a job to its end. One that fails ends its request."""
        try:
            await self._work_through(request_id, work, offset)
        except RequestCancelled:
            return
        except Exception as e:
            if not is_request_fault(e):
                raise
            log.exception("lane %d: %s cannot be handled and is ended", self._lane, request_id)
            await self._termination.end(
                request_id, "internal", f"the router failed on it: {_name(e)}"
            )
        if offset is not None and offset not in self._renewed.get(request_id, ()):
            self._batch_arrived.discard(request_id)
            if request_id not in self._renewed:
                self._termination.prompts.discard(request_id)
                self._termination.offsets.pop(request_id, None)
                self._termination.accounts.pop(request_id, None)
            for done in (self._arrived.pop(request_id, offset), offset):
                self.claim.mark_done(done)

    async def _work_through(self, request_id: str, work: JobFactory, offset: int | None) -> None:
        """Run a job. One that is deferred goes on without the record it began with."""
        while True:
            try:
                await work()
                return
            except RequestDeferred as e:
                work = partial(self._dispatcher.resume_deferred, e.deferred)
                self._backpressure.drop_prompt(request_id)
            except RenewalDue as e:
                work = partial(self._renew, e.request, offset)
                if e.attempt:  # the restart reads the answer so far
                    again = Restart(e.attempt, "resume")
                    work = partial(self._failover.restart, request_id, again)

    async def _renew(self, request: Request, offset: int | None) -> None:
        """Append a request again, whose record at `offset` would be deleted while it waits. The old
        record is done when the new one is admitted: until then the next owner reads both."""
        arrived = self._arrived.pop(request.id, None)  # the new record is no duplicate of this one
        self._batch_arrived.discard(request.id)
        offsets = self._renewed.setdefault(request.id, set())
        offsets |= {done for done in (arrived, offset) if done is not None}
        renewed = replace(request, is_renewed=True)
        await self._context.publisher.publish(REQUESTS, request.id, renewed, self._lane)

    def _ended(self, request_id: str, job: asyncio.Task[None]) -> None:
        """Start the next record that waited for this job, a Cancel first. After a job that was
        cancelled for any other reason nothing begins: the process ends."""
        if self._jobs.get(request_id) is not job:
            return
        del self._jobs[request_id]
        self._waits.latest.pop(request_id, None)
        self._backpressure.drop_prompt(request_id)
        self.resume_if_relieved()
        was_interrupted = job.cancelled() and not self._has_cancel(request_id)
        if was_interrupted or (not job.cancelled() and job.exception()):
            return
        waiting = self._records_behind.get(request_id)
        if not waiting:
            self._records_behind.pop(request_id, None)
            self.reconcile(request_id)
            return
        log_record = next((w for w in waiting if isinstance(w.record, Cancel)), waiting[0])
        waiting.remove(log_record)
        self._start(request_id, partial(self._take, log_record), log_record)

    async def _take(self, log_record: LogRecord) -> None:
        record = log_record.record
        if isinstance(record, Cancel):
            await self._cancel(record)
            return
        assert isinstance(record, Request | Refused), "no other types are read"
        if isinstance(record, Request):
            for replaced in self._renewed.pop(record.id, ()):
                self.claim.mark_done(replaced)
        if await self._is_repetition(log_record, record):
            return
        self._termination.offsets[record.id] = log_record.offset
        self._termination.accounts[record.id] = record.account
        if record.queued_ms or isinstance(record, Refused):
            self._termination.prompts.add(record.id)
        if isinstance(record, Request) and record.shown is not None:
            why = "no router has read the part of its answer that readers have for too long"
            await self._termination.end(record.id, "lost", f"cannot continue: {why}")
        elif isinstance(record, Request):
            await self._admit(log_record, record)
        else:
            await self._termination.end(record.id, record.code, record.message)

    async def _is_repetition(self, log_record: LogRecord, record: Request | Refused) -> bool:
        """True if the id of a record is taken: the record is a duplicate. If collectors do not find
        the end of the id in the ledger, it gets another one for them
        (`app/results/unanswered_requests.py`)."""
        if self._is_known(log_record, record.id):
            return True
        ledger, appended_ms = self._context.ledger, record.queued_ms or log_record.timestamp_ms
        state = ledger.request(self._lane, record.id)
        is_old = state is not None and state.is_known
        if not (is_old or ledger.is_repetition(self._lane, record.id, appended_ms)):
            return False
        await self._termination.write_terminal(record.id, "seen")
        return True

    async def _admit(self, log_record: LogRecord, request: Request) -> None:
        """Assign a request, or end it. Raises RenewalDue for a batch request that waited in the log
        for half its time there."""
        s = self._context
        self._arrived[request.id] = log_record.offset
        if request.service_class == "batch":
            self._batch_arrived.add(request.id)
        if objection := _objection(request):
            await self._termination.end(request.id, "invalid", objection)
            return
        appended_ms = log_record.timestamp_ms + self._requests_clock.lag_ms
        deadline_ms = deadline_of(request, appended_ms, s.settings)
        renewal_ms = renewal_of(request, deadline_ms, s.settings)
        if s.broker_clock.now_ms() >= renewal_ms:
            raise RenewalDue(request, 0)
        if s.broker_clock.now_ms() > deadline_ms:
            await self._termination.end(
                request.id, "deadline", "its deadline passed before it was read"
            )
        else:
            origin = RequestOffset(topic=REQUESTS, partition=self._lane, offset=log_record.offset)
            start = s.response_end_offsets[self._lane]
            rest = RemainingWork(request, 0, origin, start, deadline_ms, renewal_ms=renewal_ms)
            await self._dispatcher.assign(rest)

    async def _cancel(self, cancel: Cancel) -> None:
        """End a request that its client cancels; a Cancel of an unknown id is ignored."""
        await self._termination.catch_up_with_ledger()
        state = self._context.ledger.request(self._lane, cancel.id)
        if state is not None and state.is_known:
            is_wanted = not state.is_finished
        else:
            is_wanted = cancel.id in self._arrived or cancel.id in self._renewed
        if is_wanted:
            release = partial(self._dispatcher.release, cancel.id)
            await self._termination.end(cancel.id, "cancelled", cancel.reason, release=release)

    def _is_known(self, log_record: LogRecord, request_id: str) -> bool:
        """Whether the ledger has the id, and not its end from before the window of the record."""
        state = self._context.ledger.request(self._lane, request_id)
        if state is None or not state.is_known:
            return False
        window_ms = self._context.settings.dedup_window_s * 1000
        return not state.ended or state.last_ms >= log_record.timestamp_ms - window_ms


def _backs_off(state: RequestState) -> bool:
    """Whether workers refused it, and it is too early to try another one."""
    states = {run.state for run in state.runs.values()}
    return "worker_full" in states and not state.ended and not states & OPEN


def _objection(request: Request) -> str:
    """The fault of a request that no worker could run; "" if none."""
    if not (math.isfinite(request.deadline_s) and request.deadline_s >= 0):
        return f"deadline_s must be a time in seconds, not {request.deadline_s}"
    if len(request.token_ids) % TOKEN_BYTES:
        return "token_ids are not whole numbers of 4 bytes"
    numbers = {"priority_jump": request.hints.priority_jump}
    if request.router is not None:
        numbers |= {
            "ttft_target": request.router.ttft_target,
            "itl_target": request.router.itl_target,
        }
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):  # it would have no place in an order
            return f"{name} must be a number, not {value}"
    return ""


def _name(error: Exception) -> str:
    """The text of an error for readers: only `StreamError`s quote no content of requests."""
    return str(error) if isinstance(error, StreamError) else type(error).__name__
