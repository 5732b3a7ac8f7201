"""Tests of the reasons of a decision: terms that add up to costs, the runner-up, and its worst
term."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvlane.app.audit.cost_terms import DecisionReasons, reasons_for
from kvlane.app.routing.selection.routing_config import DynamoWeights, RoutingConfig
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import USUAL_LOAD_MS, FadingSums
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import SessionUse
from kvlane.streams.request import Hints, Request, RouterParams, RoutingConstraints, SessionControl
from tests.harness.routing_harness import NOW_MS, TOKENS, RoutingHarness, to_assigned

WEIGHTS = DynamoWeights(prefill_load_scale=2.0, active_request_weight=0.5, overlap_decay=0.3)


def got(
    routing: RoutingHarness, tuning: RoutingConfig | str = "predictive", **over: object
) -> DecisionReasons:
    found = reasons_for(to_assigned(routing.chosen(tuning, **over)), session="")
    assert found is not None
    return found


@given(
    st.sampled_from(["predictive", "dynamo"]),
    st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 900), st.integers(0, 10), st.floats(-2, 2)),
        min_size=1,
        max_size=6,
    ),
)
def test_terms_of_a_cost_add_up_to_it(
    policy: str, workers: list[tuple[int, int, int, float]]
) -> None:
    routing = RoutingHarness()
    for n, (tokens, prefill, blocks, _) in enumerate(workers):
        routing.worker(f"w{n}", taints=(f"t{n}",))
        routing.add_load(f"w{n}", tokens, prefill, since_ms=900 if prefill else None)
        if blocks:
            routing.add_blocks(f"w{n}", blocks)
    preferred = {f"t{n}": weight for n, (*_, weight) in enumerate(workers)}
    constraints = RoutingConstraints(preferred_taints=preferred)
    hints = Hints(routing_constraints=constraints)
    request = Request(id="a", model="m", token_ids=TOKENS, hints=hints)
    found = got(routing, RoutingConfig(policy, WEIGHTS), request=request)
    for each in (found.chosen, *found.others):
        assert sum(each.terms.values()) == pytest.approx(each.cost, rel=1e-9, abs=1e-9)
    assert found.difference == ""
    assert [w.cost for w in found.others] == sorted(w.cost for w in found.others)


def test_balance_of_equal_workers_is_a_term(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        routing.worker(name)
    routing.add_load("w1", 500)
    found = got(routing, RoutingConfig("predictive", WEIGHTS))
    assert found.chosen.worker == "w2"
    assert found.others[0].terms["later requests, balance"] > 1
    for each in (found.chosen, *found.others):
        assert sum(each.terms.values()) == pytest.approx(each.cost)


def test_usual_load_of_a_worker_is_a_term(routing: RoutingHarness) -> None:
    for name in ("w1", "w2"):
        routing.worker(name, engine={"total_kv_blocks": 4096})
    usual = FadingSums[WorkerRank](USUAL_LOAD_MS)
    usual.add(WorkerRank("w1", 0), 30_000.0, NOW_MS)
    found = got(routing, known={"usual_load": usual, "expected_followups": 5.0})
    assert (found.chosen.worker, found.lost_in) == ("w2", "usual load")
    for each in (found.chosen, *found.others):
        assert sum(each.terms.values()) == pytest.approx(each.cost)


def test_runner_up_is_shown_with_its_cost_difference_by_term(routing: RoutingHarness) -> None:
    for name, blocks in (("w1", 10), ("w2", 1)):
        routing.worker(name)
        routing.add_blocks(name, blocks)
    found = got(routing)
    assert (found.chosen.worker, found.others[0].worker) == ("w1", "w2")
    assert (found.chosen.cached_tokens, found.others[0].cached_tokens) == (160, 16)
    assert found.lost_by == found.others[0].cost - found.chosen.cost > 0
    assert found.lost_in == "replication"
    assert "w2 came next with" in found.words
    assert found.words.endswith("ms more, mostly replication")


def test_waiting_tokens_are_a_cost_term(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.add_load("w2", 500, 5000, since_ms=1999)
    found = got(routing)
    assert (found.chosen.worker, found.lost_in) == ("w1", "wait")
    assert got(routing, "dynamo").lost_in == "waiting prefill"


def test_tie_and_random_choice_are_named(routing: RoutingHarness) -> None:
    routing.worker("w1")
    assert got(routing).words == "the only candidate"
    routing.worker("w2")
    assert "the request's seed decided" in got(routing).words
    usual = FadingSums[WorkerRank](USUAL_LOAD_MS)
    usual.add(WorkerRank("w1", 0), 500.0, NOW_MS)
    lately = got(routing, known={"usual_load": usual}).words
    assert lately == "the same cost as w1, whose load of the last seconds was more"
    routing.add_load("w1", 160)
    routing.add_load("w2", 80)
    warm = RoutingConfig("dynamo", DynamoWeights(temperature=50.0))
    drawn = {got(routing, warm, seed=seed).words for seed in range(40)}
    assert "drawn at its temperature, though w2 cost 5 blocks less" in drawn
    assert "the least cost: w1 came next with 5 blocks more, mostly decode" in drawn


@pytest.mark.parametrize(
    ("policy", "words"),
    [("round_robin", "round-robin"), ("random", "drawn at random"), ("session_hash", "session")],
)
def test_policies_without_costs_describe_their_criterion(
    routing: RoutingHarness, policy: str, words: str
) -> None:
    routing.workers("w1", "w2")
    found = got(routing, policy)
    assert words in found.words
    assert found.lost_in == ""


def test_session_affinity_is_shown(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.add_blocks("w2", 2)
    decision = to_assigned(routing.chosen("dynamo"))
    assert decision.worker == "w2"
    at_home = replace(
        decision, worker="w1", epoch=0, cached_tokens_predicted=0, prefill_tokens=160,
        params={**decision.params, "session_allowance": 9.0},
        session=SessionUse(id="s", bound_worker="w1", bound_epoch=0, bound_rank=0),
    )  # fmt: skip
    found = reasons_for(at_home, session="s")
    assert found is not None
    assert found.words == "its session is bound to this worker, though w2 cost 2 blocks less"
    assert found.difference == ""


def test_missed_target_is_a_term_of_its_own(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.add_load("w2", 60_000, 60_000, since_ms=1999)
    request = Request(
        id="a", model="m", token_ids=pack_tokens(range(100)), router=RouterParams(ttft_target=200.0)
    )
    found = got(routing, request=request)
    assert found.others[0].terms["missed target"] == 1e9
    assert "would miss one" in found.words


def test_unknown_session_makes_no_difference(routing: RoutingHarness) -> None:
    for n in range(8):
        routing.worker(f"w{n}")
    hints = Hints(session_control=SessionControl(session_id="s"))
    request = Request(id="a", model="m", token_ids=TOKENS, hints=hints)
    decision = to_assigned(routing.chosen("session_hash", request=request))
    known, unknown = reasons_for(decision, session="s"), reasons_for(decision)
    assert known is not None
    assert unknown is not None
    assert (known.difference, unknown.difference) == ("", "")
    assert any(
        found.difference
        for n in range(8)
        if (found := reasons_for(decision, session=f"another {n}")) is not None
    )


def test_records_without_inputs_or_of_other_policies_have_no_reasons(
    routing: RoutingHarness,
) -> None:
    routing.worker("w1")
    decision = to_assigned(routing.chosen())
    assert reasons_for(replace(decision, candidate_rows=None)) is None
    assert reasons_for(replace(decision, policy="next_year")) is None
