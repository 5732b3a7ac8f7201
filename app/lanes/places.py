"""Places: which workers have room for a request, and who waits in this router until one has.

That a worker is full is known from its refusals in the ledger, which every router reads. What it
held then is what it holds at most; no more is sent to it, except for one request a second that
finds out whether it takes more by now (it may have refused because of runs that no ledger knew).

Requests wait here instead of being sent to and fro, and their number is bounded: `is_crowded` says
that one more has to be refused. A freed place wakes one of them, the one that has waited longest;
whoever finds a place wakes the next, since there may be more. Every second each looks for itself.

Never here: what a request's wait is worth, and its end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from app.bell import Bell
from app.routing.burdens import Burdens
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import Load
from app.routing.plan import Chosen, Plan, Tuning, View, plan
from app.routing.prompt import Prompt
from streams.clock import BrokerClock
from streams.records import Fact, Finished, Heartbeat, ModelCard, Started, WorkerCard

TRY_AGAIN_MS = 1_000
"""How long a refusal is taken at its word."""
LOOK_S = 1.0
LOOKERS = 1000
"""How often a waiting request looks for a place without being woken, since a wake-up may have gone
to one that could not use it; and beyond how many each looks less often. A look takes some 60 us."""
REMEMBERED = 10_000
"""Names of models that were served once; more than any registry has."""


@dataclass(slots=True)
class _Limit:
    """How many open runs a worker had when it refused one more, and when that was."""

    runs: int
    at_ms: int


class Places:
    """One per router.

    `own` are the burdens of this router's decisions that the ledger has not told it yet;
    `worker_timeout_ms` is the silence after which nothing is sent to a worker.
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
    ) -> None:
        self.waiting: set[tuple[int, str]] = set()
        """Lanes and ids of the requests that wait: held, or backing off after a refusal."""
        self._fleet = fleet
        self._load = load
        self._index = index
        self._own = own
        self._tuning = tuning
        self._pools = Pools(fleet, worker_timeout_ms)
        self._broker_clock = broker_clock
        self._timeout_ms = worker_timeout_ms
        self._bound = bound
        self._dispatched = 0
        self._limits: dict[tuple[str, int], _Limit] = {}
        self._models: dict[str, None] = {}
        self._heard_ms: dict[str, int] = {}
        self._changed = Bell()

    # --- questions -------------------------------------------------------------------------------

    @property
    def is_crowded(self) -> bool:
        """Whether one more would be too many to wait."""
        return len(self.waiting) >= self._bound

    def find(self, prompt: Prompt, excluded: Collection[str], seed: int) -> Plan:
        """Where a request goes now, or why it has to wait, or cannot go anywhere."""
        now_ms = self._broker_clock.now_ms()
        view = View(self._fleet, self._pools, self._index, self._load.burdens, self._own, now_ms)
        planned = plan(
            prompt,
            view,
            self._tuning,
            seed=seed,
            turn=self._dispatched,
            excluded=excluded,
            full=[key for key in self._limits if not self._has_room(*key, now_ms)],
        )
        if isinstance(planned, Chosen):
            self._wake_one(planned.place.worker)
        return planned

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

    def _has_room(self, worker: str, epoch: int, now_ms: int) -> bool:
        limit = self._limits.get((worker, epoch))
        if limit is None:
            return True
        one_more = now_ms - limit.at_ms >= TRY_AGAIN_MS
        burden = self._load.burdens.of(worker, epoch).plus(self._own.of(worker, epoch))
        return burden.runs < limit.runs + one_more

    # --- waiting ---------------------------------------------------------------------------------

    async def change(self, model: str) -> None:
        """Wait until there may be a place for a request of this model."""
        await self._changed.wait(LOOK_S * max(1, len(self.waiting) / LOOKERS), model)

    def fleet_changed(self) -> None:
        """Other workers may be eligible now: everybody looks."""
        lost = [key for key in self._limits if self._fleet.is_lost(*key)]
        for key in lost:
            del self._limits[key]
        for worker in self._heard_ms.keys() - self._fleet.members.keys():
            del self._heard_ms[worker]
        self._changed.ring()

    def _wake_one(self, worker: str) -> None:
        member = self._fleet.members.get(worker)
        if member is not None:
            self._changed.ring_one((member.card.model, ""))

    # --- what the log says -----------------------------------------------------------------------

    def told(self, fact: Fact) -> None:
        """A record of the ledger or of the fleet was folded."""
        match fact.record:
            case Finished(worker=worker, epoch=epoch, code="worker_full"):
                self._refused((worker, epoch), fact.timestamp_ms)
            case Finished(worker=worker):
                self._wake_one(worker)
            case Started(worker=worker, epoch=epoch):
                limit = self._limits.get((worker, epoch))
                if limit is not None:
                    limit.runs = max(limit.runs, self._load.burdens.of(worker, epoch).runs)
            case Heartbeat(worker=worker):
                before_ms = self._heard_ms.get(worker, 0)
                self._heard_ms[worker] = fact.timestamp_ms
                if fact.timestamp_ms - before_ms > self._timeout_ms:
                    self._changed.ring()  # nothing was sent to it while it was silent
            case WorkerCard(model=model) | ModelCard(name=model):
                self._models[model] = None
                while len(self._models) > REMEMBERED:
                    del self._models[next(iter(self._models))]

    def _refused(self, key: tuple[str, int], at_ms: int) -> None:
        runs, before = self._load.burdens.of(*key).runs, self._limits.get(key)
        self._limits[key] = _Limit(min(runs, before.runs) if before else runs, at_ms)
