"""What the clients of a simulation ask: requests, prompts, repeats, cancels, and the answers due.

Everything is drawn before the first record is written, so that a seed asks the same whatever the
world does. Clients publish from one process of their own, under the same weather as all others.
Those who speak HTTP stand in `calling.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, NamedTuple

from msgspec.structs import replace

from app.engine.echo import echo_answer
from app.faults.shape import MODELS
from app.faults.vtime import VirtualClock, process_context
from app.faults.world import World
from app.preprocess.byte_level import ASSISTANT, encode
from streams.codecs import encode as entry_of
from streams.codecs import pack_tokens
from streams.outbox import Outbox
from streams.ports import Entry
from streams.prompt import Prompt, encode_prompt
from streams.records import Cancel, Refused, Request, StopConditions
from streams.topics import PROMPTS, REQUESTS

TEXTS = ("abc", "kvlane", "né", "→✓", "a", "tokens, please")
UNHURRIED_S = 600.0
ENDLESS = 2000
"""Tokens of an answer that outlasts the simulation: only its Cancel can end it."""
RUSH_S = 1.5
NOBODYS = "nobody's"
"""A model that is not served."""


class Question(NamedTuple):
    """One request, and the whole answer that is due. `refused`: it is turned down."""

    request: Request
    tokens: list[int]
    cancelled: bool
    refused: bool = False

    @property
    def hurried(self) -> bool:
        """Whether its deadline may strike within the simulation."""
        return self.request.deadline_s < UNHURRIED_S

    @property
    def served(self) -> bool:
        """Whether any worker has its model."""
        return self.request.model != NOBODYS


class Publication(NamedTuple):
    """A record to publish, `at` seconds after the start; those of an `id` go one by one."""

    at: float
    id: str
    topic: str
    entry: Entry


class Asking:
    """The questions of one seed, and the client process that asks them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} asking")
        self.questions: dict[str, Question] = {}
        self._publications: list[Publication] = []
        within_s = RUSH_S if world.shape.rush else world.shape.faults_s
        for number in range(world.shape.requests):
            self._draw(f"r{number}", rng.random() * within_s)
        self._publications.sort(key=lambda p: p.at)

    def _draw(self, request_id: str, at: float) -> None:
        rng, shape = self._rng, self._world.shape
        text = rng.choice(TEXTS)
        prompt = [*encode(text), ASSISTANT]
        cancelled = rng.random() < shape.cancels
        endless = cancelled and rng.random() < 0.5
        max_tokens = ENDLESS if endless else rng.choice((None, 1, 3, 7, 12))
        prompted = bool(shape.preprocessors) and rng.random() < 0.5
        # Without a name a prompt is for the only model there is.
        unnamed = () if prompted and shape.models > 1 else ("",)
        model = rng.choice((*unnamed, *MODELS[: shape.models]))
        deadline_s = rng.uniform(1.0, 20.0) if rng.random() < 0.12 else UNHURRIED_S
        if rng.random() < 0.04:
            model, deadline_s = NOBODYS, rng.uniform(1.0, 10.0)
        request = Request(
            id=request_id,
            model=model,
            token_ids=pack_tokens(prompt),
            deadline_s=deadline_s,
            stop=StopConditions(max_tokens=max_tokens),
        )
        refused = rng.random() < 0.06
        nonsense = not prompted and rng.random() < 0.04
        if nonsense:
            request, refused = _nonsense(rng, request), True
        question = Question(request, echo_answer(prompt, max_tokens), cancelled, refused)
        self.questions[request_id] = question
        if prompted:
            topic, asked = PROMPTS, _prompt(question, text, prompt)
            cancel = encode_prompt(Prompt(id=request_id, kind="cancel"))
        else:
            turned_down = refused and not nonsense
            record = Refused(id=request_id, code="invalid") if turned_down else request
            topic, asked = REQUESTS, entry_of(record, request_id)
            cancel = entry_of(Cancel(id=request_id, reason="of the client"), request_id)
        self._publish_at(at, request_id, topic, asked)
        while rng.random() < 0.2:
            self._publish_at(at + rng.expovariate(0.3), request_id, topic, asked)
        if cancelled:
            for _ in range(rng.choice((1, 1, 2))):
                # Often at once, so that both come with the same poll.
                later_s = rng.choice((0.0, rng.expovariate(0.5), rng.expovariate(0.5)))
                self._publish_at(at + later_s, request_id, topic, cancel)

    def _publish_at(self, at: float, request_id: str, topic: str, entry: Entry) -> None:
        self._publications.append(Publication(at, request_id, topic, entry))

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
        for publication in self._publications:
            await clock.sleep(max(0.0, publication.at - clock.now()))
            publishing = _publish_after(last.get(publication.id), outbox, publication)
            last[publication.id] = asyncio.create_task(publishing)
        await asyncio.gather(*last.values())
        await log.close()


def _nonsense(rng: random.Random, request: Request) -> Request:
    """A request that can be read, and that no worker can run."""
    broken: tuple[dict[str, Any], ...] = (
        {"deadline_s": math.nan},
        {"deadline_s": -math.inf},
        {"deadline_s": -1.0},
        {"token_ids": b"abc"},
    )
    return replace(request, **rng.choice(broken))


def _prompt(question: Question, text: str, tokens: list[int]) -> Entry:
    """The same question in the form that a preprocessor reads."""
    request = question.request
    body: dict[str, Any] = {"model": request.model}
    if request.stop.max_tokens is not None:
        body["max_tokens"] = request.stop.max_tokens
    if question.refused:
        body["n"] = 2
    kind = "completion" if len(tokens) % 2 else "tokens"
    body |= {"prompt": text} if kind == "completion" else {"token_ids": tokens}
    fields = {"id": request.id, "kind": kind, "body": body, "deadline_s": request.deadline_s}
    return encode_prompt(Prompt.model_validate(fields))


async def _publish_after(
    before: asyncio.Task[None] | None, outbox: Outbox, publication: Publication
) -> None:
    """A client cancels what it knows to be asked: a Cancel that comes first is about nothing."""
    if before is not None:
        await before
    await outbox.persist_entry(publication.topic, publication.entry)
