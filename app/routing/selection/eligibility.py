"""Eligibility: the hard rules on which workers may take a request, checked before any cost.

A `CandidatePool` has the live places that serve a model, made when the fleet changes, which is
seldom; the constraints of a request, mostly none, are checked each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from kvlane.app.routing.selection.candidate_table import CandidateRow, CandidateTable
from kvlane.app.routing.selection.lora import can_serve, placement
from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.fleet import Fleet, FleetMember, WorkerRank
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.text.answer_parsers import VLLM_TOOL_PARSERS
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.xxh3 import xxh3
from kvlane.streams.record_base import ModelKind
from kvlane.streams.records import EndCode, Phase, Role, WorkerCard
from kvlane.streams.request import NO_HINTS, Hints, Request

DEFAULT_BLOCK_SIZE = 16
"""The block size of models whose workers report none."""
MAX_POOLS = 256
"""Bound on cached pools; beyond it, all are made again."""
MAX_NAMED = 3
"""Workers that a reason names."""
VLLM = "vllm"
"""Its name in the versions of a card."""

_ROLES: dict[Phase, frozenset[Role]] = {
    "aggregated": frozenset({"aggregated", "decode"}),
    "prefill": frozenset({"aggregated", "prefill"}),
    "decode": frozenset({"aggregated", "decode"}),
}


class CandidatePool(NamedTuple):
    """The places for a phase of requests for one model, by name and rank, and their `workers`, for
    one version of the fleet and of its silent workers. `table`: the places in columns.
    `has_load_limits`: some cards limit the load. `kinds`: of requests that the workers take.
    `has_transfers`: some engines transfer KV caches; `has_curves`: all cards have curves.
    `is_mixed`: some workers can continue answers that others cannot.
    `cordoned`: workers without places, by an operator's order."""

    rows: tuple[CandidateRow, ...]
    workers: list[str]
    block_size: int
    version: int
    silence: int
    table: CandidateTable
    has_load_limits: bool = False
    kinds: frozenset[ModelKind] = frozenset({"tokens"})
    has_transfers: bool = False
    has_curves: bool = False
    has_prefill_role: bool = False
    has_decode_role: bool = False
    is_mixed: bool = False
    cordoned: tuple[str, ...] = ()


class NotEligible(NamedTuple):
    """No place is eligible. `code`: the end of the request if nothing changes in its time. `retry`:
    `wait`: it may change as workers come, finish or send heartbeats; `news`: only a new worker
    could take it; `none`: it asks for the impossible."""

    reason: str
    code: EndCode
    retry: Literal["wait", "news", "none"] = "wait"


NO_RECEIVER = "no other ready worker can fetch the prompt"
NO_READY_WORKER = NotEligible("no worker is ready", "no_workers")
NO_DECODE_WORKER = NotEligible("no worker that fetches KV caches is ready", "no_workers")


@lru_cache(maxsize=4096)
def worker_number(worker: str) -> str:
    """A worker's number in decimals, 63 bits, for clients that know workers by numbers."""
    return str(xxh3(worker.encode()) >> 1)


class CandidatePools:
    def __init__(self, fleet: Fleet, silent: SilentWorkers, transfer_domain: str = "") -> None:
        """`silent`: those of the fleet that get no new work. `transfer_domain`: topology domain
        that a prefill worker must share with a decode worker; "" for none."""
        self._fleet = fleet
        self._silent = silent
        self._transfer_domain = transfer_domain
        self._pools: dict[tuple[str, Phase], CandidatePool] = {}

    def pool(self, model: str, phase: Phase) -> CandidatePool:
        known = self._pools.get((model, phase))
        if (
            known is not None
            and known.version == self._fleet.version
            and known.silence == self._silent.version
        ):
            return known
        if known is None and len(self._pools) >= MAX_POOLS:
            self._pools.clear()
        pool = self._pools[model, phase] = self._make(model, phase, known)
        return pool

    def _transfer_taints(self, model: str) -> set[str]:
        taints = (
            domain_taint(member.card.taints, self._transfer_domain)
            for member in self._fleet.members.values()
            if model in ("", member.card.model) and can_take(member.card, "decode")
        )
        return {taint for taint in taints if taint is not None}

    def _make(self, model: str, phase: Phase, before: CandidatePool | None) -> CandidatePool:
        """`before`: the previous pool; its rows are kept while its workers are the same."""
        fleet, silence = self._fleet, self._silent.version
        serving = {
            worker: member
            for worker, member in sorted(fleet.members.items())
            if model in ("", member.card.model) and can_take(member.card, phase)
        }
        if phase == "prefill" and self._transfer_domain:
            reachable = self._transfer_taints(model)
            serving = {
                worker: member
                for worker, member in serving.items()
                if domain_taint(member.card.taints, self._transfer_domain) in reachable
            }
        closed = {*self._silent.names, *fleet.cordons}
        routable = [w for w in serving if fleet.is_ready(w) and w not in closed]
        cordoned = tuple(w for w in serving if w in fleet.cordons)
        if before is not None and (before.version, before.workers) == (fleet.version, routable):
            return before._replace(silence=silence)
        for (name, _), other in self._pools.items():
            if (name, other.version, other.workers) == (model, fleet.version, routable):
                return other._replace(silence=silence, cordoned=cordoned)  # of another phase
        size = block_size_of(fleet, model, (serving[w] for w in routable))
        rows = [row for w in routable for row in _rows(w, serving[w], size)]
        return CandidatePool(
            rows=tuple(rows),
            workers=routable,
            block_size=size,
            version=fleet.version,
            silence=silence,
            table=CandidateTable(rows),
            has_load_limits=any(_is_bounded(row.card) for row in rows),
            kinds=frozenset(row.card.config.kind for row in rows),
            has_transfers=any(row.card.config.transfer_lease_s is not None for row in rows),
            has_curves=all(row.card.config.curve is not None for row in rows),
            has_prefill_role=any(row.card.role == "prefill" for row in rows),
            has_decode_role=any(row.card.role == "decode" for row in rows),
            is_mixed=len({_continuation(row.card) for row in rows}) > 1,
            cordoned=cordoned,
        )


def can_take(card: WorkerCard, phase: Phase) -> bool:
    """Whether a worker may execute a phase: by its role, and by the transfers of its engine."""
    transfers = card.config.transfer_lease_s is not None
    return card.role in _ROLES[phase] and (phase == "aggregated" or transfers)


def can_continue(card: WorkerCard, request: Request, earlier: Collection[WorkerCard] = ()) -> bool:
    """Whether a worker gives the rest of an answer as the first part: in tokens, and parsed by the
    same rules. Where these are vLLM's, its release is that of a worker in `earlier`, which had the
    answer; any, if none is known."""
    parsing = request.parsing
    if parsing is not None:
        if card.parser_version != parsing.version:
            return False
        releases = {other.versions.get(VLLM) for other in earlier}
        is_vllm = parsing.tools in VLLM_TOOL_PARSERS
        if is_vllm and releases and card.versions.get(VLLM) not in releases:
            return False
    return card.config.gives_tokens


def _continuation(card: WorkerCard) -> tuple[bool, int, str | None]:
    """All of a card that `can_continue` reads."""
    return card.config.gives_tokens, card.parser_version, card.versions.get(VLLM)


def domain_taint(taints: Sequence[str], domain: str) -> str | None:
    """The taint of a worker in a topology domain, such as topology/zone=a."""
    return next((taint for taint in taints if taint.startswith(f"topology/{domain}=")), None)


def block_size_of(fleet: Fleet, model: str, members: Iterable[FleetMember]) -> int:
    """The block size of a model's prompts: by its card, else that of most of these workers."""
    card = fleet.models.get(model)
    if card is not None and card.block_size:
        return card.block_size
    sizes = Counter(size for m in members if (size := m.card.config.kv_cache_block_size))
    return min(sizes, key=lambda size: (-sizes[size], size), default=DEFAULT_BLOCK_SIZE)


def _rows(worker: str, member: FleetMember, block_size: int) -> list[CandidateRow]:
    card, number, pace = member.card, worker_number(worker), profile_from_card(member.card.config)
    taints = frozenset(card.taints)
    return [
        CandidateRow(
            WorkerRank(worker, member.epoch, rank), CacheId(worker, rank), number, taints,
            card.config.kv_cache_block_size == block_size, card.ranks, pace, card,
        )
        for rank in range(card.ranks)
    ]  # fmt: skip


def filter_eligible(
    request: Request,
    phase: Phase,
    pool: CandidatePool,
    fleet: Fleet,
    *,
    excluded: Collection[str] = (),
    full: Collection[tuple[str, int]] = (),
    loads: Sequence[ActiveLoad] = (),
    pin_phase: Phase | None = None,
    has_output: bool = False,
) -> Sequence[CandidateRow] | NotEligible:
    """The eligible places for a phase of a request, or the reason why there is none. Workers in
    `excluded`, on which it failed before, count as long as there is no other one; those in `full`,
    with their epochs, do not. `loads`: parts of the load of places, to be added up. `pin_phase`:
    the phase whose pinned worker counts, if another one. `has_output`: its answer has tokens, which
    the worker continues; workers that cannot count as long as there is no other one. Without
    constraints: the rows of the pool as they are."""
    hints = request.hints
    is_mixed = has_output and pool.is_mixed
    continues_guided = has_output and request.sampling.guided_decoding is not None
    if (
        hints is NO_HINTS
        and not (excluded or full or pool.has_load_limits or continues_guided or is_mixed)
        and _takes(pool, request)
    ):
        return pool.rows or _none_ready(pool)
    pin = pinned_worker(hints, pin_phase or phase)
    if pin is not None and (fault := _pin_error(request, phase, pin, fleet)) is not None:
        return fault
    rows: Sequence[CandidateRow] = pool.rows
    if not rows:
        return _none_ready(pool)
    own_rule = (_CONTINUES_GUIDED,) if continues_guided else ()
    for rule in (*_rules(request, phase, pin, pool.kinds), *own_rule):
        rows = [row for row in rows if rule.accepts(row)]
        if not rows:
            return _explain_empty(rule, request, phase, pin, fleet, own_rule)
    rows = _preferred(rows, request if is_mixed else None, excluded, fleet)
    if full:
        rows = [row for row in rows if row.worker_rank[:2] not in full]
    if pool.has_load_limits:
        rows = [row for row in rows if not _is_busy(row, fleet, loads)]
    if hints.lora_name:
        rows = _with_adapter(hints.lora_name, rows, pool, loads)
    return rows or _all_busy(pin, full)


def _preferred(
    rows: Sequence[CandidateRow], continued: Request | None, excluded: Collection[str], fleet: Fleet
) -> Sequence[CandidateRow]:
    """The places that can continue an answer, and on which it has not failed, if there are such."""
    if continued is not None:
        earlier = [fleet.members[worker].card for worker in excluded if worker in fleet.members]
        for cards in (earlier, ()):
            if able := [row for row in rows if can_continue(row.card, continued, cards)]:
                rows = able
                break
    if excluded:
        rows = [row for row in rows if row.worker_rank.worker not in excluded] or rows
    return rows


def _none_ready(pool: CandidatePool) -> NotEligible:
    if not pool.cordoned:
        return NO_READY_WORKER
    names = ", ".join(pool.cordoned[:MAX_NAMED]) + ", …" * (len(pool.cordoned) > MAX_NAMED)
    return NO_READY_WORKER._replace(reason=f"no worker is ready that is not cordoned ({names})")


def _takes(pool: CandidatePool, request: Request) -> bool:
    return len(pool.kinds) == 1 and request.kind in pool.kinds


def _all_busy(pin: str | None, full: Collection[tuple[str, int]]) -> NotEligible:
    if pin is not None:
        return NotEligible(f"the pinned worker {pin} is busy", "pinned_busy")
    return NotEligible(
        "all workers are full" if full else "all workers are at their load limits", "all_busy"
    )


def pinned_worker(hints: Hints, phase: Phase) -> str | None:
    """The worker that a phase must go to, by name or number."""
    own = {"prefill": hints.prefill_worker_id, "decode": hints.decode_worker_id}.get(phase)
    return own if own is not None else hints.backend_instance_id


class EligibilityRule(NamedTuple):
    """A condition on a place beyond being in the pool, and the reason if none meets it."""

    reason: str
    accepts: Callable[[CandidateRow], bool]


_CONTINUES_GUIDED = EligibilityRule(
    "cannot continue: no worker resumes guided decoding in the middle of an answer",
    lambda row: row.card.config.continues_guided,
)


def _rules(
    request: Request, phase: Phase, pin: str | None, kinds: Collection[ModelKind] | None = None
) -> Iterator[EligibilityRule]:
    """`kinds`: the kinds that all places together take, if known."""
    hints, kind = request.hints, request.kind
    rank = _rank(hints, phase)
    if kinds is None or len(kinds) != 1 or kind not in kinds:
        yield EligibilityRule(
            f"no ready worker takes {kind}"
            + ("" if kind == "tokens" else " requests as they come"),
            lambda row: row.card.config.kind == kind,
        )
    if pin is not None:
        yield EligibilityRule(
            f"the pinned worker {pin} is not ready", lambda row: _matches_name(row, (pin,))
        )
        rank = rank or 0
    if rank is not None:
        yield EligibilityRule(
            f"no ready worker has rank {rank}", lambda row: row.worker_rank.rank == rank
        )
    if allowed := hints.allowed_worker_ids:
        yield EligibilityRule(
            "none of allowed_worker_ids is ready", lambda row: _matches_name(row, allowed)
        )
    if (constraints := hints.routing_constraints) is not None and constraints.required_taints:
        required = frozenset(constraints.required_taints)
        yield EligibilityRule(
            "no ready worker has all required_taints", lambda row: required <= row.taints
        )
    if phase == "decode" and (source := hints.prefill_worker_id) is not None:
        yield EligibilityRule(NO_RECEIVER, lambda row: row.worker_rank.worker != source)
    if adapter := hints.lora_name:
        yield EligibilityRule(
            "no ready worker serves the adapter of lora_name",
            lambda row: can_serve(row.card.config, adapter),
        )


def _explain_empty(
    rule: EligibilityRule, request: Request, phase: Phase, pin: str | None, fleet: Fleet,
    own_rule: Collection[EligibilityRule],
) -> NotEligible:  # fmt: skip
    """The result if a rule leaves no ready place. `own_rule`: that of a continued answer."""
    if pin is not None and rule.reason.startswith("the pinned"):
        if any(pin in (worker, worker_number(worker)) for worker in fleet.cordons):
            return NotEligible(f"the pinned worker {pin} is cordoned", "pinned_busy")
        return NotEligible(rule.reason, "pinned_busy")
    if rule.reason == NO_RECEIVER:  # past its time the next attempt is whole
        return NotEligible(rule.reason, "none_eligible")
    alive = (
        row
        for worker, member in fleet.live_members()
        if request.model in ("", member.card.model) and can_take(member.card, phase)
        for row in _rows(worker, member, 0)
    )
    all_rules = [*_rules(request, phase, pin), *own_rule]
    hope = any(all(each.accepts(row) for each in all_rules) for row in alive)
    if rule is _CONTINUES_GUIDED and not hope:
        return NotEligible(rule.reason, "lost", "none")
    return NotEligible(rule.reason, "none_eligible", "wait" if hope else "news")


def _is_bounded(card: WorkerCard) -> bool:
    return card.busy_cache is not None or card.busy_prefill_tokens is not None


def _is_busy(row: CandidateRow, fleet: Fleet, loads: Sequence[ActiveLoad]) -> bool:
    """Whether the load of a worker exceeds the limits of its card."""
    card, beat = row.card, fleet.heartbeats.get(row.worker_rank.worker)
    if card.busy_cache is not None and beat is not None and beat.cache_usage > card.busy_cache:
        return True
    if card.busy_prefill_tokens is None:
        return False
    waiting = sum(each.load(row.worker_rank).prefill_tokens for each in loads)
    return waiting > card.busy_prefill_tokens


def _with_adapter(
    adapter: str, rows: Sequence[CandidateRow], pool: CandidatePool, loads: Sequence[ActiveLoad]
) -> Sequence[CandidateRow]:
    """The places where an adapter is, or is to be loaded. The order of loading is over all of the
    pool, so that wishes of one request do not change where others go."""
    configs = {row.worker_rank.worker: row.card.config for row in pool.rows}
    avoided = frozenset(configs) - {row.worker_rank.worker for row in rows}
    open_runs = sum(each.adapter_runs(adapter) for each in loads)
    homes = placement(adapter, configs, open_runs, avoided)
    return [row for row in rows if row.worker_rank.worker in homes]


def _rank(hints: Hints, phase: Phase) -> int | None:
    return hints.prefill_dp_rank if phase == "prefill" else hints.dp_rank


def _pin_error(request: Request, phase: Phase, pin: str, fleet: Fleet) -> NotEligible | None:
    """Why waiting cannot make the pin possible."""
    hints, rank = request.hints, _rank(request.hints, phase) or 0
    names = [worker for worker, _ in fleet.live_members() if pin in (worker, worker_number(worker))]
    if not names:
        return NotEligible(f"the pinned worker {pin} is gone", "pinned_gone", "none")
    name, card = names[0], fleet.members[names[0]].card
    if hints.allowed_worker_ids and not {name, worker_number(name)} & {*hints.allowed_worker_ids}:
        reason = f"the pinned worker {pin} is not among allowed_worker_ids"
        return NotEligible(reason, "pin_not_allowed", "none")
    fault = ""
    if request.model not in ("", card.model):
        fault = f"does not serve {request.model}"
    elif card.role not in _ROLES[phase]:
        fault = f"only does {card.role}"
    elif not can_take(card, phase):
        fault = "transfers no KV caches"
    elif rank >= card.ranks:
        fault = f"has no rank {rank}"
    return NotEligible(f"the pinned worker {pin} {fault}", "invalid", "none") if fault else None


def _matches_name(row: CandidateRow, names: Collection[str]) -> bool:
    return row.worker_rank.worker in names or row.worker_number in names
