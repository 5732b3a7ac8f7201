"""Tests of the work of a response: it ends with its client, with its time, or by itself."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from kvlane.app.http.openai.response_writer import run_until_disconnect


class Client:
    """A client that leaves, or whose connection fails, when told."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()

    async def receive(self) -> Message:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message


class Work:
    """Work that waits, and how it ended."""

    def __init__(self) -> None:
        self.begun, self.done = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> None:
        self.begun.set()
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_finished_work_ends_the_wait_for_the_client() -> None:
    client, work = Client(), Work()
    work.done.set()
    await run_until_disconnect(client.receive, work.run(), 30.0)
    assert not work.was_cancelled
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("message", [{"type": "http.disconnect"}, ConnectionResetError("reset")])
async def test_disconnected_client_ends_the_work(message: Message | Exception) -> None:
    client, work = Client(), Work()
    running = asyncio.create_task(run_until_disconnect(client.receive, work.run(), 30.0))
    await work.begun.wait()
    await client.messages.put({"type": "http.request"})
    await client.messages.put(message)
    await running
    assert work.was_cancelled


async def test_time_limit_ends_the_work() -> None:
    client, work = Client(), Work()
    await run_until_disconnect(client.receive, work.run(), 0.01)
    assert work.was_cancelled


@pytest.mark.parametrize("error", [TimeoutError("of its own"), ValueError("wrong")])
async def test_error_of_the_work_is_raised(error: Exception) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await run_until_disconnect(Client().receive, fail(), 30.0)


async def test_cancelled_response_cancels_the_work() -> None:
    client, work = Client(), Work()
    running = asyncio.create_task(run_until_disconnect(client.receive, work.run(), 30.0))
    await work.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.was_cancelled
