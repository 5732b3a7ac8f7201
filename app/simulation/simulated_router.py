"""Simulated router: the queue of a fleet's requests, when each is planned, and the decisions.

A request is planned on arrival. A held request is planned again at the time that `select_worker`
returned, after progress of workers, and at least every `MAX_RETRY_INTERVAL_MS`. Requests of one
time are planned as a batch before the first of them is dispatched
(`app/routing/queueing/pending.py`). All as in a real router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from msgspec.structs import replace

from app.routing.queueing.joint_planning import PlanningContext, plan_together
from app.routing.queueing.pending import PendingRequest, ReservedRequests
from app.routing.selection.decision import Placement, Rejection, Reservation, RoutingConfig, Wait
from app.routing.selection.handover_rules import HandOverRules, first_phase
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.selection.select import select_worker
from app.routing.worker_rank import WorkerRank
from app.simulation.router_state import RouterState
from app.simulation.simulated_worker import NEVER
from streams.records import Phase

MAX_RETRY_INTERVAL_MS = 1000.0


class SimulationFailed(Exception):
    """A policy never scheduled a request, or rejected one, so the run has no figures."""


@dataclass(slots=True)
class SimulatedRouter:
    """Simulated router, or its part for phase decode. Requests are identified by their numbers.

    `handover_rules`: None: requests stay whole.
    """

    state: RouterState
    config: RoutingConfig
    phase: Phase = "aggregated"
    handover_rules: HandOverRules | None = None
    waiting: dict[int, PendingRequest[int]] = field(default_factory=dict)
    """Waiting requests in order of arrival."""
    _due: dict[int, None] = field(default_factory=dict)
    """Requests to plan now."""
    _held: ReservedRequests[int] = field(default_factory=ReservedRequests)
    _retries: list[tuple[float, int]] = field(default_factory=list)
    """Heap of retry times and requests; an entry that differs from `_retry_ms` is stale."""
    _retry_ms: dict[int, float] = field(default_factory=dict)
    _dispatched: int = 0

    @property
    def wake_ms(self) -> float:
        """Next retry time of a waiting request; NEVER if there is none."""
        while self._retries:
            at_ms, number = self._retries[0]
            if self._retry_ms.get(number) == at_ms:
                return at_ms
            heappop(self._retries)
        return NEVER

    def ranks_with_reservations(self) -> list[WorkerRank]:
        """The ranks that requests wait for."""
        ranks = [self._held.reserved_rank(number) for number in self.waiting]
        return [rank for rank in ranks if rank is not None]

    def on_arrival(self, prompt: PromptHashes, number: int, seed: int, now_ms: float) -> None:
        """Add a request."""
        self.waiting[number] = PendingRequest(
            number, number, prompt, seed, int(now_ms), phase=self.phase
        )
        self._due[number] = None

    def on_worker_progress(self, workers: Iterable[str]) -> None:
        """Mark the requests to plan after first or last tokens on these workers."""
        due = self._due
        for worker in workers:
            due |= dict.fromkeys(self._held.to_wake(worker))
        if len(self._held) < len(self.waiting):  # some have no reservation
            due |= dict.fromkeys([n for n in self.waiting if self._held.reserved_rank(n) is None])

    def schedule(self, now_ms: float) -> Iterator[tuple[int, Placement]]:
        """Plan all requests that are due; the caller must apply each decision before the next one.

        Raises SimulationFailed for a rejection.
        """
        while self.wake_ms <= now_ms:
            self._due[self._retries[0][1]] = None
            del self._retry_ms[self._retries[0][1]]
        while self._due:
            due, self._due = self._due, {}
            for number in due:
                if self.handover_rules is not None and number in self.waiting:
                    self._choose_phase(number, self.handover_rules, now_ms)
            looking = [self.waiting[number] for number in due if number in self.waiting]
            by = None
            if self.config.queues_for_places and self.phase != "decode" and len(looking) > 1:
                by = PlanningContext(self.state.routing_state(now_ms), self.config)
            plan_now = partial(self._plan, now_ms=now_ms)
            ordered = plan_together(looking, self._held, by, plan_now)
            self._due |= dict.fromkeys(ordered.to_wake)
            for number, wait in ordered.waiting.items():
                self._set_retry(number, wait, now_ms)
            for number in ordered.order:
                planned = self._plan(self.waiting[number], now_ms)
                if isinstance(planned, Wait):
                    self._hold(number, planned, now_ms)
                else:
                    self._reserve(number, None)
                    del self.waiting[number]
                    self._retry_ms.pop(number, None)
                    self._dispatched += 1
                    yield number, planned

    def _choose_phase(self, number: int, rules: HandOverRules, now_ms: float) -> None:
        wanted = self.waiting[number]
        view = self.state.routing_state(now_ms, self._held.reservations_of_others(number))
        first = first_phase(
            wanted.prompt, view, self.config, rules, seed=wanted.seed, stays_whole=False
        )
        if first.phase != wanted.phase:
            self.waiting[number] = replace(wanted, phase=first.phase)

    def _plan(self, wanted: PendingRequest[int], now_ms: float) -> Placement | Wait:
        others = self._held.reservations_of_others(wanted.key)
        planned = select_worker(
            wanted.prompt, self.state.routing_state(now_ms, others), self.config,
            seed=wanted.seed, phase=wanted.phase, dispatched_count=self._dispatched,
            queued_since_ms=wanted.since_ms,
        )  # fmt: skip
        if isinstance(planned, Rejection):
            raise SimulationFailed(
                f"request {wanted.prompt.request.id} was rejected: {planned.message}"
            )
        return planned

    def _hold(self, number: int, wait: Wait, now_ms: float) -> None:
        """Keep a request waiting."""
        self._reserve(number, wait.reservation)
        self._set_retry(number, wait, now_ms)

    def _set_retry(self, number: int, wait: Wait, now_ms: float) -> None:
        """Set the retry time of a waiting request; at least 1 ms ahead."""
        at_ms = self._held.next_retry_ms(number, wait)
        soon, late = int(now_ms) + 1.0, now_ms + MAX_RETRY_INTERVAL_MS
        self._retry_ms[number] = alarm = late if at_ms is None else min(max(at_ms, soon), late)
        heappush(self._retries, (alarm, number))

    def _reserve(self, number: int, planned: Reservation | None) -> None:
        """Update the reservation of a request; requests whose position changes become due."""
        self._due |= dict.fromkeys(self._held.reserve(self.waiting[number], planned))
