"""Tests of the usage that collectors write and `kvlane usage` reads, with the log in memory."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import Ended, RequestUsage
from kvlane.streams.topics import LEDGER, USAGE
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

AWAY_S = 1500.0
"""Longer than the window of ids."""


def end(results: ResultsHarness, request_id: str) -> None:
    record = Ended(id=request_id, code="invalid")
    results.world.append(LEDGER, results.lane("a"), record, key=request_id)


def usage_ids(world: MemoryWorld) -> list[str]:
    found = map(decode, world.all_records(USAGE))
    return [each.id for each in found if isinstance(each, RequestUsage)]


@scenario_test
async def test_id_is_known_after_a_restart_from_its_end_on_not_from_its_usage_on(
    world: MemoryWorld,
) -> None:
    """The collector was away for longer than the window of ids."""
    results = ResultsHarness(world)
    end(results, "a")
    await world.sleep(AWAY_S)
    await results.start()
    await world.wait_until(lambda: usage_ids(world) == ["a"])
    await results.kill()
    end(results, "b")
    end(results, "a")
    await results.start()
    await world.wait_until(lambda: usage_ids(world) == ["a", "b", "a"])


@scenario_test
async def test_id_that_is_used_again_before_its_usage_is_written_has_both(
    world: MemoryWorld,
) -> None:
    results = ResultsHarness(world)
    end(results, "a")
    await world.sleep(AWAY_S)
    end(results, "b")
    end(results, "a")
    await results.start()
    await world.wait_until(lambda: usage_ids(world) == ["a", "b", "a"])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    broker = connect_commands(MemoryBroker(SystemClock(), lanes=2), monkeypatch)
    now_ms = broker.now_ms()
    for lane in (0, 0, 1):
        usage = RequestUsage(id="a", code="stop", ended_ms=now_ms, tenant="acme", prompt_tokens=3)
        broker.append(USAGE, lane, [encode(usage, "a")])
    return broker


def test_usage_names_the_time_before_which_none_is_kept(memory: MemoryBroker) -> None:
    def usage(*arguments: str) -> tuple[dict[str, object], str]:
        shown = CliRunner().invoke(app, ["usage", "--json", "-", *arguments])
        return json.loads(shown.stdout), shown.stderr

    whole, words = usage()
    assert whole["kept_from_ms"] is None
    assert "kept" not in words
    memory.delete_records(USAGE, 0, 1)
    found, words = usage()
    assert found["usage"][0]["requests"] == 2  # type: ignore[index]
    assert found["kept_from_ms"] == memory.records(USAGE, 0)[0].timestamp
    assert "no longer kept" in words
    later, words = usage("--since", str(memory.now_ms() + 1))
    assert later["kept_from_ms"] is None
