"""What is done to one request, step by step: assign, restart, verify. How one ends: `endings.py`.

Each procedure is a fixed order of appends and barriers, and that order is the contract: whoever
dies between two steps leaves a state in which `app/routing/obligations.py` finds the rest. None of
them decides whether it is due; the lane's owner does (`owner.py`), and runs at most one at a
time per request.

Every wait of a procedure for something that may never come (a worker with room, a heartbeat, a
record of long ago) ends with the request's deadline, and at once when its Cancel comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec.structs import replace
from opentelemetry.trace import get_tracer

from app.lanes.context import FoldStopped, RouterContext
from app.lanes.endings import Endings
from app.lanes.places import Key, Wanted
from app.lanes.resumption import end_of_answer, obstacle
from app.routing.decisions import Chosen, Hold, Refuse
from app.routing.load import OPEN, RunId, Story
from app.routing.obligations import Restart, RestartReason, is_listed
from app.routing.policies import Place
from app.routing.prompt import Prompt
from streams.codecs import pack_tokens, unpack_tokens
from streams.errors import PositionLost, RecordError, RecordTooLarge, StreamError
from streams.ports import Appended, Partition
from streams.records import (
    Assigned,
    Assignment,
    EndCode,
    Fence,
    Fencing,
    Origin,
    Placed,
    Request,
    SessionUse,
    Usage,
)
from streams.topics import ASSIGNMENTS, LEDGER, RESPONSES
from streams.transcript import Transcript

tracer = get_tracer("kvlane.router")

RETRY_AFTER_S = 1.0
"""When a client that was refused may come again: by then about as many have found a place as a
worker ends in a second."""

LOOK_UP_S = 10.0
"""Time to read back what readers were shown, also when the deadline is near or past: a lane's
answers of ten minutes are a million records, which is a few seconds."""

NO_PLACE: Mapping[EndCode, str] = {
    "model_not_found": "no worker of this deployment serves the model",
    "queue_full": "too many requests, or too large ones, wait for a worker",
    "deadline": "no worker could take it in time",
    "no_workers": "its model has no worker, and none appeared in time",
    "none_eligible": "no worker has what it asks for",
    "all_busy": "all workers that it may go to had enough to do",
    "pinned_busy": "the worker that it names could not take it",
}
"""Why a request gets no worker."""

COME_AGAIN_S: Mapping[EndCode, float] = {
    "queue_full": RETRY_AFTER_S, "all_busy": RETRY_AFTER_S, "pinned_busy": RETRY_AFTER_S,
    "no_workers": 10.0,
}  # fmt: skip
"""Ends that may be over soon, and when to ask again; an engine takes longer to start than to have
room."""


class Remainder(NamedTuple):
    """What is left to do of a request: all of it, or what follows the tokens already out."""

    request: Request
    attempt: int
    origin: Origin
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str] = frozenset()
    """Workers on which it failed."""
    taken: Sequence[int] = ()
    """Token ids that readers have, and `chars`, the length of their text."""
    chars: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether a worker has worked on it, in vain or for its readers."""
        return bool(self.taken or self.chars or self.excluded)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return self.request.prompt_tokens


class Found(NamedTuple):
    """What the log holds of a request that changes hands; no request when none is needed."""

    shown: Transcript
    request: Request | None


class CalledOff(Exception):
    """A Cancel of the request is here: whatever is waited for is not wanted any more."""


def blames_request(error: Exception) -> bool:
    """Whether an error is about the request that was handled, not about the router or the broker.

    Whatever nobody thought of counts as the request's: a router that ended for it would be started
    again and get the same request again, and so would the next one.
    """
    if isinstance(error, ExceptionGroup):
        return all(isinstance(e, Exception) and blames_request(e) for e in error.exceptions)
    if isinstance(error, StreamError):
        return isinstance(error, RecordError | PositionLost)
    return not isinstance(error, FoldStopped)


class Procedures:
    """The procedures of one lane.

    `interruptible`: the ids whose procedure waits for what may never come. Cancelling its task is
    how such a wait ends, also for a Cancel. `is_called_off` tells whether one is here already; then
    no such wait begins, and CalledOff is raised. `fenced`: the attempts whose Fence stands, of the
    requests that are being restarted.
    """

    def __init__(
        self,
        context: RouterContext,
        endings: Endings,
        lane: int,
        is_called_off: Callable[[str], bool],
    ) -> None:
        self.interruptible: set[str] = set()
        self.fenced: dict[str, int] = {}
        self._is_called_off = is_called_off
        self._context = context
        self._lane = lane
        self._ledger = Partition(LEDGER, lane)
        self._ends = endings

    async def restart(self, request_id: str, action: Restart) -> None:
        """Move a request to another worker. The order is what makes it safe:

        Fencing (the intent, so that another owner finds it), Fence (from here on readers ignore the
        old attempt), ledger to its end, what readers were shown up to the first Fence, assignment
        of the rest. Whoever finds the attempt begun or the request ended on the way stops.
        """
        s, attempt = self._context, action.attempt
        old_runs = self._ends.living_runs(request_id)
        if action.reason != "resume":
            intent = Fencing(id=request_id, attempt=attempt, reason=action.reason)
            await s.outbox.persist(LEDGER, request_id, intent, self._lane)
        fence = Fence(id=request_id, attempt=attempt, reason=action.reason)
        fenced = await s.outbox.persist(RESPONSES, request_id, fence, self._lane)
        self.fenced[request_id] = attempt
        try:
            await self._ends.read_ledger()
            story = s.load.story(self._lane, request_id)
            if story is None or story.origin is None or story.ended:
                return
            if story.attempt > attempt or story.runs:
                return
            await self._ends.cancel_runs(request_id, old_runs, action.reason)
            await self._go_on(request_id, attempt, story, fenced.offset + 1)
        finally:
            self.fenced.pop(request_id, None)

    async def _go_on(self, request_id: str, attempt: int, story: Story, stop: int) -> None:
        """Find out what is left of a fenced request, and have it done. `stop`: behind the Fence."""
        try:
            with self._interruptible(request_id):
                async with asyncio.timeout(self._look_up_s(story)):
                    found = await self._look_up(request_id, attempt, story, stop)
        except (PositionLost, TimeoutError) as e:
            why = str(e) or "the log could not be read in time"
            await self._ends.end(request_id, "lost", f"cannot continue: {why}")
        else:
            await self._continue(request_id, attempt, story, found)

    async def _look_up(self, request_id: str, attempt: int, story: Story, stop: int) -> Found:
        """What is in the log of a request that changes hands. Raises PositionLost, RecordError."""
        scanner = self._context.scanner
        shown = await scanner.shown(self._lane, request_id, attempt, story.responses_from, stop)
        if shown.over or story.failures >= self._context.settings.max_attempts:
            return Found(shown, None)
        assert story.origin is not None
        return Found(shown, await scanner.fetch(story.origin))

    def _look_up_s(self, story: Story) -> float:
        """How long that may take: what is left of the request's time, but time enough to read."""
        left_ms = story.deadline_ms - self._context.broker_clock.now_ms()
        return max(LOOK_UP_S, left_ms / 1000)

    async def _continue(self, request_id: str, attempt: int, story: Story, found: Found) -> None:
        """Assign what is left of the request to a worker, or end it if nothing can be."""
        shown, request = found
        if shown.over:
            await self._ends.write_ended(request_id, "seen")
            return
        if request is None:
            await self._ends.end(request_id, "attempts", f"failed on {story.failures} workers")
            return
        assert story.origin is not None
        rest = Remainder(
            request, attempt, story.origin, story.responses_from, story.deadline_ms,
            frozenset(story.failed_workers), shown.tokens, shown.chars,
        )  # fmt: skip
        if code := end_of_answer(request, shown.tokens):
            usage = Usage(prompt_tokens=rest.prompt_tokens, completion_tokens=len(rest.taken))
            await self._ends.end(request_id, code, usage=usage)
        elif why := obstacle(request, shown):
            await self._ends.end(request_id, "lost", f"cannot continue: {why}")
        else:
            await self.assign(rest)

    async def assign(self, rest: Remainder) -> None:
        """Hold a request until a worker can take it, then dispatch it; or end it."""
        s, request = self._context, rest.request
        began_at = s.life.clock.now()
        with tracer.start_as_current_span("router.select_worker") as span:
            span.set_attribute("request_id", request.id)
            choice = await self._hold(rest)
        if isinstance(choice, Refuse):
            again_s = COME_AGAIN_S.get(choice.code)
            await self._ends.end(request.id, choice.code, choice.message, retry_after_s=again_s)
            return
        if request.is_query:
            await self._tell(rest, choice)
            return
        now = s.load.story(self._lane, request.id)
        # A worker's refusal without our Assigned does not make an id known: it still wants one.
        if (
            now is None
            or not now.known
            or not (now.ended or now.attempt > rest.attempt or now.runs)
        ):
            waited_s = s.life.clock.now() - began_at
            s.metrics.dispatched(rest.attempt, Prompt(request), choice, waited_s)
            with tracer.start_as_current_span(
                "router.route_request",
                attributes={
                    "request_id": request.id,
                    "worker_id": choice.place.worker,
                    "dp_rank": choice.place.rank,
                    "overlap_blocks": choice.overlap_blocks,
                    "phase": "aggregated",
                },
            ):
                await self._dispatch(rest, choice)

    async def _hold(self, rest: Remainder) -> Chosen | Refuse:
        """Wait for a worker with room, no longer than the deadline; or say why that ends here.

        One that has not begun is refused rather than kept waiting when too many wait already. One
        that has is kept in any case: there are never more of them than runs that workers had.
        """
        s, request = self._context, rest.request
        seed = s.life.rng.getrandbits(32)
        prompt = Prompt(request, pack_tokens(rest.taken))
        held = Hold("")
        key = Key(self._lane, request.id)
        wanted = s.places.wanted(key, prompt, seed, rest.deadline_ms, rest.excluded)
        try:
            while s.broker_clock.now_ms() <= rest.deadline_ms:
                planned = s.places.look(wanted) if request.is_query else await s.places.find(wanted)
                if not isinstance(planned, Hold):
                    return planned
                held = planned
                if refusal := self._refusal(rest, wanted, held):
                    return refusal
                if key not in s.places.waiting:
                    s.places.begin_waiting(wanted)
                with self._interruptible(request.id):
                    await s.places.change(wanted, planned)
        finally:
            s.places.left(wanted)
        if not s.places.is_served(request.model):
            return _no_place("no_workers", held.reason)
        code: EndCode = "deadline" if held.code == "no_workers" else held.code
        return _no_place(code, held.reason)

    def _refusal(self, rest: Remainder, wanted: Wanted, held: Hold) -> Refuse | None:
        """Why a request is not kept waiting; only a missing model turns one away that has begun."""
        places, model = self._context.places, rest.request.model
        if held.is_hopeless and not rest.has_begun:
            return _no_place(held.code, held.reason)
        is_new = wanted.key not in places.waiting
        if is_new and not places.may_be_served(model):
            return _no_place("model_not_found")
        if rest.has_begun:
            return None
        if held.code == "no_workers" and places.is_given_up(model):
            return _no_place("no_workers", held.reason)
        if is_new and places.is_crowded(wanted):
            return _no_place("queue_full", held.reason)
        return None

    async def _tell(self, rest: Remainder, choice: Chosen) -> None:
        """Answer where a request would go. It is in no load, no session and no cache."""
        s, request = self._context, rest.request
        s.metrics.planned(Prompt(request), choice)
        placed = Placed(
            worker_id=choice.place.worker,
            dp_rank=choice.place.rank,
            token_ids=tuple(unpack_tokens(request.token_ids)),
        )
        usage = Usage(prompt_tokens=rest.prompt_tokens, cached_tokens=choice.cached_tokens)
        try:
            await self._ends.end(request.id, "stop", usage=usage, placed=placed)
        except RecordTooLarge:
            message = "the tokens do not fit into one record"
            await self._ends.end(request.id, "too_large", message)

    @contextmanager
    def _interruptible(self, request_id: str) -> Iterator[None]:
        """Around every wait for workers and look-up: nothing is half done, and a Cancel ends it."""
        if self._is_called_off(request_id):
            raise CalledOff(request_id)
        self.interruptible.add(request_id)
        try:
            yield
        finally:
            self.interruptible.discard(request_id)

    async def _dispatch(self, rest: Remainder, choice: Chosen) -> None:
        """Write the decision to the ledger and the work to the worker's slot, together.

        No transaction: a decision without work is found as not started, work without a decision
        announces itself by Started. Ends when this router has read its own decision.
        """
        s, request = self._context, rest.request
        worker, epoch, rank = choice.place
        adapter = request.hints.lora_name or ""
        run = RunId(rest.attempt, "aggregated", worker, epoch)
        assigned = Assigned(
            id=request.id, attempt=run.attempt, phase=run.phase, worker=run.worker, epoch=run.epoch,
            origin=rest.origin, responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
            rank=rank, base_tokens=len(rest.taken), prompt_tokens=rest.prompt_tokens,
            policy=choice.policy, params=choice.params, seed=choice.seed,
            block_size=choice.block_size, cached_tokens_predicted=choice.cached_tokens,
            prefill_tokens=choice.prefill_tokens, candidates=choice.candidates, router=s.name,
            held_ms=choice.outlook.held_ms, ttft_ms_predicted=choice.outlook.ttft_ms,
            session=_session_use(request, choice), lora_name=adapter, known_ms=s.load.known_ms,
        )  # fmt: skip
        assignment = Assignment(
            worker=run.worker, epoch=run.epoch, rank=rank, attempt=run.attempt, phase=run.phase,
            request=_with_rank(request, rank), origin=rest.origin,
            responses_from=rest.responses_from, deadline_ms=rest.deadline_ms,
            budget_s=(rest.deadline_ms - s.broker_clock.now_ms()) / 1000,
            taken=pack_tokens(rest.taken), taken_chars=rest.chars,
        )  # fmt: skip
        decision: asyncio.Task[Appended] | None = None
        s.places.dispatched()
        with s.overlay(run, rank, choice.burden, adapter):
            try:
                async with asyncio.TaskGroup() as sends:
                    decision = sends.create_task(
                        s.outbox.persist(LEDGER, request.id, assigned, self._lane)
                    )
                    sends.create_task(s.outbox.persist(ASSIGNMENTS, run.worker, assignment))
            except* RecordTooLarge:
                decision = None
            if decision is not None:
                await s.ledger_read(self._ledger, decision.result().offset + 1)
        if decision is None:
            await self._ends.end(
                request.id, "too_large", "the request does not fit into one record"
            )

    async def verify(self, request_id: str, run: RunId) -> None:
        """Find out whether a worker has a run that it should have; restart the request if not.

        A heartbeat written after now, by a worker that has read its slot to where it ends now,
        lists the run if the worker took it. Finished may have been on its way: the ledger is read
        to its end before the verdict. Nothing is left to find out once the run is closed, its
        worker lost or the deadline past.
        """
        s, worker, epoch = self._context, run.worker, run.epoch
        read_to = await s.end_of(s.slot_of(worker))
        written_after = await s.end_of(s.events_of(worker))
        while (story := self._story_of_open(request_id, run)) is not None:
            beat = s.fleet.beats.get(worker)
            if s.fleet.is_lost(worker, epoch) or s.broker_clock.now_ms() > story.deadline_ms:
                return
            if beat is not None and beat.epoch == epoch and beat.offset >= written_after:
                if is_listed(s.fleet, request_id, run):
                    return
                if beat.slot_offset >= read_to:
                    break
            with self._interruptible(request_id):
                await s.heard.wait(timeout_s=1.0)
        await self._ends.read_ledger()
        story = self._story_of_open(request_id, run)
        if story is not None:
            state = story.runs[run].state
            reason: RestartReason = "not_started" if state == "assigned" else "broken"
            await self.restart(request_id, Restart(story.attempt + 1, reason))

    def _story_of_open(self, request_id: str, run: RunId) -> Story | None:
        """The story of a request, if this run of it is open."""
        story = self._context.load.story(self._lane, request_id)
        known = story.runs.get(run) if story is not None else None
        return story if known is not None and known.state in OPEN else None


def _with_rank(request: Request, rank: int) -> Request:
    """The request as its worker gets it: with the rank that was chosen."""
    if rank == (request.hints.dp_rank or 0):
        return request
    return replace(request, hints=replace(request.hints, dp_rank=rank))


def _session_use(request: Request, choice: Chosen) -> SessionUse | None:
    control = request.hints.session_control
    if control is None:
        return None
    bound = choice.bound or Place("", 0)
    return SessionUse(
        id=control.session_id, timeout_s=control.timeout, closes=control.action == "close",
        bound_worker=bound.worker, bound_epoch=bound.epoch, bound_rank=bound.rank,
    )  # fmt: skip


def _no_place(code: EndCode, why: str = "") -> Refuse:
    return Refuse(code, f"{NO_PLACE[code]}: {why}" if why else NO_PLACE[code])
