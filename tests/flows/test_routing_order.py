"""Tests of orders about routing: in routers that run or start, and by commands; and of a shadow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.commands import routing_commands
from kvlane.app.commands.routing_commands import BadRouting, parse_settings
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode, pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry
from kvlane.streams.record_base import Account
from kvlane.streams.records import (
    Assigned,
    Assignment,
    ReportedWaits,
    RouterCapacity,
    RoutingOrder,
    RoutingReport,
    Tombstone,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, LEDGER, REGISTRY, REQUESTS
from tests.harness.fake_worker import FakeWorker, append_record, start_router, wait_for_items
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.routing_harness import RoutingHarness, to_assigned

KEY = "routing"
UNKNOWN_TYPE = (("t", b"RoutingOrderOfLater"),)


def order(world: MemoryWorld, **settings: Any) -> int:
    return world.append(REGISTRY, 0, RoutingOrder(settings=settings), key=KEY)


def send(world: MemoryWorld, *names: str) -> None:
    for name in names:
        request = Request(id=name, model="demo", token_ids=pack_tokens([7] * 10), deadline_s=100)
        append_record(world, REQUESTS, request)


def decisions(world: MemoryWorld) -> dict[str, tuple[str, int | None]]:
    """By request, the policy of its decision, and the order that its router had."""
    records = map(decode, world.all_records(LEDGER))
    found = [record for record in records if isinstance(record, Assigned)]
    return {record.id: (record.policy, record.routing_order) for record in found}


def reports(world: MemoryWorld) -> dict[str, RoutingReport]:
    """The newest report of each router about its routing."""
    records = map(decode, world.all_records(CAPACITY))
    return {r.router: r.routing for r in records if isinstance(r, RouterCapacity) and r.routing}


@scenario_test
async def test_order_changes_the_policy_of_routers_that_run_and_that_start(
    world: MemoryWorld,
) -> None:
    hand = FakeWorker(world)
    await start_router(world, policy="least_loaded")
    send(world, "before")
    await wait_for_items(world, lambda: hand.received(Assignment))
    offset = order(world, policy="random")
    await world.wait_until(lambda: reports(world)["r1"].order == offset, within_s=0.5)
    await start_router(world, "r2", policy="least_loaded")
    await world.wait_until(lambda: "r2" in reports(world))
    assert reports(world)["r2"].own["policy"] == "least_loaded"
    send(world, *"abcdef")
    await wait_for_items(world, lambda: hand.received(Assignment), 7)
    world.append(REGISTRY, 0, Tombstone(key=KEY), key=KEY)
    await world.wait_until(lambda: {each.order for each in reports(world).values()} == {None})
    send(world, "after")
    await wait_for_items(world, lambda: hand.received(Assignment), 8)
    own = ("least_loaded", None)
    assert decisions(world) == {
        "before": own, **dict.fromkeys("abcdef", ("random", offset)), "after": own,
    }  # fmt: skip


@scenario_test
async def test_requests_that_wait_survive_an_order(world: MemoryWorld) -> None:
    hand = FakeWorker(world, max_runs=1)
    await start_router(world, policy="least_loaded")
    send(world, "first")
    (first,) = await wait_for_items(world, lambda: hand.received(Assignment))
    run = hand.start(first)
    send(world, *"abc")
    await world.sleep(0.2)
    offset = order(world, policy="dynamo", max_queued_requests=1)
    await world.wait_until(lambda: reports(world)["r1"].order == offset)
    assert len(hand.received(Assignment)) == 1
    for count in (2, 3, 4):
        hand.finish(run, "length")
        assignments = await wait_for_items(world, lambda: hand.received(Assignment), count)
        run = hand.start(assignments[-1])
    assert [each.request.id for each in hand.received(Assignment)][1:] == ["a", "b", "c"]
    assert {name: policy for name, (policy, _) in decisions(world).items()} == {
        "first": "least_loaded", "a": "dynamo", "b": "dynamo", "c": "dynamo",
    }  # fmt: skip


@scenario_test
async def test_order_that_cannot_be_used_is_reported_and_ignored(world: MemoryWorld) -> None:
    hand = FakeWorker(world)
    await start_router(world, policy="least_loaded")
    offset = world.append(REGISTRY, 0, RoutingOrder(settings={}, format=2), key=KEY)
    await world.wait_until(lambda: reports(world)["r1"].order == offset)
    assert "format 2" in reports(world)["r1"].problem
    world.append_raw(REGISTRY, 0, Entry(KEY.encode(), b"\x80", UNKNOWN_TYPE))
    too_large = order(world, policy="dynamo", prefill_load_scale=1e308)
    await world.wait_until(lambda: reports(world)["r1"].order == too_large)
    assert "PREFILL_LOAD_SCALE" in reports(world)["r1"].problem
    send(world, "a")
    await wait_for_items(world, lambda: hand.received(Assignment))
    assert decisions(world) == {"a": ("least_loaded", None)}


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy", "NAME=VALUE"), ("=dynamo", "NAME=VALUE"),
        ("queue_classes={", "no JSON object"),
    ],
)  # fmt: skip
def test_setting_of_another_form_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadRouting, match=words):
        parse_settings([text])
    with pytest.raises(BadRouting, match="given twice"):
        parse_settings(["policy=dynamo", "policy=random"])


def test_commands_show_set_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = connect_commands(MemoryBroker(SystemClock()), monkeypatch)
    monkeypatch.setattr(routing_commands, "SETTLE_S", 0.3)

    def report(router: str, order: int | None = None, problem: str = "") -> None:
        routing = RoutingReport(own={"policy": "predictive"}, order=order, problem=problem)
        record = RouterCapacity(router=router, waits=ReportedWaits(), routing=routing)
        broker.append(CAPACITY, 0, [encode(record, router)])

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["routing", *words])
        return result.exit_code, result.output

    code, output = run()
    assert code == 0
    assert "no order" in output
    assert "no router has reported" in output
    for wrong, words in (
        ("polcy=dynamo", "did you mean policy"), ("lanes=3", "set KVLANE_LANES, and restart"),
        ("policy=best", "KVLANE_POLICY=best: Input should be 'predictive'"),
        ("overlap_decay=-1", "greater than or equal to 0"),
        ("active_request_weight=1e308", "less than or equal to 1000000"),
        (f"max_queued_requests={10**30}", f"less than or equal to {2**62}"),
        (f'queue_classes={{"a": {{"max_queued_tokens": {2**63 - 1}}}}}', "give bounds from 0"),
    ):  # fmt: skip
        code, output = run("set", "session_affinity_tolerance=0.2", wrong)
        assert code == 1
        assert words in output
    assert list(broker.records(REGISTRY, 0)) == []
    report("r1")
    code, output = run("set", "policy=dynamo", "session_affinity_tolerance=0.20")
    assert (code, "r1: the order is not read yet" in output) == (1, True)
    code, output = run("set", 'queue_classes={"a": {"weight": 2}}')
    stored = [decode(record) for record in broker.records(REGISTRY, 0)]
    assert stored[-1] == RoutingOrder(
        settings={
            "policy": "dynamo", "session_affinity_tolerance": 0.2,
            "queue_classes": {"a": {"weight": 2.0}},
        }
    )  # fmt: skip
    for name, problem in (("r1", ""), ("r2", ""), ("r3", "it has format 1")):
        report(name, 1, problem)
    code, output = run("--json", "-")
    found = json.loads(output)
    assert found["order"]["offset"] == 1
    routers = [(row["router"], row["routing_of"], row["settings"]) for row in found["routers"]]
    own = {"policy": "predictive"}
    used = own | found["order"]["settings"]
    assert routers == [("r1", "order", used), ("r2", "order", used), ("r3", "unusable", own)]
    code, output = run()
    assert "r1, r2: by the order" in output
    assert "r3: own settings, since it cannot use the order: it has format 1" in output
    for name in ("r1", "r2", "r3"):
        report(name)
    code, output = run("reset")
    assert code == 0
    assert "no order" in output
    assert decode([*broker.records(REGISTRY, 0)][-1]) == Tombstone(key=KEY)


# --- a shadow ------------------------------------------------------------------------------------


def decided(policy: str, loads: dict[str, int], number: int) -> Assigned:
    """A decision among workers with these open tokens."""
    routing = RoutingHarness()
    for name, tokens in loads.items():
        routing.worker(name)
        routing.add_load(name, tokens)
    taken = routing.chosen(policy, seed=number)
    account = Account(model="demo")
    return to_assigned(taken, id=f"job-{number}", account=account)


def test_shadow_shows_where_requests_had_gone_otherwise_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = connect_commands(MemoryBroker(SystemClock()), monkeypatch)
    loads = {"w1": 640, "w2": 160}
    taken = [decided("random", loads, number) for number in range(8)]
    taken += [decided("least_loaded", loads, 8), decided("dynamo", loads, 9)]
    for record in taken:
        broker.append(LEDGER, 0, [encode(record, record.id)])
    before = {topic: len(broker.records(topic, 0)) for topic in (REGISTRY, CAPACITY, LEDGER)}

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["shadow", *words])
        return result.exit_code, result.output

    code, output = run("policy=least_loaded", "--json", "-")
    assert code == 0
    rows = {row["policy"]: row for row in json.loads(output)["rows"]}
    worse = sum(record.worker == "w1" for record in taken[:8])
    assert 0 < worse < 8
    assert (rows["random"]["decisions"], rows["random"]["others"]) == (8, worse)
    assert rows["random"]["regret"] == pytest.approx(480 * worse / 8)
    assert rows["random"]["extra_cost"] is None
    for policy in ("least_loaded", "dynamo"):
        assert rows[policy]["model"] == "demo"
        assert (rows[policy]["decisions"], rows[policy]["others"]) == (1, 0)
        assert (rows[policy]["regret"], rows[policy]["extra_cost"]) == (0.0, 0.0)
    code, output = run("policy=predictive", "objective=throughput", "--json", "-")
    assert {row["unknown"] for row in json.loads(output)["rows"]} == {8, 1}
    code, output = run("policy=least_loaded")
    assert "kvlane routing set policy=least_loaded" in output
    for wrong, words in (
        ("policy=random", "decides by chance"), ("queue_order=edf", "changes no choice"),
        ("policy=best", "KVLANE_POLICY=best"),
    ):  # fmt: skip
        code, output = run(wrong)
        assert code == 1
        assert words in output
    assert {topic: len(broker.records(topic, 0)) for topic in before} == before
