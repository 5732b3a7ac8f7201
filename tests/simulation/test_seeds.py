"""Tests of whole deployments under seeded faults. A seed that fails prints its history and
replays exactly: `kvlane bench faults --replay SEED`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from kvlane.app.lanes.owner import LaneOwner
from kvlane.app.lanes.scheduler import Scheduler
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing.pending import LaneRequest
from kvlane.app.routing.reconcile import TIMER_RESOLUTION_MS, next_action
from kvlane.app.routing.selection.decision import Wait
from kvlane.app.routing.state import performance
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from workbench.testing import world_parameters
from workbench.testing.checks.invariants import _failed
from workbench.testing.seed_simulation import simulate_seed
from workbench.testing.world_parameters import (
    ABSENT_PARTS,
    ADDED_SHARES,
    SCENARIO_SHARES,
    Absence,
    AbsentPart,
    WorldParameters,
)

SEEDS = 100
AT_ONCE = 10
FOUND = (703720, 704262, 708607, 340322)
"""What waited for its next cache events spun: so little was left that no clock could tell. A prompt
that was published again after 20 minutes without a router got the result of its first copy again.
"""


class SeedRun(NamedTuple):
    """The run of a seed.

    `checked`: requests that were compared after the searches for due ones, counted each time;
    `overlooked`: those of them with a due action.
    """

    violations: int
    report: str
    digest: str
    checked: int
    overlooked: Sequence[tuple[str, object]]


@cache
def run_of(seed: int) -> SeedRun:
    """The run of a seed, in which each search for due requests is repeated over all requests."""
    reconcile_due = LaneOwner.reconcile_due
    checked, overlooked = 0, []

    def reconcile_and_check(self: LaneOwner) -> None:
        nonlocal checked
        reconcile_due(self)
        s = self._context
        lag_ms = self._ledger_clock.lag_ms
        before_ms = s.broker_clock.now_ms() - TIMER_RESOLUTION_MS
        for request_id, timeline in s.ledger.lane(self._lane).unfinished.items():
            if self.serving and request_id not in self._jobs:
                checked += 1
                action = next_action(request_id, timeline, s.fleet, before_ms, s.timeouts, lag_ms)
                if action is not None:
                    overlooked.append((request_id, action))

    with patch.object(LaneOwner, "reconcile_due", reconcile_and_check):
        verdict = simulate_seed(seed)
    return SeedRun(
        len(verdict.violations), verdict.report(), verdict.history.digest(), checked, overlooked
    )


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_request_ends_once_and_correctly(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run = run_of(seed)
        assert not run.violations, run.report


def test_queued_requests_end_once_and_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short: only engines that are very slow keep anybody waiting."""
    slow = PerfCurves(prefill=(0.0, 60.0, 0.0), decode=(0.0, 0.0, 5.0))
    monkeypatch.setattr(performance, "_believed", lambda _: slow)
    for name in ("DEFAULT_SETTINGS", "TIGHT_SETTINGS"):
        held = {"policy": "predictive", "max_queue_wait_s": 4.0}
        monkeypatch.setattr(
            world_parameters, name, getattr(world_parameters, name).model_copy(update=held)
        )
    holds = []
    change = Scheduler.wait_for_change

    async def counted(self: Scheduler, wanted: LaneRequest, hold: Wait, until_ms: float) -> None:
        holds.append(hold.reservation is not None)
        await change(self, wanted, hold, until_ms)

    monkeypatch.setattr(Scheduler, "wait_for_change", counted)
    for seed in range(20):
        verdict = simulate_seed(seed)
        assert not verdict.violations, verdict.report()
    assert sum(holds) > 100


def test_due_requests_are_found_without_checking_every_request() -> None:
    """But for those that became due within the step that timers are rounded to."""
    runs = [run_of(seed) for seed in range(SEEDS)]
    assert [run.overlooked for run in runs if run.overlooked] == []
    assert sum(run.checked for run in runs) > 3000


@pytest.mark.parametrize("seed", FOUND)
def test_seed_that_once_found_an_error_is_clean(seed: int) -> None:
    verdict = simulate_seed(seed)
    assert not verdict.violations, verdict.report()


def test_seed_replays_exactly() -> None:
    seeds = range(5)
    assert [simulate_seed(s).history.digest() for s in seeds] == [run_of(s).digest for s in seeds]


def test_seeds_differ() -> None:
    assert len({run_of(seed).digest for seed in range(SEEDS)}) == SEEDS


def test_seed_replays_in_other_processes() -> None:
    """Their sets of strings are in another order."""
    script = (
        "from workbench.testing.seed_simulation import simulate_seed as s\n"
        "print(s(1).history.digest())"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.add(done.stdout.strip())
    assert digests == {run_of(1).digest}


def test_report_has_the_timeline_of_one_request() -> None:
    lines = simulate_seed(3).report(about="r2").splitlines()
    assert any("Request id=r2" in line for line in lines)
    assert not any("id=r1" in line for line in lines)
    assert lines[-1] == "nothing is wrong"


def test_faults_occur() -> None:
    """The seeds above would prove little if the weather were fine."""
    # One seed in forty lets an engine die, one in twenty a stranger write.
    stories = "\n".join(run_of(seed).report for seed in range(SEEDS))
    for deed in (
        "router-0#1 is killed", "worker-0#1 is killed", "preprocessor-0#1 is killed",
        "gateway-0#1 is killed", "is paused", "falsely suspects", "the group evicts",
        "is asked to stop", "the broker is down", "loses its partitions", "late ", "unreadable",
        "is cut below",
        "WorkerIdTaken", "EngineDead", "the engine stalls", "Fencing", "End id=", "worker_full",
        "queue_full", "reason=broken", "reason=lost", "Cancel id=", "Refused id=", "model=second",
        "code=invalid", "lost its connection", "GET /v1/streams",
        "collector-0#1 is killed", "reason=preempted", "Result id=b",
        "indexer-0#1 is killed", "junk is written into snapshots",
    ):  # fmt: skip
        assert deed in stories, deed


def test_every_scenario_is_drawn() -> None:
    worlds = [WorldParameters.of_seed(seed) for seed in range(3000)]
    assert {name for world in worlds for name in world.scenarios} == {
        *SCENARIO_SHARES,
        *ADDED_SHARES,
    }
    absences = [world.absence for world in worlds if world.absence is not None]
    assert {absence.part for absence in absences} == set(ABSENT_PARTS)
    assert all(absence.ends_s - absence.begins_s > 1200 for absence in absences)


@pytest.mark.parametrize("was_connected", [False, True])
def test_only_a_process_that_never_reached_its_broker_may_end_for_it(was_connected: bool) -> None:
    node: Any = SimpleNamespace(label="r1#1", name="r1", was_connected=was_connected)
    assert bool(list(_failed(_world_of(node, BrokerUnavailable("down"))))) == was_connected


@pytest.mark.parametrize("was_up", [False, True])
@pytest.mark.parametrize("part", ["broker", "router", "worker"])
def test_process_may_end_for_an_absence_of_brokers_or_its_own_during_its_start(
    part: AbsentPart, was_up: bool
) -> None:
    node: Any = SimpleNamespace(
        label="w1#1", name="w1", kind="worker", was_connected=True, was_up=was_up
    )
    absence = Absence(part, 10.0, 1300.0, is_paused=False, is_of_one=False)
    world = _world_of(node, AppendFailed("no acknowledgement"), absence)
    assert bool(list(_failed(world))) == (was_up or part == "router")


def _world_of(node: Any, error: Exception, absence: Absence | None = None) -> Any:
    """A world whose only process has ended."""
    parameters = SimpleNamespace(absence=absence)
    return SimpleNamespace(failures=[(node, error)], processes=[node], parameters=parameters)
