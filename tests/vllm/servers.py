"""A vLLM server in a process of its own, that publishes its cache events and can repeat them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvlane.app.demo import tiny_model
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.preprocess.models.model_folder import read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.clock import SystemClock

BLOCKS = 41
CONTEXT = 512
START_S = 400.0
"""A server with adapters took 248 s on two cores that had ten times as much to do."""


class RunningServer(NamedTuple):
    url: str
    events: str
    replay: str
    model: Path
    process: asyncio.subprocess.Process
    log: Path

    async def wait_ready(self) -> None:
        """Wait until it accepts connections. The test fails if the process ends before."""
        port = int(self.url.rpartition(":")[2])
        async with asyncio.timeout(START_S):
            while True:
                if self.process.returncode is not None:
                    output = self.log.read_text(errors="replace")[-4000:]
                    pytest.fail(f"the server ended with {self.process.returncode}:\n{output}")
                with contextlib.suppress(ConnectionRefusedError):
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                    writer.close()
                    return
                await asyncio.sleep(0.2)

    def attached(self, **over: object) -> AttachedEngine:
        where = ServerAddress(
            self.url, self.events, self.replay, read_timeout_s=60.0, start_timeout_s=START_S
        )
        tokenizer = Tokenizer(read_folder(self.model).tokenizer, InlinePool())
        guess = AssumedLimits(CONTEXT, tiny_model.BLOCK_SIZE, BLOCKS - 1)
        lease_s = over.pop("transfer_lease_s", None)
        return AttachedEngine(
            SystemClock(), where._replace(**over), tokenizer, guess, transfer_lease_s=lease_s
        )


def command(
    model: Path, ports: list[int], adapters: dict[str, Path], more: Sequence[str] = ()
) -> list[str]:
    http, events, replay = ports
    got = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    line = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(http),
        "--dtype", "float32", "--max-model-len", str(CONTEXT), "--block-size",
        str(tiny_model.BLOCK_SIZE), "--enforce-eager", "--max-num-seqs", "8",
        "--num-gpu-blocks-override", str(BLOCKS), "--kv-cache-memory-bytes", str(64 << 20),
        "--distributed-executor-backend", "uni", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(got),
    ]  # fmt: skip
    if adapters:
        modules = [f"{name}={folder}" for name, folder in adapters.items()]
        line += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
    return [*line, *more]


@contextlib.asynccontextmanager
async def running(
    model: Path,
    log: Path,
    adapters: dict[str, Path] | None = None,
    ports: list[int] | None = None,
    more: Sequence[str] = (),
    **environment: str,
) -> AsyncIterator[RunningServer]:
    """A server that starts: `wait_ready` waits for it, and so does an engine that attaches."""
    http, events, replay = ports = ports or free_ports(3)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command(model, ports, adapters or {}, more),
            env=os.environ | tiny_model.environment() | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
            | environment,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield RunningServer(
            f"http://127.0.0.1:{http}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}",
            model, process, log,
        )  # fmt: skip
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process, *, kill: bool = False) -> None:
    """Its whole group goes: the engine's core is a child of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
    try:
        async with asyncio.timeout(20):
            await process.wait()
    except TimeoutError:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
