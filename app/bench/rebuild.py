"""What a cold start costs: exec of a router until it is ready, many blocks and no worker alive.

    fill (this process) ──► kv-events ──┬─► indexer ──► snapshots
                                        ├─► router, from the log alone
                                        └─► router, from snapshots and the tail after them

64 workers have said what they hold and are gone; nobody is left to ask. A process start with empty
topics, in the same run, is what the others are held against: imports and joining cost the same with
any number of blocks. Whether the state is right is told by indexers, which fold the same log in the
same way: one that has followed from the start, and one that began with snapshots.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from app.bench.ground import BenchFailed, Child, Ground, Said, ground, topics
from app.bench.report import Bar, Report
from app.bench.samples import histogram_quantile, loop_delays, spread
from app.bench.sockets import free_port
from app.settings import Settings
from indexer.events import CLEARED, Event, Kind, encode
from streams.kafka.log import KafkaLog
from streams.records import Blocks
from streams.topics import KV_EVENTS, partition_of

WORKERS = 64
BLOCKS = 2_300_000
CHAIN_BLOCKS = 512
"""Of one prompt: 8192 tokens of 16 a block."""
RECORD_BLOCKS = 128
"""The most that a bridge puts into one record."""
SHARED_CHAINS = 1000
"""Every other prompt of a worker is one of these, which others hold, too."""
TAIL = 0.05
"""The share of blocks that is written after the snapshots were."""
SNAPSHOT_S, LOG_S = 5.0, 15.0
"""What may be added to a process start, with snapshots and without."""
READY_S = 180.0
LOOK_S = 0.02
BATCH_RECORDS = 500
COMPILED = "compiling the index kernels"
"""A process says so where the set-up has not done it; that is no part of a start."""

_READ = re.compile(r"index caught up: (\d+) records read, (\d+) partitions from snapshots")
_HASH = re.compile(
    r'^kvlane_fold_state_hash{fold="index",partition="(\d+)".*} (\S+)$', re.MULTILINE
)
_POSITION = re.compile(
    r'^kvlane_fold_position{fold="index",partition="(\d+)".*} (\S+)$', re.MULTILINE
)


class Form(NamedTuple):
    """How much is measured: blocks in all, and starts of each kind."""

    blocks: int = BLOCKS
    rounds: int = 2


class Start(NamedTuple):
    """One start. Seconds from exec; records that the index read, partitions from snapshots."""

    kind: str
    process: str
    ready_s: float
    cpu_s: float
    records: int
    restored: int


class Workers:
    """Workers that say what they hold, and no more."""

    def __init__(self, on: Ground) -> None:
        self._on = on
        self._rng = np.random.default_rng(1)
        self._fingerprint = on.settings.key_secret().fingerprint
        self._shared = self._keys(SHARED_CHAINS, CHAIN_BLOCKS)
        self._chains: dict[str, Iterator[Any]] = {}
        self._next: dict[str, int] = {}

    async def tell(self, blocks: int) -> AsyncIterator[int]:
        """Publish so many blocks, an equal share for each worker; yields how many were, each time.

        An epoch begins with the first call.
        """
        partitions = await self._on.log.partitions(KV_EVENTS)
        for number in range(WORKERS):
            name = f"bench-{number}"
            records = list(self._records(name, blocks // WORKERS))
            partition = partition_of(name.encode(), partitions)
            for start in range(0, len(records), BATCH_RECORDS):
                some = [(name, record) for record in records[start : start + BATCH_RECORDS]]
                await self._on.outbox.send_batch(KV_EVENTS, partition, some)
            yield blocks // WORKERS

    def _records(self, worker: str, blocks: int) -> Iterator[Blocks]:
        if worker not in self._next:
            self._chains[worker] = self._prompts()
            yield self._record(worker, CLEARED)
        while blocks > 0:
            chain = next(self._chains[worker])
            for position in range(0, min(blocks, CHAIN_BLOCKS), RECORD_BLOCKS):
                keys = chain[position : min(position + RECORD_BLOCKS, blocks)]
                yield self._record(
                    worker, Event(Kind.STORED, position=position, keys=tuple(keys.tolist()))
                )
            blocks -= CHAIN_BLOCKS

    def _record(self, worker: str, event: Event) -> Blocks:
        event_id = self._next.get(worker, 0)
        self._next[worker] = event_id + 1
        return Blocks(
            worker=worker, epoch=1, first_event_id=event_id, model="bench",
            hash_fingerprint=self._fingerprint, **encode([event])._asdict(),
        )  # fmt: skip

    def _prompts(self) -> Iterator[Any]:
        """The keys of one prompt after the other, without end, none twice."""
        for shared in self._rng.permutation(SHARED_CHAINS):
            yield self._shared[shared]
            yield self._keys(CHAIN_BLOCKS)
        while True:
            yield self._keys(CHAIN_BLOCKS)

    def _keys(self, *shape: int) -> Any:
        return self._rng.integers(1, 2**64 - 1, shape, np.uint64)


class Starts:
    """Processes that are started, measured and ended again."""

    def __init__(self, on: Ground, said: Said) -> None:
        self._on = on
        self._said = said
        self._launched = 0
        self.all: list[Start] = []

    async def router(self, kind: str, **changes: object) -> None:
        """Start one, and end it when it is ready."""
        self._on.end(await self._start("router", kind, **changes))

    async def indexer(self, kind: str) -> tuple[Child, int]:
        """Start one; itself and its port when it is ready."""
        port = free_port()
        return await self._start("indexer", kind, indexer_port=port), port

    async def _start(self, name: str, kind: str, **changes: object) -> Child:
        while True:
            child, began = self._launch(name, **changes)
            await self._ready(child, began, f"{name} is ready")
            if COMPILED not in child.output:
                self._note(kind, child, began)
                return child
            self._said(f"{name} from {kind}: it compiled its kernels, once more")
            self._on.end(child)

    def _launch(self, name: str, **changes: object) -> tuple[Child, float]:
        self._launched += 1
        began, label = self._on.clock.now(), f"{name}-{self._launched}"
        arguments = ("faststream", "run", f"app.{name}:app")
        return self._on.launch(label, *arguments, log_level="INFO", **changes), began

    async def _ready(self, child: Child, began: float, line: str) -> None:
        while line not in child.output:
            child.check()
            if self._on.clock.now() - began > READY_S:
                raise BenchFailed(f"{child.name} was not ready within {READY_S:g} s")
            await self._on.clock.sleep(LOOK_S)

    def _note(self, kind: str, child: Child, began: float) -> None:
        took_s = self._on.clock.now() - began
        found = _READ.search(child.output)
        assert found is not None
        records, restored = map(int, found.groups())
        name = child.name.partition("-")[0]
        self.all.append(Start(kind, name, took_s, child.cpu_s, records, restored))
        self._said(f"{name} from {kind}: ready after {took_s:.2f} s")


async def rebuild(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with ground(settings, said) as on:
        starts, workers = Starts(on, said), Workers(on)
        step = 1 / (3 * form.rounds + 6)
        empty = f"{on.settings.topic_prefix}empty."
        await _make_topics(on, empty)
        await starts.router("empty topics", topic_prefix=empty)
        starts.all.clear()  # the first one warms the machine's caches up
        await _fill(workers, form.blocks, lambda share: progress(2 * step * share))
        for _ in range(form.rounds):  # both in turn: what else the machine does hits both
            await starts.router("empty topics", topic_prefix=empty)
            await starts.router("the log alone")
            progress(2 * step)
        live, port = await starts.indexer("the log alone")
        progress(step)
        written, delay_s = await _snapshots_written(on, port)
        said(
            f"{written} snapshots written, while the event loop was {1000 * delay_s:g} ms late, p99"
        )
        progress(step)
        await _fill(workers, int(form.blocks * TAIL), lambda share: progress(step * share))
        for _ in range(form.rounds):
            await starts.router("snapshots and tail")
            progress(step)
        other, other_port = await starts.indexer("snapshots and tail")
        differ = await _differences(on, port, other_port)
        progress(step)
        for child in (live, other):
            on.end(child)
        return _report(starts.all, differ, form)


async def _make_topics(on: Ground, prefix: str) -> None:
    settings = on.settings.model_copy(update={"topic_prefix": prefix})
    log = KafkaLog(settings.connection("bench"), prefix=prefix)
    await log.start()
    try:
        await topics(log, settings)
    finally:
        await log.close()


async def _fill(workers: Workers, blocks: int, progress: Callable[[float], None]) -> None:
    async for some in workers.tell(blocks):
        progress(some / blocks)


async def _snapshots_written(on: Ground, port: int) -> tuple[int, float]:
    """Wait until every partition with records has a snapshot.

    How many there are, and an upper bound of the event loop's delay meanwhile, p99, in seconds.
    """
    deadline, before = on.clock.now() + READY_S, loop_delays(await _page(port))
    while True:
        page = await _page(port)
        filled = sum(float(at) > 0 for _, at in _POSITION.findall(page))
        written = page.count("\nkvlane_snapshot_age_seconds{")
        if written >= filled:
            counts = [(bound, n - before[bound]) for bound, n in loop_delays(page).items()]
            return written, histogram_quantile(counts, 0.99)
        if on.clock.now() > deadline:
            raise BenchFailed(f"{written} of {filled} snapshots were written in {READY_S:g} s")
        await on.clock.sleep(0.5)


async def _differences(on: Ground, *ports: int) -> int:
    """Partitions whose state hash is not the same at all of these indexers, at equal positions."""
    deadline = on.clock.now() + READY_S
    while True:
        pages = [await _page(port) for port in ports]
        if len({tuple(_POSITION.findall(page)) for page in pages}) == 1:
            hashes = [dict(_HASH.findall(page)) for page in pages]
            return sum(len({h[partition] for h in hashes}) > 1 for partition in hashes[0])
        if on.clock.now() > deadline:
            raise BenchFailed("indexers of a log that stands still are at different positions")
        await on.clock.sleep(0.5)


async def _page(port: int) -> str:
    url = f"http://127.0.0.1:{port}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
    return str(page, "utf-8")


def _report(starts: list[Start], differ: int, form: Form) -> Report:
    kinds: dict[tuple[str, str], list[Start]] = {}
    for start in starts:
        kinds.setdefault((start.process, start.kind), []).append(start)
    empty_s = median(s.ready_s for s in kinds["router", "empty topics"])
    rows = [_row(own, empty_s, form) for own in kinds.values()]
    bars = []
    for kind, limit_s in (("snapshots and tail", SNAPSHOT_S), ("the log alone", LOG_S)):
        beyond_s = median(s.ready_s for s in kinds["router", kind]) - empty_s
        name = f"a router's start from {kind}, beyond one with empty topics"
        bars.append(Bar(name, beyond_s, "s", f"<= {limit_s:g}", beyond_s <= limit_s))
    bars.append(Bar("state hashes that differ", differ, "partitions", "0", not differ))
    return Report("rebuild", rows, bars)


def _row(own: list[Start], empty_s: float, form: Form) -> dict[str, Any]:
    return {
        "process": own[0].process,
        "from": own[0].kind,
        "blocks": 0 if own[0].kind == "empty topics" else form.blocks,
        "ready s": str(spread([s.ready_s for s in own])),
        "beyond empty s": median(s.ready_s for s in own) - empty_s,
        "CPU s": str(spread([s.cpu_s for s in own])),
        "records read": own[-1].records,
        "partitions restored": own[-1].restored,
        "starts": len(own),
    }
