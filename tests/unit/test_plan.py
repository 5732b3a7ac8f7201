"""Where requests go: which place is the best, what a decision books, and what it records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.burdens import Burden
from app.routing.decisions import Chosen, Refuse, Tuning
from app.routing.plan import replan
from app.routing.policies import POLICIES, DynamoWeights, Place
from app.routing.prompt import Prompt
from app.routing.recorded import RECORDED
from indexer.events import Tier
from streams.codecs import pack_tokens
from streams.records import (
    Hints,
    ModelCard,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
    RunProgress,
    SessionControl,
    SessionUse,
)
from tests.stages import NOW_MS, TOKENS, Stage, recorded


@pytest.fixture
def stage() -> Stage:
    return Stage()


# What is booked


def test_a_pinned_request_is_booked_with_its_overlap(stage: Stage) -> None:
    stage.holds(stage.worker("w1"), 4)
    stage.worker("w2")
    pinned = stage.ask(backend_instance_id="w1")
    assert isinstance(pinned, Chosen)
    assert (pinned.overlap_blocks, pinned.cached_tokens, pinned.prefill_tokens) == (4, 64, 96)
    assert pinned.burden == Burden(1, 160, 96, 1, NOW_MS)


def test_direct_books_no_tokens(stage: Stage) -> None:
    stage.worker("w1")
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(backend_instance_id="w1"))
    assert stage.chosen("direct", request=request).burden == Burden(1, 0, 0, 1, NOW_MS)


def test_no_reuse_books_the_whole_prompt(stage: Stage) -> None:
    stage.holds(stage.worker("w1"), 10)
    override = RouterConfigOverride(assume_kv_reuse=False)
    request = Request(id="a", model="m", token_ids=TOKENS, router_config_override=override)
    chosen = stage.chosen(request=request)
    assert (chosen.cached_tokens, chosen.prefill_tokens) == (160, 160)


@pytest.mark.parametrize(
    ("tokens", "overlap", "rate"), [(160, 5, 0.5), (161, 5, 5 / 11), (15, 0, 0.0), (0, 0, None)]
)
def test_a_hit_rate_counts_a_block_that_is_not_full_as_one(
    tokens: int, overlap: int, rate: float | None
) -> None:
    prompt = Prompt(Request(id="a", token_ids=pack_tokens([1] * tokens)))
    assert prompt.hit_rate(overlap, 16) == rate


# Sessions


@pytest.mark.parametrize("policy", ["dynamo", "least_loaded", "round_robin", "random",
                                    "power_of_two", "predictive"])  # fmt: skip
def test_a_session_stays_where_it_is_bound(stage: Stage, policy: str) -> None:
    for n in range(6):
        stage.worker(f"w{n}")
    for seed in range(8):
        decision = stage.chosen(policy, seed=seed, bound=Place("w3", 3))
        assert decision.place == decision.bound == Place("w3", 3)
        use = SessionUse(id="s", bound_worker="w3", bound_epoch=3)
        assert replan(recorded(decision, session=use)) == Place("w3", 3)


@pytest.mark.parametrize("policy", ["dynamo", "least_loaded", "predictive"])
def test_a_session_breaks_when_its_worker_costs_too_much_more(stage: Stage, policy: str) -> None:
    stage.worker("w0")
    stage.worker("w1")
    stage.burden("w0", 2000, prefill=2000, since_ms=NOW_MS)
    decision = stage.chosen(policy, bound=Place("w0", 0))
    assert decision.place.worker == "w1"
    assert replan(recorded(decision, session=SessionUse(id="s", bound_worker="w0"))) == Place(
        "w1", 1
    )


def test_a_session_is_free_when_the_life_of_its_worker_is_over(stage: Stage) -> None:
    stage.worker("w0")
    stage.holds(stage.worker("w1"), 10)
    assert stage.chosen(bound=Place("w0", 0)).place.worker == "w0"
    assert stage.chosen(bound=Place("w0", 7)).place.worker == "w1"
    assert stage.chosen(bound=Place("w0", 7)).bound is None


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


def test_tokens_of_answers_count_only_under_the_switch(stage: Stage) -> None:
    stage.worker("w1")
    run = RunProgress(id="x", attempt=0, phase="aggregated", output_tokens=500)
    stage.beat("w1", running=(run,))
    counted = stage.chosen("least_loaded")
    uncounted = stage.chosen("least_loaded", known={"counts_output": False})
    assert [c.open_tokens for c in (*counted.candidates, *uncounted.candidates)] == [500, 0]


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
