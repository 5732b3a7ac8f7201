"""Building a fold again from the log: what a router knew at some moment, and whether two agree.

Everything a router knows is a fold of the log, so the log alone gives it back. Snapshots are left
out on purpose: this is how they are checked. Writes nothing, belongs to no group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.audit.moments import check_known
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import OPEN, LaneStories, Load
from app.settings import Settings
from indexer.lives import Holder
from streams.clock import Clock
from streams.codecs import decode
from streams.errors import Malformed
from streams.follow import Fold
from streams.ports import Log, Partition, Record
from streams.records import Blocks, Fact
from streams.stretch import Progress, stretch
from streams.topics import KV_EVENTS, LEDGER, REGISTRY

FoldName = Literal["load", "fleet", "index"]
SOURCES: dict[FoldName, tuple[str, ...]] = {
    "load": (LEDGER,),
    "fleet": (REGISTRY, KV_EVENTS),
    "index": (KV_EVENTS,),
}


class PartitionState(msgspec.Struct, frozen=True):
    """One partition, read in [start, position): the records in it and the hash of their state."""

    topic: str
    partition: int
    start: int
    position: int
    records: int
    malformed: int
    state_hash: str


class Replayed(msgspec.Struct, frozen=True):
    """A fold at its positions. Equal `state_hash`, equal state; `summary` is for people."""

    fold: str
    partitions: list[PartitionState]
    state_hash: str
    summary: dict[str, Any]


async def replay(
    log: Log,
    settings: Settings,
    clock: Clock,
    name: FoldName,
    at: int | Mapping[Partition, int] | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Replayed:
    """Build a fold from the start of the log up to a moment: broker ms, next offsets, or now.

    Partitions that no offset is given for are read to their present end. Raises BadMoment,
    BrokerUnavailable, PositionLost, UnknownType.
    """
    sources = [
        Partition(topic, p) for topic in SOURCES[name] for p in range(await log.partitions(topic))
    ]
    starts = await _offsets(log.start_offsets, sources)
    ends = await _offsets(log.end_offsets, sources)
    if isinstance(at, int):
        for source in sources:
            ends[source] = min(ends[source], await log.offset_at(*source, at))
    elif at is not None:
        check_known(at, sources)
        ends |= {source: min(ends[source], offset) for source, offset in at.items()}
    starts = {source: min(start, ends[source]) for source, start in starts.items()}
    fold = _fold(name, settings)
    records: Counter[Partition] = Counter()
    malformed: Counter[Partition] = Counter()
    holders: set[Holder] = set()
    for source in sources:
        fold.apply(source, (), starts[source])
    async for source, some, position in stretch(log, clock, starts, ends, progress=progress):
        facts, bad = _facts(some)
        told = [fact.record for fact in facts]
        holders |= {Holder(each.worker, each.rank) for each in told if isinstance(each, Blocks)}
        records[source] += len(some)
        malformed[source] += bad
        fold.apply(source, facts, position)
    states = [
        PartitionState(
            *source, starts[source], ends[source], records[source], malformed[source],
            fold.state_hash(source),
        )
        for source in sources
    ]  # fmt: skip
    return Replayed(name, states, _whole(states), _summary(fold, sources, holders))


async def _offsets(ask: Any, sources: Iterable[Partition]) -> dict[Partition, int]:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sources:
        by_topic.setdefault(topic, []).append(partition)
    return {
        Partition(topic, p): offset
        for topic, numbers in by_topic.items()
        for p, offset in (await ask(topic, numbers)).items()
    }


def _fold(name: FoldName, settings: Settings) -> Fold:
    if name == "load":
        return Load(int(settings.dedup_window_s * 1000))
    return Fleet() if name == "fleet" else Index(settings.key_secret())


def _facts(records: Iterable[Record]) -> tuple[list[Fact], int]:
    """Decoded records, and how many could not be. Raises UnknownType."""
    facts, malformed = [], 0
    for record in records:
        try:
            facts.append(Fact(record.offset, record.timestamp, decode(record)))
        except Malformed:
            malformed += 1
    return facts, malformed


def _whole(states: Iterable[PartitionState]) -> str:
    """One hash for all partitions and their positions."""
    said = ";".join(f"{s.topic}/{s.partition}@{s.position}={s.state_hash}" for s in states)
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def _summary(fold: Fold, sources: Iterable[Partition], holders: Iterable[Holder]) -> dict[str, Any]:
    if isinstance(fold, Load):
        return _of_load([fold.lane(source.partition) for source in sources])
    if isinstance(fold, Fleet):
        return _of_fleet(fold)
    assert isinstance(fold, Index)
    return {
        "blocks by worker and rank": {
            f"{holder.worker}/{holder.rank}": held
            for holder in sorted(holders)
            if (held := fold.blocks.blocks(holder))
        },
        "records skipped": {
            "malformed": fold.skipped.malformed,
            "of another secret": fold.skipped.foreign,
        },
        "workers with another secret": list(fold.foreign_workers),
    }


def _of_load(lanes: Sequence[LaneStories]) -> dict[str, Any]:
    runs = [
        (run_id.worker, run.state)
        for lane in lanes
        for story in lane.unfinished.values()
        for run_id, run in story.runs.items()
    ]
    return {
        "unfinished requests": sum(len(lane.unfinished) for lane in lanes),
        "open runs by worker": dict(Counter(worker for worker, state in runs if state in OPEN)),
        "runs by state": dict(Counter(state for _, state in runs)),
        "ended requests by code": dict(
            Counter(outcome.code for lane in lanes for outcome in lane.outcomes.values())
        ),
    }


def _of_fleet(fleet: Fleet) -> dict[str, Any]:
    workers = {}
    for name, member in sorted(fleet.members.items()):
        beat = fleet.beats.get(name)
        lost = fleet.is_lost(name, member.epoch)
        state = "lost" if lost else beat.state if beat is not None else "never heard of"
        card = member.card
        made_of = ", ".join(f"{what} {which}" for what, which in card.versions.items())
        said = [card.model, card.role, f"epoch {member.epoch}", state, made_of]
        workers[name] = ", ".join(filter(None, said))
    return {"workers": workers, "models": sorted(fleet.models)}
