"""What vLLM says of itself after each step, kept for the next heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streams.records import EngineFigures


class Figures:
    """The figures of all ranks of one engine; `loggers` is what vLLM is given to tell them."""

    def __init__(self) -> None:
        self.blocks = 0
        """Of each rank's cache."""
        self._ranks: dict[int, EngineFigures] = {}

    def now(self, *, idle: bool) -> EngineFigures:
        """All ranks together. vLLM tells of steps only, so `idle` is asked for besides."""
        ranks = list(self._ranks.values())
        return EngineFigures(
            running=0 if idle else sum(rank.running for rank in ranks),
            waiting=0 if idle else sum(rank.waiting for rank in ranks),
            kv_used_blocks=0 if idle else sum(rank.kv_used_blocks for rank in ranks),
            kv_total_blocks=self.blocks * max(len(ranks), 1),
            steps=sum(rank.steps for rank in ranks),
        )

    def record(self, rank: int, stats: Any) -> None:
        """A step of one rank, in vLLM's `SchedulerStats`."""
        before = self._ranks.get(rank)
        self._ranks[rank] = EngineFigures(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used_blocks=round(stats.kv_cache_usage * self.blocks),
            kv_total_blocks=self.blocks,
            steps=(before.steps if before else 0) + 1,
        )

    def loggers(self) -> list[Callable[..., Any]]:
        """For `AsyncLLM(stat_loggers=...)`."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        figures = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, *_config: object, **_: object) -> None:
                """Nothing of its configuration matters."""

            def record(
                self, scheduler_stats: Any, *_stats: object, engine_idx: int = 0, **_: object
            ) -> None:
                if scheduler_stats is not None:
                    figures.record(engine_idx, scheduler_stats)

            def log_engine_initialized(self) -> None:
                """It is logged elsewhere."""

        return [Logger]
