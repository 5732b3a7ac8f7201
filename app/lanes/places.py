"""Places: which place a request gets, and who waits in this router until there is one.

Requests wait here instead of being sent to and fro, and their number is bounded, also by class:
`is_crowded` says that one more has to be refused. A freed place wakes one of them, by priority,
class and age; whoever finds a place wakes the next, since there may be more. Every second each
looks for itself.

A request that policy predictive holds for a place looks again when that is predicted free; see
`app/routing/held.py`, also for whom the log wakes. Those who look in one turn of the event loop,
such as the requests of one poll, are planned together before one of them goes.

Never here: what a request's wait is worth, and its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from app.bell import Bell, Name, Rank
from app.lanes.room import Room
from app.routing.burdens import NOTHING, Burden, Burdens
from app.routing.classes import NO_BOUND, Classes, Queue
from app.routing.decisions import Chosen, Hold, Plan, Planned, Tuning, View
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.held import Held, LinedUp, QueueOrder
from app.routing.held import Wanted as WantedBy
from app.routing.index import Index
from app.routing.load import Load
from app.routing.paces import Paces
from app.routing.plan import plan
from app.routing.policies import Place
from app.routing.prompt import Prompt
from app.routing.survey import Surveyor, survey
from app.routing.turns import Turns
from streams.clock import BrokerClock
from streams.records import (
    Fact,
    Finished,
    Heartbeat,
    ModelCard,
    PrefillDone,
    WorkerCard,
)

log = logging.getLogger(__name__)

LOOK_S = 1.0
LOOKERS = 1000
"""How often a waiting request looks for a place without being woken, since a wake-up may have gone
to one that could not use it; and beyond how many each looks less often. A look takes some 60 us."""
REMEMBERED = 10_000
"""Names of models that were served once; more than any registry has."""


class Key(NamedTuple):
    """Which request: its lane and its id."""

    lane: int
    id: str


Wanted = WantedBy[Key]


class _Looking(NamedTuple):
    """A request that looks in this turn of the event loop, and the signal that it is its turn.

    With the signal comes what was planned for it with the others, if it is held.
    """

    wanted: Wanted
    turn: asyncio.Future[Hold | None]


class _Size(NamedTuple):
    """What waits: tokens that no cache had when it began to, and the bytes of its prompt."""

    uncached_tokens: int
    prompt_bytes: int

    def plus(self, other: _Size, sign: int = 1) -> _Size:
        """Both together, or this without the other."""
        return _Size(
            self.uncached_tokens + sign * other.uncached_tokens,
            self.prompt_bytes + sign * other.prompt_bytes,
        )


class Places:
    """One per router.

    `own` are the burdens of this router's decisions that the ledger has not told it yet;
    `worker_timeout_ms` is the silence after which nothing is sent to a worker; `absence_ms`: for
    how long requests wait while their model has no worker. `turns`: this router's among others.
    """

    def __init__(
        self,
        fleet: Fleet,
        load: Load,
        index: Index,
        own: Burdens,
        tuning: Tuning,
        broker_clock: BrokerClock,
        worker_timeout_ms: int,
        bound: int,
        *,
        turns: Turns,
        counts_output: bool = True,
        bound_tokens: int = NO_BOUND,
        bound_bytes: int = NO_BOUND,
        absence_ms: float = math.inf,
        queue_order: QueueOrder = "shortest",
        classes: Classes | None = None,
    ) -> None:
        self.waiting: set[Key] = set()
        """The requests that wait: held, or backing off after a refusal."""
        self._fleet = fleet
        self._load = load
        self._index = index
        self._own = own
        self.room = Room(fleet, load, own)
        self._tuning = tuning
        self._pools = Pools(fleet, worker_timeout_ms)
        self._broker_clock = broker_clock
        self._timeout_ms = worker_timeout_ms
        self._bound = bound
        self._turns = turns
        self._bound_tokens = bound_tokens
        self._bound_bytes = bound_bytes
        self._counts_output = counts_output
        self._dispatched = 0
        self._models: dict[str, None] = {}
        self._absence_ms = absence_ms
        self._unserved_ms: dict[str, int] = {}
        """Since when requests find no worker of a model."""
        self._heard_ms: dict[str, int] = {}
        self._changed = Bell()
        self._paces = Paces()
        self._wanted = 0
        self._classes = classes or Classes()
        self._held = Held[Key](queue_order, self._classes)
        self._bells: dict[Key, Bell] = {}
        """Of those that are held for a place."""
        self._looking: dict[Key, _Looking] = {}
        self._sizes: dict[Key, _Size] = {}
        """Of those that wait."""
        self._waiting = _Size(0, 0)
        """Of them all together."""

    # --- questions -------------------------------------------------------------------------------

    def is_crowded(self, wanted: Wanted) -> bool:
        """Whether one more, or one more of this class, would be too many to wait."""
        return (
            len(self.waiting) >= self._bound
            or self._waiting.uncached_tokens >= self._bound_tokens
            or self._waiting.prompt_bytes >= self._bound_bytes
            or self._classes.is_crowded(wanted.queue)
        )

    def wanted(
        self, key: Key, prompt: Prompt, seed: int, deadline_ms: int, excluded: Collection[str]
    ) -> Wanted:
        """A request begins to look for a place; `left` tells that it does so no more."""
        self._wanted += 1
        now_ms = self._broker_clock.now_ms()
        queue = self._classes.of(prompt.request)
        return Wanted(key, self._wanted, prompt, seed, now_ms, deadline_ms, excluded, queue)

    async def find(self, wanted: Wanted) -> Plan:
        """Where a request goes now, or why it has to wait, or cannot go anywhere.

        A place is free for as long as nothing is awaited after this.
        """
        loop = asyncio.get_running_loop()
        if not self._looking:
            loop.call_soon(self._begin_turns)
        turn: asyncio.Future[Hold | None] = loop.create_future()
        self._looking[wanted.key] = _Looking(wanted, turn)
        try:
            hold = await turn
        finally:
            self._looking.pop(wanted.key, None)
        if hold is not None:
            return hold
        planned = self._plan(wanted)
        if isinstance(planned, Chosen):
            first = self._held.first(planned.place)
            self._classes.give(wanted.claim)
            self._intend(wanted, None)
            if (now_first := self._held.first(planned.place)) not in (first, None):
                self._ring([now_first])  # it is another class's turn
            self._wake_one(planned.place.worker)
        else:
            self._intend(wanted, planned.planned if isinstance(planned, Hold) else None)
        return planned

    def _begin_turns(self) -> None:
        """Line up all who look now, and give each his turn: the loop wakes them in that order."""
        looking, self._looking = self._looking, {}
        lined_up = self._lined_up([each.wanted for each in looking.values()])
        for key in (*lined_up.order, *lined_up.held):
            if not looking[key].turn.done():
                looking[key].turn.set_result(lined_up.held.get(key))
        self._ring(lined_up.woken)

    def _lined_up(self, wanted: Sequence[Wanted]) -> LinedUp[Key]:
        if self._tuning.holds:
            now_ms = self._broker_clock.now_ms()
            by = Surveyor(self._view(now_ms), self._tuning, self.room.full(now_ms))
            try:
                return self._held.line_up(
                    wanted, lambda looking: survey(looking, self._held, by, self._plan)
                )
            except Exception:
                # One of them cannot be planned, and says so itself when it is its turn.
                log.exception("%d requests that look for a worker are not lined up", len(wanted))
        return self._held.line_up(wanted, None)

    def look(self, wanted: Wanted) -> Plan:
        """Where a request would go now; nobody else hears of it, and it is held for no place."""
        unheld = self._tuning.predictive._replace(max_hold_ms=0.0)
        return self._plan(wanted, self._tuning._replace(predictive=unheld))

    def _plan(self, wanted: Wanted, tuning: Tuning | None = None) -> Plan:
        tuning = tuning or self._tuning
        now_ms = self._broker_clock.now_ms()
        view = self._view(now_ms)
        if tuning.holds:
            view = replace(view, others=self._held.others(wanted.key))
        session = wanted.prompt.request.hints.session_control
        bound: Place | None = None
        if session is not None and session.action != "open":
            bound = self._load.sessions.bound(session.session_id, "aggregated", now_ms)
        return plan(
            wanted.prompt,
            view,
            tuning,
            seed=wanted.seed,
            turn=self._dispatched,
            excluded=wanted.excluded,
            full=self.room.full(now_ms),
            since_ms=wanted.since_ms,
            deadline_ms=wanted.deadline_ms,
            bound=bound,
        )

    def _view(self, now_ms: int) -> View:
        paces = self._paces
        return View(
            self._fleet, self._pools, self._index, self._load.burdens, self._own, now_ms,
            paces.output_tokens, paces.slowness,
            counts_output=self._counts_output, leads_to=paces.leads_to,
            later_ms=self._turns.later_ms(self._fleet.members, self._fleet.version, now_ms),
        )  # fmt: skip

    def dispatched(self) -> None:
        """A decision is being carried out: the next one in turn is the next worker's."""
        self._dispatched += 1

    def is_served(self, model: str) -> bool:
        """Whether a worker that is not dead serves this model; any worker serves ""."""
        return any(not model or m.card.model == model for _, m in self._fleet.living())

    def may_be_served(self, model: str) -> bool:
        """Whether waiting for this model makes sense: it has workers, had some, or has a card.

        Without a single worker, nobody can tell a wrong name from one whose workers are to come.
        """
        return (
            not model
            or model in self._models
            or self.is_served(model)
            or not any(self._fleet.living())
        )

    def is_given_up(self, model: str) -> bool:
        """Whether a model has had no worker for so long that nobody waits for one any more.

        That counts from the first request that found none: its card stays, and whoever starts
        workers when somebody asks for them needs some time.
        """
        if self.is_served(model):
            return False
        now_ms = self._broker_clock.now_ms()
        since_ms = self._unserved_ms.setdefault(model, now_ms)
        _forget_first(self._unserved_ms)
        return now_ms - since_ms > self._absence_ms

    # --- figures ---------------------------------------------------------------------------------

    @property
    def waiting_requests(self) -> int:
        """How many wait."""
        return len(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of their prompts that no cache had when they began to."""
        return self._waiting.uncached_tokens

    @property
    def waiting_bytes(self) -> int:
        """Bytes of their prompts: what they take of memory here."""
        return self._waiting.prompt_bytes

    @property
    def loads(self) -> Mapping[str, Burden]:
        """What the ledger says lies on each worker, as far as it was read; nothing on most."""
        return dict.fromkeys(self._fleet.members, NOTHING) | self._load.burdens.by_worker()

    @property
    def undelivered_runs(self) -> int:
        """Decisions of this router that it has not read back."""
        return sum(burden.runs for burden in self._own.by_worker().values())

    @property
    def slowness(self) -> Mapping[str, float]:
        """By worker, how many times slower than its curve it has been."""
        return self._paces.slowness

    # --- waiting ---------------------------------------------------------------------------------

    async def change(self, wanted: Wanted, hold: Hold) -> None:
        """Wait until there may be a place for a held request."""
        key = wanted.key
        look_s = LOOK_S * max(1, len(self.waiting) / LOOKERS)
        if hold.planned is None:
            await self._changed.wait(look_s, wanted.queue, wanted.precedence)
            return
        ends_ms, left_s = self._held.looks_ms(key, hold), look_s
        if ends_ms is not None:
            left_s = (ends_ms - self._broker_clock.now_ms()) / 1000
        bell = self._bells[key] = Bell()
        try:
            await bell.wait(min(left_s, look_s))
        finally:
            del self._bells[key]

    def begin_waiting(self, wanted: Wanted) -> None:
        """A request finds no place at once."""
        prompt, model = wanted.prompt, wanted.prompt.request.model
        self.waiting.add(wanted.key)
        block = self._pools.pool(model, "aggregated", self._broker_clock.now_ms()).block_size
        held = self._index.overlaps(prompt.local(block)).values()
        cached = max((overlap.device for overlap in held), default=0) * block
        uncached = max(prompt.tokens - cached, 0)
        self._end_waiting(wanted)
        size = self._sizes[wanted.key] = _Size(uncached, prompt.request.prompt_bytes)
        self._waiting = self._waiting.plus(size)
        self._classes.wait(wanted.queue, uncached)

    def left(self, wanted: Wanted) -> None:
        """A request looks for a place no more: it has one, or gave up."""
        self.waiting.discard(wanted.key)
        self._end_waiting(wanted)
        self._intend(wanted, None)

    def _end_waiting(self, wanted: Wanted) -> None:
        size = self._sizes.pop(wanted.key, None)
        if size is not None:
            self._waiting = self._waiting.plus(size, -1)
            self._classes.leave(wanted.queue, size.uncached_tokens)

    def _intend(self, wanted: Wanted, planned: Planned | None) -> None:
        self._ring(self._held.intend(wanted, planned))

    def _ring(self, keys: Iterable[Key]) -> None:
        """Have these look again, in this order, as far as they wait."""
        for key in keys:
            if (bell := self._bells.get(key)) is not None:
                bell.ring()

    def fleet_changed(self) -> None:
        """Other workers may be eligible now: everybody looks."""
        self.room.fleet_changed()
        for worker in self._heard_ms.keys() - self._fleet.members.keys():
            del self._heard_ms[worker]
        for model in [each for each in self._unserved_ms if self.is_served(each)]:
            del self._unserved_ms[model]
        self._ring_all()

    def _ring_all(self) -> None:
        self._changed.ring()
        self._ring(self._held.in_turn())

    def _wake_one(self, worker: str) -> None:
        member = self._fleet.members.get(worker)
        if member is not None:
            queues = self._classes.queues(member.card.model, "")
            self._changed.ring_one(queues, self._by_class)

    def _by_class(self, name: Name, rank: Rank) -> Rank:
        return rank[0], self._classes.given(Queue(*name)), *rank[1:]

    # --- what the log says -----------------------------------------------------------------------

    def learn(self, fact: Fact) -> None:
        """A record of the ledger was folded, however old."""
        self._paces.told(fact)
        self._turns.told(fact)

    def told(self, fact: Fact) -> None:
        """A new record of the ledger or of the fleet was folded."""
        self.room.told(fact)
        match fact.record:
            case Finished(code="worker_full"):
                pass  # it freed no place
            case Finished(worker=worker):
                self._wake_one(worker)
                self._ring(self._held.woken(worker))
            case PrefillDone(worker=worker):
                self._wake_one(worker)  # it may have been too busy until now
                self._ring(self._held.woken(worker))
            case Heartbeat(worker=worker):
                before_ms = self._heard_ms.get(worker, 0)
                self._heard_ms[worker] = fact.timestamp_ms
                if fact.timestamp_ms - before_ms > self._timeout_ms:
                    self._ring_all()  # nothing was sent to it while it was silent
            case WorkerCard(model=model) | ModelCard(name=model):
                self._models[model] = None
                _forget_first(self._models)


def _forget_first(models: dict[str, Any]) -> None:
    while len(models) > REMEMBERED:
        del models[next(iter(models))]
