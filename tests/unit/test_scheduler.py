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

from kvlane.app.lanes.scheduling.model_availability import ModelAvailability
from kvlane.app.lanes.scheduling.scheduler import Scheduler
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.app.routing.queueing.pending import RequestKey
from kvlane.app.routing.queueing.router_queue import QueueConfig, RouterQueue
from kvlane.app.routing.selection.decision import Placement, Wait
from kvlane.app.routing.selection.handover_rules import HandOverRules
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.simulation.shared_views import SimulatedLedger, assigned_record
from kvlane.app.simulation.simulated_router import SimulatedRouter
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Finished, Phase, PrefillDone
from kvlane.streams.request import Hints, Request
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.routing_harness import RoutingHarness

CURVES = PerfCurves(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 0.0), min_decode_ms=0.0)
SPEED = {"curve": CURVES.coefficients(), "max_num_batched_tokens": 65_536}
"""A millisecond for each token of a prompt."""


class Deployment(NamedTuple):
    """Workers and settings. `workers`: by name, their cards."""

    policy: str
    workers: dict[str, dict[str, Any]]
    config: dict[str, Any]


DEPLOYMENTS = {
    "predictive": Deployment("predictive", {"w1": {}, "w2": {}, "w3": {}}, {}),
    "few runs": Deployment(
        "dynamo", {"w1": {"max_runs": 2}, "w2": {"max_runs": 1}},
        {"classes": {"a": ClassConfig(3.0), "b": ClassConfig(1.0)}},
    ),
    "hand-over": Deployment(
        "predictive",
        {"p": {"role": "prefill"}, "d": {"role": "decode", "max_runs": 3}},
        {"handover_rules": HandOverRules(is_enforced=True)},
    ),
}  # fmt: skip


class DecidedQueue:
    """A queue with the ledger that it reads. `decisions`: times, requests, phases, places, inputs
    and recorded candidates of all placements."""

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

    def dispatch(self, name: str, placement: Placement, now_ms: int) -> None:
        self.decisions.append(
            (now_ms, name, placement.phase, placement.worker_rank, placement.params,
             placement.candidates)
        )  # fmt: skip
        self.ledger.on_record(assigned_record(name, placement), now_ms)


class Event(NamedTuple):
    """A record of a worker, or requests that arrive for a phase, with their lengths."""

    record: PrefillDone | Finished | None
    requests: list[tuple[str, int]]
    phase: Phase = "aggregated"


def prompt(name: str, tokens: int) -> PromptHashes:
    hints = Hints(queue_class=name[0], strict_priority=1 if name.endswith("7") else None)
    return PromptHashes(
        Request(id=name, model="m", token_ids=pack_tokens([*range(tokens)]), hints=hints)
    )


def arrivals(seed: int) -> list[tuple[int, Event]]:
    """Times, and the requests that come together."""
    rng, at_ms, coming = Random(seed), 0, []
    for number in range(30):
        at_ms += rng.choice([1, 40, 400])
        names = [f"{rng.choice('ab')}-{number}-{n}" for n in range(rng.choice([1, 1, 6]))]
        coming.append((at_ms, Event(None, [(name, rng.randint(1, 900)) for name in names])))
    return coming


def simulated(deployment: Deployment, seed: int) -> tuple[DecidedQueue, list[tuple[int, Event]]]:
    """A simulated router before workers that compute prompts one after the other, and all events
    with their times: one at a time, and none at the time of a retry."""
    decided, numbers, free_ms = DecidedQueue(deployment), count(), Counter[str]()
    decided.ledger.queues.append(decided.queue)
    router = SimulatedRouter("", decided.queue, decided.ledger)
    coming = [(at_ms, next(numbers), event) for at_ms, event in arrivals(seed)]
    timeline: list[tuple[int, Event]] = []

    def begin(name: str, placement: Placement, now_ms: int) -> None:
        place, phase = placement.worker_rank, placement.phase
        run: dict[str, Any] = {
            "id": name, "attempt": 0, "phase": phase, "worker": place.worker, "epoch": place.epoch,
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
    while coming or router.wake_ms < math.inf:
        at_ms = coming[0][0] if coming else math.inf
        if at_ms <= now_ms or at_ms == router.wake_ms:
            heapreplace(coming, (int(at_ms) + 1, *coming[0][1:]))
            continue
        now_ms = int(min(router.wake_ms, at_ms))
        if now_ms == at_ms:
            event = heappop(coming)[2]
            timeline.append((now_ms, event))
            if event.record is not None:
                decided.ledger.on_record(event.record, now_ms)
            for name, tokens in event.requests:
                router.on_arrival(prompt(name, tokens), len(name), now_ms, event.phase)
        for name, placement in router.schedule(now_ms):
            decided.dispatch(name, placement, now_ms)
            begin(name, placement, now_ms)
    return decided, timeline


class LoopClock:
    """The time of an event loop since it began, in ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._began = loop, loop.time()

    def now_ms(self) -> int:
        return round(1000 * (self._loop.time() - self._began))

    def call_at(self, at_ms: int, action: Callable[[], None]) -> None:
        self._loop.call_at(self._began + at_ms / 1000, action)


async def scheduled(
    world: MemoryWorld, deployment: Deployment, timeline: list[tuple[int, Event]]
) -> DecidedQueue:
    """The scheduler of a router with the same events."""
    clock: Any = LoopClock(asyncio.get_running_loop())
    decided = DecidedQueue(deployment)
    availability = ModelAvailability(decided.fleet, clock, 1000)
    scheduler = Scheduler(decided.queue, availability, clock, lambda _: None)
    decided.ledger.queues.append(
        SimpleNamespace(on_record=partial(scheduler.on_record, is_replay=False))  # type: ignore[arg-type]
    )

    async def run(name: str, tokens: int, phase: Phase) -> None:
        request = decided.queue.waiting.new_request(
            RequestKey(0, name), prompt(name, tokens), len(name), clock.now_ms()
        )
        request = replace(request, phase=phase)
        while True:
            if phase != "decode":
                first = scheduler.first_phase(request, stays_whole=False)
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
    requests = sum(len(event.requests) for _, event in arrivals(seed))
    phases = 2 if name == "hand-over" else 1
    assert len(expected.decisions) == phases * requests
    for decision, other in zip(expected.decisions, found.decisions, strict=True):
        assert decision == other
    assert (found.queue.reservations, len(found.queue.waiting.keys)) == (0, 0)
