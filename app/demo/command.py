"""`kvlane demo` and `kvlane up`: a broker and every process of a deployment on this machine.

Chooses the broker and how long everything stays. What the demo shows is `story.py`'s, what is set
up for it `stage.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from app import worker
from app.demo.parts import Build, DemoFailed
from app.demo.stage import free_port, stage
from app.demo.story import Story
from app.gateway import Gateway
from app.indexer import Indexer
from app.lifetime import Lifetime
from app.preprocessor import Preprocessor
from app.router import Router
from app.settings import Settings
from streams.brokers.local import Broker, Kind, obtain
from streams.clock import SystemClock

WORKERS = 4
CONTEXT_LENGTH = 16_384
"""The trace has prompts of up to 12 000 tokens."""
PREFILL_LOAD_SCALE = 4.0
"""Answers are short here, so prompts left to compute say more of a worker's load than those that
are held: with 1, the default, its cost sends many requests away from their caches."""
HEARTBEAT_S = 0.5
"""A worker that stops gives routers two heartbeats to notice."""
DRAIN_GRACE_S = 2.0
"""When the demo ends its parts, nobody waits for an answer any more."""
CHECK_S = 1.0

BUILDS: dict[str, Build] = {
    "worker": worker.build,
    "router": Router,
    "indexer": Indexer,
    "preprocessor": Preprocessor,
    "gateway": Gateway,
}

BrokerKind = Literal["auto"] | Kind


def demo_vllm(settings: Settings, console: Console, kind: BrokerKind = "auto") -> bool:
    """The demo with the real vLLM; whether all was as it should be. Raises as `demo`."""
    from app.demo import real, tiny_model
    from app.engine.contract import EngineError
    from app.engine.vllm.engine import START_METHOD
    from app.engine.vllm.versions import check_plugin, installed

    os.environ.update(tiny_model.environment())
    try:
        installed()
        check_plugin()
    except EngineError as e:
        raise DemoFailed(str(e)) from e
    with _broker(settings, console, kind) as broker, real.scratch() as folder:
        if broker.kind == "memory":  # several engines in this process: what is forked would hold on
            os.environ[START_METHOD] = "spawn"  # to what belongs to the others
        return asyncio.run(_demo_vllm(settings, console, broker, Path(folder)))


async def _demo_vllm(settings: Settings, console: Console, broker: Broker, folder: Path) -> bool:
    from app.demo import real

    life = Lifetime("demo", SystemClock())
    changes = _changes(settings, broker) | real.changes(folder / "model")
    async with stage(
        settings, broker, life.clock, workers=real.WORKERS, changes=changes, builds=BUILDS
    ) as on:
        try:
            return await real.RealStory(on.log, on.parts, on.settings, life, console).tell()
        finally:
            await life.end()


def demo(
    settings: Settings, prompts: Sequence[str], console: Console, kind: BrokerKind = "auto"
) -> bool:
    """The whole demo, from nothing to nothing; whether every text was right.

    Raises BrokerUnavailable, TopicsDiffer, DemoFailed.
    """
    with _broker(settings, console, kind) as broker:
        return asyncio.run(_demo(settings, prompts, console, broker))


def up(
    settings: Settings, console: Console, kind: BrokerKind = "auto", *, workers: int, port: int
) -> None:
    """A small deployment that stays until Ctrl-C or SIGTERM. Raises as `demo`."""
    with _broker(settings, console, kind, port) as broker:
        if broker.kind == "memory":
            raise DemoFailed("nobody else could reach the log in memory: see `kvlane demo`")
        asyncio.run(_up(settings, console, broker, workers))


def _broker(settings: Settings, console: Console, kind: BrokerKind, port: int = 0) -> Broker:
    broker = obtain(
        settings.broker if kind == "auto" else kind,
        bootstrap_servers=settings.bootstrap_servers,
        port=port,
        report=lambda line: console.print(line, style="dim", markup=False),
    )
    console.print(f"broker: {broker.description}", style="dim", markup=False)
    return broker


async def _demo(
    settings: Settings, prompts: Sequence[str], console: Console, broker: Broker
) -> bool:
    life = Lifetime("demo", SystemClock())
    changes = _changes(settings, broker) | {"context_length": CONTEXT_LENGTH}
    async with stage(
        settings, broker, life.clock, workers=WORKERS, changes=changes, builds=BUILDS
    ) as on:
        try:
            story = Story(on.log, on.parts, on.settings, life, console, WORKERS)
            return await story.tell(prompts)
        finally:
            await life.end()


def _changes(settings: Settings, broker: Broker) -> dict[str, Any]:
    """What is set otherwise in demos of any engine."""
    changes: dict[str, Any] = {
        "http_port": free_port(),
        "indexer_port": free_port(),
        "prefill_load_scale": PREFILL_LOAD_SCALE,
        "heartbeat_s": HEARTBEAT_S,
        "drain_grace_s": DRAIN_GRACE_S,
    }
    if broker.kind == "env":  # somebody's cluster: stay out of the way of what is there
        changes["topic_prefix"] = f"{settings.topic_prefix}demo."
    return changes


async def _up(settings: Settings, console: Console, broker: Broker, workers: int) -> None:
    clock = SystemClock()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with stage(settings, broker, clock, workers=workers, changes={}, builds=BUILDS) as on:
        await on.parts.start()
        console.print(
            f"a gateway, a preprocessor, a router, an indexer and {workers} workers are starting; "
            f"topics are {on.settings.topic_prefix}*\n\n"
            f"  export KVLANE_BOOTSTRAP_SERVERS={broker.bootstrap_servers}\n"
            "  kvlane publish --follow 'Hello'\n\n"
            f"  export OPENAI_BASE_URL=http://{on.settings.http_host}:{on.settings.http_port}/v1 "
            f"OPENAI_API_KEY=none   # the model is {on.settings.model!r}\n\n"
            "Ctrl-C ends everything.",
            highlight=False,
            markup=False,
        )
        while not ended.is_set():
            on.parts.check()
            broker.check()
            await asyncio.wait([asyncio.create_task(ended.wait())], timeout=CHECK_S)
        console.print("stopping", style="dim")
