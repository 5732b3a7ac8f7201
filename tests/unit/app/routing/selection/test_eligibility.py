"""Tests of eligibility: the workers that may take a request, and the rule that excludes all."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.routing.selection.decision import Decision, Placement, Rejection, Wait
from kvlane.app.routing.selection.eligibility import (
    CandidatePool,
    NotEligible,
    filter_eligible,
    worker_number,
)
from kvlane.app.routing.selection.lora import rendezvous_order
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.streams.records import Cordon, EngineConfig, EngineStats, Lost, Tombstone, WorkerCard
from kvlane.streams.request import AnswerParsing, Hints, OpenAiBody, Request, RoutingConstraints
from tests.harness.routing_harness import TIMEOUT_MS, TOKENS, RoutingHarness


def hopeless(reason: str) -> Wait:
    """No worker that lives could ever take it."""
    return Wait(reason, code="none_eligible", needs_new_worker=True)


# Who may take it


def test_ineligible_workers_get_no_requests(routing: RoutingHarness) -> None:
    for name in ("fine", "other", "dead", "silent", "draining"):
        routing.worker(name, model="x" if name == "other" else "m")
    routing.registry(WorkerCard(id="new", slot=0, model="m", config=EngineConfig(model="m")))
    routing.event(Lost(worker="dead", epoch=routing.epochs["dead"]))
    routing.send_heartbeat("fine", at_ms=9000)
    routing.send_heartbeat("draining", at_ms=9000, state="draining")
    assert {c.worker for c in routing.chosen(now_ms=9000).candidates} == {"fine"}


def test_cordoned_workers_get_no_requests(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.registry(Cordon(worker="w1"))
    assert {c.worker for c in routing.chosen().candidates} == {"w2"}
    pinned = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(backend_instance_id="w1"))
    busy = Wait("the pinned worker w1 is cordoned", code="pinned_busy")
    assert routing.plan(request=pinned) == busy
    routing.registry(Cordon(worker="w2", evacuates=True))
    why = "no worker is ready that is not cordoned (w1, w2)"
    assert routing.plan() == Wait(why, code="no_workers")
    routing.registry(Tombstone(key="cordon/w1"))
    assert routing.chosen().worker_rank.worker == "w1"


def test_begun_answer_goes_to_a_worker_that_can_continue_it(routing: RoutingHarness) -> None:
    parsed = Request(id="a", model="m", token_ids=TOKENS, parsing=AnswerParsing(version=1))
    routing.worker("text", engine={"gives_tokens": False}, parser_version=1)
    routing.worker("other parser", parser_version=2)
    routing.worker("same", parser_version=1)

    def workers(**over: Any) -> set[str]:
        pool = routing.pools.pool("m", "aggregated")
        rows = filter_eligible(parsed, "aggregated", pool, routing.fleet, **over)
        assert not isinstance(rows, NotEligible)
        return {row.worker_rank.worker for row in rows}

    assert workers() == {"text", "other parser", "same"}
    assert workers(has_output=True) == {"same"}
    routing.event(Lost(worker="same", epoch=routing.epochs["same"]))
    assert workers(has_output=True) == {"text", "other parser"}


def test_answer_read_by_a_parser_of_vllm_goes_to_a_worker_with_its_release(
    routing: RoutingHarness,
) -> None:
    for name, release in (("failed", "0.32.0"), ("newer", "0.33.0"), ("same", "0.32.0")):
        routing.worker(name, parser_version=1, versions={"kvlane": name, "vllm": release})

    def workers(tools: str, excluded: str = "failed") -> set[str]:
        parsing = AnswerParsing(tools=tools, version=1)
        request = Request(id="a", model="m", token_ids=TOKENS, parsing=parsing)
        pool = routing.pools.pool("m", "aggregated")
        rows = filter_eligible(
            request, "aggregated", pool, routing.fleet, excluded={excluded}, has_output=True
        )
        assert not isinstance(rows, NotEligible)
        return {row.worker_rank.worker for row in rows}

    assert workers("glm45") == {"same"}
    assert workers("hermes") == {"newer", "same"}, "these rules are those of kvlane"
    assert workers("glm45", "gone") == {"failed", "newer", "same"}
    routing.event(Lost(worker="failed", epoch=routing.epochs["failed"]))
    assert workers("glm45") == {"same"}, "the card of a dead worker is known"
    routing.event(Lost(worker="same", epoch=routing.epochs["same"]))
    assert workers("glm45") == {"newer"}


def test_worker_is_eligible_again_as_soon_as_its_heartbeats_resume(routing: RoutingHarness) -> None:
    routing.worker("w1")
    assert isinstance(routing.plan(now_ms=1500 + TIMEOUT_MS), Placement)
    assert routing.plan(now_ms=1501 + TIMEOUT_MS) == Wait("no worker is ready", code="no_workers")
    routing.send_heartbeat("w1", at_ms=8000)
    assert isinstance(routing.plan(now_ms=8000), Placement)


def test_request_without_a_model_goes_to_any(routing: RoutingHarness) -> None:
    routing.worker("w1", model="x")
    assert routing.chosen(request=Request(id="a")).worker_rank.worker == "w1"


def in_words(kind: Any) -> Request:
    return Request(id="a", model="m", body=OpenAiBody(kind=kind, json=b"{}", prompt_tokens=100))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_bodies_go_to_workers_that_take_them_and_tokens_to_the_others(
    routing: RoutingHarness, kind: Any
) -> None:
    routing.worker("in tokens")
    routing.worker("in words", engine={"kind": kind})
    for seed in range(5):
        assert routing.chosen(request=in_words(kind), seed=seed).worker_rank.worker == "in words"
        assert routing.chosen(seed=seed).worker_rank.worker == "in tokens"
    reason = "no ready worker takes embedding requests as they come"
    assert routing.plan(request=in_words("embedding")) == hopeless(reason)


def test_tokenized_request_has_no_worker_where_all_take_bodies(routing: RoutingHarness) -> None:
    routing.worker("w", engine={"kind": "chat"})
    assert routing.plan() == hopeless("no ready worker takes tokens")


def test_request_with_a_body_has_no_overlap_and_its_given_size(routing: RoutingHarness) -> None:
    routing.worker("w", engine={"kind": "chat"})
    for policy in ("dynamo", "predictive"):
        chosen = routing.chosen(policy, request=in_words("chat"))
        assert (chosen.tokens, chosen.cached_tokens, chosen.prefill_tokens) == (100, 0, 100)


def test_prefill_workers_take_no_whole_requests(routing: RoutingHarness) -> None:
    routing.worker("p", role="prefill")
    assert isinstance(routing.plan(), Wait)
    assert routing.chosen(phase="prefill").worker_rank.worker == "p"
    routing.worker("d", role="decode")
    assert routing.chosen().worker_rank.worker == "d"
    assert routing.chosen(phase="decode").worker_rank.worker == "d"


@pytest.mark.parametrize(
    ("hints", "places"),
    [
        ({}, {("w1", 0), ("w2", 0), ("w2", 1), ("w3", 0)}),
        ({"allowed_worker_ids": ("w1", worker_number("w3"))}, {("w1", 0), ("w3", 0)}),
        ({"backend_instance_id": "w2"}, {("w2", 0)}),
        ({"backend_instance_id": worker_number("w2"), "dp_rank": 1}, {("w2", 1)}),
        ({"dp_rank": 1}, {("w2", 1)}),
        ({"decode_worker_id": "w3"}, {("w1", 0), ("w2", 0), ("w2", 1), ("w3", 0)}),
        (
            {"routing_constraints": RoutingConstraints(required_taints=("a",))},
            {("w1", 0), ("w3", 0)},
        ),
        ({"routing_constraints": RoutingConstraints(required_taints=("a", "b"))}, {("w3", 0)}),
    ],
)
def test_no_eligible_rank_is_missed_and_no_other_is_included(
    routing: RoutingHarness, hints: dict[str, Any], places: set[tuple[str, int]]
) -> None:
    routing.worker("w1", taints=("a",))
    routing.worker("w2", ranks=2)
    routing.worker("w3", taints=("a", "b"))
    planned = routing.plan_hints(**hints)
    assert isinstance(planned, Placement)
    assert {(c.worker, c.rank) for c in planned.candidates} == places


@pytest.mark.parametrize(
    ("hints", "outcome"),
    [
        ({"backend_instance_id": "w9"}, Rejection("pinned_gone", "the pinned worker w9 is gone")),
        (
            {"backend_instance_id": "w1", "allowed_worker_ids": ("w2",)},
            Rejection("pin_not_allowed", "the pinned worker w1 is not among allowed_worker_ids"),
        ),
        (
            {"backend_instance_id": "w1", "dp_rank": 1},
            Rejection("invalid", "the pinned worker w1 has no rank 1"),
        ),
        (
            {"backend_instance_id": "x1"},
            Rejection("invalid", "the pinned worker x1 does not serve m"),
        ),
        (
            {"backend_instance_id": "p1"},
            Rejection("invalid", "the pinned worker p1 only does prefill"),
        ),
        (
            {"backend_instance_id": "w2"},
            Wait("the pinned worker w2 is not ready", code="pinned_busy"),
        ),
        ({"dp_rank": 3}, hopeless("no ready worker has rank 3")),
        ({"allowed_worker_ids": ("w9",)}, hopeless("none of allowed_worker_ids is ready")),
        (
            {"allowed_worker_ids": ("w2",)},
            Wait("none of allowed_worker_ids is ready", code="none_eligible"),
        ),
        (
            {"routing_constraints": RoutingConstraints(required_taints=("z",))},
            hopeless("no ready worker has all required_taints"),
        ),
        ({"lora_name": "l"}, hopeless("no ready worker serves the adapter of lora_name")),
    ],
)
def test_rule_that_excludes_the_last_worker_is_named(
    routing: RoutingHarness, hints: dict[str, Any], outcome: Decision
) -> None:
    routing.workers("w1", "w2")
    routing.send_heartbeat("w2", state="draining")
    routing.worker("x1", model="x")
    routing.worker("p1", role="prefill")
    assert routing.plan_hints(**hints) == outcome


def test_workers_that_failed_are_excluded_while_there_is_another(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    assert routing.chosen(excluded={"w1"}).worker_rank.worker == "w2"
    assert len(routing.chosen(excluded={"w1", "w2"}).candidates) == 2


def test_full_workers_take_nothing(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    assert routing.chosen(full_workers={("w1", 0)}).worker_rank.worker == "w2"
    assert routing.plan(full_workers={("w1", 0), ("w2", 1)}) == Wait(
        "all workers are full", code="all_busy"
    )
    assert len(routing.chosen(full_workers={("w1", 7)}).candidates) == 2, "another life of it"


def test_direct_policy_uses_the_pinned_worker(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    for hints in (
        Hints(decode_worker_id="w2", backend_instance_id="w1"),
        Hints(backend_instance_id="w2"),
    ):
        request = Request(id="a", model="m", hints=hints)
        assert routing.chosen("direct", request=request).worker_rank.worker == "w2"
    refused = routing.plan("direct")
    assert isinstance(refused, Rejection)
    assert "decode_worker_id" in refused.message
    assert "backend_instance_id" in refused.message


def test_busy_workers_take_nothing(routing: RoutingHarness) -> None:
    routing.worker("w1", busy_cache=0.9, busy_prefill_tokens=100)
    routing.worker("w2", busy_cache=0.5)
    assert len(routing.chosen().candidates) == 2
    routing.send_heartbeat("w2", engine=EngineStats(kv_used_blocks=51, kv_total_blocks=100))
    assert [c.worker for c in routing.chosen().candidates] == ["w1"]
    routing.add_load("w1", 101, prefill=101)
    assert routing.plan() == Wait("all workers are at their load limits", code="all_busy")
    pinned = routing.plan_hints(backend_instance_id="w2")
    assert pinned == Wait("the pinned worker w2 is busy", code="pinned_busy")


def test_bound_of_prefill_is_of_one_rank(routing: RoutingHarness) -> None:
    routing.worker("w1", ranks=2, busy_prefill_tokens=100)
    routing.add_load("w1", 101, prefill=101, rank=0)
    assert routing.chosen().worker_rank.rank == 1


def test_own_decisions_make_workers_busy_before_they_are_read_back(routing: RoutingHarness) -> None:
    routing.worker("w1", busy_prefill_tokens=100)
    decision = routing.chosen()
    routing.own.add(decision.worker_rank, decision.load)
    assert routing.plan() == Wait("all workers are at their load limits", code="all_busy")


def test_unconstrained_request_gets_the_rows_of_the_pool_unchanged(routing: RoutingHarness) -> None:
    routing.worker("w1")
    pool = routing.pools.pool("m", "aggregated")
    request = Request(id="a", model="m", token_ids=TOKENS)
    assert filter_eligible(request, "aggregated", pool, routing.fleet) is pool.rows


def test_columns_of_a_pool_are_kept_while_the_set_of_workers_is_unchanged(
    routing: RoutingHarness,
) -> None:
    def pool(at_ms: int) -> CandidatePool:
        routing.silent.update(at_ms / 1000)
        return routing.pools.pool("m", "aggregated")

    routing.workers("w1", "w2")
    first, late_ms = pool(1500), 1501 + TIMEOUT_MS
    for name in ("w1", "w2"):
        routing.send_heartbeat(name, late_ms)
    again = pool(late_ms)
    assert again.table is first.table
    routing.add_load("w2", 700)
    loads = {each.worker: each.open_tokens for each in routing.chosen(now_ms=late_ms).candidates}
    assert loads == {"w1": 0, "w2": 700}
    routing.send_heartbeat("w1", late_ms + 100)
    alone = pool(late_ms + TIMEOUT_MS + 1)
    assert [row.worker_rank.worker for row in alone.rows] == ["w1"]
    routing.send_heartbeat("w2", late_ms + TIMEOUT_MS + 1)
    assert len(pool(late_ms + TIMEOUT_MS + 1).rows) == 2
    routing.worker("w3")
    assert len(pool(late_ms + TIMEOUT_MS + 1).rows) == 2, "it was not heard of lately"
    routing.send_heartbeat("w3", late_ms + TIMEOUT_MS + 1)
    assert len(pool(late_ms + TIMEOUT_MS + 1).rows) == 3


def test_pin_to_a_lost_epoch_is_refused(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.event(Lost(worker="w1", epoch=routing.epochs["w1"]))
    refused = routing.plan_hints(backend_instance_id="w1")
    assert refused == Rejection("pinned_gone", "the pinned worker w1 is gone")


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
    routing: RoutingHarness, phase: Any, hints: dict[str, Any], place: tuple[str, int]
) -> None:
    for name in ("p1", "p2", "d1", "d2"):
        routing.worker(name, role="prefill" if name[0] == "p" else "decode", ranks=2)
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(**hints))
    chosen = routing.chosen(request=request, phase=phase)
    assert (chosen.worker_rank.worker, chosen.worker_rank.rank) == place


# Adapters


def test_adapter_is_served_by_those_that_have_it(routing: RoutingHarness) -> None:
    routing.worker("base")
    routing.worker("w1", engine={"lora_names": ("l",)})
    sent = routing.plan_hints(lora_name="l")
    assert isinstance(sent, Placement)
    assert [c.worker for c in sent.candidates] == ["w1"]


def test_new_adapter_has_the_same_home_for_all_routers(routing: RoutingHarness) -> None:
    for n in range(4):
        routing.worker(f"w{n}", engine={"max_loras": 2})
    homes = set()
    for n in range(20):
        sent = routing.plan_hints(lora_name=f"l{n}")
        assert isinstance(sent, Placement)
        assert len(sent.candidates) == 1
        homes.add(sent.worker_rank.worker)
    assert len(homes) > 1, "adapters are spread"


def test_adapters_move_only_when_their_worker_is_gone(routing: RoutingHarness) -> None:
    workers = [routing.worker(f"w{n}", engine={"max_loras": 2}) for n in range(4)]
    before = {n: rendezvous_order(f"l{n}", workers)[0] for n in range(30)}
    after = {n: rendezvous_order(f"l{n}", workers[1:])[0] for n in range(30)}
    assert {n for n in before if before[n] != after[n]} == {
        n for n, home in before.items() if home == "w0"
    }


def test_adapter_with_many_requests_is_loaded_by_one_more(routing: RoutingHarness) -> None:
    for n in range(4):
        routing.worker(f"w{n}", engine={"max_loras": 2, "max_num_seqs": 8})
    first = routing.plan_hints(lora_name="l")
    assert isinstance(first, Placement)
    for _ in range(9):
        routing.got.add(first.worker_rank, WorkerLoad(1, 10), "l")
    sent = routing.plan_hints(lora_name="l")
    assert isinstance(sent, Placement)
    assert len(sent.candidates) == 2
    other = routing.plan_hints(lora_name="another")
    assert isinstance(other, Placement)
    assert len(other.candidates) == 1, "load is counted by adapter"


def test_full_preferred_worker_of_an_adapter_is_skipped(routing: RoutingHarness) -> None:
    for n in range(3):
        routing.worker(f"w{n}", engine={"max_loras": 1})
    request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(lora_name="l"))
    home = routing.chosen(request=request).worker_rank
    second = routing.chosen(request=request, full_workers={home[:2]}).worker_rank
    assert second.worker == rendezvous_order("l", ["w0", "w1", "w2"])[1]
