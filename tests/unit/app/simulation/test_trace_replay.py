"""Tests of traces on simulated fleets: figures by hand, and invariants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.engine.simulated.batch import BatchSequence, EngineLimits, PerfCurves
from kvlane.app.routing.queueing import router_queue
from kvlane.app.routing.selection.decision import Decision, Rejection, Wait
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import select_worker
from kvlane.app.simulation import simulated_worker
from kvlane.app.simulation.simulated_router import NetworkConditions, SimulationFailed
from kvlane.app.simulation.simulated_worker import SimulatedWorker
from kvlane.app.simulation.simulation_runs import (
    SIMULATED,
    PreparedTrace,
    SimulationRun,
    metrics_of,
    run_requests,
)
from kvlane.app.simulation.simulator import Simulator, new_simulator
from kvlane.app.simulation.synthetic_traces import TraceSize, generate_trace
from kvlane.app.simulation.trace_requests import (
    ArrivalRate,
    SimulatedRequest,
    schedule_arrivals,
    trace_requests,
    uses_sessions,
)
from kvlane.app.traces.mooncake_trace import InvalidTrace, TraceRow
from kvlane.indexer.epochs import CacheId, Overlap

# A step takes 10 ms and a hundredth of one a new token, and 4 ms more if anybody decodes.
SIMPLE = EngineLimits(512, 64, curves=PerfCurves(prefill=(0.0, 0.01, 10.0), decode=(0.0, 0.0, 4.0)))
RECORDED = ArrivalRate()


def row(at_ms: float, tokens: int, output: int, first: int = 0) -> TraceRow:
    return TraceRow(at_ms, tokens, output, list(range(first, first - (-tokens // 512))))


def played(
    rows: list[TraceRow], workers: int = 1, policy: str = "dynamo", seed: int = 0,
    shape: EngineLimits = SIMPLE, pace: ArrivalRate = RECORDED,
) -> list[SimulatedRequest]:  # fmt: skip
    requests = trace_requests(rows, with_sessions=uses_sessions(policy))
    coming = schedule_arrivals(rows, requests, pace, seed)
    return new_simulator(coming, workers, shape, RoutingConfig(policy), seed).run()


def got(requests: list[SimulatedRequest]) -> list[tuple[Any, ...]]:
    return [
        (x.id, x.worker, x.sent_ms, x.first_token_ms, x.last_token_ms, x.cached_tokens)
        for x in requests
    ]


# --- by hand -------------------------------------------------------------------------------------


def test_lone_request_takes_its_prefill_and_a_step_a_token() -> None:
    (each,) = played([row(100, 1000, 3)])
    assert each.first_token_ms == pytest.approx(100 + 20)
    assert each.last_token_ms == pytest.approx(100 + 20 + 2 * 4)


def test_two_requests_share_steps_and_the_cached_beginning() -> None:
    requests = played([row(0, 1000, 3), row(5, 1000, 3)])
    # The second waits for the step that the first is in (20), finds 512 tokens, computes 488 in a
    # step that decodes as well (10 + 4.88 + 4), and decodes twice beside or after the first.
    assert [x.first_token_ms for x in requests] == pytest.approx([20, 38.88])
    assert [x.last_token_ms for x in requests] == pytest.approx([42.88, 46.88])
    found = metrics_of(requests)
    assert found.requests == 2
    assert found.reuse == 512 / 2000
    assert found.ttft_mean == pytest.approx((20 + 33.88) / 2)
    assert found.ttft_p50 == pytest.approx((20 + 33.88) / 2)
    assert found.ttft_p99 == pytest.approx(20 + 0.99 * 13.88)
    assert found.itl_mean == pytest.approx((22.88 + 8) / 4)
    assert found.e2e_mean == pytest.approx((42.88 + 41.88) / 2)


def test_round_robin_takes_turns_and_simultaneous_requests_share_a_step() -> None:
    requests = played([row(0, 100, 1, 10 * i) for i in range(5)], workers=2, policy="round_robin")
    assert [x.worker for x in requests] == [f"worker-{i}" for i in (0, 1, 0, 1, 0)]
    assert [x.first_token_ms for x in requests] == pytest.approx([13, 12, 13, 12, 13])


def test_workers_are_in_the_order_of_their_numbers() -> None:
    requests = played([row(0, 100, 1, i) for i in range(11)], workers=11, policy="round_robin")
    assert [int(x.worker.removeprefix("worker-")) for x in requests] == list(range(11))


def test_request_goes_where_its_beginning_is_cached() -> None:
    rows = [row(0, 5000, 1), row(0, 5000, 1, 100), row(5000, 5100, 1, 100), row(9000, 5200, 1)]
    one, two, again_two, again_one = played(rows, workers=2)
    assert one.worker != two.worker
    assert (again_two.worker, again_one.worker) == (two.worker, one.worker)
    assert (again_two.cached_tokens, again_one.cached_tokens) == (9 * 512, 9 * 512)


def test_evicted_blocks_are_not_expected() -> None:
    small = SIMPLE._replace(cache_blocks=10)
    rows = [row(0, 5000, 1), row(5000, 5000, 1, 100), row(9000, 5000, 1)]
    assert [x.cached_tokens for x in played(rows, shape=small)] == [0, 0, 0]


def test_session_stays_where_it_is() -> None:
    rows = [TraceRow(1000.0 * i, 1024, 1, [0, 1 + i % 3]) for i in range(30)]  # three conversations
    requests = played(rows, workers=8, policy="session_hash")
    assert [x.worker for x in requests[3:]] == [x.worker for x in requests[:-3]]


@given(st.lists(st.builds(row, st.just(0), st.integers(1, 9000), st.just(9)), min_size=2))
def test_simultaneous_requests_are_placed_as_they_would_be_one_by_one(rows: list[TraceRow]) -> None:
    at_once, one_by_one = (
        got(new_simulator(coming, 3, SIMPLE, RoutingConfig("predictive"), 0).run())
        for coming in (
            schedule_arrivals(rows, trace_requests(rows, with_sessions=named), RECORDED, 0)
            for named in (False, True)
        )
    )
    assert at_once == one_by_one


def test_speed_brings_arrivals_together_and_leaves_engines_unchanged() -> None:
    (each,) = played([row(1000, 1000, 3)], pace=ArrivalRate(speed=4))
    assert (each.arrived_ms, each.last_token_ms) == (250, pytest.approx(278))


def test_jitter_delays_arrivals_by_less_than_its_bound_and_by_the_seed() -> None:
    rows = [row(0, 100, 1, i) for i in range(50)]
    requests = played(rows, pace=ArrivalRate(speed=2, jitter_s=3))
    times = [x.arrived_ms for x in requests]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 1500
    assert [x.arrived_ms for x in played(rows, pace=ArrivalRate(2, 3), seed=1)] != times


# --- always --------------------------------------------------------------------------------------

ROWS = st.lists(
    st.builds(
        row,
        at_ms=st.integers(0, 2000),
        tokens=st.integers(1, 6000),
        output=st.integers(0, 300),
        first=st.sampled_from([0, 0, 100, 200]),
    ),
    min_size=1,
    max_size=25,
)


@given(
    ROWS, st.sampled_from(SIMULATED), st.integers(1, 4), st.integers(0, 3), st.sampled_from([0, 2])
)
def test_every_request_ends_the_same_way_every_time(
    rows: list[TraceRow], policy: str, workers: int, seed: int, jitter_s: float
) -> None:
    shape = SIMPLE._replace(cache_blocks=20, max_sequences=4)

    def play() -> list[SimulatedRequest]:
        return played(rows, workers, policy, seed, shape, ArrivalRate(1.0, jitter_s))

    requests = play()
    assert sorted(x.id for x in requests) == [f"{i:06}" for i in range(len(rows))]
    for each in requests:
        assert (
            each.arrived_ms <= each.sent_ms < each.first_token_ms <= each.last_token_ms < math.inf
        )
        assert 0 <= each.cached_tokens < each.request.prompt.tokens
    assert got(play()) == got(requests)


@given(ROWS, st.sampled_from(SIMULATED))
def test_batching_of_quiet_steps_changes_nothing(rows: list[TraceRow], policy: str) -> None:
    together = got(played(rows, 2, policy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_worker, "MIN_BATCHED_STEPS", 10**9)
        assert got(played(rows, 2, policy)) == together


@given(ROWS, st.sampled_from(SIMULATED))
def test_final_router_state_equals_the_caches(rows: list[TraceRow], policy: str) -> None:
    requests = trace_requests(rows)
    played_out = new_simulator(
        schedule_arrivals(rows, requests, RECORDED, 0),
        2,
        SIMPLE._replace(cache_blocks=14),
        RoutingConfig(policy),
        0,
    )
    played_out.run()
    played_out.shared_views.apply_cache_changes()
    for request in requests:
        known = played_out.shared_views.kv_index.overlaps(request.prompt.local_hashes(512))
        for each in played_out.workers:
            held = each.state.cache.match(request.chunks, len(request.chunks)).blocks
            assert known.get(CacheId(each.name, 0), Overlap()).device == held
    assert not any(router.ledger.state.active_load for router in played_out.routers)


# --- a worker ------------------------------------------------------------------------------------


def decoding(output: int) -> SimulatedWorker:
    """A worker with one request, from its first token at 11 ms on; each one more takes 4."""
    alone = SimulatedWorker("alone", 0, SIMPLE)
    alone.admit(BatchSequence("first", 100, output), 0.0)
    alone.begin(0.0)
    assert alone.ends_at_ms == 11
    alone.end()
    alone.begin(11.0)
    return alone


@pytest.mark.parametrize(("at_ms", "joins_ms"), [(11.5, 15), (14.9, 15), (15, 19), (18, 19)])
def test_request_that_arrives_in_quiet_steps_waits_for_the_end_of_one(
    at_ms: float, joins_ms: float
) -> None:
    alone = decoding(100)
    assert alone.ends_at_ms > 100
    alone.admit(BatchSequence("second", 100, 1), at_ms)
    assert alone.ends_at_ms == joins_ms
    alone.end()
    alone.begin(joins_ms)
    assert alone.ends_at_ms == joins_ms + 11 + 4


@pytest.mark.parametrize("output", [3, 100])
@pytest.mark.parametrize(("at_ms", "tokens"), [(11, 1), (14.9, 1)])
def test_tokens_of_the_current_step_do_not_count_yet(
    output: int, at_ms: float, tokens: int
) -> None:
    assert decoding(output).output_tokens(at_ms) == tokens


def test_tokens_count_when_their_quiet_step_has_ended() -> None:
    alone = decoding(100)
    assert [alone.output_tokens(at_ms) for at_ms in (15.1, 18.9, 19.1)] == [2, 2, 3]


# --- holding -------------------------------------------------------------------------------------


def holding(
    monkeypatch: pytest.MonkeyPatch, until: Callable[[str, Any], Wait | Rejection | None]
) -> None:
    """Requests go where they would, but first `until` is asked, with the id and the view."""

    def planned(prompt: Any, view: Any, tuning: Any, **about: Any) -> Decision:
        return until(prompt.request.id, view) or select_worker(prompt, view, tuning, **about)

    monkeypatch.setattr(router_queue, "select_worker", planned)


def second_until_prefilled(name: str, view: Any) -> Wait | None:
    """Hold the second request while the worker has a prefill."""
    busy = view.committed.total("worker-0", 0).prefill_tokens
    return Wait("busy") if name == "000001" and busy else None


def test_waiting_request_is_retried_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda _, view: Wait("later", 70) if view.now_ms < 70 else None)
    (each,) = played([row(0, 1000, 1)])
    assert (each.sent_ms, each.first_token_ms) == (70, pytest.approx(90))


def test_waiting_request_is_retried_when_another_gets_a_token_and_joins_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holding(monkeypatch, second_until_prefilled)
    _, held = played([row(0, 1000, 9), row(0, 1000, 9, 100)])
    assert held.sent_ms == pytest.approx(20)
    assert held.first_token_ms == pytest.approx(20 + 20 + 4)


def test_retry_time_in_the_past_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda _, view: Wait("now", 0) if view.now_ms < 5 else None)
    (each,) = played([row(0, 1000, 1)])
    assert each.sent_ms == 5


def test_requests_that_wait_forever_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda *_: Wait("never"))
    with pytest.raises(SimulationFailed, match="2 requests are never scheduled"):
        played([row(0, 100, 1), row(1, 100, 1)])


def test_policy_predictive_delays_the_longer_of_two_and_none_forever() -> None:
    rows = [row(0, 8000, 1), row(1, 8000, 1, 100), row(2, 3000, 1, 200)]
    requests = played(rows, policy="predictive")
    first, long, short = requests
    assert first.sent_ms == 0
    assert first.sent_ms < short.sent_ms < long.sent_ms
    assert short.sent_ms == pytest.approx(first.first_token_ms, abs=1)


def test_under_policy_predictive_the_shortest_of_simultaneous_requests_goes_first() -> None:
    rows = [row(0, 8000, 1), row(0, 3000, 1, 100), row(0, 5000, 1, 200)]
    long, short, middle = played(rows, policy="predictive")
    assert short.sent_ms == 0
    assert short.sent_ms < middle.sent_ms < long.sent_ms


def test_refusal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda *_: Rejection("invalid", "because"))
    with pytest.raises(SimulationFailed, match="000000 was rejected: because"):
        played([row(0, 100, 1)])


def test_request_that_no_cache_can_hold_is_reported() -> None:
    with pytest.raises(InvalidTrace, match="000000 fits no worker"):
        played([row(0, 64 * 512, 2)])


# --- what takes time -----------------------------------------------------------------------------


def under(
    conditions: NetworkConditions, rows: list[TraceRow], workers: int = 1, policy: str = "dynamo"
) -> list[SimulatedRequest]:
    coming = schedule_arrivals(rows, trace_requests(rows), RECORDED, 0)
    return new_simulator(
        coming, workers, SIMPLE, RoutingConfig(policy), 0, conditions=conditions
    ).run()


def test_hop_comes_before_the_prefill_and_is_no_part_of_measured_times() -> None:
    rows = [row(0, 1000, 1), row(100, 1000, 1, 100)]
    one, two = under(NetworkConditions(dispatch_delay_ms=3), rows)
    assert (one.sent_ms, one.first_token_ms) == (0, pytest.approx(23))
    assert (two.sent_ms, two.first_token_ms) == (100, pytest.approx(123))


def test_requests_that_hop_together_share_a_step() -> None:
    requests = under(
        NetworkConditions(dispatch_delay_ms=3), [row(0, 1000, 1), row(0, 1000, 1, 100)]
    )
    assert [x.first_token_ms for x in requests] == pytest.approx([33, 33])


def test_waiting_request_is_retried_when_new_records_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holding(monkeypatch, second_until_prefilled)
    rows = [row(0, 1000, 9), row(0, 1000, 9, 100)]
    _, held = under(NetworkConditions(event_delay_ms=7), rows)
    assert held.sent_ms == pytest.approx(27)


def test_late_record_counts_from_its_event_time() -> None:
    rows = [row(0, 1000, 1), row(500, 1000, 1)]
    coming = schedule_arrivals(rows, trace_requests(rows), RECORDED, 0)
    late = new_simulator(
        coming,
        1,
        SIMPLE,
        RoutingConfig("dynamo"),
        0,
        conditions=NetworkConditions(event_delay_ms=100),
    )
    seen = []
    late.routers[0].ledger.on_record = lambda record, at_ms: seen.append(  # type: ignore[method-assign]
        (type(record).__name__, at_ms)
    )
    late.run()
    assert seen[:3] == [("Assigned", 0), ("PrefillDone", 20), ("Finished", 20)]


def workers_of(conditions: NetworkConditions, gap_ms: float) -> list[str]:
    """Where eight requests go that come one by one, to two workers."""
    rows = [row(gap_ms * i, 5000, 1, 100 * i) for i in range(8)]
    return [x.worker for x in under(conditions, rows, 2, "least_loaded")]


def test_router_counts_its_own_decisions_at_once() -> None:
    late = workers_of(NetworkConditions(ledger_lag_ms=50), 1.0)
    assert late == workers_of(NetworkConditions(), 1.0)
    assert len(set(late[:2])) == 2


def test_router_counts_decisions_of_others_when_it_reads_them() -> None:
    rows = [row(i, 5000, 1, 100 * i) for i in range(30)]
    late = under(NetworkConditions(routers=2, ledger_lag_ms=1000), rows, 2, "least_loaded")
    assert {x.router for x in late} == {0, 1}
    for number in (0, 1):  # each divides its own as if it were alone
        own = [x.worker for x in late if x.router == number]
        counts = {simulated_worker: own.count(simulated_worker) for simulated_worker in own}
        assert max(counts.values()) - min(counts.values()) <= 1
    alone = under(NetworkConditions(routers=2), rows, 2, "least_loaded")
    assert [x.worker for x in alone] == [
        x.worker for x in under(NetworkConditions(), rows, 2, "least_loaded")
    ]


def test_routers_without_a_shared_ledger_count_their_own_requests_only() -> None:
    apart = NetworkConditions(routers=2, shares_ledger=False)
    coming = schedule_arrivals(
        rows := [row(i, 100, 1) for i in range(20)], trace_requests(rows), RECORDED, 0
    )
    replay = new_simulator(coming, 2, SIMPLE, RoutingConfig("dynamo"), 0, conditions=apart)
    received: list[set[str]] = [set(), set()]
    for router, own in zip(replay.routers, received, strict=True):
        router.ledger.on_record = lambda record, _, own=own: own.add(record.id)  # type: ignore[misc]
    requests = replay.run()
    assert received == [{x.id for x in requests if x.router == n} for n in (0, 1)]


@pytest.mark.parametrize("seed", [0, 1])
def test_engines_faster_than_their_profile_all_get_requests(seed: int) -> None:
    trace = PreparedTrace(generate_trace("shared-prefixes", TraceSize(1000)))
    twice_as_fast = PerfCurves((2.1e-7, 7.592e-3, 8.251), (-12.87, 27.0, 2.87), 0.5)
    run = SimulationRun("predictive", 6, seed=seed, curves=twice_as_fast, warmup_requests=400)
    requests = run_requests(
        trace, run._replace(conditions=NetworkConditions(publishes_curves=False))
    )
    shares = Counter(each.worker for each in requests)
    assert len(shares) == 6
    assert min(shares.values()) > 30


CONDITIONS = st.builds(
    NetworkConditions,
    dispatch_delay_ms=st.sampled_from([0, 1]),
    event_delay_ms=st.sampled_from([0, 5, 300]),
    routers=st.integers(1, 3),
    ledger_lag_ms=st.sampled_from([0, 5]),
    shares_ledger=st.booleans(),
    publishes_curves=st.booleans(),
)


@given(ROWS, st.sampled_from(SIMULATED), CONDITIONS)
def test_every_request_ends_and_no_load_remains_despite_delays(
    rows: list[TraceRow], policy: str, conditions: NetworkConditions
) -> None:
    shape = SIMPLE._replace(cache_blocks=20, max_sequences=4)

    def play() -> Simulator:
        coming = schedule_arrivals(rows, trace_requests(rows), RECORDED, 0)
        return new_simulator(coming, 2, shape, RoutingConfig(policy), 0, conditions=conditions)

    once, again = play(), play()
    requests = once.run()
    assert len(requests) == len(rows)
    assert all(
        x.sent_ms + conditions.dispatch_delay_ms < x.first_token_ms < math.inf for x in requests
    )
    assert got(again.run()) == got(requests)
    for router in once.routers:
        assert not router.queue.inputs.unconfirmed
        assert not router.ledger.state.active_load
        assert (router.queue.reservations, router.waiting_count) == (0, 0)
