"""Tests of simulation of prefill and decode workers: times and choices of requests that are
handed over.

The times of single requests are those of the offline replay of NVIDIA Dynamo 1.6.1 with the same
engine (512 tokens a block, 2048 blocks), to the last digit that it reports.
"""

from __future__ import annotations

import pytest

from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.perf_curves import PROFILES
from kvlane.app.routing.selection.handover_rules import DEFAULT_RULES
from kvlane.app.routing.selection.routing_config import RoutingConfig, TransferSpeed
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import metrics_of
from kvlane.app.simulation.simulator import Simulator, new_simulator
from kvlane.app.simulation.trace_requests import (
    ArrivalRate,
    SimulatedRequest,
    schedule_arrivals,
    trace_requests,
)
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow
from tests.unit.app.simulation.test_trace_replay import SIMPLE
from workbench.bench.routing.disagg import FLEETS, free_runs_by_profile, free_thresholds, thresholds

ENGINE = EngineLimits(CHUNK_TOKENS, 2048)


def row(timestamp: int, prompt: int, output: int, first_chunk: int) -> TraceRow:
    chunks = [*range(first_chunk, first_chunk - (-prompt // CHUNK_TOKENS))]
    return TraceRow(timestamp=timestamp, input_length=prompt, output_length=output, hash_ids=chunks)


def simulator(
    rows: list[TraceRow],
    prefill_workers: int,
    decode_workers: int,
    policy: str = "round_robin",
    shape: EngineLimits = ENGINE,
) -> Simulator:
    arrivals = schedule_arrivals(rows, trace_requests(rows), ArrivalRate(), 0)
    return new_simulator(
        arrivals, prefill_workers + decode_workers, shape, RoutingConfig(policy), 0,
        prefill_workers=prefill_workers,
    )  # fmt: skip


def times(requests: list[SimulatedRequest]) -> list[tuple[float, float]]:
    return [(each.first_token_ms, each.last_token_ms) for each in requests]


@pytest.mark.parametrize(
    ("prompt", "output", "ttft", "e2e"),
    [
        (1000, 5, 37.897344, 61.063796),
        (1000, 1, 37.897344, 37.897344),
        (5120, 2, 111.279973, 117.283131),
    ],
)
def test_first_token_comes_from_the_decode_worker(
    prompt: int, output: int, ttft: float, e2e: float
) -> None:
    (done,) = simulator([row(0, prompt, output, 0)], 1, 1).run()
    assert times([done]) == [(pytest.approx(ttft, abs=1e-6), pytest.approx(e2e, abs=1e-6))]
    assert (done.prefill_worker, done.worker) == ("worker-0", "worker-1")


def test_requests_join_a_busy_decode_worker_at_its_next_step() -> None:
    rows = [row(0, 1000, 30, 0), row(1, 1000, 5, 10), row(2, 700, 5, 20), row(3, 700, 5, 30)]
    replay = simulator(rows, 2, 1)
    expected = [(37.897, 206.491), (43.740, 67.185), (67.185, 90.642), (67.185, 90.642)]
    for found, (first, last) in zip(times(replay.run()), expected, strict=True):
        assert found == (pytest.approx(first, abs=1e-3), pytest.approx(last, abs=1e-3))
    assert [each.prefill_worker for each in replay.requests] == ["worker-0", "worker-1"] * 2
    assert {each.worker for each in replay.requests} == {"worker-2"}


def test_prompt_that_was_computed_before_is_reused_by_its_prefill_worker() -> None:
    rows = [row(0, 1024, 3, 0), row(5000, 1024, 3, 0), row(9000, 2048, 3, 0)]
    replay = simulator(rows, 1, 1)
    assert [each.cached_tokens for each in replay.run()] == [0, 512, 1024]
    firsts = [each.first_token_ms for each in replay.requests]
    assert firsts == pytest.approx([38.283, 5030.178, 9038.336], abs=1e-3)


@pytest.mark.parametrize("policy", ["predictive", "dynamo"])
def test_no_block_is_held_at_the_end(policy: str) -> None:
    rows = [row(40 * n, 1500 + 100 * (n % 7), 1 + 9 * (n % 5), 100 * (n % 11)) for n in range(120)]
    replay = simulator(rows, 2, 2, policy)
    done = replay.run()
    assert all(each.held is None for each in done)
    assert [worker.state.cache.used_blocks for worker in replay.workers] == [0] * 4
    assert {each.prefill_worker for each in done} == {"worker-0", "worker-1"}
    assert {each.worker for each in done} == {"worker-2", "worker-3"}


def test_blocks_stay_at_the_prefill_worker_until_the_decode_worker_has_room() -> None:
    shape = SIMPLE._replace(block_size=CHUNK_TOKENS, cache_blocks=8, max_batched_tokens=8192)
    rows = [row(0, 2048, 600, 0), row(1, 2000, 3, 10), row(2, 2000, 3, 20)]
    replay = simulator(rows, 1, 1, shape=shape)
    first, second, third = replay.run()
    assert (
        third.first_token_ms > second.last_token_ms or second.first_token_ms > first.last_token_ms
    )
    assert all(worker.state.cache.used_blocks == 0 for worker in replay.workers)


def test_policy_predictive_balances_decode_workers() -> None:
    rows = [row(200 * n, 2000, 200, 100 * n) for n in range(200)]
    replays = {policy: simulator(rows, 2, 3, policy) for policy in ("predictive", "random")}
    even, drawn = (metrics_of(each.run(), each.workers) for each in replays.values())
    assert even.itl_p99 is not None
    assert drawn.itl_p99 is not None
    assert even.itl_p99 < drawn.itl_p99
    assert even.itl_mean < drawn.itl_mean


def test_free_roles_hand_over_what_costs_less_apart_and_hold_no_block_at_the_end() -> None:
    rows = [row(15 * n, 500, 300, 1000 * n) for n in range(400)]
    rows += [row(1500 + 400 * n, 30_000, 20, 1_000_000 * n + 999_000) for n in range(1, 11)]
    rows.sort(key=lambda each: each.timestamp)
    arrivals = schedule_arrivals(rows, trace_requests(rows), ArrivalRate(), 0)
    config = RoutingConfig(objective="throughput")
    slow = NetworkConditions(transfer=TransferSpeed(bytes_per_s=12.5e9))
    replay = new_simulator(
        arrivals, 4, ENGINE, config, 0, conditions=slow, handover_rules=DEFAULT_RULES
    )
    done = replay.run()
    split = [each for each in done if each.prefill_worker]
    assert 0 < len(split) < len(done)
    assert all(each.prefill_worker != each.worker for each in split)
    assert all(each.held is None for each in done)
    assert [worker.state.cache.used_blocks for worker in replay.workers] == [0] * 4


def test_transfer_delays_first_token() -> None:
    rows = [row(0, 5120, 2, 0)]
    arrivals = schedule_arrivals(rows, trace_requests(rows), ArrivalRate(), 0)
    speed = TransferSpeed(bytes_per_s=12.5e9, latency_ms=2.0)
    (done,) = new_simulator(
        arrivals, 2, ENGINE, RoutingConfig("round_robin"), 0, prefill_workers=1,
        conditions=NetworkConditions(transfer=speed),
    ).run()  # fmt: skip
    assert done.first_token_ms == pytest.approx(111.279973 + 2 + 5120 * 131_072 / 12.5e6)


def test_bars_of_free_roles_are_figures_of_whole_requests() -> None:
    whole = FLEETS[0].round_robin
    steady = whole._replace(itl_p99=0.8 * (whole.itl_p99 or 0), ttft_mean=2 * whole.ttft_mean)
    assert all(each.passed for each in free_thresholds("8", whole, whole, steady))
    assert not any(each.passed for each in free_thresholds("8"))
    slower = whole._replace(ttft_mean=1.01 * whole.ttft_mean)
    failed = [each.name for each in free_thresholds("8", whole, slower, steady) if not each.passed]
    assert failed == ["8: free roles, mean TTFT to that of whole requests"]


def test_free_roles_are_compared_on_each_profile_of_engines() -> None:
    whole = FLEETS[0].run_of("predictive", is_split=False)
    found = dict(free_runs_by_profile("8", whole))
    assert [*found] == ["8", "8, h100"]
    for runs, curves in zip(found.values(), PROFILES.values(), strict=True):
        assert {run.curves for run in runs} == {curves}
        assert [run.handover_rules for run in runs] == [None, DEFAULT_RULES, DEFAULT_RULES]


def test_thresholds_are_the_published_figures() -> None:
    fleet = FLEETS[0]
    same = fleet.round_robin._replace(
        ttft_mean=fleet.kv_router.ttft_mean,
        e2e_mean=fleet.kv_router.e2e_mean,
        itl_p99=fleet.kv_router.itl_p99,
    )
    assert all(each.passed for each in thresholds(fleet, fleet.round_robin, same))
    assert not any(each.passed for each in thresholds(fleet))
    slower = same._replace(itl_p99=fleet.kv_router.itl_p99 + 0.1)
    failed = [each for each in thresholds(fleet, fleet.round_robin, slower) if not each.passed]
    assert [each.name for each in failed] == ["4+4 x1: p99 ITL to that of the KV router"]
