"""Tests of the choice between one worker for a request and two: costs, fallbacks, and its
record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvlane.app.audit.cost_terms import reasons_for
from kvlane.app.audit.recompute import find_difference
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.selection.cost_kernels import COMPARED, DECODE_PART, PREFILL_PART
from kvlane.app.routing.selection.decision import Placement, RoutingState
from kvlane.app.routing.selection.handover_rules import (
    DEFAULT_RULES,
    FirstPhase,
    HandOverRules,
    decode_request,
    first_phase,
    is_handed_over,
    recompute_choice_costs,
)
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import recorded_features, select_worker
from kvlane.app.routing.state.performance import PerformanceModel, PrefillShares
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assigned, LogRecord, PrefillDone
from kvlane.streams.request import Hints, Request
from tests.harness.routing_harness import NOW_MS, RoutingHarness, to_assigned
from workbench.bench.routing import cost_reference

PREDICTIVE = RoutingConfig()
ENGINE = {
    "curve": PerfCurves().coefficients(),
    "total_kv_blocks": 4096,
    "max_num_batched_tokens": 8192,
    "transfer_bytes_per_token": 100_000,
}
LONG = Request(id="a", model="m", token_ids=pack_tokens(list(range(8000))))


def free_worker(routing: RoutingHarness, name: str, **engine: Any) -> None:
    routing.worker(name, engine=ENGINE | engine)


def state(routing: RoutingHarness, **known: Any) -> RoutingState:
    base = RoutingState(
        routing.fleet, routing.pools, routing.index, routing.got, routing.own, NOW_MS
    )
    return replace(base, **known)


def begun(
    routing: RoutingHarness, request: Request = LONG, rules: HandOverRules = DEFAULT_RULES,
    config: RoutingConfig = PREDICTIVE, *, stays_whole: bool = False, **known: Any,
) -> FirstPhase:  # fmt: skip
    return first_phase(
        PromptHashes(request), state(routing, **known), config, rules, seed=1,
        stays_whole=stays_whole,
    )  # fmt: skip


def decided(routing: RoutingHarness, first: FirstPhase) -> Assigned:
    planned = select_worker(
        PromptHashes(LONG), state(routing), PREDICTIVE, seed=1, phase=first.phase
    )
    assert isinstance(planned, Placement)
    return to_assigned(planned, phase=first.phase, choice=first.choice)


def with_many_decodes(routing: RoutingHarness, *names: str, runs: int = 100) -> None:
    for name in names:
        for _ in range(runs):
            routing.add_load(name, 100)


def test_long_prompt_is_computed_away_from_decodes_and_handed_over(routing: RoutingHarness) -> None:
    free_worker(routing, "busy")
    free_worker(routing, "idle")
    with_many_decodes(routing, "busy", runs=300)
    shares = PrefillShares()
    shares.add("idle", 1900.0, NOW_MS)
    found = begun(routing, prefill_shares=shares)
    assert found.phase == "prefill"
    assert found.choice is not None
    assert found.choice.prefill.worker == "idle"
    assert found.choice.decode.worker == "busy"


def test_request_stays_whole_where_transfer_only_costs_time(routing: RoutingHarness) -> None:
    free_worker(routing, "w1")
    free_worker(routing, "w2")
    found = begun(routing)
    assert found.phase == "aggregated"
    assert found.choice is not None
    assert found.choice.params["transfer_ms"] == pytest.approx(1 + 8000 * 100_000 / 12.5e6)


def test_slow_network_keeps_request_whole(routing: RoutingHarness) -> None:
    for name in ("busy", "idle"):
        free_worker(routing, name)
    with_many_decodes(routing, "busy", runs=300)
    shares = PrefillShares()
    shares.add("idle", 1900.0, NOW_MS)
    assert begun(routing, prefill_shares=shares).phase == "prefill"
    slow = begun(routing, prefill_shares=shares, transfer_token_ms=1.0)
    assert slow.phase == "aggregated"
    assert slow.choice is not None
    assert slow.choice.params["transfer_ms"] == 8000.0


@pytest.mark.parametrize("over", [{"transfer_lease_s": None}, {"curve": None}])
def test_aggregated_workers_without_transfers_or_curves_get_whole_requests(
    routing: RoutingHarness, over: dict[str, Any]
) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name, **over)
    assert begun(routing) == FirstPhase("aggregated")


def test_one_worker_alone_gets_whole_requests(routing: RoutingHarness) -> None:
    free_worker(routing, "w1")
    assert begun(routing) == FirstPhase("aggregated")


def test_request_that_failed_stays_whole(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name)
    assert begun(routing, stays_whole=True) == FirstPhase("aggregated")


def test_other_policies_hand_over_by_thresholds_to_prefill_workers_only(
    routing: RoutingHarness,
) -> None:
    dynamo = RoutingConfig("dynamo")
    for name in ("w1", "w2"):
        free_worker(routing, name)
    assert begun(routing, config=dynamo) == FirstPhase("aggregated")
    routing.worker("p", role="prefill", engine=dict(ENGINE))
    assert begun(routing, config=dynamo) == FirstPhase("prefill")


def test_prefill_workers_that_are_behind_by_more_than_a_step_are_passed_over(
    routing: RoutingHarness,
) -> None:
    engine = {**ENGINE, "curve": None}
    routing.worker("p", role="prefill", engine=dict(engine))
    routing.worker("d", role="decode", engine=dict(engine))
    assert begun(routing) == FirstPhase("prefill")
    routing.add_load("p", 9000, prefill=8193, since_ms=NOW_MS)
    assert begun(routing) == FirstPhase("aggregated")
    routing.add_load("d", 9000, prefill=8193, since_ms=NOW_MS)
    assert begun(routing) == FirstPhase("prefill")


def test_worker_does_not_fetch_from_itself(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name)
    with_many_decodes(routing, "w2")
    prompt = PromptHashes(decode_request(LONG, "w1", b"{}", 0))
    planned = select_worker(prompt, state(routing), PREDICTIVE, seed=1, phase="decode")
    assert isinstance(planned, Placement)
    assert planned.worker_rank.worker == "w2"
    assert planned.params["transfer_ms"] == pytest.approx(65.0)


def test_pinned_prefill_worker_without_transfers_is_refused(routing: RoutingHarness) -> None:
    free_worker(routing, "w1", transfer_lease_s=None)
    request = replace(LONG, hints=Hints(prefill_worker_id="w1"))
    found = routing.plan("predictive", request=request, phase="prefill")
    assert getattr(found, "message", "") == "the pinned worker w1 transfers no KV caches"


LOADS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 30_000), st.integers(0, 9000), st.floats(0, 3000)),
    min_size=2,
    max_size=5,
)


@given(LOADS, st.floats(1, 5), st.sampled_from([None, 0.0, 0.01]))
def test_choice_is_recomputed_from_its_record_and_by_plain_formulas(
    loads: list[tuple[int, int, int, float]], followups: float, token_ms: float | None
) -> None:
    routing, shares = RoutingHarness(), PrefillShares()
    for n, (runs, tokens, prefill, prefill_ms) in enumerate(loads):
        free_worker(routing, f"w{n}")
        shares.add(f"w{n}", prefill_ms, NOW_MS)
        for _ in range(runs):
            routing.add_load(f"w{n}", tokens)
        if prefill:
            routing.add_load(f"w{n}", prefill, prefill=prefill, since_ms=NOW_MS - 5)
    known = {
        "prefill_shares": shares,
        "expected_followups": followups,
        "transfer_token_ms": token_ms,
    }
    first = begun(routing, **known)
    choice = first.choice
    assert choice is not None
    assert choice.prefill.worker != choice.decode.worker
    assert (first.phase == "prefill") == is_handed_over(choice)
    unheld = PREDICTIVE._replace(
        predictive_weights=PREDICTIVE.predictive_weights._replace(max_hold_ms=0.0)
    )
    planned = select_worker(
        PromptHashes(LONG), state(routing, **known), unheld, seed=1, phase=first.phase
    )
    if not isinstance(planned, Placement):
        return
    decision = to_assigned(planned, phase=first.phase, choice=choice)
    assert find_difference(decision) == ""
    parts = (choice.whole, choice.prefill, choice.decode)
    assert recompute_choice_costs(decision) == tuple(each.cost for each in parts)
    features = recorded_features(replace(decision, params=choice.params))
    most = choice.params["most_held_tokens_prefill"]
    plain = [
        cost_reference.predictive_cost(each, asked, 0.01).cost_ms
        for each, asked in (
            (choice.whole, replace(features, part=COMPARED)),
            (choice.prefill, replace(features, part=PREFILL_PART, most_cached_tokens=most)),
            (choice.decode, replace(features, part=DECODE_PART)),
        )
    ]
    assert plain == [each.cost for each in parts]


def test_changed_record_of_choice_is_found(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name)
    decision = decided(routing, begun(routing))
    assert find_difference(decision) == ""
    choice = decision.choice
    assert choice is not None
    other = replace(choice, params=choice.params | {"transfer_ms": 1.0})
    assert find_difference(replace(decision, choice=other)).startswith("the cost of decode is")
    cheap = recosted(replace(decision, choice=replace(choice, whole=busier(choice.whole))))
    assert find_difference(cheap) == "phase aggregated costs more"


def busier(candidate: Any) -> Any:
    return replace(candidate, prefill_tokens=90_000, prefill_runs=3, open_runs=9)


def recosted(decision: Assigned) -> Assigned:
    """The same with the costs of its inputs."""
    choice, costs = decision.choice, recompute_choice_costs(decision)
    assert choice is not None
    assert costs is not None
    parts = zip(("whole", "prefill", "decode"), costs, strict=True)
    new = {name: replace(getattr(choice, name), cost=cost) for name, cost in parts}
    return replace(decision, choice=replace(choice, **new))


def test_reason_of_choice_has_predicted_times_of_both(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name)
    decision = decided(routing, begun(routing))
    reasons = reasons_for(decision, session="")
    assert reasons is not None
    assert decision.choice is not None
    whole = decision.choice.whole
    assert reasons.choice.startswith(f"stayed whole: {whole.cost:.1f} ms whole on {whole.worker}, ")
    assert "(65.0 ms of it the transfer)" in reasons.choice


def test_share_of_prefill_decays(routing: RoutingHarness) -> None:
    shares = PrefillShares()
    assert shares.share("w", 0) == 0.0
    shares.add("w", 1000.0, 0)
    assert shares.share("w", 0) == 0.5
    assert shares.share("w", 2000) == pytest.approx(0.5 / 2.718281828)
    shares.add("w", 1e9, 2000)
    assert shares.share("w", 2000) == 0.95


def test_speed_of_transfers_is_learned_from_first_tokens(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        free_worker(routing, name)
    model, prompt = PerformanceModel(), PromptHashes(decode_request(LONG, "w1", b"{}", 0))
    planned = select_worker(prompt, state(routing), PREDICTIVE, seed=1, phase="decode")
    assert isinstance(planned, Placement)
    curves, room = PerfCurves(), 4096 * 16
    for n in range(5):
        assert model.transfer_token_ms is None
        done = PrefillDone(id=f"r{n}", attempt=0, phase="prefill", worker="w1", epoch=0, run=0)
        model.on_record(LogRecord(0, 0, done))
        decision = to_assigned(planned, id=f"r{n}", phase="decode")
        model.on_record(LogRecord(0, 0, decision))
        took_ms = curves.decode_ms(8000 / room) + 80.0
        done = PrefillDone(
            id=f"r{n}", attempt=0, phase="decode", worker="w2", epoch=1, run=0, prefill_ms=took_ms
        )
        model.on_record(LogRecord(0, 0, done))
    assert model.transfer_token_ms == pytest.approx(0.01)
    beside = to_assigned(planned, id="beside", phase="decode")
    model.on_record(LogRecord(0, 0, beside))
    done = PrefillDone(
        id="beside", attempt=0, phase="decode", worker="w2", epoch=1, run=0, prefill_ms=9e9
    )
    model.on_record(LogRecord(0, 0, done))
    assert model.transfer_token_ms == pytest.approx(0.01), "it has waited for its prefill"
