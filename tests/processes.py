"""Real routers and workers as processes of one world: each can be killed or stopped at any record.

A process is what runs under its name: all its tasks, its connection, its timers. `kill` is SIGKILL,
between two steps of its tasks; `stop` and `resume` are SIGSTOP and SIGCONT. `when` strikes a
process that has appended a record of some kind and has not heard of it yet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from app.engine.contract import Engine
from app.engine.echo import EchoEngine, echo_answer
from app.engine.validator import ValidatedEngine
from app.faults.vtime import PROCESS, VirtualLoop, process_context
from app.lifetime import Lifetime
from app.preprocess.byte_level import decode as text_of
from app.router import Router
from app.settings import Settings
from app.worker import Worker
from streams.codecs import decode, pack_tokens
from streams.errors import RecordError
from streams.memory.client import MemoryLog
from streams.memory.partition import MemoryRecord
from streams.ports import Appended, Entry
from streams.records import Chunk, End, Fence, Request, StopConditions, Usage
from streams.topics import REQUESTS, RESPONSES
from streams.transcript import Transcript
from tests.desks import PROMPT, STEP_S
from tests.routers import write
from tests.worlds import World

T = TypeVar("T")
MODEL = "echo"


class Processes:
    """The processes of a world, by name. All of them are alive until they are struck."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._loop = cast("VirtualLoop", asyncio.get_running_loop())
        self._logs: dict[str, MemoryLog] = {}
        self._traps: list[tuple[str, type, Callable[[str], None]]] = []
        self._append = world.broker.append
        world.broker.append = self._appended  # type: ignore[method-assign]

    # --- starting --------------------------------------------------------------------------------

    async def router(self, name: str = "r1", **over: Any) -> Router:
        """A router that has started."""
        settings = Settings(_env_file=None, **({"router_id": name, "worker_id": "-"} | over))
        life = Lifetime(name, self.world.clock, random.Random(name))
        router = Router(await self._connect(name), settings, life, name)
        await self._within(name, router.start())
        return router

    async def worker(self, name: str = "w1", engine: Engine | None = None, **over: Any) -> Worker:
        """A worker that is registered; its engine echoes."""
        settings = Settings(_env_file=None, **({"router_id": "-", "worker_id": name} | over))
        life = Lifetime(name, self.world.clock, random.Random(name))
        engine = engine or EchoEngine(
            self.world.clock, STEP_S, model=MODEL, max_num_seqs=settings.max_num_seqs
        )
        worker = Worker(await self._connect(name), settings, life, ValidatedEngine(engine))
        await self._within(name, worker.start())
        return worker

    async def _connect(self, name: str) -> MemoryLog:
        assert name not in self._logs, "each life has a name of its own"
        log = self._logs[name] = self.world.broker.connect(name)
        await log.start()
        return log

    async def _within(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        return await self._loop.create_task(work, context=process_context(name))

    # --- striking --------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._loop.hold(name)
        self._logs[name].cut()

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self._loop.hold(name)
        self._logs[name].stall()

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._logs[name].revive()
        self._loop.release(name)

    def when(self, name: str, kind: type, deed: Callable[[str], None]) -> None:
        """Do something to a process when it has appended its next record of this kind."""
        self._traps.append((name, kind, deed))

    @property
    def armed(self) -> bool:
        """Whether somebody still waits to be struck."""
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


def ask(world: World, max_tokens: int = 20, request_id: str = "a", **over: Any) -> Request:
    """Publish a request whose whole answer is known."""
    stop = over.pop("stop", StopConditions(max_tokens=max_tokens))
    prompt = over.pop("prompt", PROMPT)
    request = Request(id=request_id, model=MODEL, token_ids=pack_tokens(prompt), stop=stop, **over)
    write(world, REQUESTS, request)
    return request


class Heard:
    """What a reader of a request has been shown so far."""

    def __init__(self, world: World, request_id: str = "a") -> None:
        self.transcript = Transcript(request_id)
        self.pieces: list[Chunk | End] = []
        self.records: list[Chunk | Fence | End] = []
        for raw in world.records(RESPONSES, key=request_id):
            if raw.key == request_id.encode():
                record = decode(raw)
                assert isinstance(record, Chunk | Fence | End)
                self.records.append(record)
                if (piece := self.transcript.feed(record)) is not None:
                    self.pieces.append(piece)

    @property
    def tokens(self) -> list[int]:
        return list(self.transcript.tokens)

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces if isinstance(p, Chunk))

    @property
    def over(self) -> bool:
        return self.transcript.over

    @property
    def fences(self) -> int:
        return len({r.attempt for r in self.records if isinstance(r, Fence)})

    @property
    def reason(self) -> str | None:
        """How it ended."""
        last = self.pieces[-1] if self.pieces else None
        return last.code if isinstance(last, End) else last.finish_reason if last else None

    @property
    def usage(self) -> Usage | None:
        return self.pieces[-1].usage if self.pieces else None


async def whole(
    world: World, request_id: str = "a", max_tokens: int = 20, within_s: float = 90.0
) -> Heard:
    """Wait for the end of an answer, and hold it against the one that is due."""
    await world.until(lambda: Heard(world, request_id).over, within_s)
    await world.sleep(10.0)  # whatever comes later changes nothing
    heard = Heard(world, request_id)
    due = echo_answer(PROMPT, max_tokens)
    assert heard.tokens == due
    assert heard.text == text_of(due)
    assert heard.transcript.holes == 0
    assert heard.reason == "length"
    usage = heard.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), max_tokens)
    return heard
