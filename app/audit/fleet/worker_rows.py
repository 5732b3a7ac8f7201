"""Workers of a deployment as rows, from a `FleetView`.

The rows are the objects of `--json`, whose fields are in docs/operations.md and are only added.
Points in time are those of the broker, in ms since 1970; None: unknown. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.app.routing.state.fleet import FleetMember
from kvlane.streams.records import WorkerState

ShownState = WorkerState | Literal["starting", "silent", "lost"]


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
