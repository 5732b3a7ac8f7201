"""Where requests go: who may take one, by which rule nobody may, and which place is the best."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.adapters import order_of
from app.routing.burdens import Burden
from app.routing.eligibility import eligible, number_of
from app.routing.plan import Chosen, Hold, Plan, Refuse, Tuning, replan
from app.routing.policies import POLICIES, DynamoWeights, Place
from app.routing.prompt import Prompt
from app.routing.recorded import RECORDED
from indexer.events import Tier
from streams.codecs import pack_tokens
from streams.records import (
    EngineConfig,
    EngineFigures,
    Hints,
    Lost,
    ModelCard,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
    RunProgress,
    SessionControl,
    SessionUse,
    WorkerCard,
)
from tests.stages import NOW_MS, TIMEOUT_MS, TOKENS, Stage, recorded


def hopeless(reason: str) -> Hold:
    """No worker that lives could ever take it."""
    return Hold(reason, code="none_eligible", is_hopeless=True)


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
    assert stage.plan(now_ms=1501 + TIMEOUT_MS) == Hold("no worker is ready", code="no_workers")
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
        ({"backend_instance_id": "w9"}, Refuse("pinned_gone", "the pinned worker w9 is gone")),
        (
            {"backend_instance_id": "w1", "allowed_worker_ids": ("w2",)},
            Refuse("pin_not_allowed", "the pinned worker w1 is not among allowed_worker_ids"),
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
        (
            {"backend_instance_id": "w2"},
            Hold("the pinned worker w2 is not ready", code="pinned_busy"),
        ),
        ({"dp_rank": 3}, hopeless("no ready worker has rank 3")),
        ({"allowed_worker_ids": ("w9",)}, hopeless("none of allowed_worker_ids is ready")),
        (
            {"allowed_worker_ids": ("w2",)},
            Hold("none of allowed_worker_ids is ready", code="none_eligible"),
        ),
        (
            {"routing_constraints": RoutingConstraints(required_taints=("z",))},
            hopeless("no ready worker has all required_taints"),
        ),
        ({"lora_name": "l"}, hopeless("no ready worker serves the adapter of lora_name")),
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
    assert stage.plan(full={("w1", 0), ("w2", 1)}) == Hold("all workers are full", code="all_busy")
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


def test_busy_workers_take_nothing(stage: Stage) -> None:
    stage.worker("w1", busy_cache=0.9, busy_prefill_tokens=100)
    stage.worker("w2", busy_cache=0.5)
    assert len(stage.chosen().candidates) == 2
    stage.beat("w2", engine=EngineFigures(kv_used_blocks=51, kv_total_blocks=100))
    assert [c.worker for c in stage.chosen().candidates] == ["w1"]
    stage.burden("w1", 101, prefill=101)
    assert stage.plan() == Hold("all workers are busy", code="all_busy")
    pinned = stage.ask(backend_instance_id="w2")
    assert pinned == Hold("the pinned worker w2 is busy", code="pinned_busy")


def test_a_bound_of_prefill_is_of_one_rank(stage: Stage) -> None:
    stage.worker("w1", ranks=2, busy_prefill_tokens=100)
    stage.burden("w1", 101, prefill=101, rank=0)
    assert stage.chosen().place.rank == 1


def test_own_decisions_make_workers_busy_before_they_are_read_back(stage: Stage) -> None:
    stage.worker("w1", busy_prefill_tokens=100)
    decision = stage.chosen()
    stage.own.add(decision.place, decision.burden)
    assert stage.plan() == Hold("all workers are busy", code="all_busy")


def test_a_request_that_asks_for_nothing_gets_the_rows_of_the_pool_untouched(stage: Stage) -> None:
    stage.worker("w1")
    pool = stage.pools.pool("m", "aggregated", NOW_MS)
    request = Request(id="a", model="m", token_ids=TOKENS)
    assert eligible(request, "aggregated", pool, stage.fleet) is pool.rows


def test_a_pin_to_a_lost_life_is_gone(stage: Stage) -> None:
    stage.worker("w1")
    stage.worker("w2")
    stage.event(Lost(worker="w1", epoch=stage.epochs["w1"]))
    refused = stage.ask(backend_instance_id="w1")
    assert refused == Refuse("pinned_gone", "the pinned worker w1 is gone")


@pytest.mark.parametrize(
    ("phase", "hints", "place"),
    [
        ("prefill", {"prefill_worker_id": "p2", "backend_instance_id": "p1"}, ("p2", 0)),
        ("prefill", {"backend_instance_id": "p1"}, ("p1", 0)),
        ("prefill", {"prefill_worker_id": "p2", "prefill_dp_rank": 1, "dp_rank": 0}, ("p2", 1)),
        ("decode", {"decode_worker_id": "d2", "backend_instance_id": "d1"}, ("d2", 0)),
        ("decode", {"backend_instance_id": "d1"}, ("d1", 0)),
        ("decode", {"decode_worker_id": "d2", "dp_rank": 1, "prefill_dp_rank": 0}, ("d2", 1)),
        ("aggregated", {"backend_instance_id": "d1", "decode_worker_id": "d2"}, ("d1", 0)),
        ("aggregated", {"backend_instance_id": "d1", "prefill_worker_id": "p2"}, ("d1", 0)),
    ],
)
def test_each_phase_has_its_own_pin_and_falls_back(
    stage: Stage, phase: Any, hints: dict[str, Any], place: tuple[str, int]
) -> None:
    for name in ("p1", "p2", "d1", "d2"):
        stage.worker(name, role="prefill" if name[0] == "p" else "decode", ranks=2)
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(**hints))
    chosen = stage.chosen(request=request, phase=phase)
    assert (chosen.place.worker, chosen.place.rank) == place


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


# Adapters


def test_an_adapter_is_served_by_those_that_have_it(stage: Stage) -> None:
    stage.worker("base")
    stage.worker("w1", engine={"lora_names": ("l",)})
    asked = stage.ask(lora_name="l")
    assert isinstance(asked, Chosen)
    assert [c.worker for c in asked.candidates] == ["w1"]


def test_a_new_adapter_has_one_home_and_it_is_the_same_for_all_routers(stage: Stage) -> None:
    for n in range(4):
        stage.worker(f"w{n}", engine={"max_loras": 2})
    homes = set()
    for n in range(20):
        asked = stage.ask(lora_name=f"l{n}")
        assert isinstance(asked, Chosen)
        assert len(asked.candidates) == 1
        homes.add(asked.place.worker)
    assert len(homes) > 1, "adapters are spread"


def test_an_adapter_moves_only_with_its_home(stage: Stage) -> None:
    workers = [stage.worker(f"w{n}", engine={"max_loras": 2}) for n in range(4)]
    before = {n: order_of(f"l{n}", workers)[0] for n in range(30)}
    after = {n: order_of(f"l{n}", workers[1:])[0] for n in range(30)}
    assert {n for n in before if before[n] != after[n]} == {
        n for n, home in before.items() if home == "w0"
    }


def test_an_adapter_with_many_requests_is_loaded_by_one_more(stage: Stage) -> None:
    for n in range(4):
        stage.worker(f"w{n}", engine={"max_loras": 2, "max_num_seqs": 8})
    first = stage.ask(lora_name="l")
    assert isinstance(first, Chosen)
    for _ in range(9):
        stage.told.add(first.place, Burden(1, 10), "l")
    asked = stage.ask(lora_name="l")
    assert isinstance(asked, Chosen)
    assert len(asked.candidates) == 2
    other = stage.ask(lora_name="another")
    assert isinstance(other, Chosen)
    assert len(other.candidates) == 1, "load is counted by adapter"


def test_an_adapters_home_that_is_full_is_passed_by(stage: Stage) -> None:
    for n in range(3):
        stage.worker(f"w{n}", engine={"max_loras": 1})
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(lora_name="l"))
    home = stage.chosen(request=request).place
    second = stage.chosen(request=request, full={home[:2]}).place
    assert second.worker == order_of("l", ["w0", "w1", "w2"])[1]


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
