"""A deployment in this process, on the log in memory, whose workers have real engines."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from kvlane.app.demo.ledger_reader import LedgerDecisions
from kvlane.app.engine.interface import Engine, EngineOutput, GenerateContext, KvEventListener
from kvlane.app.gateway import Gateway
from kvlane.app.local.deployment import DeploymentPart, InProcessDeployment
from kvlane.app.local.processes import free_port
from kvlane.app.local.worker_observer import WorkerObserver
from kvlane.app.preprocess.models.model_folder import read_folder
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.worker_model import ModelPublisher
from kvlane.app.settings import Settings
from kvlane.app.text.answer_parts import ContentParser, Emit
from kvlane.app.worker import Worker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, End, EngineConfig, EngineStats, Role
from kvlane.streams.request import AnswerParsing, Request
from tests.vllm.engines import RealEngine

CLOCK = SystemClock()
OTHERS = ("router", "preprocessor", "gateway")
NO_ROLES: Mapping[str, Role] = {}


class Lent(Engine):
    """An engine that runs already and goes on running when its worker ends; served as `model`.

    A worker sees the events from its beginning on, so its engine's cache is emptied first.
    """

    def __init__(self, got: RealEngine, model: str) -> None:
        self._got = got
        self._model = model
        self._listener: KvEventListener | None = None

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._listener = listener

    def stats(self) -> EngineStats | None:
        return self._got.stats()

    async def start(self, worker_id: str) -> EngineConfig:
        await self._got.llm.reset_prefix_cache()
        if self._listener is not None:
            self._got.listeners.append(self._listener)
        return replace(self._got.config, served_model_name=self._model)

    def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        return self._got.generate(request, context)

    def calls_parser(self, parsing: AnswerParsing, request_id: str, emit: Emit) -> ContentParser:
        return self._got.calls_parser(parsing, request_id, emit)

    async def abort(self, context: GenerateContext) -> None:
        await self._got.abort(context)

    async def cleanup(self) -> None:
        if self._listener in self._got.listeners:
            self._got.listeners.remove(self._listener)


class Fleet:
    """See the module. `engines` by the names of their workers, which start in that order.

    `roles`: of workers that are not aggregated; `others`: the processes beside the workers.
    """

    def __init__(
        self,
        folder: Path,
        engines: dict[str, RealEngine],
        model: str,
        scratch: Path,
        *,
        roles: Mapping[str, Role] = NO_ROLES,
        others: Sequence[str] = OTHERS,
        **over: Any,
    ) -> None:
        self.settings = Settings(
            _env_file=None, worker_id="-", router_id="-", model=model, http_port=free_port(),
            context_length=1024, cache_dir=scratch, heartbeat_interval_s=0.5, drain_grace_s=0.5,
            lanes=2, **over,
        )  # fmt: skip
        self.broker = MemoryBroker(CLOCK, lanes=2)
        self._folder = folder
        self._engines = dict(engines)
        self._model = model
        self._roles = roles
        self.ctx = ProcessContext("fleet", CLOCK)
        self.parts = self._parts_of([*engines], others)
        self._more: list[InProcessDeployment] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.http_port}/v1"

    async def __aenter__(self) -> Self:
        self.log = MemoryLog(self.broker, "tests")
        await self.log.start()
        self.client = Client(self.log, CLOCK)
        self.decisions = LedgerDecisions(self.log)
        self.ctx.spawn("ledger", self.decisions.follow(await self.decisions.end_positions()))
        self.observer = WorkerObserver(self.log, self.ctx, self.settings.heartbeat_interval_s)
        await self.observer.start()
        await self.client.__aenter__()
        await self.parts.start()
        assert await self.observer.wait_ready(len(self._engines), 60, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for parts in (*self._more, self.parts):
            await parts.stop()
        await self.client.__aexit__(None, None, None)
        await self.ctx.cancel_tasks()
        await self.log.close()

    async def join(self, name: str, engine: RealEngine) -> None:
        """One more worker."""
        self._engines[name] = engine
        parts = self._parts_of([name], others=())
        self._more.append(parts)
        await parts.start()

    async def make_request(self, tokens: Sequence[int], max_tokens: int, **body: Any) -> str:
        """Publish a prompt in tokens; its id."""
        request_id = self.client.new_request_id()
        body = {
            "model": self._model, "token_ids": list(tokens), "max_tokens": max_tokens,
            "temperature": 0.0, "ignore_eos": True, **body,
        }  # fmt: skip
        await self.client.publish(Prompt(id=request_id, kind="tokens", body=body))
        return request_id

    async def pieces(self, request_id: str) -> AsyncGenerator[Chunk | End, None]:
        async for piece in self.client.stream(request_id, timeout_s=60):
            yield piece

    async def answer(self, request_id: str) -> list[int]:
        """Its tokens, once its end is in the ledger."""
        tokens: list[int] = []
        async for piece in self.pieces(request_id):
            assert isinstance(piece, Chunk), piece
            assert piece.finish_reason in (None, "stop", "length"), piece
            tokens += piece.token_ids
        until = CLOCK.now() + 5
        while self.decisions.cached_tokens(request_id) is None and CLOCK.now() < until:
            await CLOCK.sleep(0.005)
        return tokens

    def _parts_of(
        self, workers: Sequence[str], others: Sequence[str] = OTHERS
    ) -> InProcessDeployment:
        parts = [DeploymentPart(name, "worker") for name in workers] + [
            DeploymentPart(f"{o}-1", o) for o in others
        ]
        builds = {
            "worker": self._worker,
            "router": Router,
            "preprocessor": Preprocessor,
            "gateway": Gateway,
        }
        return InProcessDeployment(parts, builds, self.settings, self.broker, random.Random(1))

    def _worker(self, log: Log, settings: Settings, ctx: ProcessContext) -> Worker:
        offer = ModelPublisher(log, settings, ctx, read_folder(self._folder))
        engine = Lent(self._engines[settings.worker_id], self._model)
        role = self._roles.get(settings.worker_id, "aggregated")
        settings = settings.model_copy(update={"worker_role": role})
        return Worker(log, settings, ctx, engine, offer=offer)
