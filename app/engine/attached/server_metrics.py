"""Metrics of a server, for heartbeats and for the size of its cache.

Owns the names of metrics by server. A server without these metrics has no statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvlane.streams.records import EngineStats

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USED = ("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
_STEPS = ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total")
_CACHE = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_WANTED = (*_RUNNING, *_WAITING, *_USED, *_STEPS, _CACHE, _STARTED)


class ServerMetrics(NamedTuple):
    """The metrics of a server at one time; None for those it does not have.

    `cache_usage`: share of the cache in use, 0 to 1. `cache_config`: its settings, by name.
    `started_at`: changes with a restart. `ranks`: number of data-parallel engines.
    """

    running: int | None = None
    waiting: int | None = None
    cache_usage: float | None = None
    steps: int | None = None
    started_at: float | None = None
    cache_config: Mapping[str, str] = {}
    ranks: int = 1

    @property
    def block_size(self) -> int | None:
        """Tokens in a block of its cache; None if unknown, or without prefix caching."""
        if self.cache_config.get("enable_prefix_caching") == "False":
            return None
        return _number(self.cache_config.get("block_size"))

    @property
    def cache_blocks(self) -> int | None:
        """Blocks of its cache, if known; vLLM's first block is never used."""
        blocks = _number(self.cache_config.get("num_gpu_blocks"))
        return None if blocks is None or blocks < 2 else blocks - 1

    def engine_stats(self) -> EngineStats:
        blocks = self.cache_blocks or 0
        return EngineStats(
            running=self.running or 0,
            waiting=self.waiting or 0,
            kv_used_blocks=round((self.cache_usage or 0.0) * blocks),
            kv_total_blocks=blocks,
            steps=self.steps or 0,
        )


def read_metrics(text: str) -> ServerMetrics:
    """Parse a Prometheus page. Raises ValueError for an invalid one. Only the needed lines are
    parsed: a whole page of a large server takes 15 ms, once a second."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    sums: dict[str, float] = {}
    cache: Mapping[str, str] = {}
    engines = set()
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name == _CACHE:
                cache = sample.labels
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == _RUNNING[0]:
                engines.add(sample.labels.get("engine"))

    def first(names: tuple[str, ...]) -> float | None:
        return next((sums[name] for name in names if name in sums), None)

    ranks = max(len(engines), 1)
    used = first(_USED)
    return ServerMetrics(
        running=_whole(first(_RUNNING)),
        waiting=_whole(first(_WAITING)),
        cache_usage=None if used is None or not math.isfinite(used) else used / ranks,
        steps=_whole(first(_STEPS)),
        started_at=sums.get(_STARTED),
        cache_config=cache,
        ranks=ranks,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None or not 0 <= value < 1 << 63 else int(value)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
