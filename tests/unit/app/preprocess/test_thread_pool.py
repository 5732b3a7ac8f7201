"""Tests of blocking work off the loop: bounded, and refused at once beyond the bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvlane.app.preprocess.prompt_errors import PreprocessorOverloaded
from kvlane.app.preprocess.thread_pool import InlinePool, ThreadPool


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(threads=1, waiting=1)
    yield pool
    pool.close()


async def test_work_runs_on_another_thread(pool: ThreadPool) -> None:
    assert await pool.run(threading.get_ident) != threading.get_ident()


async def test_error_of_the_work_comes_back(pool: ThreadPool) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await pool.run(fail)


async def test_task_beyond_the_queue_is_refused(pool: ThreadPool) -> None:
    gate = threading.Event()
    taken = [asyncio.ensure_future(pool.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(PreprocessorOverloaded):
        await pool.run(gate.wait)
    gate.set()
    assert await asyncio.gather(*taken) == [True, True]


async def test_slot_is_free_again_when_the_work_is_done(pool: ThreadPool) -> None:
    for number in range(5):
        assert await pool.run(lambda n=number: n) == number


async def test_cancelled_caller_keeps_its_slot_until_the_thread_is_done(pool: ThreadPool) -> None:
    gate = threading.Event()
    first = asyncio.ensure_future(pool.run(gate.wait))
    second = asyncio.ensure_future(pool.run(gate.wait))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    with pytest.raises(PreprocessorOverloaded):
        await pool.run(gate.wait)
    gate.set()
    assert await second


async def test_inline_work_is_done_at_once() -> None:
    assert await InlinePool().run(threading.get_ident) == threading.get_ident()
