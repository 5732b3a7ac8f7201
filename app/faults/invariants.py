"""What must hold when the faults have stopped and the world has come to rest.

    readers see       what `readers.py` says
    routers hold      the same Load at the same positions; nothing open, nothing due, no load left
    groups have       everything committed
    processes have    their steady tasks and no others; they end with an error for two reasons only

`problems` lists what does not hold (yet), as texts; the first word is its kind.
"""

# ruff: noqa: SLF001 - what is inside the processes is what is judged here

from __future__ import annotations

from collections.abc import Iterator

from app.engine.contract import EngineDead
from app.faults.asking import Asking
from app.faults.caching import differing, forgotten
from app.faults.calling import Calling
from app.faults.readers import decoded, unread
from app.faults.world import World
from app.gateway import Gateway
from app.router import Router
from app.routing.load import Load
from app.worker import NameTaken
from streams.errors import BrokerUnavailable
from streams.ports import Partition
from streams.records import Fact
from streams.topics import LEDGER, PROMPTS, REGISTRY, REQUESTS

STEADY = {
    "router": {
        "load",
        "fleet",
        "index",
        "scanner",
        "deaths",
        "response ends",
        "tick",
        "intake",
        "drift",
    },
    "worker": {"engine", "engine watch", "registry", "heartbeats", "slot"},
    "preprocessor": {"registry", "prompts"},
    "gateway": {"replies", "registry", "probe", "loop delay"},
    "indexer": {"index", "fleet", "loop delay", "ownership", "snapshots"},
}
PASSING = {"probe", "judgement", "cache events"}
"""Tasks that not every worker has all the time: it asks its engine how it is, and tells of caches,
if there are any."""


def problems(world: World, asking: Asking, calling: Calling) -> list[str]:
    """Everything that does not hold now; [] when the world is as it should be."""
    return [
        *_uncommitted(world),
        *unread(world, asking, calling),
        *_unfinished(world),
        *_different(world),
        *differing(world),
        *forgotten(world),
        *_busy(world),
        *_failed(world),
    ]


def restless(world: World) -> bool:
    """Cheap: something is certainly still going on."""
    return any(_uncommitted(world)) or any(_unfinished(world))


def _uncommitted(world: World) -> Iterator[str]:
    groups = {REQUESTS: "router"} | ({PROMPTS: "preprocessor"} if world.shape.preprocessors else {})
    for topic, name in groups.items():
        committed = world.broker.group(topic, name).committed
        for partition in range(world.broker.partitions[topic]):
            end = world.broker.log(topic, partition).end
            if (done := committed.get(partition, 0)) < end:
                yield f"uncommitted: {topic}[{partition}] stands at {done} of {end}"


# --- what routers hold ---------------------------------------------------------------------------


def _routers(world: World) -> list[tuple[str, Router]]:
    return [
        (node.label, node.process)
        for node in world.living("router")
        if node.state == "up" and isinstance(node.process, Router)
    ]


def _unfinished(world: World) -> Iterator[str]:
    for label, router in _routers(world):
        load = router._load
        for lane in range(world.shape.lanes):
            end = world.broker.log(LEDGER, lane).end
            if (position := load.position(Partition(LEDGER, lane))) != end:
                yield f"behind: {label} has read {position} of {end} in lane {lane} of the ledger"
            for request_id, story in load.lane(lane).unfinished.items():
                yield f"open: {label} holds {request_id} as {story}"
        for owner in router._owners.values():
            for request_id in owner._jobs:
                yield f"job: {label} still works on {request_id}"


def _different(world: World) -> Iterator[str]:
    states: dict[int, str] = {}
    for lane in range(world.shape.lanes):
        source = Partition(LEDGER, lane)
        fold = Load(int(world.settings.dedup_window_s * 1000))
        raws = world.lane(LEDGER, lane)
        records = [(r, decoded(r)) for r in raws]
        facts = [Fact(r.offset, r.timestamp, d) for r, d in records if d is not None]
        fold.apply(source, facts, len(raws))
        states[lane] = fold.state_hash(source)
    for label, router in _routers(world):
        context = router._context
        for lane, state in states.items():
            if router._load.state_hash(Partition(LEDGER, lane)) != state:
                yield f"different: {label} holds another Load of lane {lane} than its records say"
        if left := (router._load.burdens or context._undelivered or context.holding):
            yield f"load: {label} still counts {left}"
    fleets = {router._fleet.state_hash(Partition(REGISTRY, 0)) for _, router in _routers(world)}
    if len(fleets) > 1:
        yield "different: routers hold different Fleets"


# --- what processes are --------------------------------------------------------------------------


def _busy(world: World) -> Iterator[str]:
    for node in world.living():
        if node.state != "up":
            yield f"{node.state}: {node.label}"
            continue
        if world.present[node.name] is not node:
            yield f"stray: {node.label} lives beside {world.present[node.name].label}"
        tasks = {task.get_name().partition("/")[2] for task in node.life._tasks}
        if more := tasks - STEADY[node.kind] - PASSING:
            yield f"task: {node.label} still has {sorted(more)}"
        if fewer := STEADY[node.kind] - tasks:
            yield f"missing: {node.label} has no task {sorted(fewer)}"
        if isinstance(node.process, Gateway) and (left := node.process.parts.streams.open):
            yield f"listening: {node.label} has {left} answers under way"
        if node.engine is not None and node.engine.running:
            yield f"running: the engine of {node.label} has {node.engine.running} streams"
    for name, node in world.present.items():
        if not node.living:
            yield f"dead: {name} was not started again"


def _failed(world: World) -> Iterator[str]:
    """Whatever ends a process costs its work and the time until an orchestrator starts it again.

    So nothing may but a dead engine, a newer process that has taken the name, and a broker that
    does not answer when the process starts.
    """
    for node, error in world.failures:
        names = [n.name for n in world.nodes if n is not node]
        if isinstance(error, EngineDead) or (isinstance(error, NameTaken) and node.name in names):
            continue
        if isinstance(error, BrokerUnavailable) and not node.was_connected:
            continue
        yield f"failure: {node.label} ended with {error!r}"
