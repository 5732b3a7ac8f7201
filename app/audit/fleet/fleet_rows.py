"""Workers, models, requests, queues and routers of a deployment as rows, from a `FleetView`.

They are the objects of `--json`, whose fields are in docs/operations.md and are only added. Points
in time are those of the broker, in ms since 1970; None: unknown. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, Literal

import msgspec

from kvlane.app.audit.fleet.fleet_view import FleetView, RequestFacts
from kvlane.app.audit.waits import ReportedWait
from kvlane.app.preprocess.models.model_aliases import ModelAliases
from kvlane.app.routing.state.fleet import FleetMember, PlacedOrder
from kvlane.app.routing.state.request_state import OPEN, RequestState, RunId, RunState, RunStatus
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import Phase, RoutingReport, RunKey, WorkerState
from kvlane.streams.topics import REQUESTS, lane_of

ShownState = WorkerState | Literal["starting", "silent", "lost"]
ShownPhase = Literal["queued", "assigned", "prefill", "decode", "ended"]
EndedShown = Literal["ended", "slow", "failed"]
RoutingOf = Literal["own", "order", "unread", "unusable", "unreported"]
_PHASES: dict[RunState, ShownPhase] = {
    "assigned": "assigned", "started": "prefill", "prefilled": "decode",
}  # fmt: skip
COMPLETED = frozenset({"stop", "length", "seen", "cancelled"})
"""Codes of requests that are no failures."""
_RUN_ORDER: dict[Phase, int] = {"prefill": 0, "aggregated": 1, "decode": 1}
_OVERDUE_MS = 60_000
"""Time after its deadline at which a request that seems to wait is an old copy of its record."""


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker. `running`, `waiting`: runs in its engine, and before. `kv_blocks`: blocks of its KV
    cache, `kv_used_blocks` of them in use. `step_ms`: mean time of an engine step lately."""

    id: str
    model: str
    role: str
    state: ShownState
    epoch: int
    order: Literal["", "cordoned", "evacuating"] = ""
    reason: str = ""
    since_ms: int | None = None
    heartbeat_age_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    hit_rate: float | None = None
    ttft_error: float | None = None
    itl_error: float | None = None
    versions: dict[str, str] = {}
    step_ms: float | None = None
    kv_used_blocks: int | None = None
    kv_blocks: int | None = None


class ModelRow(msgspec.Struct, frozen=True):
    """A model. `tokenizer`: SHA-256 of its file; `checksum`: of the card; "": none. `versions`: of
    the engines of its workers."""

    name: str
    kind: str
    workers: int
    ready: int
    open: int
    queued: int
    context_length: int | None
    tokenizer: str
    checksum: str
    versions: list[str]


class AliasRow(msgspec.Struct, frozen=True):
    """A target of an alias. `share`: of the requests that name the alias now; `ready`: workers."""

    name: str
    model: str
    weight: int
    share: float
    ready: int


class RequestRow(msgspec.Struct, frozen=True):
    """A request. `code`, `reason`: of its end, or of the last failed run. `output_tokens`: so far,
    by the last heartbeat; `retries`: attempts after the first."""

    id: str
    model: str = ""
    tenant: str = ""
    service_class: str = ""
    phase: ShownPhase = "ended"
    worker: str = ""
    code: str = ""
    reason: str = ""
    age_s: float | None = None
    wait_ms: int | None = None
    ttft_ms: int | None = None
    total_ms: int | None = None
    output_tokens: int = 0
    retries: int = 0
    ended_ms: int | None = None


class LaneRow(msgspec.Struct, frozen=True):
    """The queue of a lane. `router`: its owner, "" without one. `unread`: records of `requests`
    that it has not read."""

    lane: int
    router: str
    unread: int | None
    queued: int
    queued_batch: int
    oldest_s: float | None
    queued_unknown: int


class WaitRow(msgspec.Struct, frozen=True):
    """A reason for which requests have waited in routers for ten seconds, and their number."""

    reason: str
    requests: int


def worker_rows(view: FleetView, now_ms: int, timeout_s: float) -> list[WorkerRow]:
    """All workers by id, those that were lost in the window included."""
    rows = [_worker_row(view, member, now_ms, timeout_s) for member in view.fleet.members.values()]
    for worker, lost in view.lost.items():
        card = view.cards.get(worker)
        has_returned = card is not None and (card.epoch or 0) > lost.epoch
        if worker not in view.fleet.members and not has_returned:
            model, role, versions = (
                ("", "", {}) if card is None else (card.model, card.role, card.versions)
            )
            silent_s = round((now_ms - lost.at_ms + lost.silent_ms) / 1000, 1)
            rows.append(
                WorkerRow(
                    worker, model, role, "lost", lost.epoch, heartbeat_age_s=silent_s,
                    versions=versions,
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: row.id)


def _worker_row(view: FleetView, member: FleetMember, now_ms: int, timeout_s: float) -> WorkerRow:
    card, worker = member.card, member.card.id
    last, beat = view.fleet.heartbeats.get(worker), view.heartbeats.get(worker)
    if last is None or beat is None or last.epoch != member.epoch:
        last = beat = None
    errors, cordon = view.drift.summary_of([worker], now_ms), view.fleet.cordons.get(worker)
    state, age_s = _state(view, member, now_ms, timeout_s)
    running = waiting = kv_use = used = blocks = None
    if beat is not None:
        running, waiting = len(beat.running) - beat.waiting, beat.waiting
        if beat.engine is not None:
            running, waiting = beat.engine.running, waiting + beat.engine.waiting
            if beat.engine.kv_total_blocks:
                used, blocks = beat.engine.kv_used_blocks, beat.engine.kv_total_blocks
                kv_use = _rounded(used / blocks)
    steps = view.steps.get(worker)
    step_ms = steps.step_ms if steps is not None and steps.epoch == member.epoch else None
    return WorkerRow(
        worker, card.model, card.role, state, member.epoch,
        "" if cordon is None else "evacuating" if cordon.evacuates else "cordoned",
        "" if beat is None else beat.reason, member.since_ms, age_s, running, waiting, kv_use,
        _rounded(view.drift.hit_rate(worker, now_ms)),
        _rounded(errors.ttft_error and errors.ttft_error.median),
        _rounded(errors.itl_error and errors.itl_error.median), card.versions,
        None if step_ms is None else round(step_ms, 1), used, blocks,
    )  # fmt: skip


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _state(
    view: FleetView, member: FleetMember, now_ms: int, timeout_s: float
) -> tuple[ShownState, float | None]:
    """The state of a worker, and the age of its last heartbeat in seconds."""
    fleet, worker = view.fleet, member.card.id
    last = fleet.heartbeats.get(worker)
    is_present = last is not None and last.epoch == member.epoch
    age_s = max(0, now_ms - last.at_ms) / 1000 if last is not None and is_present else None
    if fleet.is_lost(worker, member.epoch):
        return "lost", age_s
    silent_s = (now_ms - member.since_ms) / 1000 if age_s is None else age_s
    if silent_s > timeout_s:
        return "silent", age_s
    return "starting" if last is None or not is_present else last.state, age_s


def model_rows(
    view: FleetView, now_ms: int, timeout_s: float, open_requests: Sequence[RequestRow]
) -> list[ModelRow]:
    """The models that have a card, a worker, or one of all `open_requests`."""
    workers, ready, versions = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
    for worker in worker_rows(view, now_ms, timeout_s):
        if worker.state != "lost":
            workers[worker.model] += 1
            can_answer = worker.state == "ready" and not worker.order and worker.role != "prefill"
            ready[worker.model] += can_answer
            versions[worker.model] |= {f"{name} {of}" for name, of in worker.versions.items()}
    counts, queued = Counter[str](), Counter[str]()
    for row in open_requests:
        counts[row.model] += 1
        queued[row.model] += row.phase == "queued"
    cards = view.fleet.models
    rows = []
    for name in sorted(cards.keys() | workers.keys() | {n for n in counts if n}):
        card = cards.get(name)
        tokenizer = None if card is None else card.tokenizer
        rows.append(
            ModelRow(
                name, "" if card is None else card.kind, workers[name], ready[name],
                counts[name], queued[name], None if card is None else card.context_length,
                "" if tokenizer is None else tokenizer.sha256,
                "" if card is None else card.checksum, sorted(versions[name]),
            )
        )  # fmt: skip
    return rows


def alias_rows(view: FleetView, models: Sequence[ModelRow]) -> list[AliasRow]:
    """The targets of the aliases in effect, in the order of their records."""
    aliases, ready = ModelAliases(view.fleet), {row.name: row.ready for row in models}
    rows = []
    for alias in aliases.present():
        serving = aliases.serving(alias)
        total = sum(max(each.weight, 1) for each in serving) or 1
        for target in alias.targets:
            share = max(target.weight, 1) / total if target in serving else 0.0
            rows.append(
                AliasRow(
                    alias.name, target.model, target.weight, round(share, 4),
                    ready.get(target.model, 0),
                )
            )  # fmt: skip
    return rows


def open_requests_of(
    view: FleetView, now_ms: int, *, model: str = "", tenant: str = ""
) -> list[RequestRow]:
    """The open requests, the oldest first; of a model, and of a tenant, if one is given."""
    runs = _reported_runs(view)
    rows: dict[str, RequestRow] = {}
    for request_id in view.open_ids:
        facts = view.requests[request_id]
        lane = view.lanes.get(facts.lane)
        state = None if lane is None else lane.requests.get(request_id)
        if (state is not None and state.is_known) or _waits(facts, now_ms):
            rows[request_id] = _open_row(view, request_id, facts, state, runs, now_ms)
    early = {wait.request_id: _waiting_row(wait, now_ms) for wait in view.reports.reports().waits}
    for key in sorted(runs, key=lambda key: (key.attempt, _RUN_ORDER[key.phase])):
        early[key.id] = _early_row(view, key, *runs[key])
    for request_id, row in early.items():
        known = view.requests.get(request_id)
        if request_id not in rows and (known is None or not (known.code or known.began_ms)):
            rows[request_id] = row
    found = [r for r in rows.values() if r.model == (model or r.model)]
    found = [r for r in found if r.tenant == (tenant or r.tenant)]
    return sorted(found, key=lambda row: (row.age_s is not None, -(row.age_s or 0), row.id))


def _waits(facts: RequestFacts, now_ms: int) -> bool:
    """Whether a request without a decision waits for it."""
    is_read = facts.began_ms and not facts.decided_ms and not facts.code
    return bool(is_read) and now_ms <= facts.deadline_ms + _OVERDUE_MS


def _reported_runs(view: FleetView) -> dict[RunKey, tuple[str, int]]:
    """The open runs by the last heartbeats: worker and output tokens."""
    return {
        key: (worker, tokens)
        for worker, member in view.fleet.live_members()
        if (beat := view.fleet.heartbeats.get(worker)) is not None and beat.epoch == member.epoch
        for key, tokens in beat.running.items()
    }


def _open_row(
    view: FleetView,
    request_id: str,
    facts: RequestFacts,
    state: RequestState | None,
    runs: dict[RunKey, tuple[str, int]],
    now_ms: int,
) -> RequestRow:
    found = None if state is None else _present_run(state)
    worker, tokens = "", facts.output_tokens
    phase: ShownPhase = "queued"
    if found is not None:
        run_id, run = found
        worker = run_id.worker
        phase = _PHASES[run.state]
        reported = runs.get(RunKey(request_id, run_id.attempt, run_id.phase))
        tokens = facts.base_tokens + (0 if reported is None else reported[1])
    model = facts.model or _model_of(view, worker or facts.worker)
    return _row(request_id, facts, model, phase, worker, tokens, now_ms)


def _present_run(state: RequestState) -> tuple[RunId, RunStatus] | None:
    """The open run of a request that came last: with a hand-over its decode."""
    found = [(run_id, run) for run_id, run in state.runs.items() if run.state in OPEN]
    return max(found, key=lambda each: (each[0].attempt, _RUN_ORDER[each[0].phase]), default=None)


def _waiting_row(wait: ReportedWait, now_ms: int) -> RequestRow:
    """A request that was appended before the records that were read, by its wait in a router."""
    age_s = max(0, now_ms - wait.since_ms) / 1000
    return RequestRow(wait.request_id, phase="queued", age_s=age_s)


def _early_row(view: FleetView, key: RunKey, worker: str, tokens: int) -> RequestRow:
    """A request that was appended before the records that were read, by its run."""
    return RequestRow(
        key.id, phase="decode" if tokens else "prefill", model=_model_of(view, worker),
        worker=worker, output_tokens=tokens, retries=key.attempt,
    )  # fmt: skip


def _model_of(view: FleetView, worker: str) -> str:
    card = view.cards.get(worker)
    return "" if card is None else card.model


def ended_requests_of(
    view: FleetView,
    shown: EndedShown = "ended",
    *,
    since_ms: int = 0,
    model: str = "",
    tenant: str = "",
    most: int | None = None,
) -> list[RequestRow]:
    """The requests that ended in the window, the last ones first, of `slow` the slowest; at most
    `most`. `since_ms`: begin of those whose begin is unknown."""

    def is_shown(facts: RequestFacts) -> bool:
        if not facts.code or (shown == "failed" and facts.code in COMPLETED):
            return False
        return tenant in ("", facts.tenant) and model in ("", _model_named(view, facts))

    def rank(facts: RequestFacts) -> int:
        return facts.ended_ms - ((facts.began_ms or since_ms) if shown == "slow" else 0)

    found = [(rank(facts), name) for name, facts in view.requests.items() if is_shown(facts)]
    rows = []
    for _, name in sorted(found, reverse=True) if most is None else nlargest(most, found):
        facts = view.requests[name]
        end = (facts.worker, facts.output_tokens, facts.ended_ms)
        rows.append(_row(name, facts, _model_named(view, facts), "ended", *end))
    return rows


def _model_named(view: FleetView, facts: RequestFacts) -> str:
    return facts.model or _model_of(view, facts.worker)


def _row(
    request_id: str,
    facts: RequestFacts,
    model: str,
    phase: ShownPhase,
    worker: str,
    tokens: int,
    until_ms: int,
) -> RequestRow:
    began_ms = facts.began_ms

    def after(at_ms: int) -> int | None:
        return max(0, at_ms - began_ms) if began_ms and at_ms else None

    age_ms = after(until_ms)
    return RequestRow(
        request_id, model, facts.tenant, facts.service_class, phase, worker, facts.code,
        facts.reason, None if age_ms is None else age_ms / 1000, after(facts.decided_ms),
        after(facts.first_token_ms), after(facts.ended_ms), tokens, facts.attempt,
        facts.ended_ms or None,
    )  # fmt: skip


def lane_rows(view: FleetView, now_ms: int, open_requests: Sequence[RequestRow]) -> list[LaneRow]:
    """The lanes, with what of all `open_requests` is queued in them."""
    positions, ends = view.reports.reports(now_ms).positions, list(_lane_ends(view))
    queued: dict[int, Counter[str]] = defaultdict(Counter)
    oldest: dict[int, float] = {}
    for row in open_requests:
        if row.phase == "queued":
            lane = lane_of(row.id, len(ends))
            queued[lane][row.service_class] += 1
            oldest[lane] = max(oldest.get(lane, 0.0), row.age_s or 0.0)
    rows = []
    for lane, end in enumerate(ends):
        router, position = positions.get(lane, ("", None))
        unread = None if position is None else max(0, end - position)
        of = queued[lane]
        rows.append(
            LaneRow(
                lane, router, unread, of["interactive"], of["batch"], oldest.get(lane) or None,
                of[""],
            )
        )  # fmt: skip
    return rows


def _lane_ends(view: FleetView) -> Iterator[int]:
    lane = 0
    while (end := view.position(Partition(REQUESTS, lane))) is not None:
        yield end
        lane += 1


def wait_rows(view: FleetView, open_requests: Sequence[RequestRow]) -> list[WaitRow]:
    """The reasons of waits, by the reports of routers, of requests that are queued still."""
    reports = view.reports.reports()
    queued = {row.id for row in open_requests if row.phase == "queued"}
    reasons = Counter(wait.reason for wait in reports.waits if wait.request_id in queued)
    rows = [WaitRow(reason, count) for reason, count in reasons.most_common()]
    return [*rows, WaitRow("not listed", reports.left_out)] if reports.left_out else rows


class RoutingRow(msgspec.Struct, frozen=True):
    """A router. `routing_of`: whose settings hold there, or why those of the order do not: it has
    not read the order, cannot use it (`problem`), or reports nothing, as earlier versions.
    `own`, `settings`: its own ones, and those that hold, by name; None: unknown."""

    router: str
    routing_of: RoutingOf
    problem: str = ""
    own: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None


def routing_rows(
    placed: PlacedOrder | None, reports: Mapping[str, RoutingReport | None]
) -> list[RoutingRow]:
    return [_routing_row(name, placed, report) for name, report in sorted(reports.items())]


def _routing_row(
    router: str, placed: PlacedOrder | None, report: RoutingReport | None
) -> RoutingRow:
    if report is None:
        return RoutingRow(router, "unreported")
    own = report.own
    if report.order != (None if placed is None else placed.offset):
        has_own = report.order is None or report.problem
        return RoutingRow(router, "unread", own=own, settings=own if has_own else None)
    if placed is None or report.problem:
        of: RoutingOf = "unusable" if report.problem else "own"
        return RoutingRow(router, of, report.problem, own, own)
    return RoutingRow(router, "order", own=own, settings={**own, **placed.order.settings})


class JobRow(msgspec.Struct, frozen=True):
    """A job of the Batch API that has not ended. `published`: lines up to which all are prompts."""

    id: str
    tenant: str
    status: str
    lines: int
    published: int
    completed: int
    failed: int
    created_s: int


def job_rows(jobs: Iterable[BatchJob]) -> list[JobRow]:
    return [msgspec.convert(job, JobRow, from_attributes=True) for job in jobs]
