"""What the owner of a lane does: answer for every request in it.

A `LaneOwner` lives from the moment a lane is assigned to this router until it is revoked. It takes
requests in (each is done when its decision or its end is in the ledger), and it meets the
obligations that `app/routing/obligations.py` finds, for its own requests as for those of the owner
before it. At most one job per request runs at a time; all jobs die with the ownership, in the
middle of whatever they do, which is safe because every obligation can be found again in the log.

The order of appends in each procedure is the contract; see the docstrings of `_dispatch`,
`_restart` and `_end`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.context import RouterContext
from app.routing import plan
from app.routing.load import OPEN, LedgerRecord, RunId, Story
from app.routing.obligations import Finish, Restart, RestartReason, Verify, due, is_listed
from streams.codecs import pack_tokens
from streams.errors import AppendFailed, PositionLost, RecordTooLarge
from streams.intake import Claim
from streams.ports import Partition
from streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    End,
    EndCode,
    Ended,
    Fact,
    Fence,
    Fencing,
    Origin,
    Refused,
    Request,
    RunProgress,
    Usage,
)
from streams.topics import ASSIGNMENTS, LEDGER, REQUESTS, RESPONSES

log = logging.getLogger(__name__)

TOKEN_BYTES = 4


@dataclass(slots=True)
class _Job:
    """The one task that works on a request. `holds`: it only waits for a worker."""

    task: asyncio.Task[None]
    holds: bool = False


class LaneOwner:
    """One claim on one lane."""

    def __init__(self, context: RouterContext, claim: Claim) -> None:
        self.claim = claim
        self.serving = False
        self._context = context
        self._lane = claim.partition
        self._ledger = Partition(LEDGER, claim.partition)
        self._jobs: dict[str, _Job] = {}
        self._waiting: dict[str, deque[Fact]] = {}
        self._arrived: dict[str, int] = {}  # offsets of the requests being admitted
        self._take_over = context.life.spawn(f"take over lane {self._lane}", self._begin())

    # --- from outside ----------------------------------------------------------------------------

    def received(self, fact: Fact) -> None:
        """A record of `requests` arrived in this lane."""
        record = fact.record
        if not isinstance(record, Request | Cancel | Refused):
            self.claim.done(fact.offset)
            return
        job = self._jobs.get(record.id)
        if job is not None and job.holds and isinstance(record, Cancel):
            job.task.cancel()  # what it has written, if anything, is found again by `due`
            del self._jobs[record.id]
            job = None
            self._start(record.id, self._cancel(fact, record, was_held=True))
        elif job is not None:
            self._queue(fact, record)
        else:
            self._start(record.id, self._take(fact))

    def _queue(self, fact: Fact, record: Request | Cancel | Refused) -> None:
        """Let a record wait for the job of its request.

        Bound: one of each kind waits. Another one, or a Request whose first is being admitted, says
        nothing new and is done at once; the mark cannot pass the one before it.
        """
        waiting = self._waiting.setdefault(record.id, deque())
        again = isinstance(record, Request) and record.id in self._arrived
        if again or any(type(w.record) is type(record) for w in waiting):
            self.claim.done(fact.offset)
        else:
            waiting.append(fact)

    def read_back(self, fact: Fact) -> None:
        """A record of this lane's ledger was folded."""
        if isinstance(fact.record, LedgerRecord):
            self.check(fact.record.id)

    def check(self, request_id: str) -> None:
        """Look for an obligation of one request, and start to meet it."""
        if not self.serving or request_id in self._jobs:
            return
        story = self._context.load.story(self._lane, request_id)
        if story is None:
            return
        s = self._context
        match due(request_id, story, s.fleet, s.broker_clock.now_ms(), s.patience):
            case Restart() as action:
                self._start(request_id, self._restart(request_id, action))
            case Finish(code):
                self._start(request_id, self._end(request_id, code))
            case Verify(run):
                self._start(request_id, self._verify(request_id, story.deadline_ms, run))
            case None:
                pass

    def check_all(self) -> None:
        """Look for the obligations of every request that is not over."""
        if self.serving:
            for request_id in list(self._context.load.lane(self._lane).unfinished):
                self.check(request_id)

    def reported(self, worker: str, epoch: int, key: RunProgress) -> None:
        """A heartbeat lists a run of this lane: cancel it when the ledger says it is superseded.

        Runs of ids that the ledger does not know are left alone: their Assigned may still come.
        """
        story = self._context.load.story(self._lane, key.id)
        if not self.serving or story is None or not story.known:
            return
        run_id = RunId(key.attempt, key.phase, worker, epoch)
        run = story.runs.get(run_id)
        closed = run is not None and run.state not in OPEN
        if story.ended or key.attempt < story.attempt or closed:
            self._context.life.spawn(
                "cancel run", self._cancel_runs(key.id, [run_id], "superseded")
            )

    def close(self) -> None:
        """The lane was revoked: stop everything at once."""
        self.serving = False
        self._take_over.cancel()
        for job in self._jobs.values():
            job.task.cancel()
        self._jobs.clear()
        self._waiting.clear()

    # --- jobs ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Serve only when the ledger, as it was after the assignment, has been read."""
        await self._read_ledger()
        await self._context.fleet_follower.wait_caught_up()
        self.serving = True
        self._context.resume(self.claim)
        self.check_all()

    def _start(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._context.life.spawn(f"lane {self._lane} {request_id}", work)
        job = self._jobs[request_id] = _Job(task)
        task.add_done_callback(lambda _: self._ended(request_id, job))

    def _ended(self, request_id: str, job: _Job) -> None:
        if self._jobs.get(request_id) is not job:
            return
        del self._jobs[request_id]
        if job.task.cancelled() or job.task.exception() is not None:
            return
        waiting = self._waiting.get(request_id)
        if waiting:
            self._start(request_id, self._take(waiting.popleft()))
        else:
            self._waiting.pop(request_id, None)
            self.check(request_id)

    async def _take(self, fact: Fact) -> None:
        record = fact.record
        if isinstance(record, Request):
            await self._admit(fact, record)
        elif isinstance(record, Cancel):
            await self._cancel(fact, record, was_held=False)
        elif isinstance(record, Refused):
            if not self._is_known(record.id):
                await self._end(record.id, record.code, record.message)
            self.claim.done(fact.offset)

    async def _admit(self, fact: Fact, request: Request) -> None:
        """Assign a request, or end it. A known id is a duplicate and needs nothing."""
        s = self._context
        if not self._is_known(request.id):
            self._arrived[request.id] = fact.offset
            lifetime_s = min(request.deadline_s, s.settings.max_lifetime_s)
            deadline_ms = fact.timestamp_ms + int(lifetime_s * 1000)
            if s.broker_clock.now_ms() > deadline_ms:
                await self._end(request.id, "deadline", "its deadline passed before it was read")
            elif s.holding >= s.settings.held_requests:
                await self._end(
                    request.id, "queue_full", "too many requests wait", retry_after_s=1.0
                )
            else:
                origin = Origin(topic=REQUESTS, partition=self._lane, offset=fact.offset)
                start = s.responses_ends.get(self._lane, 0)
                first = Story(origin=origin, responses_from=start, deadline_ms=deadline_ms)
                await self._assign(request, first, [], 0)
        self._arrived.pop(request.id, None)
        self.claim.done(fact.offset)

    async def _cancel(self, fact: Fact, cancel: Cancel, *, was_held: bool) -> None:
        """End a request that its client no longer wants; a Cancel of an unknown id is nothing."""
        await self._read_ledger()
        story = self._context.load.story(self._lane, cancel.id)
        known = story is not None and story.known
        if (was_held and not known) or (known and story is not None and not story.over):
            await self._end(cancel.id, "cancelled", cancel.reason)
        if cancel.id in self._arrived:
            self.claim.done(self._arrived.pop(cancel.id))
        self.claim.done(fact.offset)

    async def _restart(self, request_id: str, action: Restart) -> None:
        """Move a request to another worker. The order is what makes it safe:

        Fencing (the intent, so that another owner finds it), Fence (from here on readers ignore the
        old attempt), ledger to its end, what readers were shown up to the first Fence, assignment
        of the rest. Whoever finds the attempt begun or the request ended on the way stops.
        """
        s, attempt = self._context, action.attempt
        old_runs = self._living_runs(request_id)
        if action.reason != "resume":
            await s.outbox.persist(
                LEDGER,
                request_id,
                Fencing(id=request_id, attempt=attempt, reason=action.reason),
                self._lane,
            )
        fence = Fence(id=request_id, attempt=attempt, reason=action.reason)
        fenced = await s.outbox.persist(RESPONSES, request_id, fence, self._lane)
        await self._read_ledger()
        story = s.load.story(self._lane, request_id)
        if (
            story is None
            or story.origin is None
            or story.ended
            or story.attempt > attempt
            or story.runs
        ):
            return
        await self._cancel_runs(request_id, old_runs, action.reason)
        try:
            shown = await s.scanner.shown(
                self._lane, request_id, attempt, story.responses_from, fenced.offset + 1
            )
            if shown.over:
                await self._write_ended(request_id, "seen")
            elif story.failures >= s.settings.max_attempts:
                await self._end(request_id, "attempts", f"failed on {story.failures} workers")
            else:
                request = await s.scanner.fetch(story.origin)
                await self._assign(request, story, shown.tokens, shown.chars)
        except PositionLost as e:
            await self._end(request_id, "lost", f"cannot continue: {e}")

    async def _assign(
        self, request: Request, story: Story, taken: Sequence[int], chars: int
    ) -> None:
        """Hold the request until a worker can take it, then dispatch; or end it."""
        s = self._context
        if story.attempt and (code := _met(request, taken)):
            usage = Usage(
                prompt_tokens=len(request.token_ids) // TOKEN_BYTES, completion_tokens=len(taken)
            )
            await self._end(request.id, code, usage=usage)
            return
        choice = await self._hold(request, story)
        if choice is None:
            none_ever = not any(True for _ in s.fleet.living())
            await self._end(
                request.id, "no_workers" if none_ever else "deadline", "no worker could take it"
            )
            return
        now = s.load.story(self._lane, request.id)
        if now is not None and (now.ended or now.attempt > story.attempt or now.runs):
            return
        await self._dispatch(request, story, choice, taken, chars)

    async def _hold(self, request: Request, story: Story) -> plan.Choice | None:
        """Wait for an eligible worker, no longer than the deadline; None when it passes."""
        s = self._context
        job = self._jobs[request.id]
        seed = s.life.rng.getrandbits(32)
        while s.broker_clock.now_ms() <= story.deadline_ms:
            workers = plan.eligible(
                request, s.fleet, s.broker_clock.now_ms(), s.worker_timeout_ms, story.failed_workers
            )
            choice = plan.choose(workers, s.burden, seed)
            if choice is not None:
                return choice
            job.holds = True
            s.holding += 1
            try:
                await s.fleet_changed.wait(timeout_s=1.0)
            finally:
                s.holding -= 1
                job.holds = False
        return None

    async def _dispatch(
        self, request: Request, story: Story, choice: plan.Choice, taken: Sequence[int], chars: int
    ) -> None:
        """Write the decision to the ledger and the work to the worker's slot, together.

        No transaction: a decision without work is found as not started, work without a decision
        announces itself by Started. The job ends when this router has read its own decision.
        """
        s = self._context
        assert story.origin is not None
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        run = RunId(story.attempt, "aggregated", choice.worker, choice.epoch)
        assigned = Assigned(
            id=request.id, attempt=run.attempt, phase=run.phase, worker=run.worker, epoch=run.epoch,
            origin=story.origin, responses_from=story.responses_from, deadline_ms=story.deadline_ms,
            base_tokens=len(taken), prompt_tokens=prompt_tokens, policy=plan.POLICY,
            candidates=choice.candidates, router=s.name,
        )  # fmt: skip
        assignment = Assignment(
            worker=run.worker, epoch=run.epoch, attempt=run.attempt, phase=run.phase,
            request=request, origin=story.origin,
            responses_from=story.responses_from, deadline_ms=story.deadline_ms,
            budget_s=(story.deadline_ms - s.broker_clock.now_ms()) / 1000,
            taken=pack_tokens(taken), taken_chars=chars,
        )  # fmt: skip
        with s.overlay(run, prompt_tokens):
            try:
                async with asyncio.TaskGroup() as sends:
                    decision = sends.create_task(
                        s.outbox.persist(LEDGER, request.id, assigned, self._lane)
                    )
                    sends.create_task(s.outbox.persist(ASSIGNMENTS, run.worker, assignment))
            except* RecordTooLarge:
                decision = None
            if decision is not None:
                await s.load_follower.wait_for(self._ledger, decision.result().offset + 1)
        if decision is None:
            await self._end(request.id, "too_large", "the request does not fit into one record")

    async def _end(
        self,
        request_id: str,
        code: EndCode,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        usage: Usage | None = None,
    ) -> None:
        """End a request: End where readers see it, CancelRun to its workers, Ended last of all.

        Ended discharges everything; written first, a router that died after it would leave readers
        waiting for ever.
        """
        runs = self._living_runs(request_id)
        end = End(
            id=request_id, code=code, message=message, retry_after_s=retry_after_s, usage=usage
        )
        await self._context.outbox.persist(RESPONSES, request_id, end, self._lane)
        await self._cancel_runs(request_id, runs, code)
        await self._write_ended(request_id, code)

    async def _write_ended(self, request_id: str, code: EndCode | Literal["seen"]) -> None:
        s = self._context
        ended = await s.outbox.persist(
            LEDGER, request_id, Ended(id=request_id, code=code), self._lane
        )
        await s.load_follower.wait_for(self._ledger, ended.offset + 1)

    async def _cancel_runs(self, request_id: str, runs: Sequence[RunId], reason: str) -> None:
        """Tell workers to stop runs. One try: a run that goes on is in the next heartbeat again."""
        for run in runs:
            cancel = CancelRun(
                worker=run.worker, epoch=run.epoch, id=request_id, attempt=run.attempt,
                phase=run.phase, reason=reason,
            )  # fmt: skip
            try:
                await self._context.outbox.send(ASSIGNMENTS, run.worker, cancel)
            except AppendFailed as e:
                log.warning("lane %d: CancelRun of %s failed: %s", self._lane, request_id, e)

    async def _verify(self, request_id: str, deadline_ms: int, run: RunId) -> None:
        """Find out whether a worker has a run that it should have; restart the request if not.

        A heartbeat written after now, by a worker that has read its slot to where it ends now,
        lists the run if the worker took it. Finished may have been on its way: the ledger is read
        to its end before the verdict.
        """
        s = self._context
        read_to = await s.end_of(s.slot_of(run.worker))
        written_after = await s.end_of(s.events_of(run.worker))
        while True:
            beat = s.fleet.beats.get(run.worker)
            if s.fleet.is_lost(run.worker, run.epoch) or s.broker_clock.now_ms() > deadline_ms:
                return
            if beat is not None and beat.epoch == run.epoch and beat.offset >= written_after:
                if is_listed(s.fleet, request_id, run):
                    return
                if beat.slot_offset >= read_to:
                    break
            await s.fleet_changed.wait(timeout_s=1.0)
        await self._read_ledger()
        story = s.load.story(self._lane, request_id)
        now = story.runs.get(run) if story is not None else None
        if story is not None and now is not None and now.state in OPEN:
            reason: RestartReason = "not_started" if now.state == "assigned" else "broken"
            await self._restart(request_id, Restart(story.attempt + 1, reason))

    async def _read_ledger(self) -> None:
        """Wait until this lane's ledger is read to where it ends now."""
        end = await self._context.end_of(self._ledger)
        await self._context.load_follower.wait_for(self._ledger, end)

    def _living_runs(self, request_id: str) -> list[RunId]:
        """The open runs of a request whose workers may still be working."""
        story = self._context.load.story(self._lane, request_id)
        is_lost = self._context.fleet.is_lost
        runs = story.open_runs() if story is not None else []
        return [run for run in runs if not is_lost(run.worker, run.epoch)]

    def _is_known(self, request_id: str) -> bool:
        story = self._context.load.story(self._lane, request_id)
        return story is not None and story.known


def _met(request: Request, taken: Sequence[int]) -> EndCode | None:
    """The end code when the tokens already out fulfil the request; its last Chunk was lost."""
    limit = request.stop.max_tokens
    return "length" if limit is not None and len(taken) >= limit else None
