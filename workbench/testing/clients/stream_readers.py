"""Kafka clients of a simulation that read long answers with the client library, from any position.

A reader leaves now and then, and resumes from an earlier position. Readers only read:
the requests are those of `kafka_clients.py`.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from kvlane.streams.client import Client
from kvlane.streams.errors import BrokerUnavailable, NotFound, PositionLost
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import End
from workbench.testing.clients.kafka_clients import KafkaClients
from workbench.testing.clients.received_answer import ReceivedAnswer
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import VirtualClock, process_context

MAX_READERS = 3
LEAVE_SHARE = 0.1
"""Probability of leaving after a piece."""
MAX_PAUSE_S = 2.0
STREAM_TIMEOUT_S = 30.0


class StreamReader:
    """A reader of one answer."""

    def __init__(self, name: str, request_id: str, rng: random.Random) -> None:
        self.name = name
        self.answers = [ReceivedAnswer(request_id)]
        self.unexpected_errors: list[str] = []
        self._rng = rng
        self._pauses_s = rng.choice((0.0, MAX_PAUSE_S))

    @property
    def is_over(self) -> bool:
        return bool(self.answers[0].outcome)

    async def run(self, client: Client, clock: VirtualClock, begins_s: float) -> None:
        """Read the answer to its end."""
        answer, rng = self.answers[0], self._rng
        await clock.sleep(begins_s)
        while not answer.outcome:
            try:
                await self._read(client, clock, answer)
            except (TimeoutError, BrokerUnavailable):
                pass
            except (NotFound, PositionLost):
                answer.outcome = "stream_not_found"
            await clock.sleep(MAX_PAUSE_S * rng.random())

    async def _read(self, client: Client, clock: VirtualClock, answer: ReceivedAnswer) -> None:
        answer.rewind(self._rng)
        pieces = client.stream(answer.id, from_token=answer.position, timeout_s=STREAM_TIMEOUT_S)
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, End):
                    answer.outcome = piece.code
                    return
                position = piece.index + len(piece.token_ids)
                answer.take(piece.text, position, piece.finish_reason)
                if self._rng.random() < LEAVE_SHARE and not answer.outcome:
                    return
                if self._pauses_s:
                    await clock.sleep(self._pauses_s * self._rng.random())


class StreamReaders:
    """The readers of a seed, in one process; none where answers are short."""

    def __init__(self, world: SimulatedWorld, kafka_clients: KafkaClients) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} readers")
        count = rng.randint(1, MAX_READERS) if "long answers" in world.parameters.scenarios else 0
        self.readers = [
            StreamReader(f"reader-{n}", name, random.Random(f"{world.seed} reader {n}"))
            for n, name in enumerate(rng.choices(list(kafka_clients.requests), k=count))
        ]

    def start(self) -> None:
        """Start all readers."""
        if self.readers:
            self._running = self._world.loop.create_task(
                self._run(), name="readers/main", context=process_context("readers")
            )

    async def _run(self) -> None:
        clock = VirtualClock(self._world.loop)
        log = MemoryLog(self._world.broker, "readers")
        await log.start()
        async with Client(log, clock, random.Random(f"{self._world.seed} reading")) as client:
            faults_s = self._world.parameters.faults_s
            await asyncio.gather(
                *(r.run(client, clock, faults_s * self._rng.random()) for r in self.readers)
            )
