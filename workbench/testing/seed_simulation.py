"""The simulation of one seed, from an empty log to the verdict.

    faults   processes serve client requests while faults are injected
    drain    no more faults; all requests finish, within DRAIN_S of virtual time
    verdict  the invariants, once nothing is open or the time is over

A seed replays exactly, in any process: same records at the same virtual times, same verdict.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvlane.streams.responses import reply_stream
from workbench.testing.checks.invariants import has_open_work, violations
from workbench.testing.clients.all_clients import Clients
from workbench.testing.event_history import EventHistory
from workbench.testing.fault_schedule import SimulationFaults
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import Deadlock, StepLimitExceeded, VirtualLoop, run_virtual
from workbench.testing.world_parameters import PENDING_PIECES, Scenario, WorldParameters

DRAIN_S = 120.0
"""Enough for a session time-out, a worker failure, and several attempts with their back-offs."""
MAX_STEPS = 60_000
"""Limit of callbacks of one seed. A clean one needs a few thousand; beyond it, a task spins."""

MAX_STEPS_A_SECOND = 1_000
"""The same for each second of an absence."""
LONG_FACTOR = 3
"""Factor of MAX_STEPS where engines cache, as they compute step by step and publish events, and
where a peak takes its time; of both where answers are long, as those of agents, since one worker
may have a dozen of them, one at a time, where replies go to a topic that takes none, each for
96 s, and where a tenant may have one job at a time."""


@dataclass
class SimulationResult:
    """The result of a seed. `history` replays with the seed; times are virtual seconds."""

    seed: int
    violations: list[str]
    history: EventHistory
    parameters: WorldParameters
    ended_s: float = 0.0
    steps: int = 0
    kinds: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = frozenset(p.partition(":")[0] for p in self.violations)

    def report(self, about: str = "") -> str:
        """The history, of one request if `about` names it, and the problems found."""
        wrong = self.violations or ["nothing is wrong"]
        return "\n".join(
            [*self.history.lines(about), f"seed {self.seed}: {self.parameters}", *wrong]
        )


def simulate_seed(seed: int, scenarios: Collection[Scenario] | None = None) -> SimulationResult:
    """Run one seed, with these scenarios instead of those that it draws."""
    shape = WorldParameters.of_seed(seed, scenarios)
    worlds: list[SimulatedWorld] = []

    async def main(loop: VirtualLoop) -> SimulationResult:
        loop.set_exception_handler(lambda _loop, _context: None)  # checked by the invariants
        world = SimulatedWorld(seed, loop, shape)
        worlds.append(world)
        found = await _play(world)
        world.history.is_closed = True
        return SimulationResult(seed, found, world.history, shape, loop.time(), loop.steps)

    with _silence(), _pending_pieces(shape):
        try:
            is_long = shape.has_caches or shape.peak_s is not None or _drains_long(shape)
            most = MAX_STEPS * (LONG_FACTOR if is_long else 1)
            if shape.absence is not None:
                most += MAX_STEPS_A_SECOND * int(shape.absence.ends_s)
            return run_virtual(main, random.Random(f"{seed} scheduler"), most)
        except (Deadlock, StepLimitExceeded) as e:
            return SimulationResult(seed, [f"{type(e).__name__}: {e}"], worlds[0].history, shape)
        finally:
            for world in worlds:
                if world.keys is not None:
                    world.keys.close()


async def _play(world: SimulatedWorld) -> list[str]:
    clients = Clients(world)
    chaos = SimulationFaults(world)
    world.start_all()
    publishing = clients.start()
    await chaos.run()
    chaos.stop()
    await publishing
    is_long = _drains_long(world.parameters)
    until = world.loop.time() + DRAIN_S * (LONG_FACTOR if is_long else 1)
    while world.loop.time() < until:
        await world.clock.sleep(1.0)
        if not has_open_work(world) and not violations(world, clients):
            return []
    return violations(world, clients)


def _drains_long(shape: WorldParameters) -> bool:
    return not shape.scenarios.isdisjoint({"long answers", "agents", "replies", "limits"})


@contextmanager
def _pending_pieces(shape: WorldParameters) -> Iterator[None]:
    """Let replies merge their pieces early where answers are long."""
    before = reply_stream.MAX_PENDING_PIECES
    if "long answers" in shape.scenarios:
        reply_stream.MAX_PENDING_PIECES = PENDING_PIECES
    try:
        yield
    finally:
        reply_stream.MAX_PENDING_PIECES = before


@contextmanager
def _silence() -> Iterator[None]:
    """Disable logging: simulated processes fail by the dozen, and the history has the reasons."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
