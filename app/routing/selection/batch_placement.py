"""Placement of batch requests beside interactive ones, and the choice of runs that give way.

Both keep the predicted delay of interactive requests under the bounds of `BatchBounds`. With t the
tokens in the cache of a rank, d(t) a step of decode there, p(n) a step with n tokens of prefill,
and R batch runs of which each has o tokens of answer:

    slowdown   (d(t with batch) - d(t without)) / d(t without)  +  R · p(n) / (o · d(t without))

The first term is what each step of an interactive run takes longer, the second the prefill of batch
runs, spread over the time for which they stay. A batch request goes to a rank where

    nobody computes an interactive prompt, and none is planned to come there
    the slowdown stays below `max_slowdown`, if interactive runs are there
    the prefill of batch runs, with its own, is one step of `max_step_ms`; or it is the only one
    the slowdown of steps stays below `max_idle_slowdown`, if no interactive runs are there
    the cache and the engine have room
    no other rank has much more of the request in its cache, if it was preempted

So an interactive request finds a step of `max_step_ms` at most when it comes, unless one batch
prompt alone takes longer. When one is sent to a rank, runs give way until the same bounds hold with
it there: first those without a first token, which would share the engine with its prefill, then the
youngest: the others are nearer to their end. No more runs stay than the engine computes at the
same time.

Routers use it (`app/lanes/batch_scheduler.py`), and the simulation
(`app/simulation/batch_work.py`). Never here: the order of batch requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from app.routing.selection.decision import Placement, Rejection, RoutingState, Wait
from app.routing.selection.decision_record import record_decision
from app.routing.selection.eligibility import CandidateRow, NotEligible, filter_eligible
from app.routing.selection.policies import INELIGIBLE, NO_RESERVATIONS, choose
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.selection.request_features import expected_output_tokens
from app.routing.selection.select import refreshed_table
from app.routing.state.active_load import WorkerLoad
from app.routing.state.batch_runs import BatchLoads, BatchRun, BatchRunKey, load_of
from app.routing.state.performance import EngineProfile
from app.routing.worker_rank import WorkerRank
from streams.records import WorkerCard

POLICY = "batch"
"""Policy name in the records of these decisions."""
NO_ROOM = "no worker has capacity that interactive requests leave"
DEFAULT_MAX_SEQUENCES = 256


class BatchBounds(NamedTuple):
    """Bounds on what batch work costs interactive requests.

    `max_slowdown`: by which part of themselves their steps become longer; `max_idle_slowdown`: the
    same where there are none, which bounds the runs that give way when one comes. `max_step_ms`:
    the step that one finds then. `max_recomputed_tokens`: by how much the
    prefill of a preempted request may exceed that on the rank with most of it, which it waits for.
    """

    max_slowdown: float = 0.05
    max_step_ms: float = 30.0
    max_idle_slowdown: float = 0.5
    max_recomputed_tokens: float = 256.0


class RankWork(NamedTuple):
    """The work of a rank. Mean lengths of answers in tokens."""

    profile: EngineProfile
    interactive: WorkerLoad
    batch: WorkerLoad
    mean_output_tokens: float
    batch_output_tokens: float

    def interactive_tokens(self) -> float:
        """Expected tokens of interactive runs in the cache."""
        return self.interactive.tokens + self.interactive.runs * self.mean_output_tokens / 2

    def all_tokens(self) -> float:
        """Expected tokens of all runs in the cache."""
        batch = self.batch
        return self.interactive_tokens() + batch.tokens + batch.runs * self.batch_output_tokens / 2


def slowdown(work: RankWork, prefill_tokens: float) -> float:
    """By which part of themselves steps of interactive runs are longer; see the module.

    `prefill_tokens`: of a batch request, in the mean.
    """
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
) -> bool:
    """Whether one more batch request may go to a rank. `prefill_tokens` of its `tokens` are not
    cached there.
    """
    interactive, batch = work.interactive, work.batch
    if interactive.prefill_runs or interactive.runs + batch.runs >= max_sequences:
        return False
    pending = batch.prefill_tokens + prefill_tokens
    if batch.prefill_runs and work.profile.prefill_ms(pending) > bounds.max_step_ms:
        return False
    added = WorkerLoad(1, tokens, prefill_tokens, 1)
    after = work._replace(batch=batch.add(added))
    capacity = work.profile.capacity_tokens
    full = after.interactive_tokens() + after.batch.tokens + after.batch.runs * output_tokens
    if capacity and full > capacity:
        return False
    if interactive.runs:
        return slowdown(after, prefill_tokens) <= bounds.max_slowdown
    return slowdown(after, 0) <= bounds.max_idle_slowdown


def place_batch_request(
    prompt: PromptHashes,
    view: RoutingState,
    runs: BatchLoads,
    bounds: BatchBounds,
    *,
    seed: int,
    waits_for_cache: bool = False,
    reserved: Collection[WorkerRank] = (),
    excluded: Collection[str] = (),
    full_workers: Collection[tuple[str, int]] = (),
) -> Placement | Wait | Rejection:
    """The rank for a batch request, or Wait while none has headroom.

    Of the ranks with headroom that with the least prefill is chosen, of equal ones that with the
    least load. `view`: with the load of interactive runs; `runs`: of batch runs, with those that
    are not read back. `reserved`: ranks that interactive requests wait for.
    """
    request = prompt.request
    pool = view.pools.pool(request.model, "aggregated", view.now_ms)
    rows = filter_eligible(
        request, "aggregated", pool, view.fleet,
        excluded=excluded, full=full_workers, loads=(view.committed, view.in_flight),
    )  # fmt: skip
    if isinstance(rows, NotEligible):
        if rows.retry == "none":
            return Rejection(rows.code, rows.reason)
        return Wait(rows.reason, code=rows.code, needs_new_worker=rows.retry == "news")
    output_tokens = expected_output_tokens(request, view.mean_output_tokens)
    table = refreshed_table(pool, view)
    ranks = None if rows is pool.rows else [row.worker_rank for row in rows]
    blocks = table.overlap_blocks(view.kv_index, prompt.local_hashes(pool.block_size))
    options = table.select(ranks, blocks, None, NO_RESERVATIONS)
    cached = np.minimum(options.blocks[:, 0] * pool.block_size, prompt.tokens)
    enough = cached.max() - bounds.max_recomputed_tokens if waits_for_cache else 0.0
    costs = np.full(len(rows), INELIGIBLE)
    for i, row in enumerate(rows):
        if row.worker_rank in reserved or cached[i] < enough:
            continue
        work = _work(row, view, runs, output_tokens)
        left = max(prompt.tokens - int(cached[i]), 1)
        limit = max_sequences(row.card)
        if has_headroom(work, prompt.tokens, left, output_tokens, limit, bounds):
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
        policy=POLICY,
        params=bounds._asdict(),
        seed=seed,
        record=record_decision(options, costs, chosen),
        at_ms=view.now_ms,
        overlap_blocks=int(options.blocks[chosen, 0]),
    )


def ranks_with_headroom(
    model: str, view: RoutingState, runs: BatchLoads, bounds: BatchBounds
) -> list[WorkerRank]:
    """The ranks to which the smallest batch request could go."""
    pool = view.pools.pool(model, "aggregated", view.now_ms)
    return [
        row.worker_rank
        for row in pool.rows
        if has_headroom(_work(row, view, runs, 1.0), 1, 1, 1.0, max_sequences(row.card), bounds)
    ]


def max_sequences(card: WorkerCard) -> int:
    """The runs that a worker computes at the same time; further ones wait in it."""
    limit = card.config.max_num_seqs or DEFAULT_MAX_SEQUENCES
    return limit if card.max_runs is None else min(limit, card.max_runs)


def _work(
    row: CandidateRow, view: RoutingState, runs: BatchLoads, output_tokens: float
) -> RankWork:
    rank = row.worker_rank
    interactive = view.committed.load(rank).add(view.in_flight.load(rank))
    profile = row.profile._replace(slowdown=view.slowdown.get(rank.worker, 1.0))
    return RankWork(profile, interactive, runs.load(rank), view.mean_output_tokens, output_tokens)


def runs_to_preempt(
    profile: EngineProfile,
    interactive: WorkerLoad,
    runs: Mapping[BatchRunKey, BatchRun],
    bounds: BatchBounds,
    mean_output_tokens: float,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
) -> list[BatchRunKey]:
    """The batch runs of a rank that give way to its interactive runs, in this order.

    `interactive`: the load with the request that comes. `max_sequences`: see there.
    """
    if not runs or not interactive.runs:
        return []
    left = load_of(runs.values())
    victims: list[BatchRunKey] = []
    for key, run in sorted(
        runs.items(), key=lambda each: (not each[1].prefill_tokens, -each[1].since_ms)
    ):
        fits = interactive.runs + left.runs <= max_sequences
        if fits and _holds(profile, interactive, left, bounds, mean_output_tokens):
            break
        if run.is_preemptible:
            left = left.subtract(load_of([run]))
            victims.append(key)
    return victims


def _holds(
    profile: EngineProfile,
    interactive: WorkerLoad,
    batch: WorkerLoad,
    bounds: BatchBounds,
    mean_output_tokens: float,
) -> bool:
    if interactive.prefill_runs and batch.prefill_runs:
        return False
    work = RankWork(profile, interactive, batch, mean_output_tokens, mean_output_tokens)
    after = work.all_tokens() + interactive.runs * mean_output_tokens / 2
    if profile.capacity_tokens and after > profile.capacity_tokens:
        return False
    return slowdown(work, 0) <= bounds.max_slowdown
