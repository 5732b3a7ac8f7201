"""What a server says of itself: in its metrics, for heartbeats, and of its cache.

Owns the names of metrics, by server, and how they become figures. A server without metrics, or with
others, has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from streams.records import EngineFigures

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USED = ("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
_STEPS = ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total")
_CACHE = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_WANTED = (*_RUNNING, *_WAITING, *_USED, *_STEPS, _CACHE, _STARTED)


class Metrics(NamedTuple):
    """What the metrics of a server said at a moment; None for what they do not say.

    `used`: the share of the cache in use, from 0 to 1. `cache`: its settings, by name. `started_at`
    tells one life of the server from another. `ranks`: data-parallel engines behind it.
    """

    running: int | None = None
    waiting: int | None = None
    used: float | None = None
    steps: int | None = None
    started_at: float | None = None
    cache: Mapping[str, str] = {}
    ranks: int = 1

    @property
    def block_size(self) -> int | None:
        """Tokens in a block of its cache; None for a server that does not say, or reuses none."""
        if self.cache.get("enable_prefix_caching") == "False":
            return None
        return _number(self.cache.get("block_size"))

    @property
    def blocks(self) -> int | None:
        """Blocks of its cache, if it says; the first of vLLM's stands for nothing."""
        blocks = _number(self.cache.get("num_gpu_blocks"))
        return None if blocks is None or blocks < 2 else blocks - 1

    def figures(self) -> EngineFigures:
        """For a heartbeat."""
        blocks = self.blocks or 0
        return EngineFigures(
            running=self.running or 0,
            waiting=self.waiting or 0,
            kv_used_blocks=round((self.used or 0.0) * blocks),
            kv_total_blocks=blocks,
            steps=self.steps or 0,
        )


def read_metrics(text: str) -> Metrics:
    """The metrics in a page of Prometheus'. Raises ValueError when it is none.

    Only the lines that are wanted are parsed: the pages of large servers take 15 ms, once a second.
    """
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
    return Metrics(
        running=_whole(first(_RUNNING)),
        waiting=_whole(first(_WAITING)),
        used=None if used is None else used / ranks,
        steps=_whole(first(_STEPS)),
        started_at=sums.get(_STARTED),
        cache=cache,
        ranks=ranks,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None or not 0 <= value < 1 << 63 else int(value)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
