"""Open and ended requests of a deployment as rows, from a `FleetView`.

The rows are the objects of `--json`, whose fields are in docs/operations.md and are only added.
Points in time are those of the broker, in ms since 1970; None: unknown. Pure.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Literal

import msgspec

from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.app.audit.fleet.request_facts import COMPLETED, RequestFacts
from kvlane.app.audit.waits import ReportedWait
from kvlane.app.routing.state.request_state import OPEN, RequestState, RunId, RunState, RunStatus
from kvlane.streams.records import Phase, RunKey

ShownPhase = Literal["queued", "assigned", "prefill", "decode", "ended"]
EndedShown = Literal["ended", "slow", "failed"]
_PHASES: dict[RunState, ShownPhase] = {
    "assigned": "assigned", "started": "prefill", "prefilled": "decode",
}  # fmt: skip
_RUN_ORDER: dict[Phase, int] = {"prefill": 0, "aggregated": 1, "decode": 1}
_OVERDUE_MS = 60_000
"""Time after its deadline at which a request that seems to wait is an old copy of its record."""


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


def open_requests_of(
    view: FleetView, now_ms: int, *, model: str = "", tenant: str = ""
) -> list[RequestRow]:
    """The open requests, the oldest first; of a model, and of a tenant, if one is given."""
    runs = _reported_runs(view)
    rows: dict[str, RequestRow] = {}
    for request_id, facts in view.open.items():
        if (facts.state is not None and facts.state.is_known) or _waits(facts, now_ms):
            rows[request_id] = _open_row(view, request_id, facts, runs, now_ms)
    early = {wait.request_id: _waiting_row(wait, now_ms) for wait in view.reports.reports().waits}
    for key in sorted(runs, key=lambda key: (key.attempt, _RUN_ORDER[key.phase])):
        early[key.id] = _early_row(view, key, *runs[key])
    for request_id, row in early.items():
        known = view.open.get(request_id)
        is_open = request_id not in view.ended_ids and (known is None or not known.began_ms)
        if request_id not in rows and is_open:
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
    runs: dict[RunKey, tuple[str, int]],
    now_ms: int,
) -> RequestRow:
    found = None if facts.state is None else _present_run(facts.state)
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
    """The requests that ended in the window, the last ones first, of `slow` the slowest, as far as
    `EndedRequests` keeps them; at most `most`. `since_ms`: begin of those whose begin is
    unknown."""

    def is_shown(facts: RequestFacts) -> bool:
        if shown == "failed" and facts.code in COMPLETED:
            return False
        return tenant in ("", facts.tenant) and model in ("", _model_named(view, facts))

    def rank(facts: RequestFacts) -> int:
        return facts.ended_ms - ((facts.since_ms or since_ms) if shown == "slow" else 0)

    kept = view.ended.kept()
    found = [(rank(facts), name) for name, facts in kept.items() if is_shown(facts)]
    rows = []
    for _, name in sorted(found, reverse=True) if most is None else nlargest(most, found):
        facts = kept[name]
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
    began_ms = facts.since_ms

    def after(at_ms: int) -> int | None:
        return max(0, at_ms - began_ms) if began_ms and at_ms else None

    age_ms = after(until_ms)
    return RequestRow(
        request_id, model, facts.tenant, facts.service_class, phase, worker, facts.code,
        facts.reason, None if age_ms is None else age_ms / 1000, after(facts.decided_ms),
        after(facts.first_token_ms), after(facts.ended_ms), tokens, facts.attempt,
        facts.ended_ms or None,
    )  # fmt: skip
