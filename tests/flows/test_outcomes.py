"""Why a request got no worker, from the rule that left none to the status that its client sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exchange import Exchange
from tests.towns import Town, stopped
from tests.worlds import World, in_world, play


async def _refused(answer: Exchange, status: int, code: str, *said: str) -> None:
    await answer.done()
    assert (answer.status, answer.error["code"]) == (status, code), answer.content
    for each in said:
        assert each in answer.error["message"]


@in_world
async def test_a_pin_to_nobody_is_gone(world: World) -> None:
    town = await Town.found(world)
    await _refused(town.say(backend_instance_id="w9"), 503, "pinned_gone", "w9")


@in_world
async def test_a_pin_to_a_dead_worker_is_gone(world: World) -> None:
    town = await Town.found(world)
    await town.kill("w2")
    await world.sleep(20)
    await _refused(town.say(backend_instance_id="w2"), 503, "pinned_gone", "w2")


@in_world
async def test_a_pin_that_is_not_allowed_is_the_clients_mistake(world: World) -> None:
    town = await Town.found(world)
    answer = town.say(backend_instance_id="w1", allowed_worker_ids=["w2"])
    await _refused(answer, 400, "pin_not_allowed", "allowed_worker_ids")


@in_world
async def test_a_pin_to_a_rank_that_is_not_there_is_the_clients_mistake(world: World) -> None:
    town = await Town.found(world)
    await _refused(town.say(backend_instance_id="w1", dp_rank=3), 400, "invalid", "rank 3")


@pytest.mark.parametrize(
    ("ext", "rule"),
    [
        ({"dp_rank": 5}, "rank 5"),
        ({"allowed_worker_ids": ["w9"]}, "allowed_worker_ids"),
        ({"routing_constraints": {"required_taints": ["topology/zone=c"]}}, "required_taints"),
        ({"lora_name": "nobody's"}, "lora_name"),
    ],
)
def test_the_rule_that_leaves_no_worker_is_named(ext: dict[str, Any], rule: str) -> None:
    async def scenario(world: World) -> None:
        town = await Town.found(world)
        asked_at = world.clock.now()
        answer = town.say(**ext)
        await _refused(answer, 503, "none_eligible", rule)
        assert world.clock.now() - asked_at < 5, "no waiting would help"
        assert answer.headers["retry-after"]
        assert town.decisions() == []

    play(scenario)


@in_world
async def test_busy_workers_take_nothing_and_all_busy_is_told_when_the_time_is_up(
    world: World,
) -> None:
    town = await Town.found(world, (), deadline_s=5)
    await town.hire("w1", engine=stopped(world), busy_prefill_tokens=50)
    await town.occupy("w1")
    answer = town.say()
    await _refused(answer, 529, "all_busy", "busy")
    assert answer.headers["retry-after"]
    await town.hire("w2")
    assert (await town.placed()).worker == "w2"


@in_world
async def test_a_busy_pin_is_told_when_the_time_is_up(world: World) -> None:
    town = await Town.found(world, ("w2",), deadline_s=5)
    await town.hire("w1", engine=stopped(world), busy_prefill_tokens=50)
    await town.occupy("w1")
    await _refused(town.say(backend_instance_id="w1"), 503, "pinned_busy", "w1")


@in_world
async def test_when_the_last_worker_dies_there_are_none(world: World) -> None:
    town = await Town.found(world, (), deadline_s=15)
    await town.hire("w1", engine=stopped(world), busy_prefill_tokens=50)
    await town.occupy("w1")
    waiting = town.say()
    await world.sleep(1)
    await town.kill("w1")
    await _refused(waiting, 503, "no_workers")
    await _refused(town.say(), 503, "no_workers")


@in_world
async def test_a_full_queue_is_told_at_once(world: World) -> None:
    town = await Town.found(world, (), held_requests=0)
    await town.hire("w1", engine=stopped(world), busy_prefill_tokens=50)
    await town.occupy("w1")
    await _refused(town.say(), 529, "queue_full", "busy")


@in_world
async def test_a_deadline_in_the_worker_is_a_deadline(world: World) -> None:
    town = await Town.found(world, (), deadline_s=5)
    await town.hire("w1", engine=stopped(world))
    await _refused(town.say(), 408, "deadline")
