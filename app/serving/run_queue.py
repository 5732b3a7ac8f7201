"""The runs of one epoch of a worker: admitted, listed, reported to the ledger.

Owns an Assignment from its acceptance to the acknowledgement of its Finished. A run key is executed
at most once. A run is listed in the heartbeats until its Finished is in the ledger: a run that is
in neither was never accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import asdict

from kvlane.app.engine.interface import GenerateContext
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.run_executor import Run, RunEnd, RunExecutor
from kvlane.app.wait_queue import WaitQueue
from kvlane.streams.clock import BrokerClock
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Assignment, CancelRun, Finished, RunKey, RunProgress
from kvlane.streams.topics import LEDGER

log = logging.getLogger(__name__)

UNWANTED = ("cancelled", "superseded", "deadline")
"""Reasons of a CancelRun for a run that is healthy and no longer needed. For other reasons another
run takes its place, since it waits for a transfer that has failed."""

MAX_OPEN_RATIO = 2
"""Open runs per run that the limits admit: most others are rejections whose Finished is in flight.
When the ledger accepts no appends, further Assignments are left unanswered, as heartbeats show."""


class RunLimits(NamedTuple):
    """Capacity of a worker: concurrent runs, and runs that wait; beyond, it is full."""

    max_running: int
    max_waiting: int
    remember_key_s: float
    """A duplicate of an Assignment is appended within this time of the first, unless an outage is
    longer; its key is kept for so long, by append times: a worker may read it much later."""

    @property
    def max_open(self) -> int:
        return MAX_OPEN_RATIO * (self.max_running + self.max_waiting)


class RunQueue:
    """The runs of one epoch. No method but `wait_idle` waits; runs execute in tasks."""

    def __init__(
        self,
        executor: RunExecutor,
        ctx: ProcessContext,
        publisher: RecordPublisher,
        broker_clock: BrokerClock,
        limits: RunLimits,
        worker: str,
        epoch: int,
        on_over: Callable[[Run, RunEnd], None],
    ) -> None:
        """`on_over`: called for each run once its Finished is in the ledger."""
        self.epoch = epoch
        self._on_over = on_over
        self._executor = executor
        self._ctx = ctx
        self._publisher = publisher
        self._broker_clock = broker_clock
        self._limits = limits
        self._worker = worker
        self._open: dict[RunKey, Run] = {}
        self._waiting: deque[Run] = deque()
        self._running = 0
        self._known: OrderedDict[RunKey, int] = OrderedDict()
        """The append time of the Assignment of each run key, in the order of their records."""
        self._rejecting = False
        self._last_end_at = ctx.clock.now()
        self._changed = WaitQueue()

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def progress(self) -> tuple[RunProgress, ...]:
        return tuple(
            RunProgress(
                id=k.id,
                attempt=k.attempt,
                phase=k.phase,
                output_tokens=run.output_tokens,
                expected_output_tokens=run.assignment.request.hints.expected_output_tokens or 0,
            )
            for k, run in self._open.items()
        )

    def accept(self, assignment: Assignment, appended_ms: int) -> None:
        """Start, queue or reject an Assignment of this epoch, appended at `appended_ms`; ignore one
        whose run key is known."""
        now = self._ctx.clock.now()
        key = RunKey(assignment.request.id, assignment.attempt, assignment.phase)
        self._forget_keys(appended_ms - self._limits.remember_key_s * 1000)
        if key in self._known:
            log.info("run %s: duplicate assignment ignored", key)
            return
        if len(self._open) >= self._limits.max_open:
            log.warning("run %s is left unanswered: %d runs are open", key, len(self._open))
            return
        self._known[key] = appended_ms
        first_token = asyncio.Event()
        run = Run(
            key=key,
            assignment=assignment,
            run_id=self._ctx.rng.getrandbits(64),
            accepted_at=now,
            deadline_at=now + self._remaining_s(assignment),
            context=GenerateContext(key.id, first_token.set, key.phase),
            first_token_event=first_token,
        )
        self._open[key] = run
        self._admit(run)

    def cancel(self, order: CancelRun) -> None:
        """Stop a run. It ends with a last Chunk, which readers ignore, since they have an end
        already.

        No client interrupts a transfer of blocks, which the engines at its ends might hold for
        ever: a decode goes on to its first token, a prefill whose decode waits to its end.
        """
        run = self._open.get(RunKey(order.id, order.attempt, order.phase))
        if run is None or run.context.is_stopped:
            return
        if run.awaits_transfer and order.reason in UNWANTED:
            run.cancel_pending = True
        elif run.state == "waiting":
            # `cancelled` would mean that a last Chunk is in the log.
            self._leave_queue(run, RunEnd("broken", message="cancelled while it was queued"))
        elif run.state == "running":
            run.context.cancel()
            self._ctx.spawn(f"abort {run.key.id}", self._executor.abort(run))

    def abort_expired(self) -> None:
        """Stop the runs whose deadline has passed, and those whose transfer is overdue; the owner
        of the lane ends the requests, or begins their next attempt. A transfer that is in time is
        not interrupted by a deadline."""
        now = self._ctx.clock.now()
        for run in list(self._open.values()):
            if run.deadline_at <= now and not self._is_receiving(run):
                self._stop(run, RunEnd("expired"))
            elif run.is_bootstrapped and run.awaits_transfer and self._is_overdue(run):
                self._stop(run, RunEnd("broken", message="the blocks were not transferred in time"))

    def reject_new(self, *, rejecting: bool = True) -> None:
        """Reject every new Assignment, or accept them again."""
        self._rejecting = rejecting

    def abort_all(self, reason: str, *, stalled: bool = False) -> None:
        """Stop all open runs; they are reported as broken, without a finish reason. `stalled`: the
        engine made no step, perhaps because of one that has no token yet."""
        self._rejecting = True
        for run in list(self._open.values()):
            is_suspect = stalled and run.waiting_since is not None and not run.generated_tokens
            self._stop(run, RunEnd("broken", message=reason, stalled=is_suspect))

    def idle_output_s(self) -> float | None:
        """Seconds since the last output of the engine to any run; None if no run waits for it.

        Left out: a run that meets another engine in a room, which has a time limit of its own, and
        one whose form may be compiled, which can hold up the others: probes alone show whether the
        engine answers.
        """
        runs = [run for run in self._open.values() if run.waiting_since is not None]
        if any(run.is_compiling for run in runs):
            return None
        waiting = [
            run.waiting_since
            for run in runs
            if run.waiting_since is not None and not (run.is_bootstrapped and run.awaits_transfer)
        ]
        return self._ctx.clock.now() - max(*waiting, self._last_end_at) if waiting else None

    def discard_all(self) -> None:
        """Drop all runs without a record, since this epoch is considered dead."""
        self._rejecting = True
        for run in self._open.values():
            if run.stream is not None:
                run.stream.discard()
            if run.task is not None:
                run.task.cancel()
        self._open.clear()
        self._waiting.clear()
        self._changed.notify_all()

    async def wait_idle(self, until: float) -> bool:
        """Wait until no run is open, up to `until` on the clock; returns whether none is."""
        while self._open and (left_s := until - self._ctx.clock.now()) > 0:
            await self._changed.wait(left_s)
        return not self._open

    def _admit(self, run: Run) -> None:
        if run.deadline_at <= run.accepted_at:
            self._close(run, RunEnd("expired", message="its deadline passed before it could start"))
        elif self._rejecting:
            self._close(
                run, RunEnd("worker_full", retryable=True, message="the worker accepts no new runs")
            )
        elif self._running < self._limits.max_running:
            self._start(run)
        elif len(self._waiting) < self._limits.max_waiting:
            self._waiting.append(run)
        else:
            self._close(run, RunEnd("worker_full", retryable=True))

    def _remaining_s(self, assignment: Assignment) -> float:
        """Seconds left: the budget, or less if the Assignment was read late."""
        by_broker_s = (assignment.deadline_ms - self._broker_clock.now_ms()) / 1000
        return min(assignment.budget_s, by_broker_s)

    def _forget_keys(self, before_ms: float) -> None:
        while self._known and next(iter(self._known.values())) < before_ms:
            self._known.popitem(last=False)

    def _stop(self, run: Run, outcome: RunEnd) -> None:
        if run.state == "waiting":
            self._leave_queue(run, outcome)
        elif run.state == "running" and run.forced_outcome is None:
            run.forced_outcome = outcome
            if run.stream is not None and run.task is not None:
                # without both it has not begun, and checks `forced_outcome` when it does
                run.task.cancel()

    def _leave_queue(self, run: Run, outcome: RunEnd) -> None:
        self._waiting.remove(run)
        self._close(run, outcome)

    def _start(self, run: Run) -> None:
        run.state = "running"
        self._running += 1
        run.task = self._ctx.spawn(f"run {run.key.id}", self._serve(run))

    async def _serve(self, run: Run) -> None:
        outcome = self._handoff_expired(run) or await self._executor.execute(run)
        self._running -= 1
        self._last_end_at = self._ctx.clock.now()
        if self._waiting:
            self._start(self._waiting.popleft())
        await self._report(run, outcome)

    def _handoff_expired(self, run: Run) -> RunEnd | None:
        """Refuse a decode whose blocks may be gone: the engine could read those of another prompt.
        Checked last, after the wait in the queue. Not retryable: only another prefill helps."""
        if not self._is_overdue(run):
            return None
        return RunEnd("worker_full", message="the hand-off of its prefill has expired")

    def _is_receiving(self, run: Run) -> bool:
        """Whether blocks may be under way to it, or from it, within the time of the hand-over."""
        in_time = self._broker_clock.now_ms() <= run.assignment.handoff_until_ms
        return run.state == "running" and run.awaits_transfer and in_time

    def _is_overdue(self, run: Run) -> bool:
        until_ms = run.assignment.handoff_until_ms
        return 0 < until_ms < self._broker_clock.now_ms()

    def _close(self, run: Run, outcome: RunEnd) -> None:
        run.state = "closing"
        run.task = self._ctx.spawn(f"report {run.key.id}", self._report(run, outcome))

    async def _report(self, run: Run, outcome: RunEnd) -> None:
        """Append the Finished of a run, repeated until it is acknowledged."""
        finished = Finished(
            **asdict(run.key),
            worker=self._worker,
            epoch=self.epoch,
            code=outcome.code,
            run=run.run_id,
            output_tokens=run.output_tokens,
            cached_tokens=run.cached_tokens,
            ttft_ms=run.ttft_ms,
            itl_ms=run.itl_ms,
            retryable=outcome.retryable,
            message=outcome.message,
            reason=outcome.reason,
            stalled=outcome.stalled,
            usage=outcome.usage,
            account=run.assignment.request.account,
        )
        await self._publisher.publish(LEDGER, run.key.id, finished)
        self._open.pop(run.key, None)
        self._changed.notify_all()
        self._on_over(run, outcome)
