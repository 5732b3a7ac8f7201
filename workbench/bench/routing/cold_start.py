"""Cold start of a router, from exec until ready, with many blocks and no live worker.

    fill (this process) ──► kv-events ──┬─► indexer ──► snapshots
                                        ├─► router, from the log alone
                                        └─► router, from snapshots and the tail after them

64 workers have published their caches and are gone, so nothing can be requested from them. A start
with empty topics in the same run is the baseline: imports and joining the group take the same time
with any number of blocks. The state is verified with indexers, which apply the same log in the same
way: one that has followed from the start, and one that started from snapshots.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvlane.app.local.processes import ManagedProcess, free_port, process_command
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, encode_events
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.records import Blocks
from kvlane.streams.topics import KV_EVENTS, partition_of
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report, at_most, none_of
from workbench.bench.statistics import histogram_quantile, loop_delay_buckets, spread
from workbench.bench.streaming.raw_http import metrics_page

WORKERS = 64
BLOCKS = 2_300_000
PROMPT_BLOCKS = 512
"""Blocks of a prompt: 8192 tokens, 16 per block."""
RECORD_BLOCKS = 128
"""The largest number of blocks in one record."""
SHARED_PROMPTS = 1000
"""Every other prompt of a worker is one of these, which other workers hold, too."""
TAIL_SHARE = 0.05
"""The share of blocks that is written after the snapshots."""
SNAPSHOT_LIMIT_S, LOG_LIMIT_S = 5.0, 15.0
"""Limits of the time beyond a start with empty topics, with snapshots and without."""
READY_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 0.02
BATCH_RECORDS = 500
COMPILING_LINE = "compiling the index kernels"
"""Log line of a process that compiles the kernels first; such a start is repeated."""

_READ = re.compile(r"index caught up: (\d+) records read, (\d+) partitions from snapshots")
_HASH = re.compile(r'^kvlane_view_state_hash{partition="(\d+)".*view="index"} (\S+)$', re.MULTILINE)
_POSITION = re.compile(r'^kvlane_view_offset{partition="(\d+)".*view="index"} (\S+)$', re.MULTILINE)


class ColdStartScale(NamedTuple):
    """Amount of work: blocks in total, and starts of each kind."""

    blocks: int = BLOCKS
    rounds: int = 2


class ColdStart(NamedTuple):
    """One start. Seconds from exec; records that the index read, partitions from snapshots."""

    source: str
    process: str
    ready_s: float
    cpu_s: float
    records_read: int
    restored_partitions: int


class BlockPublishers:
    """Publishers of the cache events of workers."""

    def __init__(self, on: BenchEnvironment) -> None:
        self._on = on
        self._rng = np.random.default_rng(1)
        self._fingerprint = on.settings.block_key_secret().fingerprint
        self._shared = self._keys(SHARED_PROMPTS, PROMPT_BLOCKS)
        self._chains: dict[str, Iterator[Any]] = {}
        self._next: dict[str, int] = {}

    async def publish_blocks(self, blocks: int) -> AsyncIterator[int]:
        """Publish blocks in equal shares of the workers; yields the number after each worker.

        An epoch begins with the first call.
        """
        partitions = await self._on.log.partitions(KV_EVENTS)
        for number in range(WORKERS):
            name = f"bench-{number}"
            records = list(self._records(name, blocks // WORKERS))
            partition = partition_of(name.encode(), partitions)
            for start in range(0, len(records), BATCH_RECORDS):
                some = [(name, record) for record in records[start : start + BATCH_RECORDS]]
                await self._on.publisher.publish_batch_once(KV_EVENTS, partition, some)
            yield blocks // WORKERS

    def _records(self, worker: str, blocks: int) -> Iterator[Blocks]:
        if worker not in self._next:
            self._chains[worker] = self._prompts()
            yield self._record(worker, CLEARED)
        while blocks > 0:
            chain = next(self._chains[worker])
            for position in range(0, min(blocks, PROMPT_BLOCKS), RECORD_BLOCKS):
                keys = chain[position : min(position + RECORD_BLOCKS, blocks)]
                yield self._record(
                    worker,
                    CacheEvent(EventKind.STORED, position=position, keys=tuple(keys.tolist())),
                )
            blocks -= PROMPT_BLOCKS

    def _record(self, worker: str, event: CacheEvent) -> Blocks:
        event_id = self._next.get(worker, 0)
        self._next[worker] = event_id + 1
        return Blocks(
            worker=worker, epoch=1, first_event_id=event_id, model="bench",
            hash_fingerprint=self._fingerprint, **encode_events([event])._asdict(),
        )  # fmt: skip

    def _prompts(self) -> Iterator[Any]:
        """The keys of an endless sequence of different prompts."""
        for shared in self._rng.permutation(SHARED_PROMPTS):
            yield self._shared[shared]
            yield self._keys(PROMPT_BLOCKS)
        while True:
            yield self._keys(PROMPT_BLOCKS)

    def _keys(self, *shape: int) -> Any:
        return self._rng.integers(1, 2**64 - 1, shape, np.uint64)


class ColdStarts:
    def __init__(self, on: BenchEnvironment, print_line: PrintLine) -> None:
        self._on = on
        self._print_line = print_line
        self._launched = 0
        self.measured: list[ColdStart] = []

    async def measure_router(self, source: str, **changes: object) -> None:
        """Start a router, and stop it when it is ready."""
        self._on.stop_process(await self._start("router", source, **changes))

    async def start_indexer(self, source: str) -> tuple[ManagedProcess, int]:
        """Start an indexer; the process and its port when it is ready."""
        port = free_port()
        return await self._start("indexer", source, indexer_port=port), port

    async def _start(self, name: str, kind: str, **changes: object) -> ManagedProcess:
        while True:
            child, began = self._launch(name, **changes)
            await self._on.wait_ready(child, READY_TIMEOUT_S, POLL_INTERVAL_S)
            if COMPILING_LINE not in child.output:
                self._note(kind, child, began)
                return child
            self._print_line(f"{name} from {kind}: repeated, because it compiled its kernels")
            self._on.stop_process(child)

    def _launch(self, name: str, **changes: object) -> tuple[ManagedProcess, float]:
        self._launched += 1
        began, label = self._on.clock.now(), f"{name}-{self._launched}"
        arguments = process_command(name)
        return self._on.launch(label, *arguments, **changes), began

    def _note(self, kind: str, child: ManagedProcess, began: float) -> None:
        took_s = self._on.clock.now() - began
        found = _READ.search(child.output)
        assert found is not None
        records, restored = map(int, found.groups())
        name = child.name.partition("-")[0]
        self.measured.append(ColdStart(kind, name, took_s, cpu_time_s(child), records, restored))
        self._print_line(f"{name} from {kind}: ready after {took_s:.2f} s")


async def bench_cold_start(
    settings: Settings,
    scale: ColdStartScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with bench_environment(settings, print_line) as on:
        starts, workers = ColdStarts(on, print_line), BlockPublishers(on)
        step = 1 / (3 * scale.rounds + 6)
        empty = f"{on.settings.topic_prefix}empty."
        await _make_topics(on, empty)
        await starts.measure_router("empty topics", topic_prefix=empty)
        starts.measured.clear()  # the first one warms up the caches of the machine
        await _fill(workers, scale.blocks, lambda share: progress(2 * step * share))
        for _ in range(scale.rounds):  # in turn, so that other load on the machine affects both
            await starts.measure_router("empty topics", topic_prefix=empty)
            await starts.measure_router("the log alone")
            progress(2 * step)
        live, port = await starts.start_indexer("the log alone")
        progress(step)
        written, delay_s = await _snapshots_written(on, port)
        print_line(
            f"{written} snapshots written, while the event loop was {1000 * delay_s:g} ms late, p99"
        )
        progress(step)
        await _fill(workers, int(scale.blocks * TAIL_SHARE), lambda share: progress(step * share))
        for _ in range(scale.rounds):
            await starts.measure_router("snapshots and tail")
            progress(step)
        other, other_port = await starts.start_indexer("snapshots and tail")
        differ = await _differences(on, port, other_port)
        progress(step)
        for child in (live, other):
            on.stop_process(child)
        return _report(starts.measured, differ, scale)


async def _make_topics(on: BenchEnvironment, prefix: str) -> None:
    settings = on.settings.model_copy(update={"topic_prefix": prefix})
    log = open_log(settings, "bench")
    await log.start()
    try:
        await create_topics(log, **settings.topic_options())
    finally:
        await log.close()


async def _fill(workers: BlockPublishers, blocks: int, progress: Callable[[float], None]) -> None:
    async for some in workers.publish_blocks(blocks):
        progress(some / blocks)


async def _snapshots_written(on: BenchEnvironment, port: int) -> tuple[int, float]:
    """Wait until every non-empty partition has a snapshot.

    The number of snapshots, and an upper bound of the p99 event loop delay meanwhile, in seconds.
    """
    deadline, before = (
        on.clock.now() + READY_TIMEOUT_S,
        loop_delay_buckets(await metrics_page(port)),
    )
    while True:
        page = await metrics_page(port)
        filled = sum(float(at) > 0 for _, at in _POSITION.findall(page))
        written = page.count("\nkvlane_indexer_snapshot_age_seconds{")
        if written >= filled:
            counts = [(bound, n - before[bound]) for bound, n in loop_delay_buckets(page).items()]
            return written, histogram_quantile(counts, 0.99)
        if on.clock.now() > deadline:
            raise BenchFailed(
                f"{written} of {filled} snapshots were written in {READY_TIMEOUT_S:g} s"
            )
        await on.clock.sleep(0.5)


async def _differences(on: BenchEnvironment, *ports: int) -> int:
    """Number of partitions whose state hash differs between indexers, at equal positions."""
    deadline = on.clock.now() + READY_TIMEOUT_S
    while True:
        pages = [await metrics_page(port) for port in ports]
        if len({tuple(_POSITION.findall(page)) for page in pages}) == 1:
            hashes = [dict(_HASH.findall(page)) for page in pages]
            return sum(len({h[partition] for h in hashes}) > 1 for partition in hashes[0])
        if on.clock.now() > deadline:
            raise BenchFailed("indexers are at different positions of a log that does not grow")
        await on.clock.sleep(0.5)


def _report(starts: list[ColdStart], differ: int, form: ColdStartScale) -> Report:
    kinds: dict[tuple[str, str], list[ColdStart]] = {}
    for start in starts:
        kinds.setdefault((start.process, start.source), []).append(start)
    empty_s = median(s.ready_s for s in kinds["router", "empty topics"])
    rows = [_row(own, empty_s, form) for own in kinds.values()]
    thresholds = []
    for kind, limit_s in (("snapshots and tail", SNAPSHOT_LIMIT_S), ("the log alone", LOG_LIMIT_S)):
        beyond_s = median(s.ready_s for s in kinds["router", kind]) - empty_s
        name = f"a router's start from {kind}, beyond one with empty topics"
        thresholds.append(at_most(name, beyond_s, "s", limit_s))
    thresholds.append(none_of("state hashes that differ", differ, "partitions"))
    return Report("rebuild", rows, thresholds)


def _row(own: list[ColdStart], empty_s: float, form: ColdStartScale) -> dict[str, Any]:
    return {
        "process": own[0].process,
        "from": own[0].source,
        "blocks": 0 if own[0].source == "empty topics" else form.blocks,
        "ready s": str(spread([s.ready_s for s in own])),
        "beyond empty s": median(s.ready_s for s in own) - empty_s,
        "CPU s": str(spread([s.cpu_s for s in own])),
        "records read": own[-1].records_read,
        "partitions restored": own[-1].restored_partitions,
        "starts": len(own),
    }
