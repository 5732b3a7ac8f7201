"""An engine that stumbles: stalls, errors that another worker may not have, deaths.

What it generates is what the engine inside generates; only when, and whether to the end, differs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.engine.contract import (
    BlocksListener,
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
)
from app.serving.watch import PROBE
from streams.clock import Clock
from streams.records import EngineConfig, EngineFigures, Request

STALLS, LONGEST_STALL_S = 0.04, 4.0
FAILS, DIES, CRASHES, REFUSES = 0.01, 0.003, 0.003, 0.002


class UnevenEngine(Engine):
    """Stumbles by its seed until `calm` is set; `running` counts streams, probes left out."""

    def __init__(
        self, engine: Engine, clock: Clock, rng: random.Random, calm: asyncio.Event
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._calm = calm
        self.running = 0
        self.refused: set[str] = set()
        """Requests that it has failed for good."""

    def listen(self, listener: BlocksListener) -> None:
        """As the engine inside."""
        self._engine.listen(listener)

    def figures(self) -> EngineFigures | None:
        """As the engine inside."""
        return self._engine.figures()

    async def start(self, worker_id: str) -> EngineConfig:
        """As the engine inside."""
        return await self._engine.start(worker_id)

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The stream of the engine inside, unevenly."""
        self.running += not request.is_probe
        try:
            async with aclosing(self._engine.generate(request, context)) as outputs:
                async for output in outputs:
                    await self._stumble(context.request_id)
                    yield output
        finally:
            self.running -= not request.is_probe

    async def cleanup(self) -> None:
        """As the engine inside."""
        await self._engine.cleanup()

    async def _stumble(self, request_id: str) -> None:
        if self._calm.is_set():
            return
        draw = self._rng.random()
        if (draw := draw - DIES) < 0:
            raise EngineDead("the engine has died")
        if (draw := draw - FAILS) < 0:
            raise EngineError("the engine has failed", retryable=True)
        if (draw := draw - CRASHES) < 0:
            raise ZeroDivisionError("a mistake in the engine")
        if (draw := draw - REFUSES) < 0 and request_id != PROBE.id:
            self.refused.add(request_id)
            raise EngineError("no engine will ever do this", retryable=False)
        if draw < STALLS:
            await self._clock.sleep(self._rng.random() * LONGEST_STALL_S)
