"""What a router keeps waiting is bounded, and nobody waits who need not."""

from __future__ import annotations

from typing import Any

import pytest

from app.routing.classes import Share
from streams.records import (
    Assignment,
    End,
    Finished,
    Hints,
    Lost,
    ModelCard,
    OpenAiBody,
    Request,
    Tombstone,
)
from streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.routers import PROMPT, Hand, read, route, some, write
from tests.worlds import World, in_world


def ask(world: World, *ids: str, **over: Any) -> None:
    for name in ids:
        write(world, REQUESTS, Request(**({"id": name, "model": "demo", "deadline_s": 100} | over)))


def ended(world: World, *ids: str) -> dict[str, str]:
    return {name: end.code for name in ids for end in read(world, RESPONSES, End, name)}


def refusals(world: World, *ids: str) -> int:
    finished = (f for name in ids for f in read(world, LEDGER, Finished, name))
    return sum(f.code == "worker_full" for f in finished)


@in_world
async def test_who_need_not_wait_is_not_refused_because_others_do(world: World) -> None:
    worker, other = Hand(world), Hand(world, "w2", model="big")
    other.state = "draining"
    await route(world, held_requests=1)
    ask(world, "a", "b", model="big")
    await world.until(lambda: ended(world, "a", "b") == {"b": "queue_full"})
    ask(world, "c")
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_without_a_place_to_wait_a_free_worker_is_enough(world: World) -> None:
    worker = Hand(world)
    await route(world, held_requests=0)
    ask(world, "a")
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_what_waits_is_bounded_in_tokens_that_no_cache_has_too(world: World) -> None:
    worker = Hand(world)
    worker.state = "draining"
    await route(world, held_tokens=5000)
    ask(world, "a", "b", "c", token_ids=b"1234" * 3000)
    await world.until(lambda: ended(world, "a", "b", "c") == {"c": "queue_full"}, within_s=5)
    (end,) = read(world, RESPONSES, End, "c")
    assert end.retry_after_s
    worker.state = "ready"
    worker.beat()
    await some(world, lambda: worker.told(Assignment))
    ask(world, "d", token_ids=b"1234" * 3000)
    await world.until(lambda: len(worker.told(Assignment)) == 3, within_s=30)


@in_world
async def test_what_waits_is_bounded_in_bytes_whatever_it_counts_as_in_tokens(world: World) -> None:
    worker = Hand(world, kind="chat")
    worker.state = "draining"
    await route(world, held_bytes=150_000)
    image = OpenAiBody(kind="chat", json=b"." * 100_000, prompt_tokens=1000)
    ask(world, "a", "b", "c", body=image)
    await world.until(lambda: ended(world, "a", "b", "c") == {"c": "queue_full"}, within_s=5)
    (end,) = read(world, RESPONSES, End, "c")
    assert end.retry_after_s
    worker.state = "ready"
    worker.beat()
    await world.until(lambda: {a.request.id for a in worker.told(Assignment)} == {"a", "b"})
    worker.state = "draining"
    worker.beat()
    ask(world, "d", body=image)
    await world.sleep(5)
    assert ended(world, "d") == {}


@in_world
async def test_a_class_has_bounds_of_its_own(world: World) -> None:
    worker = Hand(world)
    worker.state = "draining"
    classes = {"batch": Share(held_requests=2), "t": Share(held_tokens=1000)}
    await route(world, queue_classes=classes)
    batch, tenants = ("a", "b", "c"), ("d", "e")
    ask(world, *batch, hints=Hints(queue_class="batch"))
    ask(world, *tenants, tenant="t", token_ids=b"1234" * 2000)
    ask(world, "f", "g", "h")
    await world.sleep(5)
    refused = ended(world, *"abcdefgh")
    assert set(refused.values()) == {"queue_full"}
    assert sorted(name in tenants for name in refused) == [False, True]
    assert len(refused.keys() & set(batch)) == 1
    worker.state = "ready"
    worker.beat()
    await world.until(lambda: len(worker.told(Assignment)) == 6, within_s=30)
    ask(world, "i", hints=Hints(queue_class="batch"))
    await world.until(lambda: len(worker.told(Assignment)) == 7, within_s=30)


@pytest.mark.parametrize("policy", ["predictive", "dynamo"])
def test_classes_that_wait_share_a_worker_by_weight(policy: str) -> None:
    @in_world
    async def scenario(world: World) -> None:
        worker = Hand(world)
        worker.state = "draining"
        await route(world, queue_classes={"batch": Share(weight=0.25)}, policy=policy)
        batch = Hints(queue_class="batch")
        ask(world, *[f"b{n}" for n in range(8)], hints=batch, token_ids=PROMPT.token_ids)
        await world.sleep(0.1)
        ask(world, *[f"o{n}" for n in range(8)], token_ids=PROMPT.token_ids)
        await world.sleep(0.1)
        world.spawn(worker.work(room=1))
        worker.state = "ready"
        worker.beat()
        await world.until(lambda: len(worker.told(Assignment)) >= 10, within_s=60)
        first_ten = [assignment.request.id[0] for assignment in worker.told(Assignment)[:10]]
        assert first_ten.count("b") == 2, "one of five"

    scenario()


@in_world
async def test_requests_that_workers_refused_count_as_waiting(world: World) -> None:
    worker = Hand(world)
    router = await route(world, held_requests=2)
    world.spawn(worker.work(room=1))
    names = [f"a{n}" for n in range(10)]
    ask(world, *names)
    await world.until(lambda: len(ended(world, *names)) == 7, within_s=5)
    assert set(ended(world, *names).values()) == {"queue_full"}
    assert all(e.retry_after_s for n in names for e in read(world, RESPONSES, End, n))
    ask(world, "late")
    await world.until(lambda: ended(world, "late") == {"late": "queue_full"}, within_s=1)
    assert router._context.holding <= 2


@in_world
async def test_a_request_is_not_sent_to_a_worker_that_was_full_a_moment_ago(world: World) -> None:
    full, free = Hand(world, "w1"), Hand(world, "w2")
    free.state = "draining"
    await route(world)
    world.spawn(full.work(room=0))
    ask(world, "a")
    await world.until(lambda: refusals(world, "a") == 1)
    free.state = "ready"
    free.beat()
    await some(world, lambda: free.told(Assignment))
    free.start(free.told(Assignment)[0])
    ask(world, "b", token_ids=b"1234" * 1000)
    ask(world, "c")  # by load alone it would go to the full one
    await some(world, lambda: free.told(Assignment), 3)
    assert refusals(world, "a", "b", "c") <= 2  # once a second it may be asked again


@in_world
async def test_a_full_worker_is_not_asked_over_and_over(world: World) -> None:
    worker = Hand(world)
    await route(world)
    world.spawn(worker.work(room=3))
    names = [f"a{n}" for n in range(40)]
    ask(world, *names)
    await world.until(lambda: len(worker.running) == 3)
    await world.sleep(2)
    before = refusals(world, *names)
    await world.sleep(10)
    assert refusals(world, *names) - before <= 10


@in_world
async def test_no_worker_is_sent_more_than_its_card_says_that_it_takes(world: World) -> None:
    worker = Hand(world, max_runs=3)
    await route(world)
    world.spawn(worker.work(room=3))
    names = [f"a{n}" for n in range(12)]
    ask(world, *names)
    await world.until(lambda: len(worker.running) == 3)
    await world.sleep(5)
    assert len(worker.running) == 3
    run = worker.running[0]
    key = {"id": run.id, "attempt": run.attempt, "phase": run.phase}
    worker.finish(key | {"worker": worker.name, "epoch": worker.epoch}, "stop")
    await world.until(lambda: len(worker.told(Assignment)) == 4, within_s=0.5)
    assert refusals(world, *names) == 0


@in_world
async def test_places_are_filled_as_they_become_free(world: World) -> None:
    worker = Hand(world)
    await route(world)
    world.spawn(worker.work(room=3))
    names = [f"a{n}" for n in range(40)]
    ask(world, *names)
    await world.until(lambda: len(worker.running) == 3)
    await world.sleep(2)
    began_at = world.clock.now()
    done = 0
    while done < 40:
        await world.until(lambda: bool(worker.running), within_s=2)
        for run in list(worker.running):
            key = {"id": run.id, "attempt": run.attempt, "phase": run.phase}
            worker.finish(key | {"worker": "w1", "epoch": worker.epoch}, "stop")
            done += 1
    assert world.clock.now() - began_at < 5
    assert ended(world, *names) == {}


@in_world
async def test_a_count_of_places_that_was_too_low_does_not_stay(world: World) -> None:
    """The worker was busy with runs that the ledger did not know."""
    worker = Hand(world)
    await route(world)
    refusing = world.spawn(worker.work(room=0))
    ask(world, "a")
    await world.until(lambda: refusals(world, "a") == 2)
    refusing.cancel()
    world.spawn(worker.work(room=4))
    ask(world, *[f"b{n}" for n in range(4)])
    await world.until(lambda: len(worker.running) == 4, within_s=5)


@in_world
async def test_a_model_that_nobody_serves_is_not_waited_for(world: World) -> None:
    Hand(world)
    await route(world, held_requests=1)
    await world.sleep(1)
    ask(world, "a", "b", model="other")
    await world.until(lambda: len(ended(world, "a", "b")) == 2, within_s=2)
    assert ended(world, "a", "b") == {"a": "model_not_found", "b": "model_not_found"}


@in_world
async def test_an_empty_fleet_may_still_get_any_model(world: World) -> None:
    await route(world)
    ask(world, "a", model="other")
    await world.sleep(10)
    assert ended(world, "a") == {}
    worker = Hand(world, model="other")
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_a_model_whose_last_worker_died_is_waited_for(world: World) -> None:
    for first in ("r1", "r2"):  # the second reads of the death in the log
        Hand(world, f"demo-{first}")
        worker = Hand(world, f"big-{first}", model="big")
        await route(world, first)
        await world.sleep(1)
        worker.beating.cancel()
        await some(world, lambda w=worker: w.told(Lost))  # type: ignore[misc]
        await world.sleep(1)
        ask(world, first, model="big")
        await world.sleep(10)
        assert ended(world, first) == {}


@in_world
async def test_a_model_that_has_a_card_is_waited_for(world: World) -> None:
    Hand(world)
    world.append(REGISTRY, 0, ModelCard(name="big"), key="model/big")
    await route(world)
    await world.sleep(1)
    ask(world, "a", model="big")
    await world.sleep(10)
    assert ended(world, "a") == {}


@in_world
async def test_nobody_waits_long_for_a_model_whose_last_worker_has_left(world: World) -> None:
    Hand(world)
    await route(world, wait_for_worker_s=60)
    await world.sleep(100)
    world.append(REGISTRY, 0, Tombstone(key="worker/w1"), key="worker/w1")
    await world.sleep(1)
    ask(world, "early", deadline_s=600)
    await world.sleep(50)
    assert ended(world, "early") == {}
    await world.sleep(20)
    ask(world, "late", deadline_s=600)
    await world.sleep(0.5)
    assert ended(world, "early", "late") == {"early": "no_workers", "late": "no_workers"}
    ends = read(world, RESPONSES, End, "early") + read(world, RESPONSES, End, "late")
    assert {end.retry_after_s for end in ends} == {10.0}
    fresh = Hand(world, "w2")
    ask(world, "new", deadline_s=600)
    await some(world, lambda: fresh.told(Assignment))


@in_world
async def test_what_has_begun_waits_for_a_worker_until_its_deadline(world: World) -> None:
    worker = Hand(world)
    await route(world, wait_for_worker_s=10)
    ask(world, "a", deadline_s=600)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.beating.cancel()
    await world.sleep(60)
    assert ended(world, "a") == {}
    fresh = Hand(world, "w2")
    await some(world, lambda: fresh.told(Assignment))


@in_world
async def test_a_request_that_waited_in_vain_says_whether_its_model_had_workers(
    world: World,
) -> None:
    Hand(world)
    world.append(REGISTRY, 0, ModelCard(name="big"), key="model/big")
    await route(world)
    ask(world, "a", model="big", deadline_s=5)
    await world.until(lambda: ended(world, "a") == {"a": "no_workers"})


@in_world
async def test_a_request_that_was_refused_and_held_again_is_taken_by_a_new_worker(
    world: World,
) -> None:
    full = Hand(world)
    await route(world)
    world.spawn(full.work(room=0))
    write(world, REQUESTS, PROMPT)
    await world.until(lambda: refusals(world, "a") == 1)
    await world.sleep(0.5)
    fresh = Hand(world, "w2")
    asked_at = world.clock.now()
    await some(world, lambda: fresh.told(Assignment))
    assert world.clock.now() - asked_at < 0.5
