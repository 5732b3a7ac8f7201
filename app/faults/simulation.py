"""One seed, from an empty log to the verdict.

    faults   processes live, clients ask, chaos reigns
    rest     no more faults; everything drains, within DRAIN_S of virtual time
    verdict  the invariants, once the world is quiet or the time is over

A seed replays exactly, in any process: same records at the same virtual times, same verdict.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from app.faults.asking import Asking
from app.faults.calling import Calling
from app.faults.chaos import Chaos
from app.faults.history import History
from app.faults.invariants import problems, restless
from app.faults.shape import Shape
from app.faults.vtime import Deadlock, OutOfSteps, VirtualLoop, run
from app.faults.world import World

DRAIN_S = 120.0
"""A session time-out, a death, a few attempts one after the other and all their back-offs."""
MAX_STEPS = 60_000
"""Callbacks of one seed; a clean one needs a few thousand, with this many something spins."""

CACHING = 3
"""How many times more there are where engines cache: they go on from step to step, and tell."""


@dataclass
class Verdict:
    """What became of a seed. `history` replays with the seed; times are virtual seconds."""

    seed: int
    problems: list[str]
    history: History
    shape: Shape
    ended_s: float = 0.0
    steps: int = 0
    kinds: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = frozenset(p.partition(":")[0] for p in self.problems)

    def report(self, about: str = "") -> str:
        """The history, of one request only if asked so, and what is wrong in the end."""
        wrong = self.problems or ["nothing is wrong"]
        return "\n".join([*self.history.lines(about), f"seed {self.seed}: {self.shape}", *wrong])


def simulate(seed: int, *, take_overs: bool = False) -> Verdict:
    """Run one seed; with `take_overs`, lanes change hands all the time."""
    shape = Shape.draw(random.Random(f"{seed} shape"))
    shape = shape.of_caches(random.Random(f"{seed} caches"))
    if take_overs:
        shape = shape.of_take_overs()
    worlds: list[World] = []

    async def main(loop: VirtualLoop) -> Verdict:
        loop.set_exception_handler(lambda _loop, _context: None)  # judged by the invariants
        world = World(seed, loop, shape)
        worlds.append(world)
        found = await _play(world)
        world.history.over = True
        return Verdict(seed, found, world.history, shape, loop.time(), loop.steps)

    with _silence():
        try:
            most = MAX_STEPS * (CACHING if shape.caches else 1)
            return run(main, random.Random(f"{seed} scheduler"), most)
        except (Deadlock, OutOfSteps) as e:
            return Verdict(seed, [f"{type(e).__name__}: {e}"], worlds[0].history, shape)


async def _play(world: World) -> list[str]:
    asking, calling = Asking(world), Calling(world)
    chaos = Chaos(world)
    world.populate()
    publishing = asking.start()
    calling.start()
    await chaos.rage()
    chaos.rest()
    await publishing
    until = world.loop.time() + DRAIN_S
    while world.loop.time() < until:
        await world.clock.sleep(1.0)
        if not restless(world) and not problems(world, asking, calling):
            return []
    return problems(world, asking, calling)


@contextmanager
def _silence() -> Iterator[None]:
    """Processes of a simulation fail by the dozen; their words are in the history."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
