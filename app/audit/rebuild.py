"""Rebuild of a view from the log: the state of a router at a point in time, for comparison.

From the log alone, without snapshots, which are verified this way. Reads only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvlane.app.audit.time_range import check_partitions
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LaneState, LedgerState
from kvlane.app.routing.state.request_state import OPEN
from kvlane.app.settings import Settings
from kvlane.indexer.epochs import CacheId
from kvlane.streams.clock import Clock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.reading.range_reader import Progress, read_range
from kvlane.streams.records import Blocks
from kvlane.streams.topics import KV_EVENTS, LEDGER, REGISTRY
from kvlane.streams.views.view import MaterializedView

ViewName = Literal["load", "fleet", "index"]
VIEW_TOPICS: dict[ViewName, tuple[str, ...]] = {
    "load": (LEDGER,),
    "fleet": (REGISTRY, KV_EVENTS),
    "index": (KV_EVENTS,),
}


class PartitionState(msgspec.Struct, frozen=True):
    """State of one partition after the records in [start, position), as a hash."""

    topic: str
    partition: int
    start: int
    position: int
    records: int
    malformed: int
    state_hash: str


class RebuiltView(msgspec.Struct, frozen=True):
    """A view at its positions. Equal `state_hash` means equal state; `summary` is informative."""

    view: str
    partitions: list[PartitionState]
    state_hash: str
    summary: dict[str, Any]


async def rebuild_view(
    log: Log,
    settings: Settings,
    clock: Clock,
    name: ViewName,
    at: int | Mapping[Partition, int] | None = None,
    progress: Progress = lambda _done, _total: None,
) -> RebuiltView:
    """Build a view from the start of the log up to a broker time in ms, next offsets, or now.

    Partitions without an offset are read to their current end. Raises InvalidTime,
    BrokerUnavailable, PositionLost, NewerRecord.
    """
    sources = [
        Partition(topic, p)
        for topic in VIEW_TOPICS[name]
        for p in range(await log.partitions(topic))
    ]
    starts = await _offsets(log.start_offsets, sources)
    ends = await _offsets(log.end_offsets, sources)
    if isinstance(at, int):
        for source in sources:
            ends[source] = min(ends[source], await log.offset_at(*source, at))
    elif at is not None:
        check_partitions(at, sources)
        ends |= {source: min(ends[source], offset) for source, offset in at.items()}
    starts = {source: min(start, ends[source]) for source, start in starts.items()}
    view, decoding = _view(name, settings), RecordDecoder(log, clock)
    records: Counter[Partition] = Counter()
    malformed: Counter[Partition] = Counter()
    holders: set[CacheId] = set()
    for source in sources:
        view.apply(source, (), starts[source])
    async for source, some, position in read_range(log, clock, starts, ends, progress=progress):
        log_records = await decoding.decode_records(source, some)
        decoded = [r.record for r in log_records]
        holders |= {CacheId(each.worker, each.rank) for each in decoded if isinstance(each, Blocks)}
        records[source] += len(some)
        malformed[source] += len(some) - len(log_records)
        view.apply(source, log_records, position)
    states = [
        PartitionState(
            *source, starts[source], ends[source], records[source], malformed[source],
            view.state_hash(source),
        )
        for source in sources
    ]  # fmt: skip
    return RebuiltView(name, states, _combined_hash(states), _summary(view, sources, holders))


async def _offsets(offsets_of: Any, sources: Iterable[Partition]) -> dict[Partition, int]:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sources:
        by_topic.setdefault(topic, []).append(partition)
    return {
        Partition(topic, p): offset
        for topic, numbers in by_topic.items()
        for p, offset in (await offsets_of(topic, numbers)).items()
    }


def _view(name: ViewName, settings: Settings) -> MaterializedView:
    if name == "load":
        return LedgerState(int(settings.dedup_window_s * 1000))
    return Fleet() if name == "fleet" else KvIndexView(settings.block_key_secret())


def _combined_hash(states: Iterable[PartitionState]) -> str:
    text = ";".join(f"{s.topic}/{s.partition}@{s.position}={s.state_hash}" for s in states)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _summary(
    view: MaterializedView, sources: Iterable[Partition], holders: Iterable[CacheId]
) -> dict[str, Any]:
    if isinstance(view, LedgerState):
        return _load_summary([view.lane(source.partition) for source in sources])
    if isinstance(view, Fleet):
        return _fleet_summary(view)
    assert isinstance(view, KvIndexView)
    return {
        "blocks by worker and rank": {
            f"{holder.worker}/{holder.rank}": held
            for holder in sorted(holders)
            if (held := view.blocks.block_count(holder))
        },
        "records skipped": {
            "malformed": view.skipped.malformed,
            "of another secret": view.skipped.wrong_secret,
        },
        "workers with another secret": list(view.wrong_secret_workers),
    }


def _load_summary(lanes: Sequence[LaneState]) -> dict[str, Any]:
    runs = [
        (run_id.worker, run.state)
        for lane in lanes
        for state in lane.unfinished.values()
        for run_id, run in state.runs.items()
    ]
    return {
        "unfinished requests": sum(len(lane.unfinished) for lane in lanes),
        "open runs by worker": dict(Counter(worker for worker, state in runs if state in OPEN)),
        "runs by state": dict(Counter(state for _, state in runs)),
        "ended requests by code": dict(
            Counter(outcome.code for lane in lanes for outcome in lane.finished.values())
        ),
    }


def _fleet_summary(fleet: Fleet) -> dict[str, Any]:
    workers = {}
    for name, member in sorted(fleet.members.items()):
        beat = fleet.heartbeats.get(name)
        lost = fleet.is_lost(name, member.epoch)
        state = "lost" if lost else beat.state if beat is not None else "no heartbeat"
        card = member.card
        versions = ", ".join(f"{package} {version}" for package, version in card.versions.items())
        parts = [card.model, card.role, f"epoch {member.epoch}", state, versions]
        workers[name] = ", ".join(filter(None, parts))
    return {"workers": workers, "models": sorted(fleet.models)}
