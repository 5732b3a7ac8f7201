"""Tests of routing hints of a request, from HTTP to the ledger: each hint has its effect.

A gateway, a router and workers on the log in memory. A hint that only informs is carried to the
worker; one that cannot be is refused with the name of its field.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import EngineOutput, GenerateContext, KvEventListener
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.app.routing.selection.eligibility import worker_number
from kvlane.indexer.cache_events.engine_events import EstimatedCache
from kvlane.streams.codecs import decode, unpack_tokens
from kvlane.streams.records import Assigned, EngineConfig
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER
from tests.harness.cluster_harness import (
    BLOCK,
    PROMPT,
    TOKENS,
    ClusterHarness,
    caching_engine,
    ranked_engine,
    slow_engine,
    two_caches,
)
from tests.harness.gateway_harness import CONTEXT, STEP_S
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test

MISSED = 1e9
"""What a missed target costs: more than anything else."""


# --- wrong values ---------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"backend_instance_id": "a b"}, "backend_instance_id"),
    ({"prefill_worker_id": -1}, "prefill_worker_id"),
    ({"decode_worker_id": ["w1"]}, "decode_worker_id"),
    ({"dp_rank": -1}, "dp_rank"),
    ({"prefill_dp_rank": "0"}, "prefill_dp_rank"),
    ({"agent_hints": {"osl": -1}}, "agent_hints.osl"),
    ({"lora_name": ""}, "lora_name"),
    ({"agent_hints": {"latency_sensitivity": "high"}}, "agent_hints.latency_sensitivity"),
    ({"agent_hints": {"priority": 2**31}}, "agent_hints.priority"),
    ({"agent_hints": {"strict_priority": -1}}, "agent_hints.strict_priority"),
    ({"allowed_worker_ids": []}, "allowed_worker_ids"),
    ({"allowed_worker_ids": ["w1", "a b"]}, "allowed_worker_ids.1"),
    ({"routing_constraints": {"required_taints": "a"}}, "routing_constraints.required_taints"),
    ({"routing_constraints": {"preferred_taints": {"a": "b"}}},
     "routing_constraints.preferred_taints.a"),
    ({"session_control": {"action": "open"}}, "session_control.session_id"),
    ({"session_control": {"session_id": "s", "action": "hide"}}, "session_control.action"),
    ({"session_control": {"session_id": "s", "timeout": 0}}, "session_control.timeout"),
    ({"router": {"ttft_target": 0}}, "router.ttft_target"),
    ({"router": {"itl_target": "fast"}}, "router.itl_target"),
    ({"router_config_override": {"overlap_score_credit": -1}},
     "router_config_override.overlap_score_credit"),
    ({"router_config_override": {"prefill_load_scale": "x"}},
     "router_config_override.prefill_load_scale"),
    ({"router_config_override": {"router_temperature": -0.5}},
     "router_config_override.router_temperature"),
    ({"router_config_override": {"assume_kv_reuse": 1}}, "router_config_override.assume_kv_reuse"),
    ({"router_config_override": {"track_prefill_tokens": "no"}},
     "router_config_override.track_prefill_tokens"),
    ({"router_config_override": {"shared_cache_multiplier": 0.5}},
     "router_config_override.shared_cache_multiplier"),
    ({"agent_hints": {"speculative_prefill": True}}, "agent_hints.speculative_prefill"),
    ({"extra_fields": ["timing"]}, "extra_fields"),
    ({"annotations": "query_instance_id:x"}, "annotations"),
    ({"agent_context": "me"}, "agent_context"),
    ({"request_timestamp_ms": "now"}, "request_timestamp_ms"),
    ({"extra_args": [1]}, "extra_args"),
    ({"mm_routing_info": {"routing_token_ids": [-1]}}, "mm_routing_info.routing_token_ids.0"),
]  # fmt: skip


@pytest.mark.parametrize(("ext", "field"), WRONG, ids=[field for _, field in WRONG])
@scenario_test
async def test_wrong_hint_is_refused_by_name(
    world: MemoryWorld, ext: dict[str, Any], field: str
) -> None:
    cluster = await ClusterHarness.gateway_only(world)
    answer = await cluster.complete_with(**ext).wait_done()
    assert (answer.status, answer.error["param"]) == (400, f"nvext.{field}")
    assert cluster.requests() == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"mm_processor_kwargs": 1}, "mm_processor_kwargs"),
        ({"prompt_embeds": "§"}, "prompt_embeds"),
    ],
)
@scenario_test
async def test_wrong_field_beside_nvext_is_refused_by_name(
    world: MemoryWorld, body: dict[str, Any], field: str
) -> None:
    cluster = await ClusterHarness.gateway_only(world)
    answer = await cluster.complete_with(body=body).wait_done()
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-worker-instance-id", "a b"),
        ("x-prefill-instance-id", "a/b"),
        ("x-dp-rank", "one"),
        ("x-prefill-dp-rank", "-1"),
        ("x-session-id", "s" * 201),
        ("x-queue-class", "c" * 201),
    ],
)
@scenario_test
async def test_wrong_header_is_refused_by_name(world: MemoryWorld, header: str, value: str) -> None:
    cluster = await ClusterHarness.gateway_only(world)
    answer = await cluster.complete_with({header: value}).wait_done()
    assert (answer.status, answer.error["param"]) == (400, header)


# --- pins -----------------------------------------------------------------------------------------


@scenario_test
async def test_pin_decides_by_name_by_number_and_by_header(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"))
    for worker in ("w1", "w2", "w3"):
        assert (await cluster.wait_decision(backend_instance_id=worker)).worker == worker
        number = int(worker_number(worker))
        assert (await cluster.wait_decision(backend_instance_id=number)).worker == worker
        answer = await cluster.complete_with({"x-worker-instance-id": worker}).wait_done()
        assert cluster.decision(answer).worker == worker


@scenario_test
async def test_rank_decides_and_a_pin_without_one_means_rank_0(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1", engine=ranked_engine(world))
    assert (await cluster.wait_decision(dp_rank=2)).rank == 2
    answer = await cluster.complete_with({"x-dp-rank": "1"}).wait_done()
    assert cluster.decision(answer).rank == 1
    for _ in range(3):
        assert (await cluster.wait_decision(backend_instance_id="w1")).rank == 0


@scenario_test
async def test_chosen_rank_is_in_the_request_of_the_worker(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1", engine=ranked_engine(world))
    together = [cluster.complete_with() for _ in range(3)]
    for answer in together:
        await answer.wait_done()
    ranks = {d.id: d.rank for d in cluster.decisions()}
    assert set(ranks.values()) == {0, 1, 2}
    for assignment in cluster.assigned():
        assert assignment.rank == ranks[assignment.request.id]
        assert (assignment.request.hints.dp_rank or 0) == assignment.rank


@scenario_test
async def test_policy_direct_goes_by_the_decode_worker_else_by_the_backend(
    world: MemoryWorld,
) -> None:
    cluster = await ClusterHarness.start(world, policy="direct")
    assert (
        await cluster.wait_decision(decode_worker_id="w2", backend_instance_id="w1")
    ).worker == "w2"
    assert (await cluster.wait_decision(backend_instance_id="w1")).worker == "w1"
    refused = await cluster.complete_with().wait_done()
    assert refused.status == 400
    assert "decode_worker_id" in refused.error["message"]
    assert "backend_instance_id" in refused.error["message"]


@scenario_test
async def test_pins_of_the_phases_do_not_bind_a_whole_request(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    busy = cluster.complete_with(backend_instance_id="w1")
    await world.wait_until(lambda: len(cluster.decisions()) == 1)
    decision = await cluster.wait_decision(
        prefill_worker_id="w1", decode_worker_id="w1", prefill_dp_rank=7
    )
    assert decision.worker == "w2"
    hints = cluster.assigned_request(decision).hints
    assert (hints.prefill_worker_id, hints.decode_worker_id) == ("w1", "w1")
    assert hints.prefill_dp_rank == 7
    await busy.wait_done()


@scenario_test
async def test_pinned_request_is_booked_with_its_overlap(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1", engine=caching_engine(world))
    await cluster.start_worker("w2", engine=caching_engine(world))
    await cluster.wait_decision(backend_instance_id="w1")
    await world.sleep(2)
    again = await cluster.wait_decision(backend_instance_id="w1")
    assert again.cached_tokens_predicted == 6 * BLOCK
    assert again.prefill_tokens == TOKENS - 6 * BLOCK


# --- who is eligible ------------------------------------------------------------------------------


@scenario_test
async def test_only_allowed_workers_are_considered(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"))
    decision = await cluster.wait_decision(allowed_worker_ids=["w1", int(worker_number("w3"))])
    assert {c.worker for c in decision.candidates} == {"w1", "w3"}


@scenario_test
async def test_taints_are_required_and_preferred(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1")
    await cluster.start_worker("w2", taints="gpu=h200, topology/zone=a")
    await cluster.start_worker("w3", taints="topology/zone=b")
    required = await cluster.wait_decision(
        routing_constraints={"required_taints": ["topology/zone=a"]}
    )
    assert [c.worker for c in required.candidates] == ["w2"]
    preferred = {"preferred_taints": {"topology/zone=b": 1.0, "gpu=h200": 0.5}}
    decision = await cluster.wait_decision(routing_constraints=preferred)
    assert decision.worker == "w3"
    weights = {c.worker: c.taint_weight for c in decision.candidates}
    assert weights == {"w1": 0, "w2": 0.5, "w3": 1}


@scenario_test
async def test_request_for_an_adapter_goes_to_a_worker_that_has_it(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    await cluster.start_worker("w1")
    await cluster.start_worker("w2", adapters={"sql": "/dev/null"})
    decision = await cluster.wait_decision(lora_name="sql")
    assert (decision.worker, decision.lora_name) == ("w2", "sql")
    assert cluster.assigned_request(decision).hints.lora_name == "sql"


@scenario_test
async def test_new_adapter_is_loaded_in_one_place(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), max_loras=2)
    placed = [await cluster.wait_decision(lora_name="new") for _ in range(4)]
    assert len({decision.worker for decision in placed}) == 1


# --- who goes first -------------------------------------------------------------------------------


async def placed_in_turn(world: MemoryWorld, answers: dict[str, HttpExchange]) -> list[str]:
    """The names of requests in the order in which they were given to workers; all are answered."""
    for answer in answers.values():
        await answer.wait_done()
    names = {answer.headers["x-kvlane-id"]: name for name, answer in answers.items()}
    came = sorted(world.all_records(LEDGER), key=lambda record: record.timestamp)
    decided = [r for r in map(decode, came) if isinstance(r, Assigned)]
    return [names[r.id] for r in decided if r.id in names]


@scenario_test
async def test_strict_priority_goes_first_and_priority_raises_the_age(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ())
    slow = EchoEngine(world.clock, 5.0, model="demo", context_length=CONTEXT)
    await cluster.start_worker("w1", engine=slow, max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    sent = {
        "plain": {},
        "older": {"latency_sensitivity": 100.0},
        "engine": {"priority": 200},
        "strict": {"strict_priority": 1},
        "most": {"strict_priority": 2, "latency_sensitivity": -50.0},
    }
    answers = {}
    for name, hints in sent.items():
        answers[name] = cluster.complete_with(agent_hints=hints)
        await world.sleep(0.1)
    assert await placed_in_turn(world, answers) == ["most", "strict", "engine", "older", "plain"]


@scenario_test
async def test_queued_class_is_served_by_its_weight(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(
        world, (), queue_classes={"batch": ClassConfig(weight=0.25)}
    )
    slow = EchoEngine(world.clock, 5.0, model="demo", context_length=CONTEXT)
    await cluster.start_worker("w1", engine=slow, max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    answers = {}
    for name in ("b1", "b2", "b3", "o1", "o2", "o3"):
        answers[name] = cluster.complete_with({"x-queue-class": "batch"} if name[0] == "b" else {})
        await world.sleep(0.1)
    assert await placed_in_turn(world, answers) == ["b1", "o1", "o2", "o3", "b2", "b3"]


# --- costs ----------------------------------------------------------------------------------------


@scenario_test
async def test_request_sets_the_credit_of_its_overlap(world: MemoryWorld) -> None:
    cluster = await two_caches(world, policy="dynamo")
    known = await cluster.wait_decision()
    assert known.worker == "w1"
    assert {c.worker: c.cost for c in known.candidates} == {
        "w1": TOKENS / BLOCK - 6,
        "w2": TOKENS / BLOCK,
    }
    none = await cluster.wait_decision(router_config_override={"overlap_score_credit": 0})
    assert none.params["overlap_score_credit"] == 0
    assert {c.cost for c in none.candidates} == {TOKENS / BLOCK}


@scenario_test
async def test_request_sets_the_scale_of_its_prefill(world: MemoryWorld) -> None:
    cluster = await two_caches(world, policy="dynamo")
    decision = await cluster.wait_decision(router_config_override={"prefill_load_scale": 4})
    assert {c.worker: c.cost for c in decision.candidates} == {
        "w1": 4 * (TOKENS / BLOCK - 6),
        "w2": 4 * TOKENS / BLOCK,
    }


@scenario_test
async def test_request_sets_its_temperature(world: MemoryWorld) -> None:
    cluster = await two_caches(world, policy="dynamo")
    hot = [
        await cluster.wait_decision(router_config_override={"router_temperature": 50})
        for _ in range(16)
    ]
    assert {d.params["temperature"] for d in hot} == {50}
    assert {d.worker for d in hot} == {"w1", "w2"}


@scenario_test
async def test_request_may_assume_no_cache_reuse(world: MemoryWorld) -> None:
    cluster = await two_caches(world)
    decision = await cluster.wait_decision(router_config_override={"assume_kv_reuse": False})
    assert decision.params["assume_kv_reuse"] == 0
    assert decision.cached_tokens_predicted == 6 * BLOCK
    assert decision.prefill_tokens == TOKENS


@scenario_test
async def test_request_may_exclude_its_prefill_from_the_load(world: MemoryWorld) -> None:
    cluster = await two_caches(world)
    decision = await cluster.wait_decision(router_config_override={"track_prefill_tokens": False})
    assert decision.params["track_prefill_tokens"] == 0
    assert decision.prefill_tokens == 0


@scenario_test
async def test_expected_length_counts_in_the_prediction(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, policy="predictive")
    decision = await cluster.wait_decision(agent_hints={"osl": 50}, body={"max_tokens": None})
    assert decision.params["output_tokens"] == 50
    shorter = await cluster.wait_decision(agent_hints={"osl": 50})
    assert shorter.params["output_tokens"] == 4, "max_tokens is the limit"


@scenario_test
async def test_worker_that_misses_a_target_ranks_behind_those_that_meet_it(
    world: MemoryWorld,
) -> None:
    cluster = await ClusterHarness.start(world, ("w2",), policy="predictive")
    await cluster.start_worker("w1", engine=slow_engine(world))
    await cluster.occupy("w1")
    free = await cluster.wait_decision()
    assert free.worker == "w2"
    assert max(c.cost for c in free.candidates) < MISSED
    target = {"ttft_target": 1.2 * free.ttft_ms_predicted}
    sent = await cluster.wait_decision(router=target)
    assert sent.params["ttft_target_ms"] == target["ttft_target"]
    assert {c.worker: c.cost >= MISSED for c in sent.candidates} == {"w1": True, "w2": False}
    slow = await cluster.wait_decision(router={"itl_target": 1e-6})
    assert {c.cost >= MISSED for c in slow.candidates} == {True}, "all miss it, one is taken"


@scenario_test
async def test_embeddings_have_no_overlap(world: MemoryWorld) -> None:
    cluster = await two_caches(world)
    tensor = base64.b64encode(b"tensor").decode()
    decision = await cluster.wait_decision(body={"prompt_embeds": tensor})
    assert {c.overlap_blocks for c in decision.candidates} == {0}
    assert cluster.assigned_request(decision).prompt_embeds == tensor


@scenario_test
async def test_routing_tokens_replace_the_prompt_in_the_overlap_only(world: MemoryWorld) -> None:
    cluster = await two_caches(world)
    other = [5] * len(PROMPT)
    held = list(unpack_tokens(cluster.requests()[0].token_ids))
    seen = await cluster.wait_decision(
        body={"prompt": other}, mm_routing_info={"routing_token_ids": held}
    )
    assert (seen.worker, seen.cached_tokens_predicted) == ("w1", 6 * BLOCK)
    request = cluster.assigned_request(seen)
    assert list(unpack_tokens(request.token_ids))[:-1] == other
    nothing: tuple[dict[str, Any], ...] = ({}, {"routing_token_ids": []})
    for empty in nothing:
        unseen = await cluster.wait_decision(mm_routing_info=empty)
        assert unseen.cached_tokens_predicted == 6 * BLOCK, "the prompt's own"
    images = [{"mm_objects": [{"mm_hash": 2**64 - 1, "offsets": [[0, 2]]}]}]
    pictured = await cluster.wait_decision(
        mm_routing_info={"routing_token_ids": held, "block_mm_infos": images}
    )
    assert pictured.cached_tokens_predicted == 0, "an image makes another block"


class Guessed(EchoEngine):
    """An engine that says nothing of its cache, so that it is guessed from what it serves."""

    def __init__(self, world: MemoryWorld) -> None:
        super().__init__(world.clock, STEP_S, model="demo", context_length=CONTEXT)
        self._guess = EstimatedCache(BLOCK, 256)

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        return replace(await super().start(worker_id), kv_cache_block_size=BLOCK)

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        tokens = list(unpack_tokens(request.token_ids))
        try:
            async for output in super().generate(request, context):
                tokens += output.token_ids
                yield output
        finally:  # who listens leaves at the last output
            self._listener(self._guess.on_served(tokens))


@scenario_test
async def test_prompts_served_by_an_engine_without_events_count_as_cached(
    world: MemoryWorld,
) -> None:
    cluster = await ClusterHarness.start(world, ())
    for name in ("w1", "w2"):
        await cluster.start_worker(name, engine=Guessed(world))
    first = await cluster.wait_decision()
    await world.sleep(2)
    again = await cluster.wait_decision()
    assert (again.worker, again.cached_tokens_predicted) == (first.worker, 6 * BLOCK)
    other = {"prompt": [5] * len(PROMPT)}
    pinned = await cluster.wait_decision(body=other, backend_instance_id="w2")
    await world.sleep(2)
    after = await cluster.wait_decision(body=other)
    assert (after.worker, after.cached_tokens_predicted) == (pinned.worker, 6 * BLOCK)


# --- what is carried ------------------------------------------------------------------------------


def got(value: bytes) -> Any:
    return json.loads(value)


CARRIED: list[tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any], Any]] = [
    ({"agent_hints": {"priority": 3}}, {}, lambda r: r.hints.priority, 3),
    ({"agent_hints": {"priority": -3}}, {}, lambda r: r.hints.priority, -3),
    ({"agent_hints": {"osl": 70}}, {}, lambda r: r.hints.expected_output_tokens, 70),
    (
        {"router": {"ttft_target": 100, "itl_target": 20}},
        {},
        lambda r: (r.router.ttft_target, r.router.itl_target),
        (100, 20),
    ),
    ({"agent_context": {"agent": ["a"]}}, {}, lambda r: got(r.agent_context), {"agent": ["a"]}),
    ({"request_timestamp_ms": 17.5}, {}, lambda r: r.request_timestamp_ms, 17.5),
    ({"extra_args": {"a": {"b": 1}}}, {}, lambda r: got(r.extra_args), {"a": {"b": 1}}),
    ({}, {"mm_processor_kwargs": {"fps": 2}}, lambda r: got(r.mm_processor_kwargs), {"fps": 2}),
    ({"annotations": ["a", "b:c"]}, {}, lambda r: r.annotations, ("a", "b:c")),
]


@pytest.mark.parametrize(("ext", "body", "of", "value"), CARRIED)
@scenario_test
async def test_informative_fields_reach_the_worker_and_the_log(
    world: MemoryWorld,
    ext: dict[str, Any],
    body: dict[str, Any],
    of: Callable[[Any], Any],
    value: Any,
) -> None:
    cluster = await ClusterHarness.start(world, ("w1",))
    decision = await cluster.wait_decision(body=body, **ext)
    (assignment,) = cluster.assigned()
    assert of(assignment.request) == value
    (request,) = cluster.requests()
    assert (of(request), request.id) == (value, decision.id)
