"""Cache scenarios of the simulation: cache events, snapshots, and torn snapshots.

In these worlds engines keep the blocks of prompts, routers and indexers build their index from the
workers' events, and a starting process reads the newest whole snapshot first. Faults here: an
indexer is killed while it writes a snapshot, parts of one are deleted, and junk is written among
them. In the end all indexes must be equal to each other and to the workers' published events.
"""

# ruff: noqa: SLF001 - compares the private state of processes

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from kvlane.app.indexer import Indexer
from kvlane.app.router import Router
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.worker import Worker
from kvlane.indexer.epochs import CacheId
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.topics import KV_EVENTS, SNAPSHOTS, partition_of
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import PROCESS

SNAPSHOT_FAULT_SHARE = 0.1
"""Probability of a fault right after a part of a snapshot was appended."""


class SnapshotFaults:
    """Faults in the snapshots of a seed; none in worlds without indexers."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed} tearing")
        self._names = count()

    def on_append(self, topic: str) -> None:
        """Maybe kill the process that appended this, or damage the snapshot."""
        world, rng = self._world, self._rng
        if (
            topic != SNAPSHOTS
            or PROCESS.get() == "stranger"
            or rng.random() >= SNAPSHOT_FAULT_SHARE
        ):
            return
        writer = next((n for n in world.running("indexer") if n.label == PROCESS.get()), None)
        if writer is not None and rng.random() < 0.5:
            world.kill(writer)
            world.restart_later(writer, rng.random() * 3.0)
        else:
            world.call_later(0.0, self._harm)

    def _harm(self) -> None:
        world, rng = self._world, self._rng
        number = rng.randrange(world.broker.partitions[SNAPSHOTS])
        log = world.broker.log(SNAPSHOTS, number)
        if log.end > log.start and rng.random() < 0.5:
            world.truncate(Partition(SNAPSHOTS, number), rng.randint(log.start + 1, log.end))
        else:
            world.history.add_event(f"junk is written into {SNAPSHOTS}[{number}]")
            junk = Entry(b"index/%d" % next(self._names), b"\xc1 no part of anything")
            world.broker.append(SNAPSHOTS, number, [junk])


def differing_indexes(world: SimulatedWorld) -> Iterator[str]:
    """Indexes that differ from others at the same position of a partition.

    Truncated partitions are left out: a process that started later never read those records.
    """
    if not world.parameters.has_caches:
        return
    for number in range(world.broker.partitions[KV_EVENTS]):
        source = Partition(KV_EVENTS, number)
        if source in world.truncated:
            continue
        states: dict[int, dict[str, list[str]]] = {}
        for label, index in _indexes(world):
            position = index.position(source)
            if position is not None:
                at = states.setdefault(position, {})
                at.setdefault(index.state_hash(source), []).append(label)
        for position, held in states.items():
            if len(held) > 1:
                yield f"different: {sorted(held.values())} differ in caches of {source}@{position}"


def incomplete_indexes(world: SimulatedWorld) -> Iterator[str]:
    """Caches of which an index has more or fewer blocks than their worker has published.

    Leaves out truncated partitions, and workers that still have events to publish.
    """
    for node in world.running("worker") if world.parameters.has_caches else ():
        worker = node.process
        assert isinstance(worker, Worker)
        number = partition_of(node.name.encode(), world.broker.partitions[KV_EVENTS])
        was_cut = Partition(KV_EVENTS, number) in world.truncated
        if node.state != "up" or worker.epoch is None or was_cut:
            continue
        normalizer = worker._cache_events[0].normalizer
        for label, index in _indexes(world):
            known = index.cache_sizes().get(CacheId(node.name, 0))
            blocks = known.total_blocks if known is not None else 0
            if normalizer.batch_due_at() is None and blocks != normalizer.held_blocks:
                held = normalizer.held_blocks
                yield f"caches: {label} has {blocks} of {held} blocks of {node.label}"


def _indexes(world: SimulatedWorld) -> Iterator[tuple[str, KvIndexView]]:
    for node in world.running():
        if node.state == "up" and isinstance(node.process, Router):
            yield node.label, node.process._index
        if node.state == "up" and isinstance(node.process, Indexer):
            yield node.label, node.process._index
