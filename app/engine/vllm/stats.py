"""Statistics of vLLM after each step, kept for the next heartbeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvlane.streams.records import EngineStats


class VllmStats:
    """Statistics of all ranks of one engine, collected through `loggers`."""

    def __init__(self) -> None:
        self.blocks_per_rank = 0
        """Blocks in the cache of each rank."""
        self._ranks: dict[int, EngineStats] = {}

    def snapshot(self, *, idle: bool) -> EngineStats:
        """The sum over all ranks. vLLM reports steps only, so the caller passes `idle`."""
        ranks = list(self._ranks.values())
        return EngineStats(
            running=0 if idle else sum(rank.running for rank in ranks),
            waiting=0 if idle else sum(rank.waiting for rank in ranks),
            kv_used_blocks=0 if idle else sum(rank.kv_used_blocks for rank in ranks),
            kv_total_blocks=self.blocks_per_rank * max(len(ranks), 1),
            steps=sum(rank.steps for rank in ranks),
        )

    def on_step(self, rank: int, stats: Any) -> None:
        """Record a step of one rank, from vLLM's `SchedulerStats`."""
        before = self._ranks.get(rank)
        self._ranks[rank] = EngineStats(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used_blocks=_used_blocks(stats.kv_cache_usage, self.blocks_per_rank),
            kv_total_blocks=self.blocks_per_rank,
            steps=(before.steps if before else 0) + 1,
        )

    def loggers(self) -> list[Callable[..., Any]]:
        """The argument of `AsyncLLM(stat_loggers=...)`."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        figures = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, *_config: object, **_: object) -> None:
                """Its configuration is not needed."""

            def record(
                self, scheduler_stats: Any, *_stats: object, engine_idx: int = 0, **_: object
            ) -> None:
                if scheduler_stats is not None:
                    figures.on_step(engine_idx, scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Logged elsewhere."""

        return [Logger]


def _used_blocks(share: float, blocks: int) -> int:
    """Blocks in use, by their share; 0 for a share that is not a number."""
    return round(share * blocks) if math.isfinite(share) else 0
