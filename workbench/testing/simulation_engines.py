"""Engines of the simulation: one with a prefix cache, and a wrapper that injects failures.

The wrapped engine's output stays the same; timing and completion differ: stalls, retryable and
permanent errors, crashes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from kvlane.app.engine.interface import (
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
    KvEventListener,
)
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers, TransferModel
from kvlane.app.serving.engine_health import PROBE
from kvlane.app.text.byte_level import encode_bytes
from kvlane.streams.clock import Clock
from kvlane.streams.records import EngineConfig, EngineStats
from kvlane.streams.request import Request

ENGINE_SHAPE = EngineLimits(block_size=2, cache_blocks=1100)
"""Small blocks, since prompts are short; two endless answers fill the cache."""
CONTEXT_LENGTH = 2100
SLOWDOWN = 10
"""Slowdown, so that a step takes about as long as one of the echo engine."""
STALL_SHARE, LONGEST_STALL_S = 0.04, 4.0
RETRYABLE_ERROR_SHARE, DEATH_SHARE, CRASH_SHARE, PERMANENT_ERROR_SHARE = 0.01, 0.003, 0.003, 0.002


LEASE_S = 6.0
"""Lease of a hand-over; most polls and appends of a world with faults take less."""
MEETING_LATENCY_MS = 20.0
"""Latency of a transfer where engines meet, so long that cancels arrive during some of them."""


def new_transfers(clock: Clock, *, has_bootstrap: bool) -> KvTransfers:
    """The transfers between all engines of a world."""
    model = TransferModel(lease_s=LEASE_S)
    if has_bootstrap:
        model = model._replace(latency_ms=MEETING_LATENCY_MS)
    return KvTransfers(clock, model, has_bootstrap=has_bootstrap)


def cached_engine(
    clock: Clock, model: str, sequences: int, transfers: KvTransfers
) -> SimulatedEngine:
    """A simulated engine with a prefix cache and cache events."""
    return SimulatedEngine(
        clock,
        ENGINE_SHAPE._replace(max_sequences=sequences),
        model=model,
        context_length=CONTEXT_LENGTH,
        speedup=1 / SLOWDOWN,
        transfers=transfers,
    )


class ChoiceGrammar:
    """The grammar of an answer that has one choice: its state, and no token so far, decides about
    the next token, as in engines that begin each grammar at its root."""

    def __init__(self, request: Request, taken_tokens: int) -> None:
        """`taken_tokens`: tokens of the answer that the grammar accepts first."""
        form = request.sampling.guided_decoding
        self._tokens = encode_bytes("".join(form.choice or ())) if form is not None else []
        self._accepted = taken_tokens

    def guide(self, output: EngineOutput) -> EngineOutput:
        """The output with the tokens of the form; of a request without one, as it is."""
        if not self._tokens:
            return output
        size, length = len(output.token_ids), len(self._tokens)
        first, self._accepted = self._accepted, self._accepted + size
        return output.with_tokens(self._tokens[(first + n) % length] for n in range(size))


class FlakyEngine(Engine):
    """Injects failures from its seed until `calm` is set; `running` counts streams, not probes."""

    def __init__(
        self, engine: Engine, clock: Clock, rng: random.Random, calm: asyncio.Event
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._calm = calm
        self.running = 0
        self.rejected: set[str] = set()
        """Requests that failed with a permanent error."""

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._engine.set_kv_event_listener(listener)

    def stats(self) -> EngineStats | None:
        return self._engine.stats()

    async def start(self, worker_id: str) -> EngineConfig:
        return replace(await self._engine.start(worker_id), continues_guided=True)

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The stream of the wrapped engine, with stalls and failures."""
        grammar = ChoiceGrammar(request, context.taken_tokens)
        request = replace(request, sampling=replace(request.sampling, guided_decoding=None))
        self.running += not request.is_probe
        try:
            async with aclosing(self._engine.generate(request, context)) as outputs:
                async for output in outputs:
                    await self._stumble(context.request_id)
                    yield grammar.guide(output)
        finally:
            self.running -= not request.is_probe

    async def abort(self, context: GenerateContext) -> None:
        await self._engine.abort(context)

    async def cleanup(self) -> None:
        await self._engine.cleanup()

    async def _stumble(self, request_id: str) -> None:
        if self._calm.is_set():
            return
        draw = self._rng.random()
        if (draw := draw - DEATH_SHARE) < 0:
            raise EngineDead("the engine has died")
        if (draw := draw - RETRYABLE_ERROR_SHARE) < 0:
            raise EngineError("the engine has failed", retryable=True)
        if (draw := draw - CRASH_SHARE) < 0:
            raise ZeroDivisionError("a mistake in the engine")
        if (draw := draw - PERMANENT_ERROR_SHARE) < 0 and request_id != PROBE.id:
            self.rejected.add(request_id)
            raise EngineError("no engine will ever do this", retryable=False)
        if draw < STALL_SHARE:
            await self._clock.sleep(self._rng.random() * LONGEST_STALL_S)
