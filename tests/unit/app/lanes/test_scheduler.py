"""Tests of the scheduler of a router: it uses its queue as the simulation does, in its own time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kvlane.app.lanes.scheduler import Scheduler
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.queueing.router_queue import QueueConfig, RouterQueue
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.decision import Placement, Wait
from kvlane.app.routing.selection.handover_rules import HandOverRules
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.simulation.shared_views import SimulatedLedger, assigned_record
from kvlane.app.simulation.simulated_router import SimulatedRouter
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Fencing, Finished, Phase, PrefillDone
from kvlane.streams.request import Hints, Request
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.routing_harness import RoutingHarness

CURVES = PerfCurves(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 0.0), min_decode_ms=1.0)
SPEED = {"curve": CURVES.coefficients(), "max_num_batched_tokens": 65_536}
"""A millisecond for each token of a prompt, and for each step of decode."""


class Deployment(NamedTuple):
    """Workers and settings. `workers`: by name, their cards."""

    policy: str
    workers: dict[str, dict[str, Any]]
    config: dict[str, Any]
    classes: str = "ab"
    """The first letters of its requests."""


DEPLOYMENTS = {
    "predictive": Deployment("predictive", {"w1": {}, "w2": {}, "w3": {}}, {}),
    "few runs": Deployment(
        "dynamo", {"w1": {"max_runs": 2}, "w2": {"max_runs": 1}},
        {"classes": {"a": ClassConfig(3.0), "b": ClassConfig(1.0)}},
    ),
    "batch": Deployment(
        "predictive", {"w1": {}, "w2": {}, "w3": {}},
        {"batch_bounds": BatchBounds(max_step_ms=1500.0, max_blocked_share=0.9)}, "acc",
    ),
    "hand-over": Deployment(
        "predictive",
        {"p": {"role": "prefill"}, "d": {"role": "decode", "max_runs": 3}},
        {"handover_rules": HandOverRules(is_enforced=True)},
    ),
}  # fmt: skip


class Event(NamedTuple):
    """A record of a worker, or requests that arrive for a phase, with their lengths."""

    record: PrefillDone | Finished | None
    requests: list[tuple[str, int]]
    phase: Phase = "aggregated"


class DecidedQueue:
    """A queue with the ledger that it reads. `decisions`: times, requests, phases, places, inputs
    and recorded candidates of all placements; times and requests of preemptions. `attempts`: by
    request, the preemptions."""

    def __init__(self, deployment: Deployment) -> None:
        routing = RoutingHarness()
        for name, card in deployment.workers.items():
            routing.worker(name, engine=dict(SPEED), **card)
        self.ledger = SimulatedLedger()
        config = QueueConfig(RoutingConfig(deployment.policy), **deployment.config)
        self.queue = RouterQueue(
            "router", routing.fleet, routing.silent, self.ledger.state, routing.index, config
        )
        self.queue.on_fleet_changed()
        self.fleet = routing.fleet
        self.decisions: list[tuple[Any, ...]] = []
        self.attempts = Counter[str]()

    def dispatch(self, name: str, placement: Placement, now_ms: int) -> list[str]:
        """Carry a decision out; returns the requests that give way to it."""
        self.decisions.append(
            (now_ms, name, placement.phase, placement.worker_rank, placement.params,
             placement.candidates)
        )  # fmt: skip
        attempt, service_class = self.attempts[name], prompt(name, 1).request.service_class
        record = assigned_record(name, placement, "", attempt, service_class)
        self.ledger.on_record(record, now_ms)
        preempted = list(self.queue.batch.giving_way_on(placement.worker_rank, now_ms))
        for other in preempted:
            self.attempts[other] += 1
            self.decisions.append((now_ms, other))
            fencing = Fencing(id=other, attempt=self.attempts[other], reason="preempted")
            self.ledger.on_record(fencing, now_ms)
        return preempted

    def is_outdated(self, event: Event) -> bool:
        """Whether it is of a run that gave way."""
        record = event.record
        return record is not None and record.attempt < self.attempts[record.id]


def prompt(name: str, tokens: int, attempt: int = 0) -> PromptHashes:
    """A request; those with c in front are of class batch."""
    hints = Hints(queue_class=name[0], strict_priority=1 if name.endswith("7") else None)
    service_class: ServiceClass = "batch" if name[0] == "c" else "interactive"
    token_ids = pack_tokens([*range(tokens)])
    request = Request(
        id=name, model="m", token_ids=token_ids, hints=hints, service_class=service_class
    )
    return PromptHashes(request, pack_tokens([7] * attempt))


def arrivals(seed: int, classes: str) -> list[tuple[int, Event]]:
    """Times, and the requests that come together."""
    rng, at_ms, coming = Random(seed), 0, []
    for number in range(30):
        at_ms += rng.choice([1, 40, 400])
        names = [f"{rng.choice(classes)}-{number}-{n}" for n in range(rng.choice([1, 1, 6]))]
        coming.append((at_ms, Event(None, [(name, rng.randint(1, 900)) for name in names])))
    return coming


def next_moment(coming: list[tuple[int, int, Event]], router: SimulatedRouter, now_ms: int) -> int:
    """The time of the next event or retry; an event at the time of a retry comes later."""
    wake_ms = math.ceil(min(router.queue.next_wake_ms, 1e12))
    while coming and (coming[0][0] <= now_ms or coming[0][0] == wake_ms):
        heapreplace(coming, (coming[0][0] + 1, *coming[0][1:]))
    return min(wake_ms, coming[0][0]) if coming else wake_ms


def simulated(deployment: Deployment, seed: int) -> tuple[DecidedQueue, list[tuple[int, Event]]]:
    """A simulated router before workers that compute prompts one after the other, and all events
    with their times: one at a time, and none at the time of a retry."""
    decided, numbers, free_ms = DecidedQueue(deployment), count(), Counter[str]()
    decided.ledger.queues.append(decided.queue)
    router = SimulatedRouter("", decided.queue, decided.ledger)
    coming = [(at_ms, next(numbers), event) for at_ms, event in arrivals(seed, deployment.classes)]
    lengths = {name: tokens for *_, event in coming for name, tokens in event.requests}
    timeline: list[tuple[int, Event]] = []

    def begin(name: str, placement: Placement, now_ms: int) -> None:
        place, phase = placement.worker_rank, placement.phase
        run: dict[str, Any] = {
            "id": name, "attempt": decided.attempts[name], "phase": phase,
            "worker": place.worker, "epoch": place.epoch,
        }  # fmt: skip
        took_ms = 5 if phase == "decode" else placement.tokens
        done_ms = free_ms[place.worker] = max(now_ms, free_ms[place.worker]) + took_ms
        events = [(done_ms, Event(PrefillDone(**run, run=0), []))]
        if phase == "prefill":
            events.append((done_ms, Event(None, [(name, placement.tokens)], "decode")))
        else:
            events.append((done_ms + 300, Event(Finished(**run, code="length"), [])))
        for at_ms, event in events:
            heappush(coming, (at_ms, next(numbers), event))

    now_ms = -1
    while coming or router.queue.next_wake_ms < math.inf:
        now_ms = next_moment(coming, router, now_ms)
        is_event = bool(coming) and coming[0][0] == now_ms
        if is_event and not decided.is_outdated(event := heappop(coming)[2]):
            timeline.append((now_ms, event))
            if event.record is not None:
                decided.ledger.on_record(event.record, now_ms)
            for name, tokens in event.requests:
                wanted = prompt(name, tokens, decided.attempts[name])
                router.on_arrival(wanted, len(name), now_ms, event.phase)
        for name, placement in router.schedule(now_ms):
            begin(name, placement, now_ms)
            for other in decided.dispatch(name, placement, now_ms):
                again = Event(None, [(other, lengths[other])])
                heappush(coming, (now_ms + 7, next(numbers), again))
    return decided, timeline


class LoopClock:
    """The time of an event loop since it began, in ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._began = loop, loop.time()

    def now_ms(self) -> int:
        return int(1000 * (self._loop.time() - self._began) + 1e-6)

    def call_at(self, at_ms: int, action: Callable[[], None]) -> None:
        self._loop.call_at(self._began + at_ms / 1000, action)


async def scheduled(
    world: MemoryWorld, deployment: Deployment, timeline: list[tuple[int, Event]]
) -> DecidedQueue:
    """The scheduler of a router with the same events."""
    clock: Any = LoopClock(asyncio.get_running_loop())
    decided = DecidedQueue(deployment)
    scheduler = Scheduler(decided.queue, clock, lambda _: None)
    decided.ledger.queues.append(
        SimpleNamespace(on_record=lambda record, _: scheduler.on_record(record, is_replay=False))  # type: ignore[arg-type]
    )

    async def run(name: str, tokens: int, phase: Phase) -> None:
        wanted = prompt(name, tokens, decided.attempts[name])
        request = decided.queue.waiting_of(wanted.request.service_class).new_request(
            RequestKey(0, name), wanted, len(name), clock.now_ms()
        )
        request = replace(request, phase=phase)
        while True:
            if phase != "decode":
                first = decided.queue.first_phase(request, clock.now_ms())
                request = replace(request, phase=first.phase)
            decision = await scheduler.schedule(request)
            if not isinstance(decision, Wait):
                break
            await scheduler.wait_for_change(request, decision, math.inf)
        assert isinstance(decision, Placement)
        scheduler.leave(request)
        decided.dispatch(name, decision, clock.now_ms())

    def happen(event: Event) -> None:
        if event.record is not None:
            decided.ledger.on_record(event.record, clock.now_ms())
        for name, tokens in event.requests:
            world.spawn(run(name, tokens, event.phase))

    for at_ms, event in timeline:
        clock.call_at(at_ms, partial(happen, event))
    await world.sleep(200)
    return decided


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DEPLOYMENTS)
@scenario_test
async def test_router_and_simulation_decide_the_same_at_the_same_times(
    world: MemoryWorld, name: str, seed: int
) -> None:
    expected, timeline = simulated(DEPLOYMENTS[name], seed)
    found = await scheduled(world, DEPLOYMENTS[name], timeline)
    requests = sum(len(event.requests) for _, event in arrivals(seed, DEPLOYMENTS[name].classes))
    phases = 2 if name == "hand-over" else 1
    preemptions = sum(expected.attempts.values())
    assert len(expected.decisions) == phases * requests + 2 * preemptions
    assert bool(preemptions) == (name == "batch")
    for decision, other in zip(expected.decisions, found.decisions, strict=True):
        assert decision == other
    assert (found.queue.reservations, len(found.queue.waiting.keys)) == (0, 0)
    assert not found.queue.batch.waiting.keys
