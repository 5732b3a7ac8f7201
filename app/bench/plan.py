"""What a decision takes in the router, and planning again all who are held.

On fleets of several sizes, half of whose workers hold the beginning of every second prompt, with
runs that come and go between two decisions. A decision is timed from the tokens of the prompt to
what the ledger gets; the hashes of its blocks and the match in the index are timed where they are
done, and the rest is held to a bar. CPU time of the thread, so that nothing else on the machine
counts, less what it takes to read that clock: the median of all calls, and the 99th
percentile, with the collector of garbage on as in a process.

Every decision is taken again from its own record, and its costs are compared with those of
`plan_reference.py`, to the bit; one that differs ends the benchmark.
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

from app.bench import plan_reference
from app.bench.ground import Said
from app.bench.report import Bar, Report
from app.lifetime import settle
from app.routing.burdens import Burden, Burdens
from app.routing.decisions import Chosen, Plan, Tuning, View
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.held import Held, Wanted
from app.routing.index import Index
from app.routing.paces import Paces
from app.routing.plan import plan, recorded_ask, replan
from app.routing.policies import DynamoWeights, Place
from app.routing.prompt import Prompt
from app.routing.survey import Surveyor, survey
from indexer.events import Event, Kind, encode
from indexer.index import Depths
from indexer.index import Index as BlockIndex
from indexer.keys import LOOPBACK_SECRET, derive, prompt_keys
from indexer.warm import compile_all
from streams.codecs import pack_tokens
from streams.ports import Partition
from streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Fact,
    Heartbeat,
    Origin,
    Request,
    WorkerCard,
)

NOW_MS = 1_000_000
BLOCK, PROMPT_TOKENS = 16, 2048
SECRET = derive(LOOPBACK_SECRET)
POLICIES = ("predictive", "dynamo")
WARM_UP = 50
AT_64_US, AT_512_US, HELD_US = 40.0, 200.0, 2000.0
HELD, HELD_WORKERS = 100, 64
MODEL = "m"


class Form(NamedTuple):
    """How large fleets are, and how often each thing is done."""

    workers: tuple[int, ...]
    decisions: int
    surveys: int


QUICK = Form((8, 64, 512), 1000, 100)
FULL = Form((1, 8, 64, 256, 512, 1024), 5000, 500)


class Differs(Exception):
    """A decision did not come out again from its own record, or has other costs than it should.

    A fault of kvlane: `app/routing/kernels.py` and what is recorded do not agree.
    """


class Timed(BlockIndex):
    """An index that tells how long its last match took, in seconds."""

    match_s = 0.0

    def depths(self, local: NDArray[np.uint64]) -> Depths:
        """As every index does it."""
        began = time.thread_time()
        found = super().depths(local)
        self.match_s = time.thread_time() - began
        return found


class Fleets(NamedTuple):
    """Workers with work, and prompts for them. `timed`: the index of the view."""

    timed: Timed
    view: View
    prompts: list[Request]
    rng: Random


async def plan_bench(form: Form, _: Said, progress: Callable[[float], None]) -> Report:
    """Measure all of it, one after the other; a coroutine like the other benchmarks."""
    compile_all()
    settle()  # as every process does when it has started
    steps = len(form.workers) * len(POLICIES) + 1
    rows: list[dict[str, Any]] = []
    for workers in form.workers:
        for policy in POLICIES:
            rows.append(_decisions(prepared(workers), workers, policy, form.decisions))
            progress(1 / steps)
            await asyncio.sleep(0)
    rows.append(_held(prepared(HELD_WORKERS), form.surveys))
    progress(1 / steps)
    return Report("plan", rows, list(bars(rows)))


def bars(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """What the figures have to reach."""
    for workers, limit in ((64, AT_64_US), (512, AT_512_US)):
        for row in rows:
            if (row["workers"], row["what"]) == (workers, "decision"):
                name = f"{row['policy']}, {workers} workers: a decision beyond hash and match"
                value = row["rest us"]["p50"]
                yield Bar(name, value, "us", f"<= {limit:g} us", value <= limit)
    for row in rows:
        if row["what"] != "decision":
            value = row["all us"]["p50"]
            name = f"{HELD} held requests over {HELD_WORKERS} workers, planned again"
            yield Bar(name, value, "us", f"<= {HELD_US:g} us", value <= HELD_US)


def prepared(workers: int) -> Fleets:
    """A fleet that is busy, with prompts of which every second one begins as others did."""
    rng = Random(workers)
    fleet, index, told, paces = Fleet(), Index(SECRET), Burdens(), Paces()
    index.blocks = timed = Timed(SECRET)
    registry, events = Partition("registry", 0), Partition("kv-events", 0)
    config = EngineConfig(
        model=MODEL, kv_cache_block_size=BLOCK, total_kv_blocks=1 << 16,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    common = [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS)]
    keys = prompt_keys(Prompt(Request(id="-", token_ids=pack_tokens(common))).local(BLOCK), SECRET)
    for n in range(workers):
        name = f"w{n:04}"
        card = WorkerCard(id=name, slot=n, model=MODEL, config=config, epoch=n)
        fleet.apply(registry, [Fact(n, 0, card)], 1 << 20)
        beat = Heartbeat(worker=name, epoch=n, slot_offset=0)
        fleet.apply(events, [Fact(n, NOW_MS, beat)], n + 1)
        place = Place(name, n)
        paces.slowness[name] = rng.uniform(0.8, 1.2)
        for k in range(rng.randrange(1, 6)):
            waiting = (rng.randrange(4000), 1, NOW_MS - rng.randrange(300)) if k == 0 else (0, 0, 0)
            told.add(place, Burden(1, rng.randrange(4000, 8000), *waiting))
        if n % 2 == 0:
            held = tuple(keys[: rng.randrange(1, len(keys))].tolist())
            columns = encode([Event(Kind.STORED, keys=held)])
            index.apply(events, [Fact(n, NOW_MS, Blocks(
                worker=name, epoch=n, first_event_id=0, hash_fingerprint=SECRET.fingerprint,
                **columns._asdict(),
            ))], n + 1)  # fmt: skip
    view = View(fleet, Pools(fleet, 5000), index, told, Burdens(), NOW_MS, slowness=paces.slowness)
    prompts = []
    for n in range(256):
        kept = rng.randrange(PROMPT_TOKENS) if n % 2 else 0
        tokens = common[:kept] + [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS - kept)]
        prompts.append(Request(id=f"{n}", model=MODEL, token_ids=pack_tokens(tokens)))
    return Fleets(timed, view, prompts, rng)


def _decisions(there: Fleets, workers: int, policy: str, count: int) -> dict[str, Any]:
    view, tuning = there.view, Tuning(policy)
    places = [Place(f"w{n:04}", n) for n in range(workers)]
    took: dict[str, list[float]] = {"all": [], "hash": [], "match": [], "rest": []}
    moved: list[tuple[Place, Burden]] = []
    reading_s = _reading_s()
    for n in range(count + WARM_UP):
        _stir(there, places, moved)
        prompt = Prompt(there.prompts[n % len(there.prompts)])
        began = time.thread_time()
        prompt.local(BLOCK)
        hashed = time.thread_time()
        decision = plan(prompt, view, tuning, seed=n, since_ms=0)
        assert isinstance(decision, Chosen), "there are workers"
        candidates = decision.candidates
        decided = time.thread_time()
        _check(decision)
        del decision, candidates  # not within the time of the next one
        if n >= WARM_UP:
            # Between two readings of the clock lies one; a match has one more before and after it.
            times = {"hash": hashed - began - reading_s, "match": there.timed.match_s - reading_s}
            times["rest"] = decided - hashed - there.timed.match_s - 2 * reading_s
            times["all"] = sum(times.values())
            for name, seconds in times.items():
                took[name].append(1e6 * seconds)
    shown = {f"{name} us": _percentiles(values) for name, values in took.items()}
    return {"what": "decision", "policy": policy, "workers": workers, **shown}


def _reading_s() -> float:
    """What it takes to read the clock, in the median."""
    return float(np.median(np.diff([time.thread_time() for _ in range(1000)])))


def _stir(there: Fleets, places: list[Place], moved: list[tuple[Place, Burden]]) -> None:
    """What happens between two decisions: one is booked, and one made before is told or over."""
    view, place = there.view, there.rng.choice(places)
    moved.append((place, Burden(1, PROMPT_TOKENS, PROMPT_TOKENS, 1, NOW_MS)))
    view.own.add(*moved[-1])
    if len(moved) > 4:
        view.own.remove(*moved[-5])
        view.told.add(moved[-5][0], Burden(1, PROMPT_TOKENS))
        view.told.prefilled(moved[-5][0], NOW_MS)
    if len(moved) > 4 + len(places):
        view.told.remove(moved[0][0], Burden(1, PROMPT_TOKENS))
        del moved[0]


def _check(decision: Plan) -> None:
    if not isinstance(decision, Chosen):
        raise Differs(f"no decision: {decision}")
    worker, epoch, rank = decision.place
    record = Assigned(
        id="-", attempt=0, phase="aggregated", worker=worker, epoch=epoch, rank=rank,
        origin=Origin(topic="requests", partition=0, offset=0), responses_from=0, deadline_ms=0,
        prompt_tokens=decision.tokens, policy=decision.policy, params=decision.params,
        seed=decision.seed, block_size=decision.block_size, candidates=decision.candidates,
    )  # fmt: skip
    if (again := replan(record)) != decision.place:
        raise Differs(f"{decision.place} by the view, {again} by the record")
    ask = recorded_ask(record)
    for each in decision.candidates:
        if decision.policy == "dynamo":
            cost = plan_reference.dynamo(each, ask, DynamoWeights())
        else:
            weight = decision.params["decode_weight"]
            cost = plan_reference.predicted(each, ask, weight).cost_ms
        if cost != each.cost:
            raise Differs(f"{each.worker} costs {each.cost!r}, by the reference {cost!r}")


def _held(there: Fleets, count: int) -> dict[str, Any]:
    """Surveys of all that are held, each after something has changed."""
    view, tuning, held = there.view, Tuning("predictive"), Held[int]()
    places = [Place(f"w{n:04}", n) for n in range(HELD_WORKERS)]
    wanted = [
        Wanted(n, n, Prompt(there.prompts[n % len(there.prompts)]), n, NOW_MS) for n in range(HELD)
    ]

    def alone(each: Wanted[int]) -> Plan:
        view_now = replace(view, others=held.others(each.key))
        return plan(each.prompt, view_now, tuning, seed=each.seed, since_ms=each.since_ms)

    took, moved = [], list[tuple[Place, Burden]]()
    for n in range(count + WARM_UP):
        _stir(there, places, moved)
        began = time.thread_time()
        sketches = list(survey(wanted, held, Surveyor(view, tuning), alone))
        ended = time.thread_time()
        for each, sketch in zip(wanted, sketches, strict=True):
            assert sketch is not None, "there are workers"
            held.hold(each.key, each.number, each.since_ms, sketch.planned)
        if n >= WARM_UP:
            took.append(1e6 * (ended - began))
    nothing = {"p50": 0.0, "p99": 0.0}
    shown = {"all us": _percentiles(took), "hash us": nothing, "match us": nothing}
    shown["rest us"] = nothing
    return {"what": f"{HELD} held", "policy": "predictive", "workers": HELD_WORKERS, **shown}


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}
