"""Requests that ask where they would go, and go nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from streams.codecs import unpack_tokens
from tests.towns import BLOCK, PROMPT, Town, session, stopped, two_caches
from tests.worlds import World, in_world, play


@pytest.mark.parametrize("value", ["", "yes", "w2", "a:b"])
def test_a_dry_run_tells_the_worker_and_the_tokens_and_books_nothing(value: str) -> None:
    async def scenario(world: World) -> None:
        town = await two_caches(world)
        before = len(town.decisions())
        answer = await town.say(annotations=[f"query_instance_id:{value}"]).done()
        assert answer.status == 200
        told = answer.json["nvext"]
        assert (told["worker_id"], told["dp_rank"]) == ("w1", 0)
        (asked,) = (r for r in town.requests() if r.id == answer.headers["x-kvlane-id"])
        assert told["token_ids"] == list(unpack_tokens(asked.token_ids))
        assert told["token_ids"][:-1] == PROMPT
        assert answer.json["choices"][0]["text"] == ""
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        assert len(town.decisions()) == before
        assert len(town.assigned()) == before
        await world.until(lambda: answer.headers["x-kvlane-id"] in town.ended())

    play(scenario)


@in_world
async def test_a_dry_run_is_told_in_a_stream_too(world: World) -> None:
    town = await Town.found(world, ("w1",))
    ask = {"annotations": ["query_instance_id:x"]}
    answer = await town.chat("hello", stream=True, nvext=ask).done()
    told = [event["nvext"] for event in answer.events[:-1] if "nvext" in event]
    assert [each["worker_id"] for each in told] == ["w1"]
    assert answer.events[-1] == "[DONE]"


@in_world
async def test_an_annotation_without_a_value_is_no_dry_run(world: World) -> None:
    town = await Town.found(world)
    for annotation in ("query_instance_id", "my_query_instance_id:x"):
        await town.placed(annotations=[annotation])
    assert len(town.assigned()) == 2


@in_world
async def test_a_dry_run_sees_pins_and_opens_no_session(world: World) -> None:
    town = await Town.found(world, ("w1", "w2"), policy="round_robin")
    ask: dict[str, Any] = {"annotations": ["query_instance_id:x"]}
    for _ in range(3):
        answer = await town.say(**ask, **session(), backend_instance_id="w2").done()
        assert answer.json["nvext"]["worker_id"] == "w2"
    turns = [(await town.say(**ask).done()).json["nvext"]["worker_id"] for _ in range(3)]
    assert len(set(turns)) == 1, "its turn goes on with what is dispatched only"
    began = await town.placed(**session())
    assert began.session is not None
    assert began.session.bound_worker == ""


@in_world
async def test_a_dry_run_waits_for_no_busy_worker(world: World) -> None:
    town = await Town.found(world, (), policy="predictive")
    await town.hire("w1", engine=stopped(world))
    await town.occupy("w1")
    answer = await town.say(annotations=["query_instance_id:x"]).done()
    assert answer.json["nvext"]["worker_id"] == "w1"


@in_world
async def test_a_dry_run_is_about_one_answer(world: World) -> None:
    town = await Town.found(world)
    answer = await town.say(body={"n": 2}, annotations=["query_instance_id:x"]).done()
    assert (answer.status, answer.error["param"]) == (400, "nvext.annotations")
