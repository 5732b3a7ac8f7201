"""Fault injection: the choice of faults of each round, their execution, and the recovery.

Rounds are derived from a seed and their number, so that a resumed run continues with the same
rounds. A round has several faults at once where their effects can still be separated (see
`impact.py`), and now and then any combination.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvlane.streams.brokers.broker_factory import JvmBroker
from kvlane.streams.clock import Clock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import count_lagging_partitions
from workbench.bench.bench_environment import BenchFailed
from workbench.bench.process_group import PROCESS_KINDS as PARTS
from workbench.bench.process_group import ProcessGroup

ROLLING = "rolling"
BROKER, BROKER_PAUSE, BROKER_DISK = "broker", "broker-pause", "broker-disk"
BROKER_STALL = "broker-stall"
PAUSES_S: Mapping[str, float] = {
    "worker-pause": 7.0,
    "router-pause": 8.0,
    "gateway-pause": 4.0,
    BROKER_PAUSE: 20.0,  # clients have to change the leader
    BROKER_STALL: 8.0,  # it comes back while they do so
}
"""Seconds from SIGSTOP to SIGCONT. For a worker and a router longer than the timeout after which
others take over, so that they come back as zombies."""
RESTARTS = ("preprocessor-restart", "collector-restart")
"""Restarts in order, by SIGTERM."""
FAULT_KINDS: tuple[str, ...] = (*PARTS, *PAUSES_S, *RESTARTS, BROKER, BROKER_DISK, ROLLING)
BROKER_FAULTS = frozenset({BROKER, BROKER_PAUSE, BROKER_STALL, BROKER_DISK})
IN_SYNC_TIMEOUT_S = 60.0
"""Timeout until all replicas are in sync again. The next broker fault waits for this: with two of
three brokers down nothing can be acknowledged, which is another guarantee."""
STALE_METADATA_S, POLL_INTERVAL_S = 3.0, 0.5
"""For this time a restarted broker may return stale metadata."""
BROKER_DOWN_S = 3.0
"""Downtime of a killed broker."""
ROLLING_EVERY = 50
"""A rolling restart has as many faults as there are processes, and takes as long as ten rounds: so
it is one in this many rounds."""
MIXED_SHARE = 0.1
"""The share of rounds with any combination of faults."""


class PlannedFault(NamedTuple):
    """A fault to inject. `kind`: one of FAULT_KINDS."""

    kind: str
    target: str


class InjectedFault(NamedTuple):
    """An injected fault. Seconds of the clock: its start, and the recovery of its target."""

    kind: str
    target: str
    at: float
    recovered_at: float


def draw_faults(
    seed: int,
    round_number: int,
    kinds: Collection[str],
    processes: Mapping[str, Sequence[str]],
    brokers: int,
) -> list[PlannedFault]:
    """The faults of a round. `processes`: names by kind of process."""
    rng = random.Random(f"{seed} {round_number}")
    if ROLLING in kinds and (round_number % ROLLING_EVERY == ROLLING_EVERY - 1 or len(kinds) == 1):
        return [PlannedFault(ROLLING, name) for kind in PARTS for name in processes[kind]]
    mixed = rng.random() < MIXED_SHARE
    strikes: list[PlannedFault] = []
    # Faults of workers are separated by the worker of each stream; faults that affect all streams
    # take turns.
    whole = [k for k in ("router", "router-pause", *sorted(BROKER_FAULTS)) if k in kinds]
    worker = [k for k in ("worker", "worker-pause") if k in kinds]
    first = ""
    if worker:
        first = rng.choice([*whole, *worker, *worker])
    elif whole:  # in turn: a run of a few rounds has each of them
        first = whole[round_number % len(whole)]
    chosen = [first] if first else []
    if mixed and whole and worker:
        chosen = [rng.choice(worker), rng.choice(whole)]
    for kind in chosen:
        strikes += _victims(kind, processes, brokers, rng)
    restarted = [(kind.partition("-")[0], kind) for kind in RESTARTS]
    for group in (("gateway", "gateway-pause"), ("indexer",), *restarted):
        possible = [k for k in group if k in kinds and processes[k.partition("-")[0]]]
        if possible and (not chosen or mixed or rng.random() < 0.5):
            strikes += _victims(rng.choice(possible), processes, brokers, rng)
    return strikes


def _victims(
    kind: str, parts: Mapping[str, Sequence[str]], brokers: int, rng: random.Random
) -> list[PlannedFault]:
    if kind in BROKER_FAULTS:
        return [PlannedFault(kind, str(rng.randint(1, brokers)))]
    names = parts[kind.partition("-")[0]]
    count = 1
    if kind == "worker":  # at most a third: with more, routers suspect their own connection
        count = rng.randint(1, max(1, len(names) // 3))
    return [PlannedFault(kind, name) for name in rng.sample(list(names), count)]


class FaultInjector:
    def __init__(
        self, processes: ProcessGroup, broker: JvmBroker | None, log: KafkaLog, clock: Clock
    ) -> None:
        """`broker`: the cluster, for broker faults."""
        self._processes = processes
        self._broker = broker
        self._log = log
        self._clock = clock

    async def inject(
        self, faults: Sequence[PlannedFault], on_fault: Callable[[], None]
    ) -> list[InjectedFault]:
        """Inject the faults of a round at the same time; returns when all targets have recovered.

        Raises BenchFailed, BrokerUnavailable.
        """
        if faults and faults[0].kind == ROLLING:
            return [await self._hit(strike, on_fault) for strike in faults]
        async with asyncio.TaskGroup() as group:
            hits = [group.create_task(self._hit(strike, on_fault)) for strike in faults]
        return [hit.result() for hit in hits]

    async def _hit(self, strike: PlannedFault, done: Callable[[], None]) -> InjectedFault:
        at = self._clock.now()
        done()
        if strike.kind in BROKER_FAULTS:
            await self._hit_broker(strike)
        elif strike.kind in (ROLLING, *RESTARTS):
            await self._processes.restart_one(strike.target)
        elif strike.kind in PAUSES_S:
            self._processes.processes[strike.target].pause()
            try:
                await self._clock.sleep(PAUSES_S[strike.kind])
            finally:
                self._processes.processes[strike.target].resume()
        else:
            await self._processes.kill(strike.target)
            await self._processes.start(strike.target)
            await self._processes.wait_ready(strike.target)
        return InjectedFault(*strike, at, self._clock.now())

    async def _hit_broker(self, strike: PlannedFault) -> None:
        assert self._broker is not None, "broker faults are injected into clusters of our own only"
        node = self._broker.node(int(strike.target))
        if strike.kind in PAUSES_S:
            node.pause()
            try:
                await self._clock.sleep(PAUSES_S[strike.kind])
            finally:
                node.resume()
        else:
            if strike.kind == BROKER_DISK:
                node.fill_disk()
                await asyncio.to_thread(node.wait_ended)
            else:
                await asyncio.to_thread(node.kill)
            await self._clock.sleep(BROKER_DOWN_S)
            await asyncio.to_thread(node.start)
        await self._caught_up(strike.target)

    async def _caught_up(self, number: str) -> None:
        deadline = self._clock.now() + IN_SYNC_TIMEOUT_S
        await self._clock.sleep(STALE_METADATA_S)
        while self._clock.now() < deadline:
            with contextlib.suppress(BrokerUnavailable):
                if not await count_lagging_partitions(self._log):
                    return
            await self._clock.sleep(POLL_INTERVAL_S)
        raise BenchFailed(f"broker {number} has not caught up after {IN_SYNC_TIMEOUT_S:g} s")
