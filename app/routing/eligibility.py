"""Who may take a request: hard rules, looked at before any cost.

A `Pool` is what all requests for one model have in common: the places that live, serve it and
were heard of lately. It is made when the fleet changes, which is seldom, and used for many
requests. What a request itself asks for is looked at each time, mostly nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from app.routing.adapters import homes_of, is_served
from app.routing.board import Board
from app.routing.burdens import Burdens
from app.routing.fleet import Fleet, FleetWorker
from app.routing.paces import Pace, pace_of
from app.routing.policies import Place
from indexer.lives import Holder
from indexer.xxh3 import xxh3
from streams.records import NO_HINTS, EndCode, Hints, ModelKind, Phase, Request, Role, WorkerCard

BLOCK_SIZE = 16
"""In which costs are counted for models whose workers name no block size."""
POOLS = 256
"""How many pools are remembered; with one more, all others are made again."""

_ROLES: dict[Phase, frozenset[Role]] = {
    "aggregated": frozenset({"aggregated", "decode"}),
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"aggregated", "decode"}),
}


class Row(NamedTuple):
    """A place in a pool. `number` and `ranks`: the worker's; see `number_of`.

    `shows_blocks`: what its cache holds is known, by blocks of the pool's size. `pace` and `card`:
    what it says of itself.
    """

    place: Place
    holder: Holder
    number: str
    taints: frozenset[str]
    shows_blocks: bool
    ranks: int
    pace: Pace
    card: WorkerCard


class Pool(NamedTuple):
    """The places for a phase of requests for one model, by name and rank, and their `workers`; its
    prompts' block size. `board`: the places in columns.

    Right for one version of the fleet, until one of the workers has been silent for too long
    (`until_ms`), or one of the `silent` ones was heard again. `bounded`: some of them are to get
    nothing more while they are busy. `kinds`: what they take, all together.
    """

    rows: tuple[Row, ...]
    workers: list[str]
    block_size: int
    version: int
    until_ms: int
    silent: tuple[tuple[str, int], ...]
    board: Board
    bounded: bool = False
    kinds: frozenset[ModelKind] = frozenset({"tokens"})


class NoPlace(NamedTuple):
    """Nobody may take it. `code`: what the request ends with if nothing changes in its time.

    `hope`: `wait` that it changes as workers come, end or are heard again; `news`: no worker there
    is could ever take it, but another one might come; `none`: it asks for what cannot be.
    """

    reason: str
    code: EndCode
    hope: Literal["wait", "news", "none"] = "wait"


NOBODY = NoPlace("no worker is ready", "no_workers")


@lru_cache(maxsize=4096)
def number_of(worker: str) -> str:
    """A worker's number, in decimals, for clients that know workers by numbers: 63 bits."""
    return str(xxh3(worker.encode()) >> 1)


class Pools:
    """The pools of a fleet; remembers those it made."""

    def __init__(self, fleet: Fleet, timeout_ms: int) -> None:
        """`timeout_ms`: silence after which a worker gets no new work."""
        self._fleet = fleet
        self._timeout_ms = timeout_ms
        self._pools: dict[tuple[str, Phase], Pool] = {}

    def pool(self, model: str, phase: Phase, now_ms: int) -> Pool:
        """The pool of a model, "" for any model, at a time of the broker."""
        known = self._pools.get((model, phase))
        if known is not None and self._holds(known, now_ms):
            return known
        if known is None and len(self._pools) >= POOLS:
            self._pools.clear()
        pool = self._pools[model, phase] = self._make(model, phase, now_ms, known)
        return pool

    def _holds(self, pool: Pool, now_ms: int) -> bool:
        if pool.version != self._fleet.version or now_ms > pool.until_ms:
            return False
        beats = self._fleet.beats
        return not pool.silent or all(w in beats and beats[w].at_ms == at for w, at in pool.silent)

    def _make(self, model: str, phase: Phase, now_ms: int, before: Pool | None) -> Pool:
        """`before`: the same until now; mostly it goes on, its workers having been heard again."""
        fleet, timeout_ms = self._fleet, self._timeout_ms
        serving = {
            worker: member
            for worker, member in sorted(fleet.members.items())
            if model in ("", member.card.model) and member.card.role in _ROLES[phase]
        }
        heard = {w: fleet.beats[w].at_ms for w in serving if w in fleet.beats}
        routable = [w for w in serving if fleet.is_routable(w, now_ms, timeout_ms)]
        until_ms = min((heard[w] for w in routable), default=now_ms) + timeout_ms
        silent = tuple((w, at) for w, at in heard.items() if now_ms - at > timeout_ms)
        if before is not None and (before.version, before.workers) == (fleet.version, routable):
            return before._replace(until_ms=until_ms, silent=silent)
        size = block_size_of(fleet, model, (serving[w] for w in routable))
        rows = [row for w in routable for row in _rows(w, serving[w], size)]
        return Pool(
            rows=tuple(rows),
            workers=routable,
            block_size=size,
            version=fleet.version,
            until_ms=until_ms,
            silent=silent,
            board=Board(rows),
            bounded=any(_is_bounded(row.card) for row in rows),
            kinds=frozenset(row.card.config.kind for row in rows),
        )


def block_size_of(fleet: Fleet, model: str, members: Iterable[FleetWorker]) -> int:
    """The block size of a model's prompts: by its card, else that of most of these workers."""
    card = fleet.models.get(model)
    if card is not None and card.block_size:
        return card.block_size
    sizes = Counter(size for m in members if (size := m.card.config.kv_cache_block_size))
    return min(sizes, key=lambda size: (-sizes[size], size), default=BLOCK_SIZE)


def _rows(worker: str, member: FleetWorker, block_size: int) -> list[Row]:
    card, number, pace = member.card, number_of(worker), pace_of(member.card.config)
    taints = frozenset(card.taints)
    return [
        Row(
            Place(worker, member.epoch, rank), Holder(worker, rank), number, taints,
            card.config.kv_cache_block_size == block_size, card.ranks, pace, card,
        )
        for rank in range(card.ranks)
    ]  # fmt: skip


def eligible(
    request: Request,
    phase: Phase,
    pool: Pool,
    fleet: Fleet,
    *,
    excluded: Collection[str] = (),
    full: Collection[tuple[str, int]] = (),
    burdens: Sequence[Burdens] = (),
) -> Sequence[Row] | NoPlace:
    """The places that may take a phase of a request, or why there is none.

    Workers in `excluded`, on which it failed before, count as long as there is no other one; those
    in `full`, named with their epochs, do not. `burdens`: what lies on places, all together.

    A request that asks for nothing gets the rows of the pool as they are.
    """
    hints = request.hints
    if hints is NO_HINTS and not (excluded or full or pool.bounded) and _takes(pool, request):
        return pool.rows or NOBODY
    pin = pin_of(hints, phase)
    if pin is not None and (fault := _unpinnable(request, phase, pin, fleet)) is not None:
        return fault
    rows: Sequence[Row] = pool.rows
    if not rows:
        return NOBODY
    for rule in _rules(request, phase, pin, pool.kinds):
        rows = [row for row in rows if rule.passes(row)]
        if not rows:
            return _left_nobody(rule, request, phase, pin, fleet)
    if excluded:
        rows = [row for row in rows if row.place.worker not in excluded] or rows
    if full:
        rows = [row for row in rows if row.place[:2] not in full]
    if pool.bounded:
        rows = [row for row in rows if not _is_busy(row, fleet, burdens)]
    if hints.lora_name:
        rows = _with_adapter(hints.lora_name, rows, pool, burdens)
    return rows or _all_busy(pin, full)


def _takes(pool: Pool, request: Request) -> bool:
    """Whether all places take a request's kind of work."""
    return len(pool.kinds) == 1 and request.kind in pool.kinds


def _all_busy(pin: str | None, full: Collection[tuple[str, int]]) -> NoPlace:
    if pin is not None:
        return NoPlace(f"the pinned worker {pin} is busy", "pinned_busy")
    return NoPlace("all workers are full" if full else "all workers are busy", "all_busy")


def pin_of(hints: Hints, phase: Phase) -> str | None:
    """The worker that a phase must go to, by name or number."""
    own = {"prefill": hints.prefill_worker_id, "decode": hints.decode_worker_id}.get(phase)
    return own if own is not None else hints.backend_instance_id


class Rule(NamedTuple):
    """What is asked of a place beyond being in the pool, with what is wrong if none does it."""

    wrong: str
    passes: Callable[[Row], bool]


def _rules(
    request: Request, phase: Phase, pin: str | None, kinds: Collection[ModelKind] | None = None
) -> Iterator[Rule]:
    """`kinds`: what all places together take, if that is known."""
    hints, kind = request.hints, request.kind
    rank = _rank(hints, phase)
    if kinds is None or len(kinds) != 1 or kind not in kinds:
        yield Rule(
            f"no ready worker takes {kind}"
            + ("" if kind == "tokens" else " requests as they come"),
            lambda row: row.card.config.kind == kind,
        )
    if pin is not None:
        yield Rule(f"the pinned worker {pin} is not ready", lambda row: _is_called(row, (pin,)))
        rank = rank or 0
    if rank is not None:
        yield Rule(f"no ready worker has rank {rank}", lambda row: row.place.rank == rank)
    if allowed := hints.allowed_worker_ids:
        yield Rule("none of allowed_worker_ids is ready", lambda row: _is_called(row, allowed))
    if (asked := hints.routing_constraints) is not None and asked.required_taints:
        required = frozenset(asked.required_taints)
        yield Rule("no ready worker has all required_taints", lambda row: required <= row.taints)
    if adapter := hints.lora_name:
        yield Rule(
            "no ready worker serves the adapter of lora_name",
            lambda row: is_served(row.card.config, adapter),
        )


def _left_nobody(
    rule: Rule, request: Request, phase: Phase, pin: str | None, fleet: Fleet
) -> NoPlace:
    """What becomes of a request when a rule leaves nobody that is ready."""
    if pin is not None and rule.wrong.startswith("the pinned"):
        return NoPlace(rule.wrong, "pinned_busy")
    alive = (
        row
        for worker, member in fleet.living()
        if request.model in ("", member.card.model) and member.card.role in _ROLES[phase]
        for row in _rows(worker, member, 0)
    )
    all_rules = list(_rules(request, phase, pin))
    hope = any(all(each.passes(row) for each in all_rules) for row in alive)
    return NoPlace(rule.wrong, "none_eligible", "wait" if hope else "news")


def _is_bounded(card: WorkerCard) -> bool:
    return card.busy_cache is not None or card.busy_prefill_tokens is not None


def _is_busy(row: Row, fleet: Fleet, burdens: Sequence[Burdens]) -> bool:
    """Whether a worker has more to do than its card allows."""
    card, beat = row.card, fleet.beats.get(row.place.worker)
    if card.busy_cache is not None and beat is not None and beat.cache_usage > card.busy_cache:
        return True
    if card.busy_prefill_tokens is None:
        return False
    waiting = sum(each.at((row.place,))[0].prefill_tokens for each in burdens)
    return waiting > card.busy_prefill_tokens


def _with_adapter(
    adapter: str, rows: Sequence[Row], pool: Pool, burdens: Sequence[Burdens]
) -> Sequence[Row]:
    """The places where an adapter is, or is to be loaded.

    The order of loading is over all of the pool, so that a request's own wishes and a worker that
    is full for a moment do not change where others go; who cannot take it is passed by.
    """
    configs = {row.place.worker: row.card.config for row in pool.rows}
    avoided = frozenset(configs) - {row.place.worker for row in rows}
    open_runs = sum(each.adapter_runs(adapter) for each in burdens)
    homes = homes_of(adapter, configs, open_runs, avoided)
    return [row for row in rows if row.place.worker in homes]


def _rank(hints: Hints, phase: Phase) -> int | None:
    return hints.prefill_dp_rank if phase == "prefill" else hints.dp_rank


def _unpinnable(request: Request, phase: Phase, pin: str, fleet: Fleet) -> NoPlace | None:
    """Why no waiting will make the pin possible."""
    hints, rank = request.hints, _rank(request.hints, phase) or 0
    names = [worker for worker, _ in fleet.living() if pin in (worker, number_of(worker))]
    if not names:
        return NoPlace(f"the pinned worker {pin} is gone", "pinned_gone", "none")
    name, card = names[0], fleet.members[names[0]].card
    if hints.allowed_worker_ids and not {name, number_of(name)} & {*hints.allowed_worker_ids}:
        reason = f"the pinned worker {pin} is not among allowed_worker_ids"
        return NoPlace(reason, "pin_not_allowed", "none")
    fault = ""
    if request.model not in ("", card.model):
        fault = f"does not serve {request.model}"
    elif card.role not in _ROLES[phase]:
        fault = f"only does {card.role}"
    elif rank >= card.ranks:
        fault = f"has no rank {rank}"
    return NoPlace(f"the pinned worker {pin} {fault}", "invalid", "none") if fault else None


def _is_called(row: Row, names: Collection[str]) -> bool:
    return row.place.worker in names or row.number in names
