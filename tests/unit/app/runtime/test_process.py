"""Tests of the life of a process: the order of its stages, and its ends."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fastapi import FastAPI

from kvlane.app.http.server import http_server
from kvlane.app.http.server.http_server import CannotListen, UvicornServer
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import ProcessContext, run_process
from kvlane.app.settings import SettingsError
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import AccessDenied
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test


class Part:
    """A process that takes its time; `starts` and `stops` are set when it may go on."""

    def __init__(self, world: MemoryWorld) -> None:
        self.ctx = ProcessContext("part", world.clock)
        self.starts, self.stops, self.sent = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.timeline: list[str] = []
        self.living = world.spawn(run_process(self.ctx, self.start, self.stop, self.sent))

    async def start(self) -> None:
        self.timeline.append("starts")
        try:
            await self.starts.wait()
        except asyncio.CancelledError:
            self.timeline.append("start broken off")
            raise
        self.timeline.append("started")

    async def stop(self) -> None:
        self.timeline.append("stops")
        await self.stops.wait()
        self.timeline.append("stopped")

    async def ended(self) -> None:
        await asyncio.wait_for(self.living, 5)


async def fails() -> None:
    raise ZeroDivisionError


@scenario_test
async def test_process_calls_its_hooks_in_order(world: MemoryWorld) -> None:
    part = Part(world)
    part.starts.set()
    part.stops.set()
    await world.sleep(1)
    part.ctx.spawn("work", world.sleep(1e9))
    part.sent.set()
    await part.ended()
    assert part.timeline == ["starts", "started", "stops", "stopped"]
    assert len(part.ctx._tasks) == 0


@scenario_test
async def test_stop_signal_aborts_a_start(world: MemoryWorld) -> None:
    part = Part(world)
    await world.sleep(1)
    part.sent.set()
    await part.ended()
    assert part.timeline == ["starts", "start broken off"]


@scenario_test
async def test_error_in_the_background_ends_a_start_that_waits_for_it(world: MemoryWorld) -> None:
    part = Part(world)
    await world.sleep(1)
    part.ctx.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.timeline == ["starts", "start broken off"]


@scenario_test
async def test_start_that_fails_is_an_error(world: MemoryWorld) -> None:
    part = Part(world)
    part.start = fails  # type: ignore[method-assign]
    part.living.cancel()
    with pytest.raises(ZeroDivisionError):
        await run_process(part.ctx, part.start, part.stop, part.sent)
    assert part.timeline == []


@scenario_test
async def test_error_later_ends_the_process_without_a_stop(world: MemoryWorld) -> None:
    part = Part(world)
    part.starts.set()
    await world.sleep(1)
    part.ctx.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.timeline == ["starts", "started"]


@scenario_test
async def test_error_ends_a_stop_that_does_not_come_to_its_end(world: MemoryWorld) -> None:
    part = Part(world)
    part.starts.set()
    await world.sleep(1)
    part.sent.set()
    await world.sleep(1)
    part.ctx.spawn("work", fails())
    with pytest.raises(ZeroDivisionError):
        await part.ended()
    assert part.timeline == ["starts", "started", "stops"]


class Mendable(OperatorError):
    """Something is wrong with it."""

    correction = "Mend it."


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (Mendable("a thing"), "Mend it."),
        (Mendable("a thing", correction="Mend its cause."), "Mend its cause."),
        (AccessDenied("a thing"), AccessDenied.correction),
        (SettingsError("a thing"), ""),  # its message has the correction
    ],
)
def test_error_for_operators_is_logged_with_its_correction_and_without_a_traceback(
    error: Exception, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: MemoryWorld) -> None:
        ProcessContext("part", world.clock).fail(error)

    run_scenario(scenario)
    expected = [f"part fails: {type(error).__name__}: a thing"]
    expected += [f"what to do: {remedy}"] if remedy else []
    assert [record.getMessage() for record in caplog.records] == expected
    assert not any(record.exc_info for record in caplog.records)


@scenario_test
async def test_port_that_is_taken_is_named_with_its_variable(world: MemoryWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = UvicornServer(
            FastAPI(), "127.0.0.1", port, ProcessContext("x", world.clock), "indexer_port"
        )
        taken = f"127.0.0.1:{port}: Address already in use. Set KVLANE_INDEXER_PORT to a free port"
        with pytest.raises(CannotListen, match=taken):
            await server.start()


async def test_answers_that_the_end_of_a_process_cuts_off_leave_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SHUTDOWN_TIMEOUT_S", 1.0)
    api = FastAPI()

    @api.get("/")
    async def never() -> None:
        await asyncio.Event().wait()

    ctx = ProcessContext("x", SystemClock())
    server = UvicornServer(api, "127.0.0.1", 0, ctx)
    await server.start()
    reader, writer = await asyncio.open_connection(*server._socket.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await asyncio.sleep(0.1)
    await server.stop()
    assert await reader.read() == b""
    writer.close()
    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in caplog.text


async def test_cancelled_server_leaves_no_reader_to_the_event_loop() -> None:
    """The event loop would not watch the next socket with the number of such a reader."""
    ctx = ProcessContext("x", SystemClock())
    server = UvicornServer(FastAPI(), "127.0.0.1", 0, ctx)
    await server.start()
    listening = server._socket.fileno()
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(*server._socket.getsockname())
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    writer.close()
    await ctx.cancel_tasks()
    assert not loop.remove_reader(listening)
