"""What the owner of a lane does: answer for every request in it.

A `LaneOwner` lives from the moment a lane is assigned to this router until it is revoked. It takes
requests in (each is done when its decision or its end is in the ledger), and it meets the
obligations that `app/routing/obligations.py` finds, for its own requests as for those of the owner
before it. At most one job per request runs at a time; all jobs die with the ownership, in the
middle of whatever they do, which is safe because every obligation can be found again in the log.

What the jobs do, step by step, stands in `app/lanes/procedures.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from app.lanes.context import RouterContext
from app.lanes.endings import Endings
from app.lanes.places import Key
from app.lanes.procedures import CalledOff, Procedures, Remainder, blames_request
from app.routing.load import OPEN, LedgerRecord, RunId, Story
from app.routing.obligations import Finish, Restart, Verify, due
from streams.codecs import TOKEN_BYTES
from streams.errors import RecordError, StreamError
from streams.intake import Claim
from streams.ports import Partition
from streams.records import Cancel, Fact, Origin, Refused, Request, RunProgress
from streams.topics import REQUESTS, RESPONSES, lane_of

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]
"""A job to be begun. Called when its task runs: one that is cancelled before leaves nothing."""


class LaneOwner:
    """One claim on one lane."""

    def __init__(self, context: RouterContext, claim: Claim) -> None:
        self.claim = claim
        self.serving = False
        self._context = context
        self._lane = claim.partition
        self._ends = Endings(context, claim.partition)
        self._do = Procedures(context, self._ends, claim.partition, self._is_called_off)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, deque[Fact]] = {}
        self._arrived: dict[str, int] = {}  # offsets of the requests being admitted
        self._take_over = context.life.spawn(f"take over lane {self._lane}", self._begin())

    # --- from outside ----------------------------------------------------------------------------

    def received(self, fact: Fact) -> None:
        """A record of `requests` arrived in this lane.

        Raises RecordError when it belongs in another one: its worker would write its story there,
        and its reader look for it there, so here it could only be run in vain, again and again.
        """
        record = fact.record
        assert isinstance(record, Request | Cancel | Refused), "the intake lets no other types pass"
        if (lane := lane_of(record.id, self._context.partitions[REQUESTS])) != self._lane:
            raise RecordError(
                f"{record.id!r} belongs in lane {lane}, not in {self._lane}: "
                "its producer does not partition keys by murmur2"
            )
        job = self._jobs.get(record.id)
        if job is None:
            self._start(record.id, partial(self._take, fact), fact)
            return
        self._queue(fact, record)
        if isinstance(record, Cancel) and record.id in self._do.interruptible:
            job.cancel()  # `_ended` goes on with the Cancel

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

    def _is_called_off(self, request_id: str) -> bool:
        """Whether a Cancel waits for the job of its request."""
        return any(isinstance(w.record, Cancel) for w in self._waiting.get(request_id, ()))

    def read_back(self, fact: Fact) -> None:
        """A record of this lane's ledger was folded."""
        if isinstance(fact.record, LedgerRecord):
            self.check(fact.record.id)

    def check(self, request_id: str) -> None:
        """Look for an obligation of one request, and start to meet it."""
        if not self.serving or request_id in self._jobs:
            return
        s, action = self._context, None
        story = s.load.story(self._lane, request_id)
        if story is not None:
            action = due(request_id, story, s.fleet, s.broker_clock.now_ms(), s.patience)
        waits, key = s.places.waiting, Key(self._lane, request_id)
        if story is not None and action is None and _backs_off(story):
            waits.add(key)
        else:
            waits.discard(key)
        match action:
            case Restart():
                self._start(request_id, partial(self._do.restart, request_id, action))
            case Finish(code):
                self._start(request_id, partial(self._ends.end, request_id, code))
            case Verify(run):
                self._start(request_id, partial(self._do.verify, request_id, run))
            case None:
                pass

    def check_all(self) -> None:
        """Look for the obligations of every request that is not over."""
        if self.serving:
            for request_id in list(self._context.load.lane(self._lane).unfinished):
                self.check(request_id)

    def reported(self, worker: str, epoch: int, key: RunProgress) -> None:
        """A heartbeat lists a run of this lane: cancel it when readers do not see it any more.

        A Fencing alone does not make it so: before the Fence stands, the last word of a cancelled
        run would be the end of its request. A run of the new attempt shows that it does. Runs of
        ids that the ledger does not know are left alone: their Assigned may still come.
        """
        story = self._context.load.story(self._lane, key.id)
        if not self.serving or story is None or not story.known:
            return
        run_id = RunId(key.attempt, key.phase, worker, epoch)
        run = story.runs.get(run_id)
        closed = run is not None and run.state not in OPEN
        fenced = bool(story.runs) or self._do.fenced.get(key.id) == story.attempt
        if story.ended or closed or (key.attempt < story.attempt and fenced):
            self._context.life.spawn(
                "cancel run", self._ends.cancel_runs(key.id, [run_id], "superseded")
            )

    def close(self) -> None:
        """The lane was revoked: stop everything at once."""
        self.serving = False
        self._take_over.cancel()
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()
        self._waiting.clear()
        waits = self._context.places.waiting
        waits -= {key for key in waits if key.lane == self._lane}

    # --- jobs ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Serve only when the ledger, as it was after the assignment, has been read."""
        s = self._context
        await self._ends.read_ledger()
        await s.fleet_follower.wait_caught_up()
        s.responses_ends[self._lane] = await s.end_of(Partition(RESPONSES, self._lane))
        self.serving = True
        s.resume(self.claim)
        self.check_all()

    def _start(self, request_id: str, work: Work, fact: Fact | None = None) -> None:
        """Begin a job; `fact` is the record that it handles, done when the job is."""
        job = self._context.life.spawn(
            f"lane {self._lane} {request_id}", self._run(request_id, work, fact)
        )
        self._jobs[request_id] = job
        job.add_done_callback(lambda _: self._ended(request_id, job))

    async def _run(self, request_id: str, work: Work, fact: Fact | None) -> None:
        """A job, whatever becomes of it. One that cannot be done ends its request."""
        try:
            await work()
        except CalledOff:
            return
        except Exception as e:
            if not blames_request(e):
                raise
            log.exception("lane %d: %s cannot be handled and is ended", self._lane, request_id)
            await self._ends.end(request_id, "internal", f"the router failed on it: {_name(e)}")
        if fact is not None:
            for offset in (self._arrived.pop(request_id, fact.offset), fact.offset):
                self.claim.done(offset)

    def _ended(self, request_id: str, job: asyncio.Task[None]) -> None:
        """Go on with what waited for this job, a Cancel first.

        After a job that was cancelled for any other reason nothing begins: the process ends.
        """
        if self._jobs.get(request_id) is not job:
            return
        del self._jobs[request_id]
        called_off = self._is_called_off(request_id)
        if (job.cancelled() and not called_off) or (not job.cancelled() and job.exception()):
            return
        waiting = self._waiting.get(request_id)
        if not waiting:
            self._waiting.pop(request_id, None)
            self.check(request_id)
            return
        fact = next((w for w in waiting if isinstance(w.record, Cancel)), waiting[0])
        waiting.remove(fact)
        self._start(request_id, partial(self._take, fact), fact)

    async def _take(self, fact: Fact) -> None:
        record = fact.record
        if isinstance(record, Request):
            await self._admit(fact, record)
        elif isinstance(record, Cancel):
            await self._cancel(record)
        elif isinstance(record, Refused) and not self._is_known(record.id):
            await self._ends.end(record.id, record.code, record.message)

    async def _admit(self, fact: Fact, request: Request) -> None:
        """Assign a request, or end it. A known id is a duplicate and needs nothing."""
        s = self._context
        if self._is_known(request.id):
            return
        self._arrived[request.id] = fact.offset
        if objection := _objection(request):
            await self._ends.end(request.id, "invalid", objection)
            return
        lifetime_s = min(request.deadline_s, s.settings.max_lifetime_s)
        deadline_ms = fact.timestamp_ms + int(lifetime_s * 1000)
        if s.broker_clock.now_ms() > deadline_ms:
            await self._ends.end(request.id, "deadline", "its deadline passed before it was read")
        else:
            origin = Origin(topic=REQUESTS, partition=self._lane, offset=fact.offset)
            start = s.responses_ends[self._lane]
            await self._do.assign(Remainder(request, 0, origin, start, deadline_ms))

    async def _cancel(self, cancel: Cancel) -> None:
        """End a request that its client no longer wants; a Cancel of an unknown id is nothing."""
        await self._ends.read_ledger()
        story = self._context.load.story(self._lane, cancel.id)
        if story is not None and story.known:
            is_wanted = not story.over
        else:
            is_wanted = cancel.id in self._arrived
        if is_wanted:
            await self._ends.end(cancel.id, "cancelled", cancel.reason)

    def _is_known(self, request_id: str) -> bool:
        story = self._context.load.story(self._lane, request_id)
        return story is not None and story.known


def _backs_off(story: Story) -> bool:
    """Whether workers refused it, and it is too early to ask another one."""
    states = {run.state for run in story.runs.values()}
    return "worker_full" in states and not story.ended and not states & OPEN


def _objection(request: Request) -> str:
    """What is wrong with a request that no worker could run; "" when nothing is."""
    if not (math.isfinite(request.deadline_s) and request.deadline_s >= 0):
        return f"deadline_s must be a time in seconds, not {request.deadline_s}"
    if len(request.token_ids) % TOKEN_BYTES:
        return "token_ids are not whole numbers of 4 bytes"
    return ""


def _name(error: Exception) -> str:
    """What may be told of an error: records say what is wrong with them, others might quote."""
    return str(error) if isinstance(error, StreamError) else type(error).__name__
