"""Discrete-event simulator of a trace on a fleet: one loop over events in order of time.

    arrival ──► waiting ──plan──► a worker's engine ──► first token ──► last token
                   ▲                                        │              │
                   └──────────── planned again ◄────────────┴──────────────┘

Queues and decisions are those of a real router (`app/routing/queueing/router_queue.py`), steps
those of `app/engine/simulated/step.py`. Only engines and the delays of `NetworkConditions` take
time.

Order at one time: steps end first, worker by worker; then routers read records and plan, router by
router; all requests that a worker gets at that time are in the next step that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from zlib import crc32

from kvlane.app.engine.simulated.batch import BatchSequence, EngineLimits, StepResult
from kvlane.app.engine.simulated.step import release_held
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.routing.queueing.router_queue import QueueConfig, RouterQueue
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.selection.handover_rules import (
    DEFAULT_RULES,
    NO_HASHES,
    HandOverRules,
    decode_request,
)
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig, TransferSpeed
from kvlane.app.routing.selection.select import DEFAULT_BYTES_PER_TOKEN
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.request_state import RunId
from kvlane.app.simulation.batch_work import BatchTask, BatchWork
from kvlane.app.simulation.shared_views import (
    HEARTBEAT_MS,
    SharedViews,
    SimulatedLedger,
    SimulatedLedgerRecord,
    assigned_record,
    finished_record,
    prefill_done_record,
)
from kvlane.app.simulation.simulated_router import (
    DEFAULT_CONDITIONS,
    NetworkConditions,
    SimulatedRouter,
    SimulationFailed,
)
from kvlane.app.simulation.simulated_worker import NEVER, EventQueue, SimulatedWorker
from kvlane.app.simulation.trace_requests import RequestArrival, SimulatedRequest, request_of
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, InvalidTrace
from kvlane.streams.records import Fencing, Phase, Role
from kvlane.streams.request import Request

STARVATION_TIMEOUT_MS = 60_000.0
"""Idle time of all workers after which a waiting request counts as never scheduled."""


@dataclass(slots=True)
class Simulator:
    """One run of a trace. `progress` is called with the number of new arrivals."""

    workers: list[SimulatedWorker]
    routers: list[SimulatedRouter]
    shared_views: SharedViews
    conditions: NetworkConditions
    arrivals: Sequence[RequestArrival]
    rng: Random
    batch: BatchWork | None = None
    """Batch work beside the trace; the run ends with the last request of the trace."""
    progress: Callable[[int], None] = lambda _: None
    requests: list[SimulatedRequest] = field(default_factory=list)
    _by_id: dict[str, SimulatedRequest] = field(default_factory=dict)
    _unfinished: int = 0
    _events: EventQueue = field(init=False)
    _event_delay_ms: float = field(init=False)
    _wake_ms: float = NEVER
    """When a router plans next without a new event."""
    _heartbeat_ms: float = 0.0
    _last_event_ms: float = 0.0
    _has_news: bool = False
    """Whether routers have read records of workers since they planned last."""
    _idle: dict[int, SimulatedWorker] = field(default_factory=dict)
    """Workers that start a step once all requests of the current time are dispatched."""

    def __post_init__(self) -> None:
        self._events = EventQueue(self.workers)
        self._event_delay_ms = self.conditions.event_delay_ms + self.conditions.ledger_lag_ms

    def run(self) -> list[SimulatedRequest]:
        """Run to the end; returns the requests in order of arrival. Raises as `new_simulator`."""
        if self.batch is not None:
            for _ in range(self.batch.first_count(len(self.workers))):
                self._add_batch_task(0.0)
            self._plan(0.0)
        while True:
            came = len(self.requests)
            arrival = self.arrivals[came].at_ms if came < len(self.arrivals) else NEVER
            end, later = self._events.next_end_ms, self._events.next_action_ms
            wake = self._wake_ms
            news = min(arrival, later, wake)
            if end == news == NEVER or (
                self.batch is not None and arrival == NEVER and not self._unfinished
            ):
                return self.requests
            if (
                end == arrival == later == NEVER
                and wake > self._last_event_ms + STARVATION_TIMEOUT_MS
            ):
                held = sum(router.waiting_count for router in self.routers)
                raise SimulationFailed(f"{held} requests are never scheduled on idle workers")
            if self._heartbeat_ms <= min(end, news):
                self._send_heartbeats(is_read=arrival < self._heartbeat_ms + HEARTBEAT_MS)
            elif end <= news:
                self._end_step(end)
            else:
                self._arrive(news)
                if self._events.run_actions(news):
                    self._last_event_ms = news
                self._plan(news)

    def change_engines(self, at_ms: float, curves: PerfCurves) -> None:
        def change() -> None:
            for worker in self.workers:
                before = worker.ends_at_ms
                worker.change_curves(curves, at_ms)
                self._on_changed(worker, before)
            self.shared_views.on_changed_engines(curves)
            for router in self.routers:
                router.queue.on_fleet_changed()

        self._events.delay(0.0, at_ms, change)

    # --- events ----------------------------------------------------------------------------------

    def _send_heartbeats(self, *, is_read: bool) -> None:
        """Send the heartbeats of all workers, if a router may read them before the next ones."""
        is_read = is_read or self.batch is not None
        if is_read or any(router.waiting_count for router in self.routers):
            for worker in self.workers:
                self.shared_views.on_heartbeat(worker, self._heartbeat_ms)
        self._heartbeat_ms += HEARTBEAT_MS

    def _arrive(self, now_ms: float) -> None:
        came = number = len(self.requests)
        while number < len(self.arrivals) and self.arrivals[number].at_ms <= now_ms:
            self._last_event_ms, request = self.arrivals[number]
            simulated = SimulatedRequest(request, self._last_event_ms)
            simulated.router = crc32(simulated.id.encode()) % len(self.routers)
            self.requests.append(simulated)
            self._by_id[simulated.id] = simulated
            router = self.routers[simulated.router]
            router.on_arrival(request.prompt, self.rng.getrandbits(32), now_ms)
            number += 1
        self._unfinished += number - came
        self.progress(number - came)

    def _end_step(self, now_ms: float) -> None:
        worker = self._events.pop_end()
        if worker is None:
            return
        self._last_event_ms = now_ms
        done = worker.end()
        if done is not None:
            if done.removed or done.stored:
                if self._event_delay_ms:
                    changed = partial(self.shared_views.on_cache_change, worker, done)
                    self._events.delay(now_ms, self._event_delay_ms, changed)
                else:
                    self.shared_views.on_cache_change(worker, done)
            if done.chunks or done.finished or done.received:
                self._record_tokens(worker, done, now_ms)
        self._take_removed(worker, now_ms)
        if self._has_news:
            self._plan(now_ms)
        self._begin(worker, now_ms)

    def _record_tokens(self, worker: SimulatedWorker, done: StepResult, now_ms: float) -> None:
        for sequence, _, is_last in done.chunks:
            if isinstance(sequence.key, BatchTask):
                if is_last:
                    self._on_batch_token(sequence.key, worker, now_ms)
                continue
            simulated = request_of(sequence)
            if is_last and sequence.is_handed_over:
                self._hand_over(simulated, sequence, worker, now_ms)
            elif is_last and simulated.first_token_ms == NEVER:
                simulated.first_token_ms, simulated.cached_tokens = now_ms, sequence.cached_tokens
                took_ms = now_ms - simulated.sent_ms - self.conditions.dispatch_delay_ms
                self._write(
                    simulated,
                    prefill_done_record(simulated.id, worker, simulated.cached_tokens, took_ms),
                    now_ms,
                )
        for sequence in done.received:
            simulated = request_of(sequence)
            simulated.first_token_ms = now_ms
            took_ms = now_ms - simulated.sent_ms - self.conditions.dispatch_delay_ms
            record = prefill_done_record(simulated.id, worker, 0, took_ms, "decode")
            self._write(simulated, record, now_ms)
        for sequence in done.finished:
            if sequence.is_handed_over:
                continue
            if isinstance(sequence.key, BatchTask):
                self._on_batch_end(sequence.key, worker, now_ms)
                continue
            simulated = request_of(sequence)
            simulated.last_token_ms = now_ms
            self._unfinished -= 1
            phase: Phase = "decode" if sequence.is_received else "aggregated"
            output_tokens = simulated.request.output_tokens
            came_ms = simulated.sent_ms + self.conditions.dispatch_delay_ms
            end = finished_record(
                simulated.id, worker, output_tokens, phase,
                ttft_ms=simulated.first_token_ms - came_ms,
                itl_ms=(now_ms - simulated.first_token_ms) / max(output_tokens - 1, 1),
            )  # fmt: skip
            self._write(simulated, end, now_ms)

    def _plan(self, now_ms: float) -> None:
        """Let the routers plan, then start steps on idle workers."""
        self._has_news = False
        for router in self.routers:
            if router.has_due(now_ms):
                self.shared_views.apply_cache_changes()
                for request_id, decision in router.schedule(now_ms):
                    if request_id in self._by_id:
                        self._send(self._by_id[request_id], decision, now_ms)
                    else:
                        self._send_batch(request_id, decision, now_ms)
        self._wake_ms = min([router.queue.next_wake_ms for router in self.routers])
        for worker in self._idle.values():
            self._begin(worker, now_ms)
        self._idle.clear()

    # --- actions ---------------------------------------------------------------------------------

    def _send(self, simulated: SimulatedRequest, placement: Placement, now_ms: float) -> None:
        """Dispatch a request. Its own router counts it at once, others when they read it."""
        router, phase = self.routers[simulated.router], placement.phase
        worker = self.workers[placement.worker_rank.epoch]
        simulated.worker, simulated.sent_ms = worker.name, now_ms
        if phase == "aggregated":
            simulated.predicted_ttft_ms = placement.forecast.ttft_ms
            simulated.predicted_itl_ms = placement.forecast.itl_ms
        delay_ms = self.conditions.dispatch_delay_ms
        if phase == "decode":
            delay_ms += self.conditions.transfer_ms(simulated.request.prompt.tokens)
        admit = partial(self._admit, simulated, worker, phase, now_ms + delay_ms)
        self._events.delay(now_ms, delay_ms, admit)
        self._record_decision(router, simulated.request.prompt.request, placement, now_ms)

    def _record_decision(
        self,
        router: SimulatedRouter,
        request: Request,
        placement: Placement,
        now_ms: float,
        attempt: int = 0,
    ) -> None:
        """Count a decision at once, and read its record after the lag of the ledger."""
        queue, lag_ms = router.queue, self.conditions.ledger_lag_ms
        worker, epoch, _ = placement.worker_rank
        run = RunId(attempt, placement.phase, worker, epoch)
        queue.inputs.add_unconfirmed(run, request, placement)

        def read() -> None:
            queue.inputs.remove_unconfirmed(run, request, placement)
            queue.inputs.herd_avoidance.observe_lag(lag_ms)
            record = assigned_record(
                request.id, placement, router.name, attempt, request.service_class
            )
            router.ledger.on_record(record, now_ms)
            self._preempt(placement.worker_rank, now_ms)

        self._events.delay(now_ms, lag_ms, read)

    def _admit(
        self, simulated: SimulatedRequest, worker: SimulatedWorker, phase: Phase, now_ms: float
    ) -> None:
        request, is_prefill = simulated.request, phase == "prefill"
        output_tokens = 1 if is_prefill else request.output_tokens
        sequence = BatchSequence(
            simulated, request.prompt.tokens, output_tokens, request.chunks,
            is_handed_over=is_prefill, is_received=phase == "decode",
        )  # fmt: skip
        before = worker.ends_at_ms
        try:
            worker.admit(sequence, now_ms)
        except ValueError as e:
            raise InvalidTrace(f"request {simulated.id} fits no worker: {e}") from e
        self._on_changed(worker, before)

    def _hand_over(
        self,
        simulated: SimulatedRequest,
        sequence: BatchSequence,
        worker: SimulatedWorker,
        now_ms: float,
    ) -> None:
        took_ms = now_ms - simulated.sent_ms - self.conditions.dispatch_delay_ms
        simulated.cached_tokens = sequence.cached_tokens
        simulated.prefill_worker, simulated.held = worker.name, (worker, sequence)
        for record in (
            prefill_done_record(simulated.id, worker, sequence.cached_tokens, took_ms, "prefill"),
            finished_record(simulated.id, worker, 0, "prefill"),
        ):
            self._write(simulated, record, now_ms)
        router = self.routers[simulated.router]
        seed, prompt = self.rng.getrandbits(32), simulated.request.prompt
        request = decode_request(prompt.request, worker.name, b"", sequence.cached_tokens)
        prompt = PromptHashes.from_hashes(request, prompt.tokens, NO_HASHES, CHUNK_TOKENS)
        came_ms = now_ms + self._event_delay_ms
        arrive = partial(router.on_arrival, prompt, seed, came_ms, "decode")
        self._events.delay(now_ms, self._event_delay_ms, arrive)

    def _on_received(self, sequence: BatchSequence, now_ms: float) -> None:
        """Release the blocks at the prefill worker, which may have waited for them."""
        simulated = request_of(sequence)
        assert simulated.held is not None
        (worker, held), simulated.held = simulated.held, None
        release_held(worker.state, held)
        self._begin(worker, now_ms)

    def _on_changed(self, worker: SimulatedWorker, before: float) -> None:
        """Sequences of a worker changed, whose step was to end at `before`."""
        if before == NEVER:
            self._idle[worker.epoch] = worker
        elif worker.ends_at_ms != before:  # its decode-only steps were cut after the current one
            self._events.add_end(worker)

    # --- batch work ------------------------------------------------------------------------------

    def _add_batch_task(self, now_ms: float) -> None:
        assert self.batch is not None
        task = self.batch.next_task()
        self.shared_views.add_chunks(task.chunks, self.batch.keys(task))
        self.routers[0].on_arrival(self.batch.prompt(task), 0, now_ms)

    def _send_batch(self, request_id: str, placement: Placement, now_ms: float) -> None:
        assert self.batch is not None
        task, worker = self.batch.tasks[request_id], self.workers[placement.worker_rank.epoch]
        sequence, request = self.batch.begin(task, worker), self.batch.prompt(task).request
        admit = partial(self._admit_batch, sequence, worker, now_ms)
        self._events.delay(now_ms, self.conditions.dispatch_delay_ms, admit)
        self._record_decision(self.routers[0], request, placement, now_ms, task.attempt)
        if self.batch.has_class and not task.attempt:
            self._add_batch_task(now_ms)

    def _admit_batch(
        self, sequence: BatchSequence, worker: SimulatedWorker, sent_ms: float
    ) -> None:
        before = worker.ends_at_ms
        worker.admit(sequence, sent_ms + self.conditions.dispatch_delay_ms)
        self._on_changed(worker, before)

    def _preempt(self, rank: WorkerRank, now_ms: float) -> None:
        if self.batch is None or self.batch.mode != "classes":
            return
        router = self.routers[0]
        for request_id in list(router.queue.batch.giving_way_on(rank, int(now_ms))):
            task = self.batch.tasks[request_id]
            assert task.sequence is not None
            task.attempt += 1
            self.batch.counts.preemptions += 1
            fencing = Fencing(id=task.id, attempt=task.attempt, reason="preempted")
            router.ledger.on_record(fencing, now_ms)
            remove = partial(self._remove, task.sequence, self.workers[rank.epoch], now_ms)
            self._events.delay(now_ms, self.conditions.dispatch_delay_ms, remove)

    def _remove(self, sequence: BatchSequence, worker: SimulatedWorker, sent_ms: float) -> None:
        before = worker.ends_at_ms
        worker.remove(sequence, sent_ms + self.conditions.dispatch_delay_ms)
        self._on_changed(worker, before)
        if before == NEVER:
            self._take_removed(worker, sent_ms + self.conditions.dispatch_delay_ms)

    def _take_removed(self, worker: SimulatedWorker, now_ms: float) -> None:
        if self.batch is not None:
            for removed in worker.removed():
                task = self.batch.on_removed(removed)
                self.routers[0].on_arrival(self.batch.prompt(task), 0, now_ms)

    def _on_batch_token(self, task: BatchTask, worker: SimulatedWorker, now_ms: float) -> None:
        assert self.batch is not None
        self.batch.on_first_token(task)
        record = prefill_done_record(task.id, worker, 0, 0.0, attempt=task.attempt)
        self.routers[0].ledger.on_record(record, now_ms)
        self._has_news = True

    def _on_batch_end(self, task: BatchTask, worker: SimulatedWorker, now_ms: float) -> None:
        assert self.batch is not None
        self.batch.on_finished(task)
        record = finished_record(task.id, worker, task.output_tokens, attempt=task.attempt)
        self.routers[0].ledger.on_record(record, now_ms)
        self._has_news = True
        if not self.batch.has_class:
            self._add_batch_task(now_ms)

    def _write(
        self, simulated: SimulatedRequest, record: SimulatedLedgerRecord, now_ms: float
    ) -> None:
        """Write a record of a worker; routers that read it plan again."""
        ledger = self.routers[simulated.router].ledger

        def read() -> None:
            ledger.on_record(record, now_ms)
            self._has_news = True

        self._events.delay(now_ms, self._event_delay_ms, read)

    def _begin(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Start a step of a worker that is in none, if it has work."""
        if worker.ends_at_ms != NEVER:
            return
        worker.begin(now_ms)
        if worker.ends_at_ms != NEVER:
            self._events.add_end(worker)
            for sequence in worker.started():
                self._on_received(sequence, now_ms)


def new_simulator(
    arrivals: Sequence[RequestArrival],
    workers: int,
    shape: EngineLimits,
    config: RoutingConfig,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    conditions: NetworkConditions = DEFAULT_CONDITIONS,
    batch: BatchWork | None = None,
    *,
    prefill_workers: int = 0,
    handover_rules: HandOverRules | None = None,
    queue_order: QueueOrder = "sjf",
) -> Simulator:
    """A run of a trace on equal workers with empty caches. `batch`: the work beside it.

    `prefill_workers`, `handover_rules`: as in `SimulationRun`. A function of the arguments. `run`
    raises InvalidTrace for a request that fits into no cache, and SimulationFailed.
    """
    fleet = [
        SimulatedWorker(name, number, shape) for number, name in enumerate(worker_names(workers))
    ]
    keys = {
        chunk: key
        for arrival in arrivals
        for chunk, key in zip(arrival.request.chunks, arrival.request.keys, strict=True)
    }
    roles: list[Role] = ["aggregated"] * workers
    if prefill_workers:
        roles[:prefill_workers] = ["prefill"] * prefill_workers
        roles[prefill_workers:] = ["decode"] * (workers - prefill_workers)
    if prefill_workers and handover_rules is None:
        handover_rules = HandOverRules(is_enforced=True)
    bytes_per_token = None
    if handover_rules is not None:
        bytes_per_token = 0 if conditions.transfer is None else DEFAULT_BYTES_PER_TOKEN
        speed = conditions.transfer or TransferSpeed(latency_ms=0.0)
        config = config._replace(transfer_speed=speed)
    views = SharedViews(
        fleet, shape, keys, publishes_curves=conditions.publishes_curves, roles=roles,
        transfer_bytes_per_token=bytes_per_token,
    )  # fmt: skip
    rules = handover_rules or DEFAULT_RULES
    queue_config = QueueConfig(config, order=queue_order, handover_rules=rules)
    if batch is not None:
        queue_config = queue_config._replace(batch_bounds=batch.bounds)
    ledger, routers = SimulatedLedger(), []
    for number in range(conditions.routers):
        read = ledger if conditions.shares_ledger or not number else SimulatedLedger()
        name = f"router-{number}"
        queue = RouterQueue(
            name, views.fleet, views.silent, read.state, views.kv_index, queue_config
        )
        queue.on_fleet_changed()
        read.queues.append(queue)
        routers.append(SimulatedRouter(name if conditions.staggers_routers else "", queue, read))
    return Simulator(fleet, routers, views, conditions, arrivals, Random(seed), batch, progress)


def worker_names(workers: int) -> list[str]:
    """Names of workers; their order is that of their numbers."""
    digits = len(str(workers - 1))
    return [f"worker-{number:0{digits}}" for number in range(workers)]
