"""Tests of many readers that come and go, while workers die and the broker has outages."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from kvlane.streams.client import Client
from kvlane.streams.memory.memory_broker import AppendFate, Operation
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, Fence
from tests.harness.memory_world import MemoryWorld, ScriptedFaults
from tests.reply_harness import Worker, connect
from workbench.testing.virtual_time import VirtualLoop, run_virtual


class Weather(ScriptedFaults):
    """Questions, polls and appends take random times; some appends are repeated or unreported."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def latency_s(self, client: str, operation: Operation) -> float:
        return self._rng.choice((0.0, 0.001, 0.02, 0.3))

    def answer_s(self, client: str, operation: Operation) -> float:
        return self._rng.choice((0.0, 0.001, 0.02, 0.3))

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        return self._rng.choice(
            (
                AppendFate.KEPT,
                AppendFate.KEPT,
                AppendFate.KEPT,
                AppendFate.UNREPORTED,
                AppendFate.LOST,
            )
        )


async def listen(client: Client, request_id: str, rng: random.Random) -> str:
    """Read a reply, breaking off and attaching again now and then, as a flaky program does."""
    received, token = "", 0
    while True:
        async with aclosing(client.stream(request_id, from_token=token)) as stream:
            async for piece in stream:
                assert isinstance(piece, Chunk)
                received, token = received + piece.text, piece.index + len(piece.token_ids)
                if piece.finish_reason is not None:
                    return received
                if rng.random() < 0.05:
                    break


async def write(world: MemoryWorld, request_id: str, answer: str, rng: random.Random) -> None:
    """A worker that dies now and then, with the router that lets another one go on."""
    attempt, worker = 0, Worker(world, request_id)
    while True:
        await world.sleep(rng.choice((0.0, 0.001, 0.01, 0.2, 1.0)))
        if rng.random() < 0.1:
            attempt += 1
            worker.append(Fence(id=request_id, attempt=attempt))
            zombie, worker = worker, Worker(world, request_id, attempt, worker.index)
            zombie.write("zombie", "stop")
        part = answer[worker.index : worker.index + rng.randint(1, 5)]
        last = worker.index + len(part) == len(answer)
        chunk = worker.write(part, "stop" if last else None)
        if rng.random() < 0.1:
            worker.append(chunk)
        if last:
            return


async def many_streams(loop: VirtualLoop, seed: int) -> None:
    rng = random.Random(seed)
    world = MemoryWorld(loop, lanes=3)
    world.broker.faults = Weather(rng)
    clients = [await connect(world, f"client-{n}") for n in range(2)]

    async def one(number: int) -> None:
        await world.sleep(rng.random() * 100)
        client, other = rng.sample(clients, 2)
        request_id = rng.choice((client.new_request_id(), f"job-{number}"))
        await client.publish(Prompt(id=request_id), subscribe=rng.random() < 0.8)
        answer = f"{number}-" + "".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 60)))
        writing = world.spawn(write(world, request_id, answer, rng))
        await world.sleep(rng.choice((0.0, 0.0, 0.5, 5.0, 90.0)))
        listening = [listen(who, request_id, rng) for who in (client, other)]
        assert await asyncio.gather(*listening) == [answer, answer]
        await writing

    async def outages() -> None:
        while True:
            await world.sleep(rng.random() * 60)
            world.broker.available = False
            await world.sleep(rng.random() * 5)
            world.broker.available = True

    world.spawn(outages())
    await asyncio.gather(*(one(number) for number in range(30)))
    for client in clients:
        assert not client._listening()._live.all_replies()
        assert not client._listening()._history.all_replies()
        await client.close()


@pytest.mark.parametrize("seed", range(25))
def test_every_client_reads_the_whole_answer_under_all_faults(seed: int) -> None:
    run_virtual(lambda loop: many_streams(loop, seed), random.Random(seed))
