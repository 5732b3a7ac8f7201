"""Tests of the usage that collectors write, with the log in memory."""

from __future__ import annotations

from kvlane.streams.codecs import decode
from kvlane.streams.records import Ended, RequestUsage
from kvlane.streams.topics import LEDGER, USAGE
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
