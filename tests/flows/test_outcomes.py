"""Tests of requests without a worker: from the rule that excluded the last one to the status of
the client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.cluster_harness import ClusterHarness, slow_engine
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test


async def _refused(answer: HttpExchange, status: int, code: str, *output: str) -> None:
    await answer.wait_done()
    assert (answer.status, answer.error["code"]) == (status, code), answer.content
    for each in output:
        assert each in answer.error["message"]


@scenario_test
async def test_request_pinned_to_an_unknown_worker_ends(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    await _refused(cluster.complete_with(backend_instance_id="w9"), 503, "pinned_gone", "w9")


@scenario_test
async def test_pin_to_a_dead_worker_is_gone(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    await cluster.kill("w2")
    await world.sleep(20)
    await _refused(cluster.complete_with(backend_instance_id="w2"), 503, "pinned_gone", "w2")


@scenario_test
async def test_disallowed_pin_is_a_client_error(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    answer = cluster.complete_with(backend_instance_id="w1", allowed_worker_ids=["w2"])
    await _refused(answer, 400, "pin_not_allowed", "allowed_worker_ids")


@scenario_test
async def test_pin_to_a_missing_rank_is_a_client_error(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world)
    await _refused(
        cluster.complete_with(backend_instance_id="w1", dp_rank=3), 400, "invalid", "rank 3"
    )


@pytest.mark.parametrize(
    ("ext", "rule"),
    [
        ({"dp_rank": 5}, "rank 5"),
        ({"allowed_worker_ids": ["w9"]}, "allowed_worker_ids"),
        ({"routing_constraints": {"required_taints": ["topology/zone=c"]}}, "required_taints"),
        ({"lora_name": "nobody's"}, "lora_name"),
    ],
)
@scenario_test
async def test_rule_that_leaves_no_worker_is_named(
    world: MemoryWorld, ext: dict[str, Any], rule: str
) -> None:
    cluster = await ClusterHarness.start(world)
    sent_at = world.clock.now()
    answer = cluster.complete_with(**ext)
    await _refused(answer, 503, "none_eligible", rule)
    assert world.clock.now() - sent_at < 5, "no waiting would help"
    assert answer.headers["retry-after"]
    assert cluster.decisions() == []


@scenario_test
async def test_busy_workers_take_nothing_and_all_busy_is_reported_at_the_deadline(
    world: MemoryWorld,
) -> None:
    cluster = await ClusterHarness.start(world, (), deadline_s=5)
    await cluster.start_worker("w1", engine=slow_engine(world), max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    answer = cluster.complete_with()
    await _refused(answer, 529, "all_busy", "at their load limits")
    assert answer.headers["retry-after"]
    await cluster.start_worker("w2")
    assert (await cluster.wait_decision()).worker == "w2"


@scenario_test
async def test_request_pinned_to_a_busy_worker_ends_at_its_deadline(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w2",), deadline_s=5)
    await cluster.start_worker("w1", engine=slow_engine(world), max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    await _refused(cluster.complete_with(backend_instance_id="w1"), 503, "pinned_busy", "w1")


@scenario_test
async def test_death_of_the_last_worker_leaves_no_workers(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, (), deadline_s=15)
    await cluster.start_worker("w1", engine=slow_engine(world), max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    waiting = cluster.complete_with()
    await world.sleep(1)
    await cluster.kill("w1")
    await _refused(waiting, 503, "no_workers")
    await _refused(cluster.complete_with(), 503, "no_workers")


@scenario_test
async def test_full_queue_ends_the_request_immediately(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, (), max_queued_requests=0)
    await cluster.start_worker("w1", engine=slow_engine(world), max_pending_prefill_tokens=50)
    await cluster.occupy("w1")
    await _refused(cluster.complete_with(), 529, "queue_full", "at their load limits")


@scenario_test
async def test_deadline_in_the_worker_ends_the_request(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, (), deadline_s=5)
    await cluster.start_worker("w1", engine=slow_engine(world))
    await _refused(cluster.complete_with(), 408, "deadline")
