"""Engines for tests with the real vLLM, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kvlane.app.demo import tiny_model
from kvlane.app.engine.interface import EngineOutput, GenerateContext
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.engine.vllm.async_llm import VllmEngine
from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret
from kvlane.indexer.cache_events.engine_events import EngineEvent
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Hints, Request, SamplingOptions, StopConditions

CLOCK = SystemClock()
GREEDY = SamplingOptions(temperature=0.0)
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
"""For answers in JSON: a model with random weights would fill them with white space."""


class RealEngine(ValidatingEngine):
    """A started engine that remembers its events, and passes them on to who listens by then."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        self.vllm = engine
        self.events: list[tuple[int, EngineEvent]] = []
        self.listeners: list[Callable[..., None]] = []
        self.config: EngineConfig

    @property
    def llm(self) -> Any:
        return self.vllm._llm

    def receive(self, events: Sequence[EngineEvent], rank: int = 0, /) -> None:
        self.events += [(rank, event) for event in events]
        for listener in self.listeners:
            listener(events, rank)

    def bridge(self, rank: int = 0) -> EventNormalizer:
        """What a bridge has made of all events of a rank."""
        bridge = EventNormalizer(tiny_model.BLOCK_SIZE, derive_secret(LOOPBACK_SECRET))
        bridge.on_events([event for of, event in self.events if of == rank], 0.0)
        return bridge


async def started(
    model: Path, *, blocks: int, adapters: dict[str, Path] | None = None, **arguments: Any
) -> RealEngine:
    adapters = adapters or {}
    loras = {"max_loras": len(adapters), "max_lora_rank": 8} if adapters else {}
    engine = VllmEngine(
        CLOCK,
        str(model),
        model="tiny",
        adapters=adapters,
        arguments=tiny_model.engine_arguments(blocks) | loras | arguments,
    )
    got = RealEngine(engine)
    got.set_kv_event_listener(got.receive)
    try:
        got.config = await got.start("w1")
    except BaseException:
        await got.cleanup()
        raise
    return got


def make_request(
    tokens: Sequence[int], max_tokens: int = 8, *, lora: str | None = None, **over: Any
) -> Request:
    fields: dict[str, Any] = {
        "id": "a",
        "token_ids": pack_tokens(tokens),
        "stop": StopConditions(max_tokens=max_tokens, ignore_eos=True),
        "sampling": GREEDY,
        "hints": Hints(lora_name=lora),
    }
    return Request(**(fields | over))


async def outputs(engine: Any, request: Request) -> list[EngineOutput]:
    async with aclosing(engine.generate(request, GenerateContext(request.id))) as stream:
        return [output async for output in stream]


async def answer(engine: Any, request: Request) -> list[int]:
    return [token for output in await outputs(engine, request) for token in output.token_ids]


async def direct(
    engine: RealEngine, tokens: Sequence[int], max_tokens: int = 8, **named: Any
) -> list[int]:
    """What vLLM says itself, asked without us."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    stream = engine.llm.generate(tokens_input(list(tokens)), params, "direct", **named)
    last = [output async for output in stream][-1]
    return list(last.outputs[0].token_ids)


def cached(got: Sequence[EngineOutput]) -> int:
    counts = got[0].usage
    assert counts is not None
    return counts.cached_tokens


async def settled(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    until = CLOCK.now() + within_s
    while not condition():
        assert CLOCK.now() < until, "it never came true"
        await CLOCK.sleep(0.01)


def core_of(engine: RealEngine) -> int:
    """The process of its core."""
    manager = engine.llm.engine_core.resources.engine_manager
    (core,) = manager.processes
    return int(core.pid)
