"""Tests of collectors under faults, in virtual time: each finished request has one result, under
any seed.

A seed draws requests, replies and faults: collectors are killed and evicted from their group,
transactions get lost, late or unreported. A rule of the collector that is taken away must
show: `MUTATIONS` names for each the harm that follows, and seeds that find it.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from kvlane.app.results import pending_result
from kvlane.app.results.lane_collector import LaneCollector
from kvlane.app.results.result_writer import ResultWriter
from kvlane.streams.memory.memory_broker import AppendFate, BrokerFaults, MemoryBroker, Operation
from kvlane.streams.records import Chunk, End
from kvlane.streams.topics import REQUESTS, RESULTS
from tests.harness.memory_world import MemoryWorld
from tests.harness.results_harness import ResultsHarness
from workbench.testing.virtual_time import VirtualLoop, run_virtual

SEEDS = range(12)
MUTATION_SEEDS = range(60)
"""Until the first that shows the harm: the seeds of two writers at once are 1 in 7."""
LANES = 2
FAULTS_S = 40.0
DRAIN_S = 90.0


class SeededFaults(BrokerFaults):
    """Slow and lost requests, and transactions of unknown end, until `is_over`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed} faults")
        self.is_over = False

    def latency_s(self, client: str, operation: Operation) -> float:
        return 0.0 if self.is_over else self._rng.choice((0.0, 0.01, 0.3, 2.0)) * self._rng.random()

    def late_s(self, client: str) -> float:
        return 8.0 * self._rng.random()

    def departed(self, client: str) -> bool:
        return self._rng.random() < 0.5

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        if self.is_over or topic != RESULTS:
            return AppendFate.KEPT
        troubles = (AppendFate.LOST, AppendFate.UNREPORTED, AppendFate.LATE)
        return self._rng.choice(troubles) if self._rng.random() < 0.25 else AppendFate.KEPT


class CollectorWorld:
    """The requests, the collectors and the faults of one seed."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.rng = random.Random(f"{seed} collectors")
        self.world = MemoryWorld(loop, LANES)
        self.faults = SeededFaults(seed)
        self.world.broker = MemoryBroker(
            self.world.clock, lanes=LANES, faults=self.faults, session_timeout_s=3.0
        )
        self.results = ResultsHarness(self.world)
        self.expected: dict[str, str | None] = {}
        """The text of each finished request; None for one that goes on."""
        self._names = count()

    async def run(self) -> list[str]:
        """The problems of the seed; the first word of each is its kind."""
        for _ in range(2):
            self._start()
        talks = [self.world.spawn(self._converse(f"r{n}")) for n in range(24)]
        until = self.world.clock.now() + FAULTS_S
        while self.world.clock.now() < until:
            await self.world.sleep(3.0 * self.rng.random())
            await self._hurt()
        self.faults.is_over = True
        while len(self.results.running) < 2:
            self._start()
            await self.world.sleep(1.0)
        for talk in talks:
            await talk
        await self.world.sleep(DRAIN_S)
        return [*self._problems(), *self._failures()]

    def _start(self) -> None:
        self.world.spawn(self.results.start(f"c{next(self._names)}"))

    async def _hurt(self) -> None:
        running = list(self.results.running)
        if len(running) < 2:
            self._start()
        if not running:
            return
        name = self.rng.choice(running)
        if self.rng.random() < 0.5:
            await self.results.kill(name)
            return
        group = self.world.broker.group(REQUESTS, "collector")
        for member in [m for m in group.members if m.startswith(f"{name}-")]:
            group.evict(member)

    async def _converse(self, name: str) -> None:
        """One request with its reply, as other processes write them."""
        rng, results = random.Random(f"{self.rng.random()} {name}"), self.results
        goes_on = rng.random() < 0.2
        self.expected[name] = None if goes_on else ""
        await self.world.sleep(rng.random() * FAULTS_S)
        results.ask(name)
        if rng.random() < 0.2:
            results.ask(name)
        pace_s = rng.choice((0.0, 0.1, 3.0))
        shown = attempt = seq = 0
        for number in range(rng.randint(2, 6)):
            if pace_s:
                await self.world.sleep(pace_s * rng.random())
            if rng.random() < 0.15:
                attempt, seq = attempt + 1, 0
                results.fence(name, attempt)
                results.answer(name, "zombie", attempt=attempt - 1, seq=9, index=shown)
            text = f"{number} "
            results.answer(name, text, attempt=attempt, seq=seq, index=shown, end=None)
            seq, shown = seq + 1, shown + 1
            if not goes_on:
                self.expected[name] = (self.expected[name] or "") + text
        if not goes_on:
            results.answer(name, ".", attempt=attempt, seq=seq, index=shown)
            self.expected[name] = (self.expected[name] or "") + "."
            if rng.random() < 0.2:
                results.ask(name)

    def _problems(self) -> Iterator[str]:
        found = self.results.results()
        written = Counter(result.id for result in found)
        for name, text in self.expected.items():
            if text is None:
                if written[name]:
                    yield f"early: {name} goes on and has a result"
            elif written[name] != 1:
                yield f"{'twice' if written[name] else 'lost'}: {name}: {written[name]} results"
        for result in found:
            body = result.body or {"choices": [{"text": result.error}]}
            text = self.expected[result.id]
            if text is not None and body["choices"][0]["text"] != text:
                yield f"wrong: {result.id} has {body['choices'][0]['text']!r}, not {text!r}"
        committed = self.world.broker.group(REQUESTS, "collector").committed
        for lane in range(LANES):
            records = self.world.records(REQUESTS, lane)
            open_ones = [
                r.offset for r in records if self.expected[(r.key or b"").decode()] is None
            ]
            low = min(open_ones, default=len(records))
            if committed.get(lane, 0) != low:
                yield f"uncommitted: lane {lane} is at {committed.get(lane, 0)} of {low}"

    def _failures(self) -> Iterator[str]:
        for name, (_, ctx, _) in self.results.running.items():
            if ctx.error is not None:
                yield f"failure: {name} ended with {ctx.error!r}"


def problems_of(seed: int) -> list[str]:
    logging.disable(logging.CRITICAL)
    try:
        return run_virtual(
            lambda loop: CollectorWorld(seed, loop).run(), random.Random(f"{seed} scheduler")
        )
    finally:
        logging.disable(logging.NOTSET)


def _commit_early(self: LaneCollector, log_record: Any) -> None:
    self._results.add_request(log_record)
    self.claim.mark_done(log_record.offset)


async def _find_nothing(self: ResultWriter, since_ms: int) -> None:
    self._results.add_finished({})


def _always(*_: object) -> bool:
    return True


async def _no_first(*_: object) -> None:
    return None


def _any_chunk_ends(record: object) -> bool:
    return isinstance(record, Chunk | End)


MUTATIONS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "commit after the result": (LaneCollector, "on_request_record", _commit_early, "lost"),
    "look for results at a take-over": (ResultWriter, "find_results", _find_nothing, "twice"),
    "let one write the results of a lane": (MemoryBroker, "is_writer_epoch", _always, "twice"),
    "write results of what is over": (pending_result, "_ends", _any_chunk_ends, "early wrong"),
    "read replies from their beginning": (LaneCollector, "_first_ms", _no_first, "lost"),
}
"""By the rule that is taken away: owner, attribute, replacement, and the kinds of harm."""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    owner, attribute, replacement, _ = MUTATIONS[name]
    before = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_finished_request_has_one_result(seed: int) -> None:
    assert problems_of(seed) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_removed_rule_is_detected(name: str) -> None:
    harm = set(MUTATIONS[name][3].split())
    with mutated(name):
        seen = ({p.partition(":")[0] for p in problems_of(seed)} for seed in MUTATION_SEEDS)
        assert any(harm & kinds for kinds in seen)
