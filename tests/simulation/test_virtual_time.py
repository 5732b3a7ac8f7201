"""Tests of the virtual loop: time that jumps, an order that a seed draws, processes that stop
dead."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from workbench.testing.virtual_time import (
    Deadlock,
    StepLimitExceeded,
    VirtualClock,
    VirtualLoop,
    process_context,
    run_virtual,
)


def test_waiting_costs_no_time() -> None:
    async def main(loop: VirtualLoop) -> float:
        await VirtualClock(loop).sleep(3600.0)
        return loop.time()

    assert run_virtual(main) == 3600.0  # the time limit of the test is shorter


def test_timers_fire_in_order_of_time() -> None:
    async def main(_: VirtualLoop) -> list[int]:
        fired: list[int] = []

        async def fire(after_s: int) -> None:
            await asyncio.sleep(after_s)
            fired.append(after_s)

        await asyncio.gather(*(fire(n) for n in (3, 1, 2)))
        return fired

    assert run_virtual(main, random.Random(1)) == [1, 2, 3]


def test_timeouts_of_asyncio_work() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await loop.create_future()
        return loop.time()

    assert run_virtual(main) == 5.0


def test_deadlock_names_the_waiting_tasks() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def main(loop: VirtualLoop) -> None:
        await loop.create_task(stuck(), name="the one that waits")

    with pytest.raises(Deadlock, match="the one that waits: stuck"):
        run_virtual(main)


def test_spinning_is_detected() -> None:
    async def main(_: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110 - that is what is to be noticed
            await asyncio.sleep(0)

    with pytest.raises(StepLimitExceeded):
        run_virtual(main, max_steps=1000)


def test_errors_come_out() -> None:
    async def main(_: VirtualLoop) -> None:
        raise LookupError("of the test")

    with pytest.raises(LookupError, match="of the test"):
        run_virtual(main)


def test_remaining_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("endless")

    async def main(loop: VirtualLoop) -> None:
        loop.create_task(endless(), context=process_context("held"))
        await asyncio.sleep(1.0)
        loop.pause("held")

    run_virtual(main)
    assert ended == ["endless"]


async def _chatter(loop: VirtualLoop, names: str) -> str:
    """What processes of these names say when each speaks ten times without waiting."""
    output: list[str] = []

    async def speak(name: str) -> None:
        for n in range(10):
            output.append(f"{name}{n}")
            await asyncio.sleep(0)

    tasks = [loop.create_task(speak(n), context=process_context(n)) for n in names]
    await asyncio.gather(*tasks)
    return " ".join(output)


def _heard(seed: int) -> str:
    return run_virtual(lambda loop: _chatter(loop, "abc"), random.Random(seed))


def test_same_seed_gives_the_same_order() -> None:
    assert _heard(1) == _heard(1)


def test_other_seeds_give_other_orders() -> None:
    assert len({_heard(seed) for seed in range(10)}) == 10


def test_order_within_a_process_is_kept() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        order: list[int] = []

        def call() -> None:
            for n in range(20):
                loop.call_soon(order.append, n)

        loop.call_soon(call, context=process_context("a"))
        loop.create_task(_chatter(loop, "bc"))
        await asyncio.sleep(1.0)
        return order

    assert run_virtual(main, random.Random(1)) == list(range(20))


def test_sets_of_tasks_keep_their_order() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        waste = [bytearray(n) for n in range(1000)]  # so that addresses differ from run to run
        tasks = {loop.create_task(asyncio.sleep(0), name=f"{n}") for n in range(100)}
        await asyncio.wait(tasks)
        del waste
        return [task.get_name() for task in tasks]

    assert run_virtual(main) == run_virtual(main)


class TestHolding:
    @staticmethod
    def beats(hold: Any) -> list[float]:
        """When a process that beats every second did so, while `pause` plays with it."""

        async def main(loop: VirtualLoop) -> list[float]:
            at: list[float] = []

            async def beat() -> None:
                for _ in range(6):
                    at.append(loop.time())
                    await asyncio.sleep(1.0)

            beating = loop.create_task(beat(), context=process_context("worker"))
            await hold(loop)
            await asyncio.wait([beating], timeout=100.0)
            return at

        return run_virtual(main, random.Random(1))

    def test_suspended_process_does_nothing(self) -> None:
        async def hold(loop: VirtualLoop) -> None:
            await asyncio.sleep(2.5)
            loop.pause("worker")

        assert self.beats(hold) == [0.0, 1.0, 2.0]

    def test_resumed_process_continues_where_it_was(self) -> None:
        async def hold(loop: VirtualLoop) -> None:
            await asyncio.sleep(2.5)
            loop.pause("worker")
            await asyncio.sleep(10.0)
            loop.resume("worker")

        assert self.beats(hold) == [0.0, 1.0, 2.0, 12.5, 13.5, 14.5]

    def test_process_is_suspended_before_its_next_step(self) -> None:
        async def hold(loop: VirtualLoop) -> None:
            loop.pause("worker")
            await asyncio.sleep(5.0)
            loop.resume("worker")

        assert self.beats(hold)[0] == 5.0
