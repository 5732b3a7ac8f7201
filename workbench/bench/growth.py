"""Growth of costs: workers, blocks, waiting requests, lanes and streams at a tenth and ten times.

A cost is that of one decision, block, match, plan or token while the growing quantity is n. A
decision compares all workers, so its cost may grow with n log n; all other costs are those of one
of n, and may grow with log n. Decisions, index and plans are timed in this process; lanes and
streams over Kafka with the gateway and the writers of a worker, at the same number of tokens a
second. Memory is the growth of a process for one stream, and for one request that waits in a router
because the only worker is busy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvlane.app.local.processes import ManagedProcess, process_command
from kvlane.app.settings import Settings
from kvlane.indexer.block_hashes import prompt_keys
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import CacheEvent, EventKind, encode_events
from kvlane.indexer.index import Index
from kvlane.indexer.precompile import compile_all
from kvlane.streams.records import EngineConfig
from kvlane.streams.topics import DEFAULT_LANES, REQUESTS
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.process_usage import cpu_time_s, resident_bytes
from workbench.bench.report import Report, Threshold, at_most, figure
from workbench.bench.routing.decision_latency import (
    SECRET,
    decision_times,
    loaded_fleet,
    queued_times,
)
from workbench.bench.routing.router_load import MODEL, RegisteredWorkers, SharedPrefixPrompts
from workbench.bench.streaming.baseline_kafka import BareProducer
from workbench.bench.streaming.token_latency import STREAMS, TOKENS_PER_S, token_round

TOLERANCE = 1.5
"""A cost may grow by so much more than n log n allows: caches of the processor are finite."""
WORKERS, QUEUED = 64, 100
STORE_BLOCKS, MATCH_BLOCKS, MATCHES = 1024, 64, 2000
HOLDERS = 64
WAITING_REQUESTS = 2000
STREAM_MEMORY = "memory of an open stream in a gateway"
RSS_INTERVAL_S = 0.1
MIN_TOKENS = 100
"""Tokens of a stream: with fewer the cost of its request would be that of its tokens."""
SETTLE_S = 5.0


class GrowthScale(NamedTuple):
    """Amount of work for each size: decisions, plans, and seconds of streams; the usual blocks."""

    decisions: int
    plans: int
    streams_s: float
    blocks: int


QUICK = GrowthScale(200, 20, 4.0, 100_000)
FULL = GrowthScale(3000, 300, 30.0, 1_000_000)


class GrowthFigure(NamedTuple):
    """Costs in us by size. `factor`: the growth from one size to the next that is allowed."""

    what: str
    cost: str
    costs_us: dict[int, float]
    is_scan: bool = False

    @property
    def factor(self) -> float:
        """Cost of the largest size relative to that of the middle one."""
        _, usual, most = self.costs_us.values()
        return most / usual

    @property
    def limit(self) -> float:
        _, usual, most = self.costs_us
        logarithm = math.log(most) / math.log(max(usual, 2))
        return TOLERANCE * logarithm * (most / usual if self.is_scan else 1)


async def bench_growth(
    settings: Settings, scale: GrowthScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    compile_all()
    figures = []
    for measured in _in_process(scale):
        figures.append(measured)
        progress(0.1)
        await asyncio.sleep(0)
    lanes: dict[int, float] = {}
    streams: dict[int, float] = {}
    memory: list[Threshold] = []
    grown_bytes = 0
    for count in (1, DEFAULT_LANES, 10 * DEFAULT_LANES):
        changed = settings.model_copy(update={"lanes": count})
        async with bench_environment(changed, print_line) as on:
            gateway, port = await on.start_gateway(MODEL, 131_072)
            await token_round(on, "kvlane", 1, TOKENS_PER_S // STREAMS, gateway, port)
            lanes[count] = await _token_us(on, gateway, port, STREAMS, scale.streams_s)
            if count == DEFAULT_LANES:
                for open_streams in (STREAMS // 10, STREAMS, 10 * STREAMS):
                    before = resident_bytes(gateway)
                    resident = asyncio.create_task(_most_resident(on, gateway))
                    streams[open_streams] = await _token_us(
                        on, gateway, port, open_streams, scale.streams_s
                    )
                    resident.cancel()
                    grown_bytes = await resident - before
                memory.append(figure(STREAM_MEMORY, grown_bytes / (10 * STREAMS) / 1024, "KiB"))
                memory += await _waiting_memory(on)
            progress(0.2)
    figures.append(GrowthFigure("lanes", "token, gateway and writers", lanes))
    figures.append(GrowthFigure("streams", "token, gateway and writers", streams))
    return growth_report(figures, memory)


def growth_report(figures: list[GrowthFigure], memory: list[Threshold]) -> Report:
    """A row for each figure, and a threshold of its growth."""
    rows: list[dict[str, Any]] = [
        {
            "n": one.what,
            "sizes": " / ".join(map(str, one.costs_us)),
            "cost of a": one.cost,
            "us": " / ".join(f"{us:.3g}" for us in one.costs_us.values()),
            "10 n to n": one.factor,
        }
        for one in figures
    ]
    thresholds = [
        at_most(f"{one.cost}, ten times the {one.what}", one.factor, "x", round(one.limit, 1))
        for one in figures
    ]
    return Report("growth", rows, thresholds + memory)


def _in_process(scale: GrowthScale) -> Iterator[GrowthFigure]:
    decisions = {
        count: decision_times(loaded_fleet(count), count, "predictive", scale.decisions)
        for count in (WORKERS // 10, WORKERS, 10 * WORKERS)
    }
    medians = {count: float(np.median(took["all"])) for count, took in decisions.items()}
    yield GrowthFigure("workers", "decision", medians, is_scan=True)
    stored, matched = {}, {}
    for count in (scale.blocks // 10, scale.blocks, 10 * scale.blocks):
        stored[count], matched[count] = _index_times(count)
    yield GrowthFigure("blocks", "block stored", stored)
    yield GrowthFigure("blocks", f"match of {MATCH_BLOCKS} blocks", matched)
    plans = {
        count: float(np.median(queued_times(loaded_fleet(WORKERS), count, scale.plans))) / count
        for count in (QUEUED // 10, QUEUED, 10 * QUEUED)
    }
    yield GrowthFigure("waiting requests", "request planned again", plans)


def _index_times(blocks: int) -> tuple[float, float]:
    """CPU time in us of a stored block, and of a match, in an index with `blocks` blocks."""
    index, rng = Index(SECRET), np.random.default_rng(5)
    prompts, stored_s = [], 0.0
    for number in range(blocks // STORE_BLOCKS):
        local = rng.integers(1, 1 << 64, STORE_BLOCKS, dtype=np.uint64)
        prompts.append(local[:MATCH_BLOCKS].copy())
        keys = tuple(prompt_keys(local, SECRET).tolist())
        columns = encode_events([CacheEvent(EventKind.STORED, keys=keys)])
        holder = CacheId(f"w{number % HOLDERS}", 0)
        began = time.thread_time()
        index.apply_events(0, holder, 1, number // HOLDERS, columns)
        stored_s += time.thread_time() - began
    began = time.thread_time()
    for number in range(MATCHES):
        index.match_depths(prompts[number * 7919 % len(prompts)])
    matched_s = time.thread_time() - began
    return stored_s / blocks * 1e6, matched_s / MATCHES * 1e6


async def _token_us(
    on: BenchEnvironment, gateway: ManagedProcess, port: int, streams: int, seconds: float
) -> float:
    tokens = max(MIN_TOKENS, int(TOKENS_PER_S * seconds / streams))
    played = await token_round(on, "kvlane", 1, tokens, gateway, port, streams)
    return played.total_cpu_us


async def _most_resident(on: BenchEnvironment, process: ManagedProcess) -> int:
    """The most resident memory of a process until cancelled."""
    most = 0
    try:
        while True:
            most = max(most, resident_bytes(process))
            await on.clock.sleep(RSS_INTERVAL_S)
    except asyncio.CancelledError:
        return most


async def _waiting_memory(on: BenchEnvironment) -> list[Threshold]:
    """Memory of a waiting request, and the router's CPU time with all of them."""
    config = EngineConfig(model=f"{MODEL}-busy", context_length=131_072, max_num_seqs=256)
    card = await on.register_worker("busy", config, busy_prefill_tokens=1)
    producer = BareProducer(on.settings, "load")
    await producer.start()
    beating = asyncio.create_task(RegisteredWorkers(producer, [card]).send_heartbeats())
    try:
        router = on.launch("router", *process_command("router"))
        await on.wait_ready(router)
        prompts = SharedPrefixPrompts(on.settings.lanes, config.model)
        await _send(producer, prompts, WAITING_REQUESTS // 10)
        await on.clock.sleep(SETTLE_S)
        before = resident_bytes(router)
        await _send(producer, prompts, WAITING_REQUESTS)
        await on.clock.sleep(SETTLE_S)
        grown = (resident_bytes(router) - before) / WAITING_REQUESTS / 1024
        cpu_s = cpu_time_s(router)
        await on.clock.sleep(SETTLE_S)
        busy = 100 * (cpu_time_s(router) - cpu_s) / SETTLE_S
        router.check()
    finally:
        beating.cancel()
        await producer.close()
    return [
        figure("memory of a waiting request of 2000 tokens in a router", grown, "KiB"),
        figure(f"router with {WAITING_REQUESTS} waiting requests", busy, "% of a core"),
    ]


async def _send(producer: BareProducer, prompts: SharedPrefixPrompts, count: int) -> None:
    for request in prompts.requests(count):
        await producer.send(REQUESTS, request.lane, (request.entry,))
