"""Whole deployments under seeded faults. A seed that fails prints its history and replays exactly:
`kvlane bench faults --replay SEED`."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.curves import Curves
from app.faults import shape
from app.faults.invariants import _failed
from app.faults.simulation import simulate
from app.lanes.places import Places, Wanted
from app.routing import paces
from app.routing.decisions import Hold
from streams.errors import BrokerUnavailable

SEEDS = 100
AT_ONCE = 10
FOUND = (703720, 704262, 708607)
"""What waited for its next cache events spun: so little was left that no clock could tell."""


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_request_ends_once_and_right(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        verdict = simulate(seed)
        assert not verdict.problems, verdict.report()


def test_requests_that_routers_hold_end_once_and_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short: only engines that are very slow keep anybody waiting."""
    slow = Curves(prefill=(0.0, 60.0, 0.0), decode=(0.0, 0.0, 5.0))
    monkeypatch.setattr(paces, "_believed", lambda _: slow)
    for name in ("ROOMY", "CRAMPED"):
        held = {"policy": "predictive", "max_hold_s": 4.0}
        monkeypatch.setattr(shape, name, getattr(shape, name).model_copy(update=held))
    holds = []
    change = Places.change

    async def counted(self: Places, wanted: Wanted, hold: Hold) -> None:
        holds.append(hold.planned is not None)
        await change(self, wanted, hold)

    monkeypatch.setattr(Places, "change", counted)
    for seed in range(20):
        verdict = simulate(seed)
        assert not verdict.problems, verdict.report()
    assert sum(holds) > 100


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something_once_is_clean(seed: int) -> None:
    verdict = simulate(seed)
    assert not verdict.problems, verdict.report()


def test_seed_replays_exactly() -> None:
    assert [simulate(s).history.digest() for s in range(5)] == [
        simulate(s).history.digest() for s in range(5)
    ]


def test_seeds_differ() -> None:
    assert len({simulate(s).history.digest() for s in range(5)}) == 5


def test_seed_replays_in_other_processes() -> None:
    """Their sets of strings are in another order."""
    script = "from app.faults.simulation import simulate as s\nprint(s(1).history.digest())"
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
    assert digests == {simulate(1).history.digest()}


def test_report_tells_the_story_of_one_request() -> None:
    lines = simulate(3).report(about="r2").splitlines()
    assert any("Request id=r2" in line for line in lines)
    assert not any("id=r1" in line for line in lines)
    assert lines[-1] == "nothing is wrong"


def test_faults_really_happen() -> None:
    """The seeds above would prove little if the weather were fine."""
    # One seed in forty lets an engine die, one in twenty a stranger write.
    stories = "\n".join(simulate(seed).report() for seed in range(120))
    for deed in (
        "router-0#1 is killed", "worker-0#1 is killed", "preprocessor-0#1 is killed",
        "gateway-0#1 is killed", "is paused", "accuses", "the group gives up", "is asked to stop",
        "the broker is down", "is deposed", "late ", "unreadable", "is cut below",
        "NameTaken", "EngineDead", "the engine stalls", "Fencing", "End id=", "worker_full",
        "queue_full", "reason=broken", "reason=lost", "Cancel id=", "Refused id=", "model=second",
        "code=invalid", "lost its connection", "GET /v1/streams",
        "indexer-0#1 is killed", "a stranger writes into snapshots",
    ):  # fmt: skip
        assert deed in stories, deed


@pytest.mark.parametrize("was_connected", [False, True])
def test_only_a_process_that_never_reached_its_broker_may_end_for_it(was_connected: bool) -> None:
    node: Any = SimpleNamespace(label="r1#1", name="r1", was_connected=was_connected)
    world: Any = SimpleNamespace(failures=[(node, BrokerUnavailable("down"))], nodes=[node])
    assert bool(list(_failed(world))) == was_connected
