"""Routers and workers as simulated processes: each can be killed or paused at any record.

A process has its own tasks, connection and timers. `kill` is SIGKILL, between two steps of its
tasks; `stop` and `resume` are SIGSTOP and SIGCONT. `on_append` hits a process that has appended a
record of some kind, before the acknowledgement.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.errors import RecordError
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Appended, Entry
from kvlane.streams.records import Chunk, End, Fence, Usage
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import REQUESTS, RESPONSES
from tests.harness.decoded import decode_bytes as text_of
from tests.harness.fake_worker import append_record
from tests.harness.memory_world import MemoryWorld
from tests.harness.worker_harness import PROMPT, STEP_S
from workbench.testing.virtual_time import PROCESS, VirtualLoop, process_context

MODEL = "echo"


class SimulatedProcesses:
    """The processes of a world, by name."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self._loop = cast("VirtualLoop", asyncio.get_running_loop())
        self._logs: dict[str, MemoryLog] = {}
        self._struck: dict[str, asyncio.Future[None]] = {}
        """By process, done when it is killed or stopped."""
        self._traps: list[tuple[str, type, Callable[[str], None]]] = []
        self._append = world.broker.append
        world.broker.append = self._appended  # type: ignore[method-assign]

    # --- starting --------------------------------------------------------------------------------

    @staticmethod
    async def started(world: MemoryWorld) -> SimulatedProcesses:
        """A router `r1` and a worker `w1`."""
        processes = SimulatedProcesses(world)
        await processes.router()
        await processes.worker()
        return processes

    async def router(self, name: str = "r1", **over: Any) -> Router:
        settings = Settings(_env_file=None, **({"router_id": name, "worker_id": "-"} | over))
        ctx = ProcessContext(name, self.world.clock, random.Random(name))
        router = Router(await self._connect(name), settings, ctx, name)
        await self._within(name, router.start())
        return router

    async def worker(self, name: str = "w1", engine: Engine | None = None, **over: Any) -> Worker:
        """Start a worker, by default with an echo engine."""
        settings = Settings(_env_file=None, **({"router_id": "-", "worker_id": name} | over))
        ctx = ProcessContext(name, self.world.clock, random.Random(name))
        engine = engine or EchoEngine(
            self.world.clock, STEP_S, model=MODEL, max_num_seqs=settings.max_num_seqs
        )
        worker = Worker(await self._connect(name), settings, ctx, ValidatingEngine(engine))
        await self._within(name, worker.start())
        return worker

    async def _connect(self, name: str) -> MemoryLog:
        assert name not in self._logs, "each process needs a name of its own"
        log = self._logs[name] = MemoryLog(self.world.broker, name)
        await log.start()
        return log

    async def _within(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run the start of a process to its end, or until it is struck."""
        starting = self._loop.create_task(work, context=process_context(name))
        struck = self._struck[name] = self._loop.create_future()
        await asyncio.wait({starting, struck}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()

    # --- faults ----------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        self._strike(name)
        self._logs[name].kill()

    def stop(self, name: str) -> None:
        self._strike(name)
        self._logs[name].suspend()

    def _strike(self, name: str) -> None:
        self._loop.pause(name)
        if not self._struck[name].done():
            self._struck[name].set_result(None)

    def resume(self, name: str) -> None:
        self._logs[name].resume()
        self._loop.resume(name)

    def on_append(self, name: str, kind: type, deed: Callable[[str], None]) -> None:
        """Call `deed` with a process when it has appended its next record of this kind."""
        self._traps.append((name, kind, deed))

    @property
    def has_pending_faults(self) -> bool:
        """Whether a fault has not been triggered yet."""
        return bool(self._traps)

    def _appended(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        stands = self._append(topic, partition, entries)
        name = PROCESS.get()
        for trap in [t for t in self._traps if t[0] == name]:
            for entry in entries:
                record = MemoryRecord(topic, partition, 0, 0, *entry)
                if trap in self._traps and _kind_of(record) is trap[1]:
                    self._traps.remove(trap)
                    trap[2](name)
        return stands


def _kind_of(record: MemoryRecord) -> type | None:
    try:
        return type(decode(record))
    except RecordError:
        return None


def publish_request(
    world: MemoryWorld, max_tokens: int = 20, request_id: str = "a", **over: Any
) -> Request:
    """Publish a request with a known answer."""
    stop = over.pop("stop", StopConditions(max_tokens=max_tokens))
    prompt = over.pop("prompt", PROMPT)
    request = Request(id=request_id, model=MODEL, token_ids=pack_tokens(prompt), stop=stop, **over)
    append_record(world, REQUESTS, request)
    return request


class ObservedAnswer:
    """The stream of a request as a reader has seen it so far."""

    def __init__(self, world: MemoryWorld, request_id: str = "a") -> None:
        self.transcript = Transcript(request_id)
        self.visible_records: list[Chunk | End] = []
        self.records: list[Chunk | Fence | End] = []
        for raw in world.records(RESPONSES, key=request_id):
            if raw.key == request_id.encode():
                record = decode(raw)
                assert isinstance(record, Chunk | Fence | End)
                self.records.append(record)
                if (piece := self.transcript.apply(record)) is not None:
                    self.visible_records.append(piece)

    @property
    def tokens(self) -> list[int]:
        return list(self.transcript.tokens)

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.visible_records if isinstance(p, Chunk))

    @property
    def is_over(self) -> bool:
        return self.transcript.is_over

    @property
    def fences(self) -> int:
        return len({r.attempt for r in self.records if isinstance(r, Fence)})

    @property
    def finish_reason(self) -> str | None:
        last = self.visible_records[-1] if self.visible_records else None
        return last.code if isinstance(last, End) else last.finish_reason if last else None

    @property
    def usage(self) -> Usage | None:
        return self.visible_records[-1].usage if self.visible_records else None


async def wait_complete(
    world: MemoryWorld, request_id: str = "a", max_tokens: int = 20, within_s: float = 90.0
) -> ObservedAnswer:
    """Wait for the end of an answer, and compare it with the expected one."""
    await world.wait_until(lambda: ObservedAnswer(world, request_id).is_over, within_s)
    await world.sleep(10.0)  # whatever comes later changes nothing
    received = ObservedAnswer(world, request_id)
    due = echo_answer(PROMPT, max_tokens)
    assert received.tokens == due
    assert received.text == text_of(due)
    assert received.transcript.gaps == 0
    assert received.finish_reason == "length"
    usage = received.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), max_tokens)
    return received
