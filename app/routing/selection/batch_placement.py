"""Placement of batch requests beside interactive ones, and the choice of runs that give way.

Both keep the predicted delay of interactive requests under the bounds of `BatchBounds`. With t the
tokens in the cache of a rank, d(t) a step of decode there, p(n) a step with n tokens of prefill,
and R batch runs of which each has o tokens of answer:

    slowdown   (d(t with batch) - d(t without)) / d(t without)  +  R · p(n) / (o · d(t without))

The first term is the part by which each step of an interactive run becomes longer, the second the
prefill of batch runs, spread over the time for which they stay.

Some ranks of a pool get no batch request: the fewest, m, with which a share of at most
`max_blocked_share` of interactive prompts finds each of them at another prompt. With a the offered
load (`RecentPrefill`), that share is B(m) of Erlang's formula:

    B(0) = 1,   B(m) = a · B(m - 1) / (m + a · B(m - 1))

At least one rank gets batch requests, and all of them where no interactive request came for long. A
batch request that may go to reserved ranks alone goes there. In a pool of one rank steps stay below
`max_only_step_ms` instead, while interactive requests come. The reserved ranks are those with the
fastest prefill by their cards, equal ones by name: the set does not rotate, so their caches keep
the prefixes of interactive prompts. A batch request goes to another rank where

    no interactive prompt is in computation, and none is planned to come
    the slowdown stays below `max_slowdown`, if interactive runs are there
    a step, with the prefill of all batch runs, stays below `max_step_ms`, or has one prompt alone
    the cache and the engine have room
    no other such rank has much more of the request in its cache, if it was preempted

Prefill has a large constant part, so requests begin in groups (`group_size`).

When an interactive request is sent to a rank, runs give way until, with it there, the first term of
the slowdown is at most `max_slowdown`, cache and engine have room for all, and no batch prompt is
computed at the same time as an interactive one. Runs without a first token go first, then the
youngest: the others are nearer to their end. None stays with prompts alone: the first batch run
would add a whole step of decode to each of their steps.

Never here: the order of batch requests (`app/routing/queueing/batch_class.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from kvlane.app.routing.policy_names import BATCH_POLICY
from kvlane.app.routing.selection.candidate_table import CandidateRow
from kvlane.app.routing.selection.candidates import NO_RESERVATIONS, expected_output_tokens
from kvlane.app.routing.selection.choice import INELIGIBLE, choose
from kvlane.app.routing.selection.decision import Placement, Rejection, RoutingState, Wait
from kvlane.app.routing.selection.decision_record import record_decision
from kvlane.app.routing.selection.eligibility import CandidatePool, NotEligible, filter_eligible
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.select import not_eligible, refreshed_table
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchLoads, BatchRun, BatchRunKey, load_of
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.streams.records import WorkerCard

NO_ROOM = "no worker has capacity that interactive requests leave"
DEFAULT_MAX_SEQUENCES = 256
RESUME_ELSEWHERE_MS = 60_000
"""Time for which a preempted request waits for the worker that has most of it in its cache."""
MIN_PREFILL_LOAD = 1e-4
"""Offered load of interactive prefill, in prompts, below which no rank is reserved."""
MAX_GROUP_SHARE = 0.25
"""Batch requests that begin together, as a share of the batch runs of the rank."""


class BatchBounds(NamedTuple):
    """Bounds on the cost of batch work to interactive requests.

    `max_slowdown`: the part of themselves by which their steps become longer. `max_step_ms`: the
    step of a rank without interactive runs, in ms, of which one that comes waits for the rest;
    `max_only_step_ms`: the same where no other rank is free of batch runs.
    `max_blocked_share`: the share of prompts, from 0 to 1, that find each reserved rank at another
    prompt; with 1 none is reserved. `max_recomputed_tokens`: tokens by which the prefill of a
    preempted request may exceed that on the rank with most of it, for which it waits.
    """

    max_slowdown: float = 0.05
    max_step_ms: float = 120.0
    max_only_step_ms: float = 30.0
    max_blocked_share: float = 0.005
    max_recomputed_tokens: float = 256.0


class RankWork(NamedTuple):
    """The work of a rank. Mean lengths of answers in tokens."""

    profile: EngineProfile
    interactive: WorkerLoad
    batch: WorkerLoad
    mean_output_tokens: float
    batch_output_tokens: float

    def interactive_tokens(self) -> float:
        return self.interactive.tokens + self.interactive.runs * self.mean_output_tokens / 2

    def all_tokens(self) -> float:
        batch = self.batch
        return self.interactive_tokens() + batch.tokens + batch.runs * self.batch_output_tokens / 2


def blocked_share(load: float, ranks: int) -> float:
    """The share of prompts that find each of so many ranks at another prompt, B(`ranks`) above;
    `load`: the mean number of prompts in computation."""
    share = 1.0
    for count in range(1, ranks + 1):
        share = load * share / (count + load * share)
    return share


def reserved_ranks(
    pool: CandidatePool, state: RoutingState, bounds: BatchBounds
) -> Collection[WorkerRank]:
    """The ranks of a pool that get no batch request; see the module."""
    load = _prefill_load(pool, state)
    if load < MIN_PREFILL_LOAD:
        return ()
    count = 0
    while count < len(pool.rows) - 1 and blocked_share(load, count) > bounds.max_blocked_share:
        count += 1
    by_speed = sorted(pool.rows, key=lambda row: (_token_ms(row.profile), row.worker_rank))
    return {row.worker_rank for row in by_speed[:count]}


def _prefill_load(pool: CandidatePool, state: RoutingState) -> float:
    """The offered load of interactive prefill in a pool, in prompts."""
    recent = state.recent_prefill
    if recent is None:
        return 0.0
    return sum([recent.load(worker, state.now_ms) for worker in pool.workers])


def bounds_in(pool: CandidatePool, state: RoutingState, bounds: BatchBounds) -> BatchBounds:
    if len(pool.rows) > 1 or _prefill_load(pool, state) < MIN_PREFILL_LOAD:
        return bounds
    return bounds._replace(max_step_ms=min(bounds.max_step_ms, bounds.max_only_step_ms))


def _token_ms(profile: EngineProfile) -> float:
    """Time of prefill per token, in full steps."""
    return profile.prefill_ms(profile.chunk_tokens) / profile.chunk_tokens


def slowdown(work: RankWork, prefill_tokens: float) -> float:
    """By which part of themselves steps of interactive runs are longer, as above; `prefill_tokens`:
    of a batch request, in the mean."""
    alone_ms = work.profile.decode_ms(work.interactive_tokens())
    step_ms = work.profile.decode_ms(work.all_tokens()) - alone_ms
    if work.batch.runs and prefill_tokens:
        stay_tokens = max(work.batch_output_tokens, 1.0)
        step_ms += work.batch.runs * work.profile.prefill_ms(prefill_tokens) / stay_tokens
    return step_ms / alone_ms


def has_headroom(
    work: RankWork,
    tokens: int,
    prefill_tokens: int,
    output_tokens: float,
    max_sequences: int,
    bounds: BatchBounds,
    count: int = 1,
) -> bool:
    """Whether `count` more batch requests may go to a rank; of the `tokens` of each,
    `prefill_tokens` are not cached there."""
    interactive, batch = work.interactive, work.batch
    if interactive.prefill_runs or interactive.runs + batch.runs + count > max_sequences:
        return False
    pending = batch.prefill_tokens + count * prefill_tokens
    if batch.prefill_runs and _step_ms(work, pending) > bounds.max_step_ms:
        return False
    added = WorkerLoad(count, count * tokens, count * prefill_tokens, count)
    after = work._replace(batch=batch.add(added))
    capacity = work.profile.capacity_tokens
    full = after.interactive_tokens() + after.batch.tokens + after.batch.runs * output_tokens
    if capacity and full > capacity:
        return False
    if interactive.runs:
        return slowdown(after, prefill_tokens) <= bounds.max_slowdown
    return not batch.runs or _step_ms(after, 0) <= bounds.max_step_ms


def _step_ms(work: RankWork, prefill_tokens: float) -> float:
    """Time of a step of all runs, with tokens of prefill beside it."""
    return work.profile.decode_ms(work.all_tokens()) + work.profile.prefill_ms(prefill_tokens)


def group_size(work: RankWork, prefill_tokens: int, bounds: BatchBounds) -> int:
    """The number of batch requests with so many tokens of prefill that begin together on a rank:
    about as many as a step computes, 1 where others begin already."""
    if work.batch.prefill_runs:
        return 1
    fixed_ms = _step_ms(work, 1)
    each_ms = _step_ms(work, 1 + prefill_tokens) - fixed_ms
    fitting = (bounds.max_step_ms - fixed_ms) / each_ms if each_ms > 0 else work.batch.runs
    return max(1, int(min(fitting, MAX_GROUP_SHARE * work.batch.runs)))


def place_batch_request(
    prompt: PromptHashes,
    state: RoutingState,
    runs: BatchLoads,
    bounds: BatchBounds,
    *,
    seed: int,
    waits_for_cache: bool = False,
    awaited: Collection[WorkerRank] = (),
    excluded: Collection[str] = (),
    full_workers: Collection[tuple[str, int]] = (),
) -> Placement | Wait | Rejection:
    """The rank with headroom and the least prefill for a batch request, of equal ones that with the
    least load; or Wait. `state`: with the load of interactive runs; `runs`: of batch runs, with
    those that are not read back. `awaited`: ranks that interactive requests wait for."""
    request = prompt.request
    pool = state.pools.pool(request.model, "aggregated")
    rows = filter_eligible(
        request, "aggregated", pool, state.fleet,
        excluded=excluded, full=full_workers, loads=(state.committed, state.unconfirmed),
        has_output=prompt.has_output,
    )  # fmt: skip
    if isinstance(rows, NotEligible):
        return not_eligible(rows)
    output_tokens = expected_output_tokens(request, state.mean_output_tokens)
    table = refreshed_table(pool, state)
    ranks = None if rows is pool.rows else [row.worker_rank for row in rows]
    blocks = table.overlap_blocks(state.kv_index, prompt.local_hashes(pool.block_size))
    options = table.select(ranks, blocks, None, NO_RESERVATIONS)
    cached = np.minimum(options.blocks[:, 0] * pool.block_size, prompt.tokens)
    bounds = bounds_in(pool, state, bounds)
    reserved = reserved_ranks(pool, state, bounds)
    is_open = np.array([row.worker_rank not in reserved for row in rows], bool)
    if not is_open.any():  # it is pinned to them, or no other one satisfies its constraints
        is_open[:] = True
    enough = 0.0
    if waits_for_cache:
        enough = cached[is_open].max(initial=0.0) - bounds.max_recomputed_tokens
    costs = np.full(len(rows), INELIGIBLE)
    for i, row in enumerate(rows):
        if not is_open[i] or row.worker_rank in awaited or cached[i] < enough:
            continue
        work = _work(row, state, runs, output_tokens)
        left = max(prompt.tokens - int(cached[i]), 1)
        limit = max_sequences(row.card)
        count = group_size(work, left, bounds)
        if has_headroom(work, prompt.tokens, left, output_tokens, limit, bounds, count):
            costs[i] = row.profile.prefill_ms(left) + row.profile.decode_ms(work.all_tokens())
    chosen = choose(costs, options.hashes, seed)
    if chosen is None:
        return Wait(NO_ROOM, code="all_busy")
    cached_tokens = int(cached[chosen])
    return Placement(
        worker_rank=options.worker_ranks[chosen],
        tokens=prompt.tokens,
        cached_tokens=cached_tokens,
        prefill_tokens=prompt.tokens - cached_tokens,
        block_size=pool.block_size,
        policy=BATCH_POLICY,
        params=bounds._asdict(),
        seed=seed,
        record=record_decision(options, costs, chosen),
        at_ms=state.now_ms,
        overlap_blocks=int(options.blocks[chosen, 0]),
    )


def max_sequences(card: WorkerCard) -> int:
    """The runs that a worker computes at the same time; further ones wait in it."""
    limit = card.config.max_num_seqs or DEFAULT_MAX_SEQUENCES
    return limit if card.max_runs is None else min(limit, card.max_runs)


def _work(
    row: CandidateRow, state: RoutingState, runs: BatchLoads, output_tokens: float
) -> RankWork:
    rank = row.worker_rank
    interactive = state.committed.load(rank).add(state.unconfirmed.load(rank))
    profile = state.profile_of(rank.worker, row.profile)
    return RankWork(profile, interactive, runs.load(rank), state.mean_output_tokens, output_tokens)


def runs_to_preempt(
    profile: EngineProfile,
    interactive_load: WorkerLoad,
    runs: Mapping[BatchRunKey, BatchRun],
    bounds: BatchBounds,
    mean_output_tokens: float,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
) -> list[BatchRunKey]:
    """The batch runs of a rank that give way to its interactive runs, in this order.
    `interactive_load`: the load with the request that comes."""
    if not runs or not interactive_load.runs:
        return []
    left = load_of(runs.values())
    victims: list[BatchRunKey] = []
    for key, run in sorted(
        runs.items(), key=lambda each: (not each[1].prefill_tokens, -each[1].since_ms)
    ):
        fits = interactive_load.runs + left.runs <= max_sequences
        if fits and _holds(profile, interactive_load, left, bounds, mean_output_tokens):
            break
        if run.is_preemptible:
            left = left.subtract(load_of([run]))
            victims.append(key)
    return victims


def _holds(
    profile: EngineProfile,
    interactive_load: WorkerLoad,
    batch_load: WorkerLoad,
    bounds: BatchBounds,
    mean_output_tokens: float,
) -> bool:
    if interactive_load.prefill_runs and (
        batch_load.prefill_runs or interactive_load.prefill_runs == interactive_load.runs
    ):
        return not batch_load.runs
    work = RankWork(profile, interactive_load, batch_load, mean_output_tokens, mean_output_tokens)
    after = work.all_tokens() + interactive_load.runs * mean_output_tokens / 2
    if profile.capacity_tokens and after > profile.capacity_tokens:
        return False
    return slowdown(work, 0) <= bounds.max_slowdown
