"""Where requests go: who may take one, by which rule nobody may, and which place is the best."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.burdens import Burden
from app.routing.eligibility import number_of
from app.routing.plan import RECORDED, Chosen, Hold, Plan, Refuse, Tuning, replan
from app.routing.policies import POLICIES, DynamoWeights, Place
from indexer.events import Tier
from streams.records import (
    EngineConfig,
    Hints,
    Lost,
    ModelCard,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
    RunProgress,
    SessionControl,
    WorkerCard,
)
from tests.stages import NOW_MS, TIMEOUT_MS, TOKENS, Stage, recorded


@pytest.fixture
def stage() -> Stage:
    return Stage()


# Who may take it


def test_workers_of_other_models_dead_silent_draining_and_unfinished_ones_get_nothing(
    stage: Stage,
) -> None:
    for name in ("fine", "other", "dead", "silent", "draining"):
        stage.worker(name, model="x" if name == "other" else "m")
    stage.registry(WorkerCard(id="new", slot=0, model="m", config=EngineConfig(model="m")))
    stage.event(Lost(worker="dead", epoch=stage.epochs["dead"]))
    stage.beat("fine", at_ms=9000)
    stage.beat("draining", at_ms=9000, state="draining")
    assert {c.worker for c in stage.chosen(now_ms=9000).candidates} == {"fine"}


def test_a_worker_is_taken_again_as_soon_as_it_is_heard_of(stage: Stage) -> None:
    stage.worker("w1")
    assert isinstance(stage.plan(now_ms=1500 + TIMEOUT_MS), Chosen)
    assert stage.plan(now_ms=1501 + TIMEOUT_MS) == Hold("no worker is ready")
    stage.beat("w1", at_ms=8000)
    assert isinstance(stage.plan(now_ms=8000), Chosen)


def test_a_request_without_a_model_goes_to_any(stage: Stage) -> None:
    stage.worker("w1", model="x")
    assert stage.chosen(request=Request(id="a")).place.worker == "w1"


def test_prefill_workers_take_no_whole_requests(stage: Stage) -> None:
    stage.worker("p", role="prefill")
    assert isinstance(stage.plan(), Hold)
    assert stage.chosen(phase="prefill").place.worker == "p"
    stage.worker("d", role="decode")
    assert stage.chosen().place.worker == "d"
    assert stage.chosen(phase="decode").place.worker == "d"


@pytest.mark.parametrize(
    ("hints", "places"),
    [
        ({}, {("w1", 0), ("w2", 0), ("w2", 1), ("w3", 0)}),
        ({"allowed_worker_ids": ("w1", number_of("w3"))}, {("w1", 0), ("w3", 0)}),
        ({"backend_instance_id": "w2"}, {("w2", 0)}),
        ({"backend_instance_id": number_of("w2"), "dp_rank": 1}, {("w2", 1)}),
        ({"dp_rank": 1}, {("w2", 1)}),
        ({"decode_worker_id": "w3"}, {("w1", 0), ("w2", 0), ("w2", 1), ("w3", 0)}),
        ({"routing_constraints": RoutingConstraints(required_taints=("a",))},
         {("w1", 0), ("w3", 0)}),
        ({"routing_constraints": RoutingConstraints(required_taints=("a", "b"))}, {("w3", 0)}),
    ],
)  # fmt: skip
def test_no_eligible_place_is_missed_and_no_other_is_taken(
    stage: Stage, hints: dict[str, Any], places: set[tuple[str, int]]
) -> None:
    stage.worker("w1", taints=("a",))
    stage.worker("w2", ranks=2)
    stage.worker("w3", taints=("a", "b"))
    planned = stage.ask(**hints)
    assert isinstance(planned, Chosen)
    assert {(c.worker, c.rank) for c in planned.candidates} == places


@pytest.mark.parametrize(
    ("hints", "outcome"),
    [
        ({"backend_instance_id": "w9"}, Refuse("no_workers", "the pinned worker w9 is gone")),
        (
            {"backend_instance_id": "w1", "allowed_worker_ids": ("w2",)},
            Refuse("invalid", "the pinned worker w1 is not among allowed_worker_ids"),
        ),
        (
            {"backend_instance_id": "w1", "dp_rank": 1},
            Refuse("invalid", "the pinned worker w1 has no rank 1"),
        ),
        (
            {"backend_instance_id": "x1"},
            Refuse("invalid", "the pinned worker x1 does not serve m"),
        ),
        (
            {"backend_instance_id": "p1"},
            Refuse("invalid", "the pinned worker p1 only does prefill"),
        ),
        ({"backend_instance_id": "w2"}, Hold("the pinned worker w2 is not ready")),
        ({"dp_rank": 3}, Hold("no ready worker has rank 3")),
        ({"allowed_worker_ids": ("w9",)}, Hold("none of allowed_worker_ids is ready")),
        (
            {"routing_constraints": RoutingConstraints(required_taints=("z",))},
            Hold("no ready worker has all required_taints"),
        ),
    ],
)
def test_the_rule_that_leaves_nobody_is_named(
    stage: Stage, hints: dict[str, Any], outcome: Plan
) -> None:
    stage.worker("w1")
    stage.worker("w2")
    stage.beat("w2", state="draining")
    stage.worker("x1", model="x")
    stage.worker("p1", role="prefill")
    assert stage.ask(**hints) == outcome


def test_workers_that_failed_are_excluded_while_there_is_another(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    assert stage.chosen(excluded={"w1"}).place.worker == "w2"
    assert len(stage.chosen(excluded={"w1", "w2"}).candidates) == 2


def test_full_workers_take_nothing(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    assert stage.chosen(full={("w1", 0)}).place.worker == "w2"
    assert stage.plan(full={("w1", 0), ("w2", 1)}) == Hold("all workers are full")
    assert len(stage.chosen(full={("w1", 7)}).candidates) == 2, "another life of it"


def test_direct_goes_where_the_request_says(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    for hints in (Hints(decode_worker_id="w2", backend_instance_id="w1"),
                  Hints(backend_instance_id="w2")):  # fmt: skip
        request = Request(id="a", model="m", hints=hints)
        assert stage.chosen("direct", request=request).place.worker == "w2"
    refused = stage.plan("direct")
    assert isinstance(refused, Refuse)
    assert "decode_worker_id" in refused.message
    assert "backend_instance_id" in refused.message


# Which place it is


def test_the_documented_example_is_decided_as_documented(stage: Stage) -> None:
    for blocks, tokens in ((2, 160), (5, 80), (8, 144)):
        stage.holds(stage.worker(f"w{blocks}"), blocks)
        stage.burden(f"w{blocks}", tokens)
    decision = stage.chosen()
    assert decision.place.worker == "w5"
    assert [(c.worker, c.cost) for c in decision.candidates] == [("w5", 10), ("w8", 11), ("w2", 18)]
    assert (decision.cached_tokens, decision.prefill_tokens) == (80, 80)
    assert decision.burden == Burden(1, 160, 80, 1, NOW_MS)


def test_a_holder_that_is_overloaded_is_passed_by(stage: Stage) -> None:
    stage.holds(stage.worker("holder"), 10)
    stage.worker("idle")
    assert stage.chosen().place.worker == "holder"
    stage.burden("holder", tokens=64, prefill=64)
    assert stage.chosen().place.worker == "holder"
    stage.burden("holder", tokens=64, prefill=64)
    assert stage.chosen().place.worker == "idle"


def test_decisions_of_this_router_count_before_they_are_read_back(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    first = stage.chosen()
    stage.own.add(first.place, first.burden)
    assert stage.chosen().place.worker != first.place.worker


def test_tokens_that_workers_report_count_as_open(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    run = RunProgress(id="x", attempt=0, phase="aggregated", output_tokens=500)
    stage.beat("w1", running=(run,))
    decision = stage.chosen("least_loaded")
    assert [(c.worker, c.open_tokens) for c in decision.candidates] == [("w2", 0), ("w1", 500)]


def test_a_rank_is_chosen_by_its_own_cache_and_load(stage: Stage) -> None:
    stage.worker("w1", ranks=3)
    stage.holds("w1", 10, rank=2)
    assert stage.chosen().place == Place("w1", 0, 2)
    stage.burden("w1", 800, prefill=800, rank=2)
    stage.burden("w1", 80, rank=0)
    assert stage.chosen().place == Place("w1", 0, 1)


def test_nearer_tiers_are_worth_more(stage: Stage) -> None:
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        stage.holds(stage.worker(tier.name), 8, tier)
    costs = {c.worker: c.cost for c in stage.chosen().candidates}
    assert costs == {"DEVICE": 2, "HOST": 4, "DISK": 8}


def test_caches_in_blocks_of_another_size_are_unknown(stage: Stage) -> None:
    stage.registry(ModelCard(name="m", block_size=16))
    stage.holds(stage.worker("w1", block_size=32), 10)
    stage.worker("w2", block_size=32)
    decision = stage.chosen()
    assert decision.block_size == 16
    assert {c.overlap_blocks for c in decision.candidates} == {0}


def test_without_a_card_of_the_model_most_workers_say_the_block_size(stage: Stage) -> None:
    for n, size in enumerate((8, 32, 32)):
        stage.worker(f"w{n}", block_size=size)
    assert stage.chosen().block_size == 32


def test_preferred_taints_attract(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2", taints=("fast", "near"))
    wanted = RoutingConstraints(preferred_taints={"fast": 1.0, "near": 0.5, "cheap": 9.0})
    planned = stage.ask(routing_constraints=wanted)
    assert isinstance(planned, Chosen)
    assert planned.place.worker == "w2"
    assert [c.taint_weight for c in planned.candidates] == [1.5, 0]


def test_a_request_overrides_the_weights_for_itself_and_they_are_recorded(stage: Stage) -> None:
    stage.holds(stage.worker("holder"), 10)
    stage.burden("holder", 16)
    stage.worker("idle")
    assert stage.chosen().place.worker == "holder"
    override = RouterConfigOverride(
        overlap_score_credit=0.0, prefill_load_scale=2.0, router_temperature=0.5,
        track_prefill_tokens=False, assume_kv_reuse=False,
    )  # fmt: skip
    request = Request(id="a", model="m", token_ids=TOKENS, router_config_override=override)
    decision = stage.chosen(request=request)
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
def test_overrides_that_no_cost_can_be_made_of_are_refused(
    stage: Stage, name: str, value: float
) -> None:
    stage.worker("w1")
    override = RouterConfigOverride(**{name: value})
    refused = stage.plan(request=Request(id="a", model="m", router_config_override=override))
    assert isinstance(refused, Refuse)
    assert refused.code == "invalid"
    assert name in refused.message


def test_weights_of_taints_that_no_cost_can_be_made_of_are_refused(stage: Stage) -> None:
    stage.worker("w1")
    wanted = RoutingConstraints(preferred_taints={"fast": float("nan")})
    assert isinstance(stage.ask(routing_constraints=wanted), Refuse)


def test_temperature_spreads_what_costs_decide_alone(stage: Stage) -> None:
    stage.holds(stage.worker("w1"), 10)
    stage.worker("w2")
    hot = Tuning("dynamo", DynamoWeights(temperature=5.0))
    assert {stage.chosen(seed=n).place.worker for n in range(40)} == {"w1"}
    assert {stage.chosen(hot, seed=n).place.worker for n in range(40)} == {"w1", "w2"}


def test_a_salt_separates_tenants(stage: Stage) -> None:
    stage.holds(stage.worker("w1"), 10, cache_salt="one")
    stage.worker("w2")
    one, two = (Request(id="a", model="m", token_ids=TOKENS, cache_salt=s) for s in ("one", "two"))
    assert stage.chosen(request=one).cached_tokens == 160
    assert stage.chosen(request=two).cached_tokens == 0


def test_the_best_candidates_are_recorded_and_the_chosen_one(stage: Stage) -> None:
    for n in range(RECORDED + 10):
        stage.worker(f"w{n:02}")
        stage.burden(f"w{n:02}", 16 * n)
    decision = stage.chosen()
    assert [c.worker for c in decision.candidates] == [f"w{n:02}" for n in range(RECORDED)]
    hot = Tuning("dynamo", DynamoWeights(temperature=50.0))
    farther = [
        d
        for seed in range(60)
        if (d := stage.chosen(hot, seed=seed)).place.worker >= f"w{RECORDED:02}"
    ]
    assert farther
    for decision in farther:
        assert len(decision.candidates) == RECORDED + 1
        assert decision.candidates[-1].worker == decision.place.worker


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
    stage = Stage()
    for n, (tokens, prefill, blocks, two) in enumerate(workers):
        stage.worker(f"w{n}", ranks=2 if two else 1)
        stage.burden(f"w{n}", tokens, prefill)
        if blocks:
            stage.holds(f"w{n}", blocks)
    hints = Hints(session_control=SessionControl(session_id="s"))
    if policy == "direct":
        hints = Hints(backend_instance_id="w0")
    request = Request(id="a", model="m", token_ids=TOKENS, hints=hints)
    tuning = Tuning(policy, weights)
    decision = stage.chosen(tuning, seed=seed, turn=turn, request=request)
    assert decision == stage.chosen(tuning, seed=seed, turn=turn, request=request)
    assert replan(recorded(decision), session="s") == decision.place


def test_a_decision_without_candidates_cannot_be_recomputed(stage: Stage) -> None:
    stage.worker("w1")
    assert replan(recorded(stage.chosen(), candidates=())) is None
