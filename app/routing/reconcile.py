"""Reconciliation: the next action for a request, as a pure function of the logs' state.

`next_action` is level-triggered, so any router may call it at any time; `next_action_times` gives
the times until which the result stays the same if no record arrives, `RequestTimers` keeps them.
After a crash in the middle of an action the same action is due for the next owner; acting twice is
harmless by the stream reconstruction rule.

    state of the request                                            action
    ended, or its id unknown (no origin)                            nothing
    a Fencing was written, but no run of that attempt               Restart, same attempt
    deadline passed, and something is running or failed             Finish(deadline)
    a run reported `expired`                                        Finish(deadline)
    a run broken, or ended with a retryable error                   Restart, next attempt
    all runs refused by full workers, and a back-off over           Restart, next attempt
    an open run on a lost epoch                                     Restart, next attempt
    a run assigned long ago and not started                         Verify
    a run started, but not in its worker's later heartbeat          Verify
    a prefill handed off, and no decode assigned                    Decode
    a prefill failed, lost or missing, whose decode has no token    the action of the prefill alone
    otherwise (running well, or ended by the worker)                nothing

Not in the table: a Cancel, which stays uncommitted in `requests` until its Ended is written; and
two that depend on other requests: preemption (`app/routing/queueing/batch_class.py`) and
evacuation (`evacuation.py`, there).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.request_state import OPEN, RequestState, RunId, RunState, RunStatus
from kvlane.streams.records import EndCode, RunKey

RestartReason = Literal[
    "broken", "retryable", "worker_full", "lost", "not_started", "resume", "preempted",
    "handover_unused", "evacuated",
]  # fmt: skip


class Restart(NamedTuple):
    """Begin `attempt`: fence all lower ones, and dispatch the rest of the request, or end it."""

    attempt: int
    reason: RestartReason


class Decode(NamedTuple):
    """Assign the decode of this attempt, whose prefill was handed over; or begin the next attempt,
    where the hand-over cannot be used any more."""

    attempt: int


class Finish(NamedTuple):
    code: EndCode


class Verify(NamedTuple):
    """Find out whether the worker really has this run; if not, it is due for a Restart."""

    run: RunId


class Evacuate(NamedTuple):
    """Let another worker continue this run, if one can; until then it goes on."""

    run: RunId


Action = Restart | Decode | Finish | Verify | Evacuate


class ReconcileTimeouts(NamedTuple):
    """Time-outs after which a run is verified or restarted, in milliseconds of broker time."""

    start_timeout_ms: int = 3_000
    """From Assigned to Started; a worker's two heartbeats and a slow broker fit in."""
    heartbeat_timeout_ms: int = 2_000
    """From Started to a heartbeat that must list the run."""
    full_backoff_ms: int = 50
    """First back-off after a full worker; doubles with every refusal."""
    full_backoff_max_ms: int = 2_000


def next_action(
    request_id: str,
    state: RequestState,
    fleet: Fleet,
    now_ms: int,
    timeouts: ReconcileTimeouts,
    lag_ms: int = 0,
) -> Action | None:
    """The next action of the owner for this request; None when none is due.

    `now_ms` is broker time; `lag_ms`: by how much the clock of the ledger's leader is behind it. A
    function of its arguments only.
    """
    if state.ended or state.origin is None:
        return None
    runs = _current_runs(state)
    if not runs:
        return Restart(state.attempt, "resume") if state.attempt > 0 else None
    if state.is_finished:
        return None
    if now_ms > state.deadline_ms or any(run.state == "expired" for _, run in runs):
        return Finish("deadline")
    if _is_handed_over(state):
        return Decode(state.attempt)
    return _action_for_runs(request_id, state, runs, fleet, now_ms - lag_ms, timeouts)


def _action_for_runs(
    request_id: str,
    state: RequestState,
    runs: Sequence[tuple[RunId, RunStatus]],
    fleet: Fleet,
    now_ms: int,
    timeouts: ReconcileTimeouts,
) -> Restart | Verify | None:
    """The next action for runs of which one has failed or is missing."""
    reason = next(
        (
            r
            for run_id, run in runs
            if (r := _failure(request_id, state, run_id, run, fleet, now_ms, timeouts))
        ),
        None,
    )
    if reason is not None:
        return Restart(state.attempt + 1, reason)
    missing = (k for k, run in runs if _looks_missing(request_id, k, run, fleet, now_ms, timeouts))
    return next((Verify(k) for k in missing), None)


class ActionTimes(NamedTuple):
    """Times at which an action may become due without a new record; None if none may.

    `deadline_ms`: in broker time; `run_ms`: by the clock of the ledger's leader, which the ages of
    runs count by. The difference of these clocks is an estimate, so no time is of both.
    """

    deadline_ms: int | None = None
    run_ms: int | None = None


def next_action_times(
    request_id: str, state: RequestState, now_ms: int, timeouts: ReconcileTimeouts, lag_ms: int = 0
) -> ActionTimes:
    """The times from which an action may be due; arguments as of `next_action`. Before them only
    records make an action due: of the ledger, Lost, heartbeats without the run."""
    if state.ended or state.origin is None:
        return ActionTimes()
    times = []
    for _, run in _current_runs(state):
        if run.state == "assigned":
            times.append(run.since_ms + timeouts.start_timeout_ms + 1)
        elif run.state == "worker_full":
            back_off_ms = _back_off_ms(request_id, state.full_rejections, timeouts)
            times.append(run.since_ms + back_off_ms)
    return ActionTimes(
        state.deadline_ms + 1 if state.deadline_ms >= now_ms else None,
        min((at_ms for at_ms in times if at_ms > now_ms - lag_ms), default=None),
    )


def is_run_listed(fleet: Fleet, request_id: str, run_id: RunId) -> bool:
    """Whether the worker's last heartbeat, of that epoch, lists the run."""
    beat = fleet.heartbeats.get(run_id.worker)
    key = RunKey(request_id, run_id.attempt, run_id.phase)
    return beat is not None and beat.epoch == run_id.epoch and key in beat.running


def _current_runs(state: RequestState) -> Sequence[tuple[RunId, RunStatus]]:
    """The runs of the present attempt that determine the action; decode, where there is one.

    On the bootstrap path the prefill too, until decode has a token, since decode waits for its
    blocks. A refused run counts only where there is no other: a full worker has shown nothing to
    readers.
    """
    runs = [(k, run) for k, run in state.runs.items() if k.attempt == state.attempt]
    prefills = _without_refused([x for x in runs if x[0].phase == "prefill"])
    others = _without_refused([x for x in runs if x[0].phase != "prefill"])
    if not others:
        return prefills
    has_blocks = any(run.state == "handed_off" for _, run in prefills)
    is_waiting = all(k.phase == "decode" and run.state in _WAITING for k, run in others)
    return [*others, *prefills] if is_waiting and not has_blocks else others


_WAITING: frozenset[RunState] = frozenset({"assigned", "started"})


def _without_refused(runs: Sequence[tuple[RunId, RunStatus]]) -> Sequence[tuple[RunId, RunStatus]]:
    return [x for x in runs if x[1].state != "worker_full"] or runs


def _is_handed_over(state: RequestState) -> bool:
    """Whether the present attempt has a prefill that was handed over, and no decode."""
    runs = [(k, run) for k, run in state.runs.items() if k.attempt == state.attempt]
    has_handover = any(run.state == "handed_off" for _, run in runs)
    return has_handover and all(k.phase == "prefill" for k, _ in runs)


def _failure(
    request_id: str,
    state: RequestState,
    run_id: RunId,
    run: RunStatus,
    fleet: Fleet,
    now_ms: int,
    timeouts: ReconcileTimeouts,
) -> RestartReason | None:
    """Why a run will not go on, if so; a full worker counts when the back-off is over."""
    if run.state == "worker_full":
        ready_ms = run.since_ms + _back_off_ms(request_id, state.full_rejections, timeouts)
        return "worker_full" if now_ms >= ready_ms else None
    if run.state in ("broken", "retryable"):
        return run.state
    if run.state in OPEN and fleet.is_lost(run_id.worker, run_id.epoch):
        return "lost"
    return None


def _back_off_ms(request_id: str, refusals: int, timeouts: ReconcileTimeouts) -> int:
    """Doubling, with up to half of it taken off by the request's own hash, so that requests which
    were refused together do not come back together."""
    full_ms = min(timeouts.full_backoff_ms << min(refusals, 16), timeouts.full_backoff_max_ms)
    spread = sum(request_id.encode()) % 64
    return full_ms - full_ms * spread // 128


def _looks_missing(
    request_id: str,
    run_id: RunId,
    run: RunStatus,
    fleet: Fleet,
    now_ms: int,
    timeouts: ReconcileTimeouts,
) -> bool:
    if run.state not in OPEN or is_run_listed(fleet, request_id, run_id):
        return False
    if run.state == "assigned":
        return now_ms - run.since_ms > timeouts.start_timeout_ms
    beat = fleet.heartbeats.get(run_id.worker)
    return (
        beat is not None
        and beat.epoch == run_id.epoch
        and beat.at_ms - run.since_ms > timeouts.heartbeat_timeout_ms
    )


TIMER_RESOLUTION_MS = 64
"""Timers are rounded up to whole steps. Those of ten minutes are 10 000 steps at most, however many
requests they are for."""


class RequestTimers:
    """One timer for each id at most. To set, move or drop one costs the same however many run."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        """A heap of the steps that have timers, or had."""
        self._ids: dict[int, dict[str, None]] = {}
        self._step_of: dict[str, int] = {}

    def set(self, request_id: str, at_ms: int | None) -> None:
        """Set the timer of an id, instead of any other; None: no timer."""
        step = None if at_ms is None else -(-at_ms // TIMER_RESOLUTION_MS)
        before = self._step_of.get(request_id)
        if step == before:
            return
        if before is not None:
            del self._ids[before][request_id]
            del self._step_of[request_id]
        if step is None:
            return
        ids = self._ids.get(step)
        if ids is None:
            ids = self._ids[step] = {}
            heappush(self._steps, step)
        ids[request_id] = None
        self._step_of[request_id] = step

    def due(self, now_ms: int) -> list[str]:
        """Remove and return the ids whose timers have expired, in the order of their times."""
        found: list[str] = []
        while self._steps and self._steps[0] * TIMER_RESOLUTION_MS <= now_ms:
            for request_id in self._ids.pop(heappop(self._steps)):
                del self._step_of[request_id]
                found.append(request_id)
        return found
