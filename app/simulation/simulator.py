"""Discrete-event simulator of a trace on a fleet: one loop over events in order of time.

    arrival ──► waiting ──plan──► a worker's engine ──► first token ──► last token
                   ▲                                        │              │
                   └──────────── planned again ◄────────────┴──────────────┘

Decisions come from `app/routing/selection/select.py` and steps from `app/engine/simulated/step.py`,
so the figures are those of the shipped code. No Kafka, no event loop, no clock: only engines and
the delays of `NetworkConditions` take time.

Order at one time: steps end first, worker by worker; then routers read records and plan, router by
router; all requests that a worker gets at that time are in the next step that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple
from zlib import crc32

from app.engine.simulated.batch import BatchSequence as Modelled
from app.engine.simulated.batch import EngineLimits, StepResult
from app.mooncake_trace import InvalidTrace
from app.routing.queueing.herd_avoidance import stagger_by_worker
from app.routing.selection.decision import Placement, RoutingConfig
from app.simulation.network_conditions import DEFAULT_CONDITIONS, NetworkConditions
from app.simulation.router_state import (
    HEARTBEAT_MS,
    LedgerRecord,
    LedgerReplica,
    RouterState,
    SharedViews,
    assigned_record,
    finished_record,
    prefill_done_record,
)
from app.simulation.simulated_router import SimulatedRouter, SimulationFailed
from app.simulation.simulated_worker import NEVER, SimulatedWorker
from app.simulation.trace_requests import RequestArrival, TraceRequest

STARVATION_TIMEOUT_MS = 60_000.0
"""Idle time of all workers after which a waiting request counts as never scheduled."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request; times in ms since the start, NEVER until they are known.

    `router`: number of its router. `cached_tokens`: cached prompt tokens at its first admission.
    """

    request: TraceRequest
    arrived_ms: float
    router: int = 0
    worker: str = ""
    sent_ms: float = NEVER
    first_token_ms: float = NEVER
    last_token_ms: float = NEVER
    cached_tokens: int = 0

    @property
    def id(self) -> str:
        return self.request.prompt.request.id


class RouterSlot(NamedTuple):
    """A router and its state."""

    router: SimulatedRouter
    state: RouterState


@dataclass(slots=True)
class Simulator:
    """One run of a trace. `progress` is called with the number of new arrivals."""

    workers: list[SimulatedWorker]
    router_slots: list[RouterSlot]
    shared_views: SharedViews
    conditions: NetworkConditions
    arrivals: Sequence[RequestArrival]
    rng: Random
    progress: Callable[[int], None] = lambda _: None
    requests: list[SimulatedRequest] = field(default_factory=list)
    _event_delay_ms: float = field(init=False)
    """Delay from an event on a worker until routers read it."""
    _wake_ms: float = NEVER
    """When a router plans next without a new event."""
    _heartbeat_ms: float = 0.0
    _last_event_ms: float = 0.0
    """Time of the last arrival or end of a step."""
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of ends of steps with the worker's number; an entry that differs from the worker's
    `ends_at_ms` is stale."""
    _delayed: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of delayed actions: time, sequence number, action."""
    _delayed_count: int = 0
    _progressed: dict[str, None] = field(default_factory=dict)
    """Workers with records that routers have read since they planned last."""
    _idle: dict[int, SimulatedWorker] = field(default_factory=dict)
    """Workers that start a step once all requests of the current time are dispatched."""

    def __post_init__(self) -> None:
        self._event_delay_ms = self.conditions.event_delay_ms + self.conditions.ledger_lag_ms

    def run(self) -> list[SimulatedRequest]:
        """Run to the end; returns the requests in order of arrival. Raises as "
        "`new_simulator` does."""
        while True:
            came = len(self.requests)
            arrival = self.arrivals[came].at_ms if came < len(self.arrivals) else NEVER
            end = self._ends[0][0] if self._ends else NEVER
            later = self._delayed[0][0] if self._delayed else NEVER
            wake = self._wake_ms
            news = min(arrival, later, wake)
            if end == news == NEVER:
                return self.requests
            if (
                end == arrival == later == NEVER
                and wake > self._last_event_ms + STARVATION_TIMEOUT_MS
            ):
                held = sum(len(seat.router.waiting) for seat in self.router_slots)
                raise SimulationFailed(f"{held} requests are never scheduled on idle workers")
            if self._heartbeat_ms <= min(end, news):
                self._send_heartbeats(is_read=arrival < self._heartbeat_ms + HEARTBEAT_MS)
            elif end <= news:
                self._end_step()
            else:
                self._arrive(news)
                self._catch_up(news)
                self._plan(news)

    # --- events ----------------------------------------------------------------------------------

    def _send_heartbeats(self, *, is_read: bool) -> None:
        """Send the heartbeats of all workers, if a router may read them before the next ones."""
        if is_read or any(seat.router.waiting for seat in self.router_slots):
            for worker in self.workers:
                self.shared_views.on_heartbeat(worker, self._heartbeat_ms)
        self._heartbeat_ms += HEARTBEAT_MS

    def _arrive(self, now_ms: float) -> None:
        """Process all arrivals up to now."""
        came = number = len(self.requests)
        while number < len(self.arrivals) and self.arrivals[number].at_ms <= now_ms:
            self._last_event_ms, request = self.arrivals[number]
            life = SimulatedRequest(request, self._last_event_ms)
            life.router = crc32(life.id.encode()) % len(self.router_slots)
            self.requests.append(life)
            router = self.router_slots[life.router].router
            router.on_arrival(request.prompt, number, self.rng.getrandbits(32), now_ms)
            number += 1
        self.progress(number - came)

    def _catch_up(self, now_ms: float) -> None:
        """Run all delayed actions up to now."""
        while self._delayed and self._delayed[0][0] <= now_ms:
            self._last_event_ms = now_ms
            heappop(self._delayed)[2]()

    def _end_step(self) -> None:
        now_ms, number = heappop(self._ends)
        worker = self.workers[number]
        if worker.ends_at_ms != now_ms:
            return
        self._last_event_ms = now_ms
        done = worker.end()
        if done is not None:
            if done.removed or done.stored:
                if self._event_delay_ms:
                    changed = partial(self.shared_views.on_cache_change, worker, done)
                    self._delay(now_ms, self._event_delay_ms, changed)
                else:
                    self.shared_views.on_cache_change(worker, done)
            if done.chunks or done.finished:
                self._record_tokens(worker, done, now_ms)
            if self._progressed:
                self._plan(now_ms)
        self._begin(worker, now_ms)

    def _record_tokens(self, worker: SimulatedWorker, done: StepResult, now_ms: float) -> None:
        """Record first and last tokens."""
        for sequence, _, is_last in done.chunks:
            life = _life_of(sequence)
            if is_last and life.first_token_ms == NEVER:
                life.first_token_ms, life.cached_tokens = now_ms, sequence.cached_tokens
                took_ms = now_ms - life.sent_ms - self.conditions.dispatch_delay_ms
                self._write(
                    life, prefill_done_record(life.id, worker, life.cached_tokens, took_ms), now_ms
                )
        for sequence in done.finished:
            life = _life_of(sequence)
            life.last_token_ms = now_ms
            self._write(life, finished_record(life.id, worker, life.request.output_tokens), now_ms)

    def _plan(self, now_ms: float) -> None:
        """Let the routers plan, then start steps on idle workers."""
        for seat in self.router_slots:
            if seat.router.waiting:
                seat.router.on_worker_progress(self._progressed)
                for number, decision in seat.router.schedule(now_ms):
                    self._send(self.requests[number], decision, now_ms)
        self._wake_ms = min([seat.router.wake_ms for seat in self.router_slots])
        self._progressed.clear()
        for worker in self._idle.values():
            self._begin(worker, now_ms)
        self._idle.clear()

    # --- actions ---------------------------------------------------------------------------------

    def _send(self, life: SimulatedRequest, decision: Placement, now_ms: float) -> None:
        """Dispatch a request. Its own router counts it at once, others when they read it."""
        worker = self.workers[decision.worker_rank.epoch]
        life.worker, life.sent_ms = worker.name, now_ms
        self._delay(now_ms, self.conditions.dispatch_delay_ms, partial(self._admit, life, worker))
        knowledge = self.router_slots[life.router].state
        record = assigned_record(life.id, decision)
        if not self.conditions.ledger_lag_ms:
            knowledge.ledger.on_record(record, now_ms)
            return
        knowledge.own_load.add(decision.worker_rank, decision.load)

        def read() -> None:
            knowledge.own_load.remove(decision.worker_rank, decision.load)
            knowledge.ledger.on_record(record, now_ms)

        self._delay(now_ms, self.conditions.ledger_lag_ms, read)

    def _admit(self, life: SimulatedRequest, worker: SimulatedWorker) -> None:
        now_ms = life.sent_ms + self.conditions.dispatch_delay_ms
        request = life.request
        sequence = Modelled(life, request.prompt.tokens, request.output_tokens, request.chunks)
        before = worker.ends_at_ms
        try:
            worker.admit(sequence, now_ms)
        except ValueError as e:
            raise InvalidTrace(f"request {life.id} fits no worker: {e}") from e
        if before == NEVER:
            self._idle[worker.epoch] = worker
        elif worker.ends_at_ms != before:  # its decode-only steps were cut after the current one
            heappush(self._ends, (worker.ends_at_ms, worker.epoch))

    def _write(self, life: SimulatedRequest, record: LedgerRecord, now_ms: float) -> None:
        """Write a record of a worker; routers that read it plan again."""
        books = self.router_slots[life.router].state.ledger

        def read() -> None:
            books.on_record(record, now_ms)
            self._progressed[record.worker] = None

        self._delay(now_ms, self._event_delay_ms, read)

    def _delay(self, now_ms: float, delay_ms: float, happen: Callable[[], None]) -> None:
        """Run an action now, or after a delay."""
        if delay_ms <= 0:
            happen()
        else:
            self._delayed_count += 1
            heappush(self._delayed, (now_ms + delay_ms, self._delayed_count, happen))

    def _begin(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Start a step of a worker that is in none, if it has work."""
        if worker.ends_at_ms != NEVER:
            return
        worker.begin(now_ms)
        if worker.ends_at_ms != NEVER:
            heappush(self._ends, (worker.ends_at_ms, worker.epoch))


def new_simulator(
    arrivals: Sequence[RequestArrival],
    workers: int,
    shape: EngineLimits,
    tuning: RoutingConfig,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    conditions: NetworkConditions = DEFAULT_CONDITIONS,
) -> Simulator:
    """A run of a trace on equal workers with empty caches.

    The result is a function of the arguments. `run` raises InvalidTrace for a request that fits
    into no cache, and SimulationFailed.
    """
    fleet = [
        SimulatedWorker(name, number, shape) for number, name in enumerate(worker_names(workers))
    ]
    keys = {
        chunk: key
        for arrival in arrivals
        for chunk, key in zip(arrival.request.chunks, arrival.request.keys, strict=True)
    }
    views = SharedViews(fleet, shape, keys, publishes_curves=conditions.publishes_curves)
    books = LedgerReplica(conditions.ledger_lag_ms)
    seats = []
    routers = [f"router-{number}" for number in range(conditions.routers)]
    for router in routers:
        later = stagger_by_worker(router, routers, worker_names(workers), conditions.ledger_lag_ms)
        if conditions.shares_ledger:
            knowledge = RouterState(views, books, later)
        else:
            knowledge = RouterState(views, LedgerReplica())
        seats.append(RouterSlot(SimulatedRouter(knowledge, tuning), knowledge))
    return Simulator(fleet, seats, views, conditions, arrivals, Random(seed), progress)


def worker_names(workers: int) -> list[str]:
    """Names of workers; their order is that of their numbers."""
    digits = len(str(workers - 1))
    return [f"worker-{number:0{digits}}" for number in range(workers)]


def _life_of(sequence: Modelled) -> SimulatedRequest:
    life = sequence.key
    assert isinstance(life, SimulatedRequest)
    return life
