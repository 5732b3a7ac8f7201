"""Worlds whose engines cache: their events, the indexers that write snapshots of them, and harm.

In these worlds prompts leave blocks behind, routers and indexers fold what workers tell of them,
and whoever starts reads the newest whole snapshot first. What is done to snapshots here: an indexer
is struck in the middle of writing one, its parts are cut off, and strangers write among them. In
the end all who follow the caches must hold the same, and what the workers have told.
"""

# ruff: noqa: SLF001 - what processes hold is compared inside

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from app.faults.vtime import PROCESS
from app.faults.world import World
from app.indexer import Indexer
from app.router import Router
from app.routing.index import Index
from app.worker import Worker
from indexer.lives import Holder
from streams.ports import Entry, Partition
from streams.topics import KV_EVENTS, SNAPSHOTS, partition_of

STRUCK = 0.1
"""How often an indexer is struck when a part of a snapshot of its has landed."""


class Tearing:
    """What is done to the snapshots of a seed; nothing in worlds that have none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed} tearing")
        self._names = count()

    def landed(self, topic: str) -> None:
        """Maybe strike who has appended this, and maybe harm what lies there."""
        world, rng = self._world, self._rng
        if topic != SNAPSHOTS or PROCESS.get() == "stranger" or rng.random() >= STRUCK:
            return
        writer = next((n for n in world.living("indexer") if n.label == PROCESS.get()), None)
        if writer is not None and rng.random() < 0.5:
            world.kill(writer)
            world.reboot_later(writer, rng.random() * 3.0)
        else:
            world.later(0.0, self._harm)

    def _harm(self) -> None:
        world, rng = self._world, self._rng
        number = rng.randrange(world.broker.partitions[SNAPSHOTS])
        log = world.broker.log(SNAPSHOTS, number)
        if log.end > log.start and rng.random() < 0.5:
            world.truncate(Partition(SNAPSHOTS, number), rng.randint(log.start + 1, log.end))
        else:
            world.history.happened(f"a stranger writes into {SNAPSHOTS}[{number}]")
            junk = Entry(b"index/%d" % next(self._names), b"\xc1 no part of anything")
            world.broker.append(SNAPSHOTS, number, [junk])


def differing(world: World) -> Iterator[str]:
    """Who holds another state of a partition than others that have read as far.

    Of partitions that were cut nobody is asked: who started later cannot know what was before.
    """
    if not world.shape.caches:
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
                yield f"different: {sorted(held.values())} hold other caches of {source}@{position}"


def forgotten(world: World) -> Iterator[str]:
    """Caches of which a router knows more or less than their workers have told.

    Not asked of partitions that were cut, and of workers that still have something to tell.
    """
    for node in world.living("worker") if world.shape.caches else ():
        worker = node.process
        assert isinstance(worker, Worker)
        number = partition_of(node.name.encode(), world.broker.partitions[KV_EVENTS])
        was_cut = Partition(KV_EVENTS, number) in world.truncated
        if node.state != "up" or worker.epoch is None or was_cut:
            continue
        bridge = worker._cache_events[0].bridge
        for label, index in _indexes(world):
            known = index.holdings().get(Holder(node.name, 0))
            blocks = known.blocks if known is not None else 0
            if bridge.due_at() is None and blocks != bridge.held:
                yield f"caches: {label} knows {blocks} of {bridge.held} blocks of {node.label}"


def _indexes(world: World) -> Iterator[tuple[str, Index]]:
    for node in world.living():
        if node.state == "up" and isinstance(node.process, Router):
            yield node.label, node.process._index
        if node.state == "up" and isinstance(node.process, Indexer):
            yield node.label, node.process._index
