"""What a running request is booked with, and that this is given back once, however it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from app.engine.contract import EngineOutput, GenerateContext
from app.engine.echo import EchoEngine
from app.routing.policies import Place
from streams.codecs import decode
from streams.memory.broker import Fate
from streams.records import Finished, PrefillDone, Request, Started
from streams.topics import KV_EVENTS, LEDGER
from tests.gateways import CONTEXT, STEP_S
from tests.towns import PROMPT, TOKENS, Town, caching, stopped
from tests.worlds import World, in_world, play


class Hesitant(EchoEngine):
    """Says something without a token before it says anything."""

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        for _ in range(3):
            await self._clock.sleep(1.0)
            yield EngineOutput()
        async for output in super().generate(request, context):
            yield output


@in_world
async def test_prefill_is_done_with_the_first_token_and_not_with_an_empty_output(
    world: World,
) -> None:
    town = await Town.found(world, ())
    engine = Hesitant(world.clock, STEP_S, model="demo", context_length=CONTEXT)
    worker = await town.hire("w1", engine=engine)
    assert worker.epoch is not None
    place = Place("w1", worker.epoch)
    answer = town.say(body={"max_tokens": 200})
    await world.until(lambda: any(isinstance(r, Started) for r in _ledger(world)))
    await world.sleep(2)
    (burden,) = town.router._load.burdens.at([place])
    assert burden.prefill_tokens == TOKENS, "two empty outputs came"
    await world.until(lambda: any(isinstance(r, PrefillDone) for r in _ledger(world)))
    await world.sleep(0.1)
    (burden,) = town.router._load.burdens.at([place])
    assert (burden.runs, burden.prefill_tokens) == (1, 0)
    await answer.done()


@pytest.mark.parametrize("way", ["end", "cancel", "leave", "death", "deadline"])
def test_what_a_request_was_booked_with_is_given_back_once_however_it_ends(way: str) -> None:
    async def scenario(world: World) -> None:
        town = await Town.found(world, (), deadline_s=30)
        engine = caching(world) if way == "end" else stopped(world)
        await town.hire("w1", engine=engine)
        answer = town.say(body={"stream": True})
        await world.until(lambda: len(town.decisions()) == 1)
        await world.sleep(1)
        (decision,) = town.decisions()
        if way != "end":
            assert not town.is_idle
        if way == "cancel":
            assert (await town.ask("DELETE", f"/v1/streams/{decision.id}").done()).status < 300
        elif way == "leave":
            answer.leave()
        elif way == "death":
            await town.kill("w1")
        await answer.task
        await world.sleep(40)
        assert town.is_idle
        assert not town.router._load.lane(0).unfinished
        assert not town.router._load.lane(1).unfinished

    play(scenario)


@in_world
async def test_two_ends_of_one_request_give_back_what_one_was_booked_with(world: World) -> None:
    town = await Town.found(world, ())
    await town.hire("w1", engine=stopped(world))
    first, second = town.say(), town.say()
    await world.until(lambda: len(town.decisions()) == 2)
    one = next(d for d in town.decisions())
    await town.ask("DELETE", f"/v1/streams/{one.id}").done()
    await town.ask("DELETE", f"/v1/streams/{one.id}").done()
    await world.sleep(2)
    place = Place("w1", one.epoch)
    (burden,) = town.router._load.burdens.at([place])
    assert (burden.runs, burden.tokens) == (1, TOKENS)
    for answer in (first, second):
        answer.leave()
        await answer.task


@in_world
async def test_news_that_get_lost_on_their_way_cost_no_request(world: World) -> None:
    """Of the prefill's end, of the cache, and of the run's end, which is said until it stands."""
    town = await Town.found(world, ())
    await town.hire("w1", engine=caching(world))
    kept = [Fate.KEPT] * 2  # Assigned, Started
    world.faults.next_fates(LEDGER, *kept, Fate.LOST, Fate.LOST, Fate.KEPT)
    world.faults.next_fates(KV_EVENTS, Fate.LOST)
    answer = await town.say().done()
    assert answer.status == 200
    await world.sleep(5)
    kinds = [type(r) for r in _ledger(world)]
    assert kinds.count(PrefillDone) <= 1
    assert kinds.count(Finished) == 1
    assert town.is_idle
    assert (await town.placed()).worker == "w1"


@in_world
async def test_a_cancel_wins_over_tokens_that_are_ready(world: World) -> None:
    """Tokens that an engine makes after its run was cancelled are not in the answer."""
    town = await Town.found(world, ())
    await town.hire("w1")
    answer = town.say(body={"stream": True, "max_tokens": 300, "prompt": PROMPT})
    await world.until(lambda: len(answer.text) > 5)
    (decision,) = town.decisions()
    await town.ask("DELETE", f"/v1/streams/{decision.id}").done()
    shown = len(answer.text)
    await answer.task
    assert len(answer.text) <= shown + 3
    await world.until(lambda: any(isinstance(r, Finished) for r in _ledger(world)))
    (finished,) = (r for r in _ledger(world) if isinstance(r, Finished))
    assert finished.code == "cancelled"
    assert finished.output_tokens < 300


def _ledger(world: World) -> list[object]:
    return [decode(record) for record in world.everywhere(LEDGER)]
