"""A deployment in memory, for tests: its log, a client, and workers that answer from a script."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvlane.app.engine.echo import current_turn
from kvlane.app.engine.interface import (
    SCRIPTED_UNSUPPORTED,
    Engine,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    check_text_only,
    token_usage,
)
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.app.text.byte_level import ByteDetokenizer
from kvlane.app.worker import Worker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Request

__all__ = ["MemoryDeployment", "ScriptedEngine", "memory_deployment"]


class ScriptedEngine(Engine):
    """An engine that answers each message from a script; a token is a byte of the text. An answer
    with a form (JSON schema, enforced calls) is taken from the script as it is. A call of a tool is
    text in the form of parser `hermes`; the result of a tool is the next message.

    Args:
        answers: the answer to a prompt by its last message, or a function of that message. A
            message without an answer is refused.
        model: the name under which clients ask for it.
        context_length: bound of prompt and answer, in tokens.
    """

    def __init__(
        self,
        answers: Mapping[str, str] | Callable[[str], str | None],
        *,
        model: str = "scripted",
        context_length: int = 4096,
    ) -> None:
        self._answers = answers if callable(answers) else answers.get
        self._config = EngineConfig(
            model=model,
            context_length=context_length,
            unsupported=SCRIPTED_UNSUPPORTED,
            continues_guided=True,
        )

    async def start(self, worker_id: str) -> EngineConfig:  # noqa: ARG002
        return self._config

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the rest of the answer. Raises InvalidRequest for a message without an answer."""
        check_text_only(request, has_script=True)
        sequence = unpack_tokens(request.token_ids)
        message, emitted_tokens = current_turn(sequence)
        text = ByteDetokenizer()
        asked = text.push(message) + text.end()
        answer = "." if request.is_probe else self._answers(asked)
        if answer is None:
            raise InvalidRequest(f"the script has no answer to {asked!r}")
        tokens = answer.encode()[emitted_tokens:]
        limit = min(request.stop.max_tokens or len(tokens), len(tokens))
        for made, token in enumerate(tokens[:limit]):
            if context.is_stopped:
                yield EngineOutput.cancelled().with_usage(token_usage(len(sequence), made))
                return
            yield EngineOutput.token(token)
        end = EngineOutput.length() if limit < len(tokens) else EngineOutput.stop()
        yield end.with_usage(token_usage(len(sequence), limit))

    async def cleanup(self) -> None:
        """Nothing to release."""


class MemoryDeployment(NamedTuple):
    """A running deployment: its log, a client of it, and the URL of its gateway."""

    log: Log
    client: Client
    url: str


@asynccontextmanager
async def memory_deployment(*engines: Engine, lanes: int = 4) -> AsyncIterator[MemoryDeployment]:
    """Run one process of each kind, and a worker for each engine, in this event loop.

    The log is in memory and is gone at the end. KVLANE_* variables apply, as to any process.

    Args:
        engines: one for each worker.
        lanes: partitions of `requests` and `responses`.

    Raises:
        The error of a process that failed, at the end of the block.

    Example:
        async with memory_deployment(ScriptedEngine({"ping": "pong"})) as deployment:
            client = deployment.client
            body = {"messages": [{"role": "user", "content": "ping"}]}
            request_id = await client.publish(Prompt(id=client.new_request_id(), body=body))
            assert (await client.result(request_id)).text == "pong"
    """
    clock, ctx = SystemClock(), ProcessContext("memory deployment")
    log = MemoryLog(MemoryBroker(clock, lanes=lanes), "memory deployment")
    settings = Settings(
        lanes=lanes, http_port=0, indexer_port=0, status_port=None, router_id="router",
        drain_grace_s=0.1,
    )  # fmt: skip
    workers = [
        Worker(log, settings, ctx, engine, worker_id=f"worker-{number}")
        for number, engine in enumerate(engines, 1)
    ]
    processes = StandaloneProcess(log, settings, ctx, workers)
    await log.start()
    try:
        await processes.start()
        async with Client(log, clock) as client:
            yield MemoryDeployment(log, client, processes.gateway.url)
        await processes.stop()
    finally:
        await ctx.cancel_tasks()
        await log.close()
    if ctx.error is not None:
        raise ctx.error
