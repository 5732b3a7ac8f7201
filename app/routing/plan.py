"""Which worker a request goes to: eligibility first, then the policy.

Pure: a choice is a function of its arguments. The policy is `least_loaded`: fewest open prompt
tokens, then fewest open runs, ties broken at random by the request's own seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import NamedTuple

from app.routing.fleet import Fleet, FleetWorker
from app.routing.load import Burden
from streams.records import Candidate, Request

POLICY = "least_loaded"

RECORDED = 16
"""How many candidates a decision records: the best ones; the chosen one is the first."""


class Choice(NamedTuple):
    """Where a request goes, and among whom it was decided."""

    worker: str
    epoch: int
    candidates: tuple[Candidate, ...]


def eligible(
    request: Request, fleet: Fleet, now_ms: int, timeout_ms: int, excluded: Collection[str]
) -> list[tuple[str, FleetWorker]]:
    """The workers that may take the request, by name.

    Workers on which it failed before are excluded as long as there is another one.
    """
    served = [
        (worker, member)
        for worker, member in sorted(fleet.members.items())
        if (not request.model or member.card.model == request.model)
        and (not request.hints.allowed_worker_ids or worker in request.hints.allowed_worker_ids)
        and (request.hints.backend_instance_id in (None, worker))
        and fleet.is_routable(worker, now_ms, timeout_ms)
    ]
    return [x for x in served if x[0] not in excluded] or served


def choose(
    workers: list[tuple[str, FleetWorker]], burden: Callable[[str, int], Burden], seed: int
) -> Choice | None:
    """The least loaded of the eligible workers; None when there is none.

    `burden(worker, epoch)` is what lies on a worker: what the ledger says plus what this router
    has decided and not read back.
    """
    draw = random.Random(seed)
    candidates = []
    for worker, member in workers:
        open_runs, open_tokens, _ = burden(worker, member.epoch)
        candidates.append(
            (open_tokens, open_runs, draw.random(),
             Candidate(worker=worker, epoch=member.epoch, cost=float(open_tokens),
                       open_runs=open_runs, open_tokens=open_tokens))
        )  # fmt: skip
    if not candidates:
        return None
    candidates.sort(key=lambda c: c[:3])
    best = candidates[0][-1]
    recorded = tuple(c[-1] for c in candidates[:RECORDED])
    return Choice(best.worker, best.epoch, recorded)
