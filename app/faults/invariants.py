"""What must hold when the faults have stopped and the world has come to rest.

    a reader sees     every request end exactly once, with the engine's tokens and text: all of
                      them, or the first ones where its end has a cause; no hole in any stream
    routers hold      the same Load at the same positions; nothing open, nothing due, no load left
    the group has     everything committed
    processes have    their steady tasks and no others; they failed only for reasons of the world

`problems` lists what does not hold (yet), as texts; the first word is its kind.
"""

# ruff: noqa: SLF001 - what is inside the processes is what is judged here

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from app.engine.contract import EngineDead
from app.faults.asking import Asking, Question
from app.faults.world import World
from app.preprocess.byte_level import Detokenizer
from app.router import Router
from app.routing.load import UNCOUNTED, Load
from app.worker import NameTaken
from streams.codecs import AnyRecord, decode
from streams.errors import AppendFailed, BrokerUnavailable, RecordError
from streams.memory.partition import MemoryRecord
from streams.ports import Partition
from streams.records import Chunk, End, Fact, Fence, Fencing
from streams.topics import DEAD_LETTERS, LEDGER, REGISTRY, REQUESTS, RESPONSES, lane_of
from streams.transcript import Transcript

STEADY = {
    "router": {"load", "fleet", "index", "scanner", "deaths", "response ends", "tick", "intake"},
    "worker": {"engine", "registry", "heartbeats", "slot"},
}
OF_THE_WORLD = (AppendFailed, BrokerUnavailable, EngineDead, NameTaken)
"""Errors that a process may end with in these simulations; an orchestrator starts it again."""


def problems(world: World, asking: Asking) -> list[str]:
    """Everything that does not hold now; [] when the world is as it should be."""
    return [
        *_uncommitted(world),
        *_unread(world, asking),
        *_unfinished(world),
        *_different(world),
        *_busy(world),
        *_failed(world),
    ]


def restless(world: World) -> bool:
    """Cheap: something is certainly still going on."""
    return any(_uncommitted(world)) or any(_unfinished(world))


def _uncommitted(world: World) -> Iterator[str]:
    for lane in range(world.shape.lanes):
        end = world.broker.log(REQUESTS, lane).end
        if (committed := world.committed(lane)) < end:
            yield f"uncommitted: lane {lane} stands at {committed} of {end}"


def _decoded(raw: MemoryRecord) -> AnyRecord | None:
    """The record, None for poison."""
    try:
        return decode(raw)
    except RecordError:
        return None


# --- what readers see ----------------------------------------------------------------------------


def _unread(world: World, asking: Asking) -> Iterator[str]:
    shown: dict[str, Transcript] = defaultdict(Transcript)
    for lane in range(world.shape.lanes):
        for raw in world.lane(RESPONSES, lane):
            if isinstance(record := _decoded(raw), Chunk | Fence | End):
                shown[record.id].feed(record)
    causes = _Causes(world)
    letters = {r.key for p in range(4) for r in world.broker.records(DEAD_LETTERS, p)}
    for key, source in world.poisoned.items():
        if source.topic == REQUESTS and key not in letters:
            yield f"poison: {key!r} of {source} did not go to the dead letters"
    for request_id, question in asking.questions.items():
        yield from _misread(question, shown[request_id], causes)


def _misread(question: Question, seen: Transcript, causes: _Causes) -> Iterator[str]:
    request_id = question.request.id
    if not seen.over:
        yield f"hanging: {request_id} never ends (shown {seen.shown} tokens)"
        return
    if seen.holes:
        yield f"hole: {request_id} lost {seen.holes} times a Chunk"
    code = seen.end.code if seen.end is not None else seen.finish_reason
    whole = code in ("stop", "length")
    if question.refused and (seen.shown or whole):
        yield f"refused: {request_id} was refused and has an answer"
    due = question.tokens if whole else question.tokens[: seen.shown]
    if seen.tokens != due:
        yield f"wrong: {request_id} ({code}) shows {seen.tokens}, due is {question.tokens}"
    elif seen.text not in _texts(seen):
        yield f"text: {request_id} ({code}) shows {seen.text!r} for {seen.tokens}"
    elif whole and (code == "length") != (question.request.stop.max_tokens is not None):
        yield f"code: {request_id} ends as {code}"
    if not whole and not causes.justify(question, str(code)):
        yield f"causeless: {request_id} ends as {code}"


def _texts(seen: Transcript) -> tuple[str, ...]:
    """What the tokens shown may read as; an End leaves a character that was cut off unsaid."""
    text = Detokenizer()
    said = text.push(seen.tokens)
    whole = said + text.end()
    return (whole,) if seen.end is None else (said, whole)


class _Causes:
    """Which ends are justified by what happened."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._failed: dict[str, set[int]] = defaultdict(set)
        for lane in range(world.shape.lanes):
            for raw in world.lane(LEDGER, lane):
                record = _decoded(raw)
                if isinstance(record, Fencing) and record.reason not in UNCOUNTED:
                    self._failed[record.id].add(record.attempt)

    def justify(self, question: Question, code: str) -> bool:
        request_id = question.request.id
        settings, cut = self._world.settings, self._world.truncated
        lane = lane_of(request_id, self._world.shape.lanes)
        engines = [node.engine for node in self._world.nodes if node.engine is not None]
        causes = {
            "cancelled": question.cancelled,
            "deadline": question.hurried,
            "no_workers": question.hurried,
            "attempts": len(self._failed[request_id]) >= settings.max_attempts,
            "lost": Partition(RESPONSES, lane) in cut or Partition(REQUESTS, lane) in cut,
            "invalid": question.refused,
            "queue_full": self._world.shape.cramped,
            "error": any(request_id in engine.refused for engine in engines),
        }
        return causes.get(code, False)


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
        records = [(r, _decoded(r)) for r in raws]
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
        if more := tasks - STEADY[node.kind]:
            yield f"task: {node.label} still has {sorted(more)}"
        if fewer := STEADY[node.kind] - tasks:
            yield f"missing: {node.label} has no task {sorted(fewer)}"
        if node.engine is not None and node.engine.running:
            yield f"running: the engine of {node.label} has {node.engine.running} streams"
    for name, node in world.present.items():
        if not node.living:
            yield f"dead: {name} was not started again"


def _failed(world: World) -> Iterator[str]:
    for label, error in world.failures:
        if not isinstance(error, OF_THE_WORLD):
            yield f"failure: {label} ended with {error!r}"
