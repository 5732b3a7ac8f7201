"""What is done to a deployment in a round: which parts are hit, how, and that they come back.

Rounds are drawn from a seed and their number, so that a run that was broken off goes on with the
rounds that it would have had. A round hits several parts at once where what follows can still be
told apart (see `toll.py`), and now and then all that can be hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from app.bench.ground import BenchFailed
from app.bench.herd import KINDS as PARTS
from app.bench.herd import Herd
from streams.brokers.local import JvmBroker
from streams.clock import Clock
from streams.errors import BrokerUnavailable
from streams.kafka.log import KafkaLog
from streams.provision import lagging

ROLLING = "rolling"
BROKER, BROKER_PAUSE, BROKER_DISK = "broker", "broker-pause", "broker-disk"
BROKER_STALL = "broker-stall"
PAUSES_S: Mapping[str, float] = {
    "worker-pause": 7.0,
    "router-pause": 8.0,
    "gateway-pause": 4.0,
    BROKER_PAUSE: 20.0,  # clients have to leave it behind
    BROKER_STALL: 8.0,  # it comes back while they do
}
"""SIGSTOP, and SIGCONT after so many seconds: of a worker and a router longer than the time-outs
after which others do their work, so that they come back as zombies."""
KINDS: tuple[str, ...] = (*PARTS, *PAUSES_S, BROKER, BROKER_DISK, ROLLING)
OF_BROKERS = frozenset({BROKER, BROKER_PAUSE, BROKER_STALL, BROKER_DISK})
CAUGHT_UP_S = 60.0
"""What a broker gets to have all copies in sync again. The next one is not hit before: with two of
three away nothing can be acknowledged, which is another promise."""
STALE_S, LOOK_S = 3.0, 0.5
"""So long a broker that comes back may tell what it knew before."""
DOWN_S = 3.0
"""How long a killed broker is away."""
ROLLING_EVERY = 50
"""A restart of everything is as many strikes as there are parts, and takes as long as ten rounds:
so it is one in so many rounds."""
MIXED = 0.1
"""The share of rounds in which anything may be hit together."""


class Strike(NamedTuple):
    """One part is hit. `kind`: one of KINDS."""

    kind: str
    victim: str


class Hit(NamedTuple):
    """A strike that was made. Seconds of the clock: when it began, and when all was well again."""

    kind: str
    victim: str
    at: float
    ready_at: float


def drawn(
    seed: int, number: int, kinds: Collection[str], parts: Mapping[str, Sequence[str]], brokers: int
) -> list[Strike]:
    """The strikes of a round. `parts`: names by kind of part."""
    rng = random.Random(f"{seed} {number}")
    if ROLLING in kinds and (number % ROLLING_EVERY == ROLLING_EVERY - 1 or len(kinds) == 1):
        return [Strike(ROLLING, name) for kind in PARTS for name in parts[kind]]
    mixed = rng.random() < MIXED
    strikes: list[Strike] = []
    # What holds up running streams is told apart by the part that each stream depends on; what
    # holds up all of them takes turns.
    whole = [k for k in ("router", "router-pause", *sorted(OF_BROKERS)) if k in kinds]
    worker = [k for k in ("worker", "worker-pause") if k in kinds]
    first = ""
    if worker:
        first = rng.choice([*whole, *worker, *worker])
    elif whole:  # in turn: a run of a few rounds has hit with each of them
        first = whole[number % len(whole)]
    chosen = [first] if first else []
    if mixed and whole and worker:
        chosen = [rng.choice(worker), rng.choice(whole)]
    for kind in chosen:
        strikes += _victims(kind, parts, brokers, rng)
    for group in (("gateway", "gateway-pause"), ("indexer",), ("preprocessor",)):
        possible = [k for k in group if k in kinds]
        if possible and (not chosen or mixed or rng.random() < 0.5):
            strikes += _victims(rng.choice(possible), parts, brokers, rng)
    return strikes


def _victims(
    kind: str, parts: Mapping[str, Sequence[str]], brokers: int, rng: random.Random
) -> list[Strike]:
    if kind in OF_BROKERS:
        return [Strike(kind, str(rng.randint(1, brokers)))]
    names = parts[kind.partition("-")[0]]
    count = 1
    if kind == "worker":  # at most a third: more at once, and routers think it is them
        count = rng.randint(1, max(1, len(names) // 3))
    return [Strike(kind, name) for name in rng.sample(list(names), count)]


class Striker:
    """Hits parts, and sees to it that they come back."""

    def __init__(self, herd: Herd, broker: JvmBroker | None, log: KafkaLog, clock: Clock) -> None:
        """`broker`: the cluster, where one is to be hurt."""
        self._herd = herd
        self._broker = broker
        self._log = log
        self._clock = clock

    async def strike(self, strikes: Sequence[Strike], done: Callable[[], None]) -> list[Hit]:
        """Make the strikes of a round, all at the same moment; returns when all is well again.

        Raises BenchFailed, BrokerUnavailable.
        """
        if strikes and strikes[0].kind == ROLLING:
            return [await self._hit(strike, done) for strike in strikes]
        async with asyncio.TaskGroup() as group:
            hits = [group.create_task(self._hit(strike, done)) for strike in strikes]
        return [hit.result() for hit in hits]

    async def _hit(self, strike: Strike, done: Callable[[], None]) -> Hit:
        at = self._clock.now()
        done()
        if strike.kind in OF_BROKERS:
            await self._hit_broker(strike)
        elif strike.kind == ROLLING:
            await self._herd.restart(strike.victim)
        elif strike.kind in PAUSES_S:
            self._herd.pause(strike.victim)
            try:
                await self._clock.sleep(PAUSES_S[strike.kind])
            finally:
                self._herd.resume(strike.victim)
        else:
            self._herd.kill(strike.victim)
            self._herd.start(strike.victim)
            await self._herd.ready(strike.victim)
        return Hit(*strike, at, self._clock.now())

    async def _hit_broker(self, strike: Strike) -> None:
        assert self._broker is not None, "brokers are hurt in clusters of our own only"
        node = self._broker.node(int(strike.victim))
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
            await self._clock.sleep(DOWN_S)
            await asyncio.to_thread(node.start)
        await self._caught_up(strike.victim)

    async def _caught_up(self, number: str) -> None:
        deadline = self._clock.now() + CAUGHT_UP_S
        await self._clock.sleep(STALE_S)
        while self._clock.now() < deadline:
            with contextlib.suppress(BrokerUnavailable):
                if not await lagging(self._log):
                    return
            await self._clock.sleep(LOOK_S)
        raise BenchFailed(f"broker {number} has not caught up after {CAUGHT_UP_S:g} s")
