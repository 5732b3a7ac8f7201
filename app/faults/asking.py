"""What the clients of a simulation ask: requests, repeats, cancels, and the answers due.

Everything is drawn before the first record is written, so that a seed asks the same whatever the
world does. Clients publish from one process of their own, under the same weather as all others.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from app.engine.echo import echo_answer
from app.faults.vtime import VirtualClock, process_context
from app.faults.world import World
from app.preprocess.byte_level import ASSISTANT
from streams.codecs import pack_tokens
from streams.outbox import Outbox
from streams.records import Cancel, Refused, Request, StopConditions
from streams.topics import REQUESTS

TEXTS = ("abc", "kvlane", "né", "→✓", "a", "tokens, please")
UNHURRIED_S = 600.0
ENDLESS = 2000
"""Tokens of an answer that outlasts the simulation: only its Cancel can end it."""


class Question(NamedTuple):
    """One request, and the whole answer that is due. `refused`: a preprocessor turned it down."""

    request: Request
    tokens: list[int]
    cancelled: bool
    refused: bool

    @property
    def hurried(self) -> bool:
        """Whether its deadline may strike within the simulation."""
        return self.request.deadline_s < UNHURRIED_S


class Publication(NamedTuple):
    """A record to publish, `at` seconds after the start."""

    at: float
    record: Request | Cancel | Refused


class Asking:
    """The questions of one seed, and the client process that asks them."""

    def __init__(self, world: World) -> None:
        self._world = world
        rng = random.Random(f"{world.seed} asking")
        self.questions: dict[str, Question] = {}
        self._publications: list[Publication] = []
        for number in range(world.shape.requests):
            self._draw(rng, f"r{number}", rng.random() * world.shape.faults_s)
        self._publications.sort(key=lambda p: p.at)

    def _draw(self, rng: random.Random, request_id: str, at: float) -> None:
        prompt = [*rng.choice(TEXTS).encode(), ASSISTANT]
        cancelled = rng.random() < self._world.shape.cancels
        endless = cancelled and rng.random() < 0.5
        max_tokens = ENDLESS if endless else rng.choice((None, 1, 3, 7, 12))
        request = Request(
            id=request_id,
            token_ids=pack_tokens(prompt),
            deadline_s=rng.uniform(1.0, 20.0) if rng.random() < 0.12 else UNHURRIED_S,
            stop=StopConditions(max_tokens=max_tokens),
        )
        tokens = echo_answer(prompt, max_tokens)
        refused = rng.random() < 0.06
        record = Refused(id=request_id, code="invalid") if refused else request
        self._publications.append(Publication(at, record))
        while rng.random() < 0.2:
            self._publications.append(Publication(at + rng.expovariate(0.3), record))
        self.questions[request_id] = Question(request, tokens, cancelled, refused)
        if cancelled:
            cancel = Cancel(id=request_id, reason="of the client")
            for _ in range(rng.choice((1, 1, 2))):
                self._publications.append(Publication(at + rng.expovariate(0.5), cancel))

    def start(self) -> asyncio.Task[None]:
        """Start the clients; done when everything is published."""
        return self._world.loop.create_task(
            self._publish(), name="clients/main", context=process_context("clients")
        )

    async def _publish(self) -> None:
        world = self._world
        clock = VirtualClock(world.loop)
        log = world.broker.connect("clients")
        await log.start()
        outbox = Outbox(log, clock)
        last: dict[str, asyncio.Task[None]] = {}
        for at, record in self._publications:
            await clock.sleep(max(0.0, at - clock.now()))
            publishing = _publish_after(last.get(record.id), outbox, record)
            last[record.id] = asyncio.create_task(publishing)
        await asyncio.gather(*last.values())
        await log.close()


async def _publish_after(
    before: asyncio.Task[None] | None, outbox: Outbox, record: Request | Cancel | Refused
) -> None:
    """A client cancels what it knows to be asked: a Cancel that comes first is about nothing."""
    if before is not None:
        await before
    await outbox.persist(REQUESTS, record.id, record)
