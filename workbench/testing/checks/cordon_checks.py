"""Checks of orders about workers: routers at one offset of the registry hold the same ones, and
nothing of an evacuation is left when all has ended."""

# ruff: noqa: SLF001 - checks the private state of routers

from __future__ import annotations

from collections.abc import Iterator

from kvlane.app.router import Router
from kvlane.streams.ports import Partition
from kvlane.streams.records import Cordon, Tombstone
from kvlane.streams.topics import REGISTRY
from workbench.testing.checks.stream_checks import decode_or_none
from workbench.testing.simulated_world import SimulatedWorld

_SOURCE = Partition(REGISTRY, 0)


def cordons_of(world: SimulatedWorld) -> dict[str, Cordon]:
    """The orders by the registry, by worker."""
    found: dict[str, Cordon] = {}
    for raw in world.broker.records(*_SOURCE):
        record = decode_or_none(raw)
        if isinstance(record, Cordon):
            found[record.worker] = record
        elif isinstance(record, Tombstone):
            found.pop(record.key.removeprefix("cordon/"), None)
    return found


def differing_cordons(world: SimulatedWorld) -> Iterator[str]:
    """The routers that have read all of the registry, and hold other orders than it has."""
    expected, end = cordons_of(world), world.broker.log(*_SOURCE).end
    for node in world.running("router"):
        router = node.process
        assert isinstance(router, Router)
        held = sorted(router._fleet.cordons)
        if router._fleet.position(_SOURCE) == end and router._fleet.cordons != expected:
            yield f"cordons: {node.label} has orders about {held}, not {sorted(expected)}"


def cordon_violations(world: SimulatedWorld) -> Iterator[str]:
    """Violations, as texts; those while faults were injected are in `world.differing_cordons`."""
    yield from world.differing_cordons
    yield from differing_cordons(world)
    for node in world.running("router"):
        if node.state == "up" and isinstance(router := node.process, Router):
            evacuation = router._context.queue.evacuation
            if left := evacuation._moving or evacuation._staying:
                yield f"cordons: {node.label} still moves {sorted(left)}"
