"""Invariants of a simulation, checked when faults have stopped and the world has drained.

    readers      see the streams that `stream_checks.py` expects
    routers      hold the same Load at the same positions; no open request, no load left
    tenants      share no sessions and no cached blocks (`tenant_checks.py`)
    limits       hold for a tenant that asks in parallel (`limit_checks.py`)
    orders       about workers are those of the registry (`cordon_checks.py`)
    jobs         one line of output for each line of input (`job_checks.py`)
    results      one for each request that asks for one, equal to its stream (`result_checks.py`)
    usage        one record for each request that has ended (`usage_checks.py`)
    replies      are copies of results, and hold no others (`reply_checks.py`)
    groups       have committed everything
    credit       of a report is used once (`credit_recount.py`), and shared without overlap
    hand-overs   are used once, in time; no block is held past its lease; no client's cancel
                 interrupts a transfer
    processes    run their steady tasks and no others; an error ends one for three reasons only

`violations` lists the invariants that do not hold (yet), as texts; the first word is the kind.
"""

# ruff: noqa: SLF001 - checks the private state of processes

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.interface import EngineDead
from kvlane.app.gateway import Gateway
from kvlane.app.lanes.handovers import LEASE_SHARE
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.routing.state.ledger import LedgerState, _LaneSnapshot
from kvlane.app.worker import WorkerIdTaken
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Partition
from kvlane.streams.records import Fencing, LogRecord
from kvlane.streams.topics import BATCH, LEDGER, PROMPTS, REQUESTS
from workbench.testing.cache_scenarios import differing_indexes, incomplete_indexes
from workbench.testing.checks.cordon_checks import cordon_violations
from workbench.testing.checks.job_checks import job_violations
from workbench.testing.checks.limit_checks import limit_violations
from workbench.testing.checks.reply_checks import reply_violations
from workbench.testing.checks.result_checks import result_violations
from workbench.testing.checks.stream_checks import (
    decode_or_none,
    stream_violations,
    waiting_answers,
)
from workbench.testing.checks.tenant_checks import tenant_violations
from workbench.testing.checks.usage_checks import usage_violations
from workbench.testing.clients.all_clients import Clients
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.simulation_engines import LEASE_S

STEADY_TASKS = {
    "router": {
        "tail",
        "load",
        "fleet",
        "index",
        "scanner",
        "failure detector",
        "response ends",
        "tick",
        "intake",
        "drift",
        "capacity",
        "ended ids",
        "writer of ended ids",
    },
    "worker": {"engine", "engine watch", "registry", "heartbeats", "slot"},
    "preprocessor": {"commits", "tail", "registry", "prompts", "capacity"},
    "gateway": {"replies", "registry", "log probe", "loop delay", "batch jobs"},
    "collector": {
        "registry",
        "requests",
        "replies",
        "usage",
        "replies to clients",
        "checks",
        "batch jobs",
        "ownership of jobs",
        "jobs of new partitions",
        "jobs",
    },
    "indexer": {"tail", "index", "fleet", "loop delay", "ownership", "snapshots"},
}
OPTIONAL_TASKS = {
    "api keys",
    "limit claims",
    "limit shares",
    "probe",
    "judgement",
    "cache events",
    *(f"results of lane {n}" for n in range(3)),
    *(f"usage of lane {n}" for n in range(3)),
}
"""Tasks that not every worker has all the time, health probes of the engine and cache events, and
those of the lanes that a collector owns."""


def violations(world: SimulatedWorld, clients: Clients) -> list[str]:
    """All violated invariants; [] when there are none."""
    return [
        *_uncommitted(world),
        *stream_violations(world, clients),
        *result_violations(world, clients),
        *usage_violations(world),
        *reply_violations(world, clients),
        *job_violations(world, clients),
        *tenant_violations(world),
        *limit_violations(world, clients),
        *cordon_violations(world),
        *_unfinished(world),
        *_handovers(world),
        *_credit(world),
        *_different(world),
        *differing_indexes(world),
        *incomplete_indexes(world),
        *_busy(world),
        *_listening(world, clients),
        *_failed(world),
    ]


def has_open_work(world: SimulatedWorld) -> bool:
    """A cheap check: whether some work is certainly still going on."""
    return any(_uncommitted(world)) or any(_unfinished(world))


def _uncommitted(world: SimulatedWorld) -> Iterator[str]:
    groups = [(REQUESTS, "router")]
    if world.parameters.preprocessors:
        groups += [(PROMPTS, "preprocessor"), (BATCH, "preprocessor-batch")]
    if world.parameters.collectors:
        groups += [(REQUESTS, "collector")]
    for topic, name in groups:
        committed = world.broker.group(topic, name).committed
        for partition in range(world.broker.partitions[topic]):
            end = world.broker.log(topic, partition).end
            if (done := committed.get(partition, 0)) < end:
                yield f"uncommitted: {topic}[{partition}] is committed to {done} of {end}"


# --- routers -------------------------------------------------------------------------------------


def _routers(world: SimulatedWorld) -> list[tuple[str, Router]]:
    return [
        (node.label, node.process)
        for node in world.running("router")
        if node.state == "up" and isinstance(node.process, Router)
    ]


def _unfinished(world: SimulatedWorld) -> Iterator[str]:
    for label, router in _routers(world):
        load = router._ledger
        for lane in range(world.parameters.lanes):
            end = world.broker.log(LEDGER, lane).end
            if (position := load.position(Partition(LEDGER, lane))) != end:
                yield f"behind: {label} has read {position} of {end} in lane {lane} of the ledger"
            for request_id, state in load.lane(lane).unfinished.items():
                yield f"open: {label} holds {request_id} as {state}"
        for owner in router._owners.values():
            for request_id in owner._jobs:
                yield f"job: {label} still works on {request_id}"


def _different(world: SimulatedWorld) -> Iterator[str]:
    states: dict[int, _LaneSnapshot] = {}
    since_ms = _ledger_start_ms(world)
    for lane in range(world.parameters.lanes):
        source = Partition(LEDGER, lane)
        view = LedgerState(int(world.settings.dedup_window_s * 1000))
        raws = world.all_records(LEDGER, lane)
        records = [(r, decode_or_none(r)) for r in raws]
        log_records = [LogRecord(r.offset, r.timestamp, d) for r, d in records if d is not None]
        view.apply(source, log_records, len(raws))
        states[lane] = _recent_state(view, source, since_ms)
    for label, router in _routers(world):
        for lane, state in states.items():
            if _recent_state(router._ledger, Partition(LEDGER, lane), since_ms) != state:
                yield f"different: {label} differs from the replayed records of lane {lane}"
        yield from _left_over(label, router)
    if len({_cards(router) for _, router in _routers(world)}) > 1:
        yield "different: routers hold different Fleets"


def _ledger_start_ms(world: SimulatedWorld) -> int:
    """The append time from which a router that starts now reads the ledger, or a later one."""
    s = world.settings
    longest_s = max(s.batch_run_limit_s, s.dedup_window_s) + s.max_lifetime_s
    latest_ms = world.broker.now_ms() + world.parameters.skew_ms
    return latest_ms - int(longest_s * 1000) - CLOCK_SKEW_MS


def _recent_state(view: LedgerState, source: Partition, since_ms: int) -> _LaneSnapshot:
    """The state of a lane without the requests, and uses of sessions, from before `since_ms`.

    In a lane without later records an older router has them still. One that has started since, or
    was paused in the middle of its start, has not read them: for both they are past their windows.
    A request that is not over among them has its `End`, or hangs (`stream_checks.py`): its router
    ended before the record of the ledger.
    """
    lane = msgspec.msgpack.decode(view.snapshot(source), type=_LaneSnapshot)
    return replace(
        lane,
        requests=[row for row in lane.requests if row.last_ms >= since_ms],
        outcomes=[outcome for outcome in lane.outcomes if outcome[-1] >= since_ms],
        sessions=[use for use in lane.sessions if use[1].at_ms >= since_ms],
    )


def _cards(router: Router) -> str:
    """The cards of workers and models. The rest differs: compaction may have removed
    tombstones and earlier cards that an older router has read."""
    fleet = router._fleet
    workers = [(name, m.epoch) for name, m in sorted(fleet.members.items())]
    return repr((workers, sorted(fleet.models)))


def _left_over(label: str, router: Router) -> Iterator[str]:
    context = router._context
    queue = context.queue
    if left := (
        router._ledger.active_load or router._ledger.batch_runs or queue.inputs.unconfirmed
        or queue.inputs.unconfirmed_batch or queue.waiting.keys
        or queue.batch.waiting.keys
    ):  # fmt: skip
        yield f"load: {label} still counts {left}"
    for waiting in (queue.waiting, queue.batch.waiting):
        deferred = waiting.deferred
        if deferred.size.requests or deferred.granted.requests:
            yield f"load: {label} still defers {deferred.size} and reserves {deferred.granted}"
    for owner in router._owners.values():
        kept = owner._backpressure
        if owner.claim.is_paused or kept.prompt_bytes or kept._sizes:
            lane = owner.claim.partition
            yield f"paused: {label} has lane {lane} with {kept.prompt_bytes} bytes"


def _handovers(world: SimulatedWorld) -> Iterator[str]:
    transfers = world.transfers
    if transfers.held_blocks:
        yield f"pinned: {transfers.held_offers} hand-overs hold {transfers.held_blocks} blocks"
    if transfers.taken_twice:
        yield f"twice: {transfers.taken_twice} hand-overs were used again"
    # Clocks of brokers that differ by more than the part that is kept let a hand-over end late.
    if transfers.taken_late and world.parameters.skew_ms <= 1000 * LEASE_S * (1 - LEASE_SHARE):
        yield f"late: {transfers.taken_late} hand-overs were used past their leases"
    if transfers.invalid:
        yield f"invalid: {transfers.invalid} hand-overs were used without their parameters"
    if interrupted := transfers.interrupted - _fenced(world):
        yield f"interrupted: a cancel interrupted the transfer of {sorted(interrupted)}"
    for owner in (o for _, router in _routers(world) for o in router._owners.values()):
        if owner._dispatcher.handovers.open_count:
            yield f"handover: a router keeps {owner._dispatcher.handovers.open_count} hand-overs"


def _fenced(world: SimulatedWorld) -> set[str]:
    """The requests that had another attempt: it may interrupt the transfer of the one before."""
    lanes = range(world.parameters.lanes)
    records = (decode_or_none(r) for lane in lanes for r in world.all_records(LEDGER, lane))
    return {record.id for record in records if isinstance(record, Fencing)}


def _credit(world: SimulatedWorld) -> Iterator[str]:
    for recount in world.credit_recounts:
        yield from recount.violations
    processes = [node.process for node in world.running("preprocessor")]
    preprocessors = [p for p in processes if isinstance(p, Preprocessor)]
    for name in ("_credit", "_batch_credit"):
        shares = [getattr(p, name).prompts_share for p in preprocessors]
        if shares and sum(shares) != 1:
            yield f"shares: preprocessors count {shares} of each router's room, together not 1"


# --- processes -----------------------------------------------------------------------------------


def _busy(world: SimulatedWorld) -> Iterator[str]:
    for node in world.running():
        if node.state != "up":
            yield f"{node.state}: {node.label}"
            continue
        if world.current[node.name] is not node:
            yield f"stray: {node.label} runs beside {world.current[node.name].label}"
        tasks = {task.get_name().partition("/")[2] for task in node.ctx._tasks}
        if more := tasks - STEADY_TASKS[node.kind] - OPTIONAL_TASKS:
            yield f"task: {node.label} still has {sorted(more)}"
        if fewer := STEADY_TASKS[node.kind] - tasks:
            yield f"missing: {node.label} has no task {sorted(fewer)}"
        if node.engine is not None and node.engine.running:
            yield f"running: the engine of {node.label} has {node.engine.running} streams"
    for name, node in world.current.items():
        if not node.exists:
            yield f"dead: {name} was not started again"


def _listening(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    left = {
        node.label: node.process.parts.streams.open_streams
        for node in world.running("gateway")
        if node.state == "up" and isinstance(node.process, Gateway)
    }
    if sum(left.values()) > waiting_answers(world, clients.http_readers):
        yield f"listening: open responses of gateways: {left}"


def _failed(world: SimulatedWorld) -> Iterator[str]:
    """Processes that ended with an error they should have survived.

    The end of a process costs its work and the time until an orchestrator restarts it. The allowed
    reasons: a dead engine, a newer process under the same name, no broker at the start, and brokers
    that are away, or a process that is stopped, for longer than the rest of a start may take.
    """
    absence = world.parameters.absence
    for node, error in world.failures:
        names = [n.name for n in world.processes if n is not node]
        if isinstance(error, EngineDead) or (
            isinstance(error, WorkerIdTaken) and node.name in names
        ):
            continue
        if isinstance(error, BrokerUnavailable) and not node.was_connected:
            continue
        was_away = absence is not None and absence.part in ("broker", node.kind)
        if was_away and isinstance(error, AppendFailed) and not node.was_up:
            continue
        yield f"failure: {node.label} ended with {error!r}"
