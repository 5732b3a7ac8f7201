"""Tests of the selection of a worker: the best place, its load, and its record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.selection.decision import Placement, Rejection
from kvlane.app.routing.selection.decision_record import MAX_RECORDED_CANDIDATES
from kvlane.app.routing.selection.policies.registry import POLICIES
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import (
    DynamoWeights,
    PredictiveWeights,
    RoutingConfig,
)
from kvlane.app.routing.selection.select import choose_otherwise, recompute_choice
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.indexer.events import Tier
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import ModelCard, RunProgress, SessionUse
from kvlane.streams.request import (
    Hints,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
    SessionControl,
)
from tests.harness.routing_harness import NOW_MS, TOKENS, RoutingHarness, to_assigned

# What is booked


def test_pinned_request_is_booked_with_its_overlap(routing: RoutingHarness) -> None:
    routing.add_blocks(routing.worker("w1"), 4)
    routing.worker("w2")
    pinned = routing.plan_hints(backend_instance_id="w1")
    assert isinstance(pinned, Placement)
    assert (pinned.overlap_blocks, pinned.cached_tokens, pinned.prefill_tokens) == (4, 64, 96)
    assert pinned.load == WorkerLoad(1, 160, 96, 1, NOW_MS)


def test_direct_books_no_tokens(routing: RoutingHarness) -> None:
    routing.worker("w1")
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(backend_instance_id="w1"))
    assert routing.chosen("direct", request=request).load == WorkerLoad(1, 0, 0, 1, NOW_MS)


def test_no_reuse_books_the_whole_prompt(routing: RoutingHarness) -> None:
    routing.add_blocks(routing.worker("w1"), 10)
    override = RouterConfigOverride(assume_kv_reuse=False)
    request = Request(id="a", model="m", token_ids=TOKENS, router_config_override=override)
    chosen = routing.chosen(request=request)
    assert (chosen.cached_tokens, chosen.prefill_tokens) == (160, 160)


@pytest.mark.parametrize(
    ("tokens", "overlap", "rate"), [(160, 5, 0.5), (161, 5, 5 / 11), (15, 0, 0.0), (0, 0, None)]
)
def test_hit_rate_counts_a_block_that_is_not_full_as_one(
    tokens: int, overlap: int, rate: float | None
) -> None:
    prompt = PromptHashes(Request(id="a", token_ids=pack_tokens([1] * tokens)))
    assert prompt.hit_rate(overlap, 16) == rate


# Sessions


@pytest.mark.parametrize(
    "policy", ["dynamo", "least_loaded", "round_robin", "random", "power_of_two", "predictive"]
)
def test_session_stays_where_it_is_bound(routing: RoutingHarness, policy: str) -> None:
    for n in range(6):
        routing.worker(f"w{n}")
    for seed in range(8):
        decision = routing.chosen(policy, seed=seed, session_rank=WorkerRank("w3", 3))
        assert decision.worker_rank == decision.session_rank == WorkerRank("w3", 3)
        use = SessionUse(id="s", bound_worker="w3", bound_epoch=3)
        assert recompute_choice(to_assigned(decision, session=use)) == WorkerRank("w3", 3)


@pytest.mark.parametrize("policy", ["dynamo", "least_loaded", "predictive"])
def test_session_breaks_when_its_worker_costs_too_much_more(
    routing: RoutingHarness, policy: str
) -> None:
    routing.worker("w0")
    routing.worker("w1")
    routing.add_load("w0", 2000, prefill=2000, since_ms=NOW_MS)
    decision = routing.chosen(policy, session_rank=WorkerRank("w0", 0))
    assert decision.worker_rank.worker == "w1"
    assert recompute_choice(
        to_assigned(decision, session=SessionUse(id="s", bound_worker="w0"))
    ) == WorkerRank("w1", 1)


def test_session_is_free_when_the_epoch_of_its_worker_has_ended(routing: RoutingHarness) -> None:
    routing.worker("w0")
    routing.add_blocks(routing.worker("w1"), 10)
    assert routing.chosen(session_rank=WorkerRank("w0", 0)).worker_rank.worker == "w0"
    assert routing.chosen(session_rank=WorkerRank("w0", 7)).worker_rank.worker == "w1"
    assert routing.chosen(session_rank=WorkerRank("w0", 7)).session_rank is None


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "predictive"])
def test_tolerance_of_zero_is_zero_for_every_policy(routing: RoutingHarness, policy: str) -> None:
    routing.worker("w0")
    routing.worker("w1")
    tuning = RoutingConfig(policy, session_affinity_tolerance=0.0)
    decision = routing.chosen(tuning, session_rank=WorkerRank("w0", 0))
    assert decision.params["session_allowance"] == 0.0


# Which place it is


def test_documented_example_is_decided_as_documented(routing: RoutingHarness) -> None:
    for blocks, tokens in ((2, 160), (5, 80), (8, 144)):
        routing.add_blocks(routing.worker(f"w{blocks}"), blocks)
        routing.add_load(f"w{blocks}", tokens)
    decision = routing.chosen()
    assert decision.worker_rank.worker == "w5"
    assert [(c.worker, c.cost) for c in decision.candidates] == [("w5", 10), ("w8", 11), ("w2", 18)]
    assert (decision.cached_tokens, decision.prefill_tokens) == (80, 80)
    assert decision.load == WorkerLoad(1, 160, 80, 1, NOW_MS)


def test_overloaded_holder_is_avoided(routing: RoutingHarness) -> None:
    routing.add_blocks(routing.worker("holder"), 10)
    routing.worker("idle")
    assert routing.chosen().worker_rank.worker == "holder"
    routing.add_load("holder", tokens=64, prefill=64)
    assert routing.chosen().worker_rank.worker == "holder"
    routing.add_load("holder", tokens=64, prefill=64)
    assert routing.chosen().worker_rank.worker == "idle"


def test_decisions_of_this_router_count_before_they_are_read_back(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    first = routing.chosen()
    routing.own.add(first.worker_rank, first.load)
    assert routing.chosen().worker_rank.worker != first.worker_rank.worker


def test_tokens_that_workers_report_count_as_open(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    run = RunProgress(id="x", attempt=0, phase="aggregated", output_tokens=500)
    routing.send_heartbeat("w1", running=(run,))
    decision = routing.chosen("least_loaded")
    assert [(c.worker, c.open_tokens) for c in decision.candidates] == [("w2", 0), ("w1", 500)]


def test_tokens_of_answers_count_only_under_the_switch(routing: RoutingHarness) -> None:
    routing.worker("w1")
    run = RunProgress(id="x", attempt=0, phase="aggregated", output_tokens=500)
    routing.send_heartbeat("w1", running=(run,))
    counted = routing.chosen("least_loaded")
    uncounted = routing.chosen("least_loaded", known={"count_output_tokens": False})
    assert [c.open_tokens for c in (*counted.candidates, *uncounted.candidates)] == [500, 0]


def test_rank_is_chosen_by_its_own_cache_and_load(routing: RoutingHarness) -> None:
    routing.worker("w1", ranks=3)
    routing.add_blocks("w1", 10, rank=2)
    assert routing.chosen().worker_rank == WorkerRank("w1", 0, 2)
    routing.add_load("w1", 800, prefill=800, rank=2)
    routing.add_load("w1", 80, rank=0)
    assert routing.chosen().worker_rank == WorkerRank("w1", 0, 1)


def test_nearer_tiers_are_worth_more(routing: RoutingHarness) -> None:
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        routing.add_blocks(routing.worker(tier.name), 8, tier)
    costs = {c.worker: c.cost for c in routing.chosen().candidates}
    assert costs == {"DEVICE": 2, "HOST": 4, "DISK": 8}


def test_caches_in_blocks_of_another_size_are_unknown(routing: RoutingHarness) -> None:
    routing.registry(ModelCard(name="m", block_size=16))
    routing.add_blocks(routing.worker("w1", block_size=32), 10)
    routing.worker("w2", block_size=32)
    decision = routing.chosen()
    assert decision.block_size == 16
    assert {c.overlap_blocks for c in decision.candidates} == {0}


def test_without_a_model_card_the_block_size_of_most_workers_is_used(
    routing: RoutingHarness,
) -> None:
    for n, size in enumerate((8, 32, 32)):
        routing.worker(f"w{n}", block_size=size)
    assert routing.chosen().block_size == 32


def test_preferred_taints_attract(routing: RoutingHarness) -> None:
    routing.worker("w1")
    routing.worker("w2", taints=("fast", "near"))
    wanted = RoutingConstraints(preferred_taints={"fast": 1.0, "near": 0.5, "cheap": 9.0})
    planned = routing.plan_hints(routing_constraints=wanted)
    assert isinstance(planned, Placement)
    assert planned.worker_rank.worker == "w2"
    assert [c.taint_weight for c in planned.candidates] == [1.5, 0]


def test_request_overrides_the_weights_for_itself_and_they_are_recorded(
    routing: RoutingHarness,
) -> None:
    routing.add_blocks(routing.worker("holder"), 10)
    routing.add_load("holder", 16)
    routing.worker("idle")
    assert routing.chosen().worker_rank.worker == "holder"
    override = RouterConfigOverride(
        overlap_score_credit=0.0, prefill_load_scale=2.0, router_temperature=0.5,
        track_prefill_tokens=False, assume_kv_reuse=False,
    )  # fmt: skip
    request = Request(id="a", model="m", token_ids=TOKENS, router_config_override=override)
    decision = routing.chosen(request=request)
    assert decision.params["overlap_score_credit"] == 0
    assert decision.params["prefill_load_scale"] == 2
    assert decision.params["temperature"] == 0.5
    assert decision.params["assume_kv_reuse"] == 0
    assert {c.cost for c in decision.candidates} == {20, 21}
    assert decision.prefill_tokens == 0, "not tracked"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7, -1.0])
@pytest.mark.parametrize(
    "name", ["overlap_score_credit", "prefill_load_scale", "router_temperature"]
)
def test_overrides_without_a_valid_cost_are_refused(
    routing: RoutingHarness, name: str, value: float
) -> None:
    routing.worker("w1")
    override = RouterConfigOverride(**{name: value})
    refused = routing.plan(request=Request(id="a", model="m", router_config_override=override))
    assert isinstance(refused, Rejection)
    assert refused.code == "invalid"
    assert name in refused.message


def test_taint_weights_without_a_valid_cost_are_refused(routing: RoutingHarness) -> None:
    routing.worker("w1")
    wanted = RoutingConstraints(preferred_taints={"fast": float("nan")})
    assert isinstance(routing.plan_hints(routing_constraints=wanted), Rejection)


def test_temperature_spreads_the_choice_by_cost(routing: RoutingHarness) -> None:
    routing.add_blocks(routing.worker("w1"), 10)
    routing.worker("w2")
    hot = RoutingConfig("dynamo", DynamoWeights(temperature=5.0))
    assert {routing.chosen(seed=n).worker_rank.worker for n in range(40)} == {"w1"}
    assert {routing.chosen(hot, seed=n).worker_rank.worker for n in range(40)} == {"w1", "w2"}


def test_salt_separates_tenants(routing: RoutingHarness) -> None:
    routing.add_blocks(routing.worker("w1"), 10, cache_salt="one")
    routing.worker("w2")
    one, two = (Request(id="a", model="m", token_ids=TOKENS, cache_salt=s) for s in ("one", "two"))
    assert routing.chosen(request=one).cached_tokens == 160
    assert routing.chosen(request=two).cached_tokens == 0


def test_best_candidates_are_recorded_and_the_chosen_one(routing: RoutingHarness) -> None:
    for n in range(MAX_RECORDED_CANDIDATES + 10):
        routing.worker(f"w{n:02}")
        routing.add_load(f"w{n:02}", 16 * n)
    decision = routing.chosen()
    assert [c.worker for c in decision.candidates] == [
        f"w{n:02}" for n in range(MAX_RECORDED_CANDIDATES)
    ]
    hot = RoutingConfig("dynamo", DynamoWeights(temperature=50.0))
    farther = [
        d
        for seed in range(60)
        if (d := routing.chosen(hot, seed=seed)).worker_rank.worker
        >= f"w{MAX_RECORDED_CANDIDATES:02}"
    ]
    assert farther
    for decision in farther:
        assert len(decision.candidates) == MAX_RECORDED_CANDIDATES + 1
        assert decision.candidates[-1].worker == decision.worker_rank.worker


# What is recorded is enough


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 10), st.booleans()),
        min_size=1, max_size=24,
    ),
    st.integers(0, 2**32 - 1),
    st.builds(
        DynamoWeights, overlap_score_credit=st.floats(0, 2), prefill_load_scale=st.floats(0, 64),
        host_weight=st.just(0.75), disk_weight=st.just(0.25),
        active_request_weight=st.floats(0, 2), overlap_decay=st.sampled_from([0, 0.7]),
        temperature=st.sampled_from([0, 0.3, 5]),
    ),
    st.integers(0, 100),
)  # fmt: skip
def test_every_decision_is_recomputed_from_its_record(
    policy: str,
    workers: list[tuple[int, int, int, bool]],
    seed: int,
    weights: DynamoWeights,
    turn: int,
) -> None:
    routing = RoutingHarness()
    for n, (tokens, prefill, blocks, two) in enumerate(workers):
        routing.worker(f"w{n}", ranks=2 if two else 1)
        routing.add_load(f"w{n}", tokens, prefill)
        if blocks:
            routing.add_blocks(f"w{n}", blocks)
    hints = Hints(session_control=SessionControl(session_id="s"))
    if policy == "direct":
        hints = Hints(backend_instance_id="w0")
    request = Request(id="a", model="m", token_ids=TOKENS, hints=hints)
    tuning = RoutingConfig(policy, weights)
    decision = routing.chosen(tuning, seed=seed, dispatched_count=turn, request=request)
    assert decision == routing.chosen(tuning, seed=seed, dispatched_count=turn, request=request)
    record = to_assigned(decision)
    assert recompute_choice(record, session="s") == decision.worker_rank
    listed = record.with_candidates(record.candidates)
    assert recompute_choice(listed, session="s") == decision.worker_rank
    assert listed.chosen == record.chosen is not None
    assert listed.candidate_workers == record.candidate_workers


def test_decision_without_candidates_cannot_be_recomputed(routing: RoutingHarness) -> None:
    routing.worker("w1")
    assert recompute_choice(to_assigned(routing.chosen(), candidate_rows=None)) is None


@pytest.mark.parametrize(
    "name", ["overlap_score_credit", "prefill_load_scale", "router_temperature"]
)
@pytest.mark.parametrize("policy", ["predictive", "least_loaded"])
def test_policy_without_a_setting_refuses_it_by_name(
    routing: RoutingHarness, policy: str, name: str
) -> None:
    routing.worker("w1")
    override = RouterConfigOverride(**{name: 0.5})
    request = Request(id="a", model="m", token_ids=TOKENS, router_config_override=override)
    refused = routing.plan(policy, request=request)
    assert isinstance(refused, Rejection)
    assert f"{name}: policy {policy}" in refused.message
    assert isinstance(routing.plan("dynamo", request=request), Placement)
    assert isinstance(routing.plan(policy, request=request, phase="decode"), Placement)


# Other settings from the same inputs


@given(
    st.sampled_from([
        ("predictive", "predictive"), ("predictive", "dynamo"), ("predictive", "least_loaded"),
        ("dynamo", "dynamo"), ("dynamo", "least_loaded"), ("random", "dynamo"),
    ]),
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 10), st.booleans()),
        min_size=1, max_size=MAX_RECORDED_CANDIDATES // 2,
    ),
    st.integers(0, 2**32 - 1),
    st.tuples(
        st.floats(0, 2), st.floats(0, 64), st.sampled_from([0, 0.7]), st.sampled_from([0, 5])
    ),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
)  # fmt: skip
def test_choice_by_other_settings_is_that_of_a_router_that_has_them(
    policies: tuple[str, str],
    workers: list[tuple[int, int, int, bool]],
    seed: int,
    weights: tuple[float, float, float, float],
    decode_weight: float,
    tolerance: float,
    has_session: bool,
) -> None:
    routing = RoutingHarness()
    for n, (tokens, prefill, blocks, two) in enumerate(workers):
        routing.worker(f"w{n}", ranks=2 if two else 1)
        routing.add_load(f"w{n}", tokens, prefill)
        if blocks:
            routing.add_blocks(f"w{n}", blocks)
    known = {"session_rank": WorkerRank("w0", 0) if has_session else None}
    use = SessionUse(id="s", bound_worker="w0") if has_session else None
    credit, scale, decay, temperature = weights
    other = RoutingConfig(
        policies[1], DynamoWeights(credit, scale, overlap_decay=decay, temperature=temperature),
        PredictiveWeights(decode_weight, max_hold_ms=0.0), tolerance,
    )  # fmt: skip
    live = RoutingConfig(policies[0], predictive_weights=PredictiveWeights(max_hold_ms=0.0))
    taken = routing.chosen(live, seed=seed, **known)
    choice = choose_otherwise(record := to_assigned(taken, session=use), other)
    assert choice is not None
    wanted = routing.chosen(other, seed=seed, **known)
    chosen = record.candidates[choice.position]
    assert (chosen.worker, chosen.epoch, chosen.rank) == wanted.worker_rank
    own = {(c.worker, c.epoch, c.rank): c.cost for c in to_assigned(wanted).candidates}
    for candidate, cost in zip(record.candidates, choice.costs.tolist(), strict=True):
        assert cost == own[candidate.worker, candidate.epoch, candidate.rank]


def test_decision_by_load_alone_has_no_inputs_of_policy_predictive(routing: RoutingHarness) -> None:
    routing.worker("w1")
    record = to_assigned(routing.chosen("least_loaded"))
    assert choose_otherwise(record, RoutingConfig("predictive")) is None
    assert choose_otherwise(record, RoutingConfig("dynamo")) is not None
