"""The runs of one epoch of a worker: admitted, listed, reported to the ledger.

Owns the life of an Assignment from its acceptance to the acknowledgement of its Finished. A run key
is executed at most once. A run counts as open, and stands in the heartbeats, until its Finished is
in the ledger: a router that finds it in neither knows that it was never taken.

Reads nothing from the log and does not know why an epoch ends: `app/worker.py` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from app.bell import Bell
from app.engine.contract import EngineDead, GenerateContext
from app.lifetime import Lifetime
from app.serving.execution import Executor, Outcome, Run
from streams.clock import BrokerClock
from streams.outbox import Outbox
from streams.records import Assignment, CancelRun, Finished, RunKey, RunProgress
from streams.topics import LEDGER

log = logging.getLogger(__name__)

OPEN_PER_PLACE = 2
"""Open runs for each place to run or wait. Most are refusals whose Finished is on its way; when the
ledger takes no more, further Assignments are left unanswered, and heartbeats show that."""


class Limits(NamedTuple):
    """How much this worker takes on: running at a time, waiting for a place; beyond, it is full."""

    running: int
    waiting: int
    remember_s: float
    """How long a run key is remembered; an Assignment that comes later has expired by then."""

    @property
    def open(self) -> int:
        """The bound of all open runs."""
        return OPEN_PER_PLACE * (self.running + self.waiting)


class Runs:
    """The runs of one epoch. Everything but `idle` returns at once; work goes on in tasks."""

    def __init__(
        self,
        executor: Executor,
        life: Lifetime,
        outbox: Outbox,
        broker_clock: BrokerClock,
        limits: Limits,
        worker: str,
        epoch: int,
        on_dead: Callable[[EngineDead], None],
    ) -> None:
        """`on_dead` is told when a run finds the engine dead, after the run was reported."""
        self.epoch = epoch
        self._on_dead = on_dead
        self._executor = executor
        self._life = life
        self._outbox = outbox
        self._broker_clock = broker_clock
        self._limits = limits
        self._worker = worker
        self._open: dict[RunKey, Run] = {}
        self._waiting: deque[Run] = deque()
        self._running = 0
        self._known: OrderedDict[RunKey, float] = OrderedDict()
        """When each run key was accepted, in that order."""
        self._hands_back = False
        self._served_at = life.clock.now()
        self._changed = Bell()

    @property
    def waiting(self) -> int:
        """How many accepted runs wait for a place."""
        return len(self._waiting)

    def progress(self) -> tuple[RunProgress, ...]:
        """All open runs, for the heartbeat."""
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

    def accept(self, assignment: Assignment) -> None:
        """Take an Assignment of this epoch: start it, let it wait, or refuse it.

        One whose run key was started or refused before is ignored.
        """
        now = self._life.clock.now()
        key = RunKey(assignment.request.id, assignment.attempt, assignment.phase)
        self._forget(now - self._limits.remember_s)
        if key in self._known:
            log.info("run %s came again, ignored", key)
            return
        if len(self._open) >= self._limits.open:
            log.warning("run %s is left unanswered: %d are open", key, len(self._open))
            return
        self._known[key] = now
        first_token = asyncio.Event()
        run = Run(
            key=key,
            assignment=assignment,
            number=self._life.rng.getrandbits(64),
            accepted_at=now,
            deadline=now + self._left_s(assignment),
            context=GenerateContext(key.id, first_token.set),
            first_token=first_token,
        )
        self._open[key] = run
        self._admit(run)

    def cancel(self, order: CancelRun) -> None:
        """Stop a run. It ends with a last Chunk, which readers ignore: they were served before."""
        run = self._open.get(RunKey(order.id, order.attempt, order.phase))
        if run is None or run.context.stopped:
            return
        if run.state == "waiting":
            # `cancelled` would say that a last Chunk stands in the log.
            self._leave_queue(run, Outcome("broken", message="cancelled while it waited"))
        elif run.state == "running":
            run.context.cancel()
            self._life.spawn(f"abort {run.key.id}", self._executor.abort(run))

    def expire(self) -> None:
        """Stop the runs whose time is up; their owner ends the requests."""
        now = self._life.clock.now()
        for run in [r for r in self._open.values() if r.deadline <= now]:
            self._stop(run, Outcome("expired"))

    def hand_back(self, *, back: bool = True) -> None:
        """From now on refuse every Assignment, or take them again."""
        self._hands_back = back

    def break_off(self, why: str) -> None:
        """Stop everything that has not ended; it is reported as broken, without a finish reason."""
        self._hands_back = True
        for run in list(self._open.values()):
            self._stop(run, Outcome("broken", message=why))

    def quiet_s(self) -> float | None:
        """For how long the engine has said nothing to any run; None when none waits for it."""
        heard = [run.heard_at for run in self._open.values() if run.heard_at is not None]
        return self._life.clock.now() - max(*heard, self._served_at) if heard else None

    def drop(self) -> None:
        """Forget all runs without another word: this epoch is dead to everybody."""
        self._hands_back = True
        for run in self._open.values():
            if run.stream is not None:
                run.stream.abandon()
            if run.task is not None:
                run.task.cancel()
        self._open.clear()
        self._waiting.clear()
        self._changed.ring()

    async def idle(self, until: float) -> bool:
        """Wait until no run is open, no longer than `until` on the clock; whether that came."""
        while self._open and (left_s := until - self._life.clock.now()) > 0:
            await self._changed.wait(left_s)
        return not self._open

    def _admit(self, run: Run) -> None:
        if run.deadline <= run.accepted_at:
            self._close(run, Outcome("expired", message="its time was up before it could start"))
        elif self._hands_back:
            self._close(run, Outcome("worker_full", retryable=True, message="it takes nothing new"))
        elif self._running < self._limits.running:
            self._start(run)
        elif len(self._waiting) < self._limits.waiting:
            self._waiting.append(run)
        else:
            self._close(run, Outcome("worker_full", retryable=True))

    def _left_s(self, assignment: Assignment) -> float:
        """Seconds left: the budget, or less when the Assignment lay in the log for a while."""
        by_broker_s = (assignment.deadline_ms - self._broker_clock.now_ms()) / 1000
        return min(assignment.budget_s, by_broker_s)

    def _forget(self, before: float) -> None:
        while self._known and next(iter(self._known.values())) < before:
            self._known.popitem(last=False)

    def _stop(self, run: Run, outcome: Outcome) -> None:
        if run.state == "waiting":
            self._leave_queue(run, outcome)
        elif run.state == "running" and run.stopped_as is None:
            run.stopped_as = outcome
            if run.stream is not None and run.task is not None:
                run.task.cancel()  # else it has not begun, and sees this when it does

    def _leave_queue(self, run: Run, outcome: Outcome) -> None:
        self._waiting.remove(run)
        self._close(run, outcome)

    def _start(self, run: Run) -> None:
        run.state = "running"
        self._running += 1
        run.task = self._life.spawn(f"run {run.key.id}", self._serve(run))

    async def _serve(self, run: Run) -> None:
        outcome = await self._executor.execute(run)
        self._running -= 1
        self._served_at = self._life.clock.now()
        if self._waiting:
            self._start(self._waiting.popleft())
        await self._report(run, outcome)

    def _close(self, run: Run, outcome: Outcome) -> None:
        """End a run that never started."""
        run.state = "closing"
        run.task = self._life.spawn(f"report {run.key.id}", self._report(run, outcome))

    async def _report(self, run: Run, outcome: Outcome) -> None:
        """Say that a run is over, until that stands in the ledger."""
        finished = Finished(
            id=run.key.id,
            attempt=run.key.attempt,
            phase=run.key.phase,
            worker=self._worker,
            epoch=self.epoch,
            code=outcome.code,
            run=run.number,
            output_tokens=run.output_tokens,
            cached_tokens=run.cached_tokens,
            ttft_ms=run.ttft_ms,
            itl_ms=run.itl_ms,
            retryable=outcome.retryable,
            message=outcome.message,
        )
        await self._outbox.persist(LEDGER, run.key.id, finished)
        self._open.pop(run.key, None)
        self._changed.ring()
        if outcome.fatal is not None:
            self._on_dead(outcome.fatal)
