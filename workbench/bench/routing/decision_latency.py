"""CPU time of a routing decision, also while many requests wait, and of planning them again.

On fleets of several sizes, half of whose workers have the prefix of every second prompt cached,
with runs that start and end between decisions. A decision is timed from the tokens of the prompt to
the record for the ledger; block hashes and index match are timed separately, and the rest has a
threshold. CPU time of the thread, independent of other load, less the time of reading that clock:
median and 99th percentile of all calls, with garbage collection on as in a process.

Every decision is recomputed from its own record, and its costs are compared with those of
`cost_reference.py`, to the bit; a difference ends the benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvlane.app.routing.queueing.joint_planning import PlanningContext, plan_uniform, uniform_groups
from kvlane.app.routing.queueing.pending import PendingRequest, ReservedRequests
from kvlane.app.routing.selection.decision import Decision, Placement, Reservation, RoutingState
from kvlane.app.routing.selection.eligibility import CandidatePools
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import DynamoWeights, RoutingConfig
from kvlane.app.routing.selection.select import recompute_choice, recorded_features, select_worker
from kvlane.app.routing.state.active_load import ActiveLoad, WorkerLoad
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.performance import PerformanceModel
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.runtime.process import tune_interpreter
from kvlane.app.settings import Settings
from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret, prompt_keys
from kvlane.indexer.events import CacheEvent, EventKind, encode_events
from kvlane.indexer.index import Index as BlockIndex
from kvlane.indexer.index import MatchDepths
from kvlane.indexer.precompile import compile_all
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Heartbeat,
    LogRecord,
    RequestOffset,
    WorkerCard,
)
from kvlane.streams.request import Request
from workbench.bench.bench_environment import PrintLine
from workbench.bench.report import Report, Threshold
from workbench.bench.routing import cost_reference

NOW_MS = 1_000_000
BLOCK_SIZE, PROMPT_TOKENS = 16, 2048
SECRET = derive_secret(LOOPBACK_SECRET)
MEASURED_POLICIES = ("predictive", "dynamo")
WARM_UP_DECISIONS = 50
LIMIT_64_WORKERS_US, LIMIT_512_WORKERS_US, QUEUED_LIMIT_US = 40.0, 200.0, 2000.0
QUEUED_REQUESTS, QUEUED_WORKERS = 100, 64
QUEUE_SIZES = (10, 100, 1000, 4096)
"""Waiting requests among which one is decided about; the last is the bound by default."""
GROWTH_LIMIT = 2.0
"""Ratio of a decision's time with the most of them to that with the fewest, at most."""
MODEL = "m"


class DecisionScale(NamedTuple):
    """Amount of work: fleet sizes, decisions, and plans of all queued requests."""

    workers: tuple[int, ...]
    decisions: int
    batch_plans: int


QUICK = DecisionScale((8, 64, 512), 1000, 100)
FULL = DecisionScale((1, 8, 64, 256, 512, 1024), 5000, 500)


class DecisionMismatch(Exception):
    """A decision differs from the one recomputed from its record, or from the reference costs.

    A defect of kvlane: the kernels of the costs and the record do not agree.
    """


class TimedIndex(BlockIndex):
    """An index that measures the CPU time of its last match, in seconds."""

    match_s = 0.0

    def match_depths(self, local: NDArray[np.uint64]) -> MatchDepths:
        began = time.thread_time()
        found = super().match_depths(local)
        self.match_s = time.thread_time() - began
        return found


class LoadedFleet(NamedTuple):
    """Workers with load, and prompts. `timed_index`: the index of the view."""

    timed_index: TimedIndex
    view: RoutingState
    prompts: list[Request]
    rng: Random


async def bench_decisions(
    _: Settings, scale: DecisionScale, _print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Measure all fleets in turn; a coroutine like the other benchmarks."""
    compile_all()
    tune_interpreter()  # as every process does when it has started
    steps = len(scale.workers) * len(MEASURED_POLICIES) + len(QUEUE_SIZES) + 1
    rows: list[dict[str, Any]] = []
    for workers in scale.workers:
        for policy in MEASURED_POLICIES:
            took = decision_times(loaded_fleet(workers), workers, policy, scale.decisions)
            shown = {f"{name} us": _percentiles(values) for name, values in took.items()}
            rows.append({"what": "decision", "policy": policy, "workers": workers, **shown})
            progress(1 / steps)
            await asyncio.sleep(0)
    took_us = queued_times(loaded_fleet(QUEUED_WORKERS), QUEUED_REQUESTS, scale.batch_plans)
    rows.append(_queued_row(took_us))
    progress(1 / steps)
    for waiting in QUEUE_SIZES:
        rows.append(_among_waiting(loaded_fleet(QUEUED_WORKERS), waiting, scale.decisions))
        progress(1 / steps)
    return Report("plan", rows, list(decision_thresholds(rows)))


def decision_thresholds(rows: list[dict[str, Any]]) -> Iterator[Threshold]:
    for workers, limit in ((64, LIMIT_64_WORKERS_US), (512, LIMIT_512_WORKERS_US)):
        for row in rows:
            if (row["workers"], row["what"]) == (workers, "decision"):
                name = f"{row['policy']}, {workers} workers: a decision beyond hash and match"
                value = row["rest us"]["p50"]
                yield Threshold(name, value, "us", f"<= {limit:g} us", value <= limit)
    among = {row["what"]: row["all us"]["p50"] for row in rows}
    fewest, most = _among(QUEUE_SIZES[0]), _among(QUEUE_SIZES[-1])
    if fewest in among and most in among:
        growth = among[most] / among[fewest]
        name = f"a decision among {QUEUE_SIZES[-1]} waiting requests, to one among {QUEUE_SIZES[0]}"
        yield Threshold(name, growth, "x", f"<= {GROWTH_LIMIT:g} x", growth <= GROWTH_LIMIT)
    for row in rows:
        if row["what"] == f"{QUEUED_REQUESTS} held":
            value = row["all us"]["p50"]
            name = f"{QUEUED_REQUESTS} held requests over {QUEUED_WORKERS} workers, planned again"
            yield Threshold(
                name, value, "us", f"<= {QUEUED_LIMIT_US:g} us", value <= QUEUED_LIMIT_US
            )


def loaded_fleet(workers: int) -> LoadedFleet:
    """A fleet with load, and prompts of which every second one has a shared prefix."""
    rng = Random(workers)
    fleet, index, committed, performance = (
        Fleet(),
        KvIndexView(SECRET),
        ActiveLoad(),
        PerformanceModel(),
    )
    index.blocks = timed = TimedIndex(SECRET)
    registry, events = Partition("registry", 0), Partition("kv-events", 0)
    config = EngineConfig(
        model=MODEL,
        kv_cache_block_size=BLOCK_SIZE,
        total_kv_blocks=1 << 16,
        max_num_batched_tokens=8192,
    )
    common = [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS)]
    keys = prompt_keys(
        PromptHashes(Request(id="-", token_ids=pack_tokens(common))).local_hashes(BLOCK_SIZE),
        SECRET,
    )
    for n in range(workers):
        name = f"w{n:04}"
        card = WorkerCard(id=name, slot=n, model=MODEL, config=config, epoch=n)
        fleet.apply(registry, [LogRecord(n, 0, card)], 1 << 20)
        beat = Heartbeat(worker=name, epoch=n, slot_offset=0)
        fleet.apply(events, [LogRecord(n, NOW_MS, beat)], n + 1)
        place = WorkerRank(name, n)
        performance.slowdown[name] = rng.uniform(0.8, 1.2)
        performance.usual_load.add(place, 5000.0, NOW_MS)
        for k in range(rng.randrange(1, 6)):
            waiting = (rng.randrange(4000), 1, NOW_MS - rng.randrange(300)) if k == 0 else (0, 0, 0)
            committed.add(place, WorkerLoad(1, rng.randrange(4000, 8000), *waiting))
        if n % 2 == 0:
            held = tuple(keys[: rng.randrange(1, len(keys))].tolist())
            columns = encode_events([CacheEvent(EventKind.STORED, keys=held)])
            index.apply(events, [LogRecord(n, NOW_MS, Blocks(
                worker=name, epoch=n, first_event_id=0, hash_fingerprint=SECRET.fingerprint,
                **columns._asdict(),
            ))], n + 1)  # fmt: skip
    view = RoutingState(
        fleet,
        CandidatePools(fleet, SilentWorkers(fleet, 5.0)),
        index,
        committed,
        ActiveLoad(),
        NOW_MS,
        slowdown=performance.slowdown,
        usual_load=performance.usual_load,
    )
    prompts = []
    for n in range(256):
        kept = rng.randrange(PROMPT_TOKENS) if n % 2 else 0
        tokens = common[:kept] + [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS - kept)]
        prompts.append(Request(id=f"{n}", model=MODEL, token_ids=pack_tokens(tokens)))
    return LoadedFleet(timed, view, prompts, rng)


def decision_times(
    there: LoadedFleet, workers: int, policy: str, count: int
) -> dict[str, list[float]]:
    """CPU times of decisions in us: all, and its parts. Raises DecisionMismatch."""
    view, tuning = there.view, RoutingConfig(policy)
    places = [WorkerRank(f"w{n:04}", n) for n in range(workers)]
    took: dict[str, list[float]] = {"all": [], "hash": [], "match": [], "rest": []}
    moved: list[tuple[WorkerRank, WorkerLoad]] = []
    reading_s = _reading_s()
    for n in range(count + WARM_UP_DECISIONS):
        _stir(there, places, moved)
        prompt = PromptHashes(there.prompts[n % len(there.prompts)])
        began = time.thread_time()
        prompt.local_hashes(BLOCK_SIZE)
        hashed = time.thread_time()
        decision = select_worker(prompt, view, tuning, seed=n, queued_since_ms=0)
        assert isinstance(decision, Placement), "there are workers"
        decided = time.thread_time()
        _check(decision)
        del decision  # freed outside the time of the next one
        if n >= WARM_UP_DECISIONS:
            # Between two readings of the clock lies one; a match has one more before and after it.
            times = {
                "hash": hashed - began - reading_s,
                "match": there.timed_index.match_s - reading_s,
            }
            times["rest"] = decided - hashed - there.timed_index.match_s - 2 * reading_s
            times["all"] = sum(times.values())
            for name, seconds in times.items():
                took[name].append(1e6 * seconds)
    return took


def _reading_s() -> float:
    """The median time of reading the clock."""
    return float(np.median(np.diff([time.thread_time() for _ in range(1000)])))


def _stir(
    there: LoadedFleet, places: list[WorkerRank], moved: list[tuple[WorkerRank, WorkerLoad]]
) -> None:
    """Load changes between two decisions: one is booked, an earlier one is confirmed or ends."""
    view, place = there.view, there.rng.choice(places)
    moved.append((place, WorkerLoad(1, PROMPT_TOKENS, PROMPT_TOKENS, 1, NOW_MS)))
    view.unconfirmed.add(*moved[-1])
    if len(moved) > 4:
        view.unconfirmed.remove(*moved[-5])
        view.committed.add(moved[-5][0], WorkerLoad(1, PROMPT_TOKENS))
        view.committed.on_first_token(moved[-5][0], NOW_MS)
    if len(moved) > 4 + len(places):
        view.committed.remove(moved[0][0], WorkerLoad(1, PROMPT_TOKENS))
        del moved[0]


def _check(decision: Decision) -> None:
    if not isinstance(decision, Placement):
        raise DecisionMismatch(f"no decision: {decision}")
    worker, epoch, rank = decision.worker_rank
    record = Assigned(
        id="-", attempt=0, phase="aggregated", worker=worker, epoch=epoch, rank=rank,
        origin=RequestOffset(topic="requests", partition=0, offset=0), responses_from=0,
        deadline_ms=0,
        prompt_tokens=decision.tokens, policy=decision.policy, params=decision.params,
        seed=decision.seed, block_size=decision.block_size, candidate_rows=decision.record,
    )  # fmt: skip
    if (again := recompute_choice(record)) != decision.worker_rank:
        raise DecisionMismatch(f"{decision.worker_rank} by the view, {again} by the record")
    features = recorded_features(record)
    for each in decision.candidates:
        if decision.policy == "dynamo":
            cost = cost_reference.dynamo_cost(each, features, DynamoWeights())
        else:
            weight = decision.params["decode_weight"]
            cost = cost_reference.predictive_cost(each, features, weight).cost_ms
        if cost != each.cost:
            raise DecisionMismatch(f"{each.worker} costs {each.cost!r}, by the reference {cost!r}")


def queued_times(there: LoadedFleet, queued: int, count: int) -> list[float]:
    """CPU times in us of planning all queued requests, each time after a load change."""
    view, tuning, held = there.view, RoutingConfig("predictive"), ReservedRequests[int]()
    places = [WorkerRank(f"w{n:04}", n) for n in range(QUEUED_WORKERS)]
    wanted = [
        PendingRequest(n, n, PromptHashes(there.prompts[n % len(there.prompts)]), n, NOW_MS)
        for n in range(queued)
    ]
    by = PlanningContext(view, tuning)
    took, moved = [], list[tuple[WorkerRank, WorkerLoad]]()
    for n in range(count + WARM_UP_DECISIONS):
        _stir(there, places, moved)
        began = time.thread_time()
        ((pool, group),) = uniform_groups(wanted, by)
        assert pool is not None, "there are workers"
        plans = plan_uniform(group, held, pool, by)
        ended = time.thread_time()
        for each, tentative in zip(wanted, plans, strict=True):
            held.reserve(each, tentative.reservation)
        if n >= WARM_UP_DECISIONS:
            took.append(1e6 * (ended - began))
    return took


def _queued_row(took_us: list[float]) -> dict[str, Any]:
    nothing = {"p50": 0.0, "p99": 0.0}
    shown = {"all us": _percentiles(took_us), "hash us": nothing, "match us": nothing}
    shown["rest us"] = nothing
    return {
        "what": f"{QUEUED_REQUESTS} held",
        "policy": "predictive",
        "workers": QUEUED_WORKERS,
        **shown,
    }


def _among(waiting: int) -> str:
    return f"decision, {waiting} waiting"


def _among_waiting(there: LoadedFleet, waiting: int, count: int) -> dict[str, Any]:
    """Decisions while many requests wait, with the changes of a reservation before each."""
    held, tuning = ReservedRequests[int](), RoutingConfig("predictive")
    places = [WorkerRank(f"w{n:04}", n) for n in range(QUEUED_WORKERS)]
    for n in range(waiting):
        reservation = Reservation(there.rng.choice(places), there.rng.uniform(1, 900), 0)
        held.add(n, n, NOW_MS, reservation)
    took = []
    for n in range(waiting, waiting + count + WARM_UP_DECISIONS):
        prompt = PromptHashes(there.prompts[n % len(there.prompts)])
        prompt.local_hashes(BLOCK_SIZE)
        wanted = PendingRequest(n, n, prompt, n, NOW_MS)
        began = time.thread_time()
        view = replace(there.view, reservations=held.reservations_of_others(n))
        decision = select_worker(prompt, view, tuning, seed=n, queued_since_ms=0)
        assert isinstance(decision, Placement), "there are workers"
        held.reserve(wanted, decision.forecast.reservation)
        held.to_wake(decision.worker_rank.worker)
        held.reserve(wanted, None)
        ended = time.thread_time()
        _check(decision)
        del decision
        if n >= waiting + WARM_UP_DECISIONS:
            took.append(1e6 * (ended - began))
    nothing = {"p50": 0.0, "p99": 0.0}
    shown = {"hash us": nothing, "match us": nothing, "rest us": nothing}
    return {
        "what": _among(waiting), "policy": "predictive", "workers": QUEUED_WORKERS,
        "all us": _percentiles(took), **shown,
    }  # fmt: skip


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}
