"""Tests of a router with prefill and decode workers: two decisions for a request, and one
hand-over."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvlane.app.lanes.scheduler import Scheduler
from kvlane.app.routing.queueing.pending import LaneRequest
from kvlane.app.routing.selection.decision import Decision
from kvlane.streams.codecs import decode as decoded
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    End,
    Ended,
    Fence,
    Fencing,
    PrefillDone,
)
from kvlane.streams.request import (
    Hints,
    RouterConfigOverride,
    RoutingConstraints,
    SessionControl,
    StopConditions,
)
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, lane_of
from kvlane.streams.views.tail_reader import AWAITED_GATHER_S
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.handover_harness import LONG, PARAMS, assigned, workers
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.testing.virtual_time import VirtualClock


def decisions(world: MemoryWorld, key: str = "a") -> list[tuple[int, str, str]]:
    return [(d.attempt, d.phase, d.worker) for d in read_records(world, LEDGER, Assigned, key)]


@scenario_test
async def test_prompt_is_computed_by_a_prefill_worker_and_decoded_by_another(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world)
    await start_router(world, policy="dynamo")
    override = RouterConfigOverride(router_temperature=0.25, overlap_score_credit=3.0)
    append_record(world, REQUESTS, replace(LONG, router_config_override=override))
    first = await assigned(world, prefill)
    assert (first.phase, first.attempt) == ("prefill", 0)
    assert first.request.id == "a"
    assert first.request.stop == replace(LONG.stop, max_tokens=1, min_tokens=0)
    assert first.request.hints.prefill_worker_id == "p"
    assert first.request.hints.prefill_dp_rank == 0
    await world.sleep(2)
    assert not decode.received(Assignment)
    prefill.hand_over(first, PARAMS)
    second = await assigned(world, decode)
    assert (second.phase, second.attempt) == ("decode", 0)
    assert second.request.stop == LONG.stop
    assert second.request.token_ids == LONG.token_ids
    assert second.request.hints.prefill_worker_id == "p"
    assert second.request.prefill_result is not None
    assert second.request.prefill_result.disaggregated_params == PARAMS
    assert second.request.router_config_override == RouterConfigOverride(
        router_temperature=0.25,
        overlap_score_credit=0.0,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
    )
    assert second.handoff_until_ms > 0
    assert decisions(world) == [(0, "prefill", "p"), (0, "decode", "d")]
    decode.start(second)
    await world.sleep(5)
    assert len(prefill.received(Assignment)) == len(decode.received(Assignment)) == 1
    assert not read_records(world, RESPONSES, Fence)


@scenario_test
async def test_decode_does_not_wait_until_the_router_has_gathered_records(
    world: MemoryWorld,
) -> None:
    world.faults.gathers = True
    prefill, decode = workers(world)
    await start_router(world)
    late_ms = []
    for n in range(8):
        append_record(world, REQUESTS, replace(LONG, id=f"a{n}"))
        first = await assigned(world, prefill, n + 1)
        await world.sleep(0.1 + n / 1000)
        prefill.start(first)
        await world.sleep(0.002)
        prefill.hand_over(first, PARAMS)
        second = await assigned(world, decode, n + 1)
        times = {type(decoded(r)): r.timestamp for r in world.records(LEDGER, key=f"a{n}")}
        late_ms.append(times[Assigned] - times[PrefillDone])
        decode.finish(decode.start(second), "stop")
    assert max(late_ms) <= 1000 * AWAITED_GATHER_S + 1, late_ms


@scenario_test
async def test_limits_that_are_absent_stay_absent(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, stop=StopConditions()))
    first = await assigned(world, prefill)
    assert first.request.stop.max_tokens == 1
    prefill.hand_over(first, PARAMS)
    assert (await assigned(world, decode)).request.stop == StopConditions()


@scenario_test
async def test_request_stays_whole_without_prefill_workers(world: MemoryWorld) -> None:
    decode = FakeWorker(world, "d", role="decode")
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    assert (await assigned(world, decode)).phase == "aggregated"


@scenario_test
async def test_prompt_that_the_decode_worker_has_cached_stays_whole(world: MemoryWorld) -> None:
    _, decode = workers(world, block_size=16)
    decode.publish_blocks(list(range(2000)), 16)
    await start_router(world)
    append_record(world, REQUESTS, LONG)  # 1000 tokens of 3000 are not cached
    assert (await assigned(world, decode)).phase == "aggregated"


@scenario_test
async def test_prompt_with_too_little_cached_is_handed_over(world: MemoryWorld) -> None:
    prefill, decode = workers(world, block_size=16)
    decode.publish_blocks(list(range(800)), 16)
    await start_router(world)
    append_record(world, REQUESTS, LONG)  # 2200 tokens are not cached
    assert (await assigned(world, prefill)).phase == "prefill"


@scenario_test
async def test_enforced_disaggregation_waits_for_a_prefill_worker(world: MemoryWorld) -> None:
    decode = FakeWorker(world, "d", role="decode")
    await start_router(world, enforce_disaggregation=True, no_worker_timeout_s=5)
    append_record(world, REQUESTS, LONG)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "no_workers"
    assert not decode.received(Assignment)
    prefill = FakeWorker(world, "p", role="prefill")
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    assert (await assigned(world, prefill)).phase == "prefill"


@scenario_test
async def test_model_with_prefill_workers_only_has_no_workers(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    await start_router(world, no_worker_timeout_s=5)
    append_record(world, REQUESTS, LONG)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "no_workers"
    assert not prefill.received(Assignment)


@scenario_test
async def test_expired_hand_over_begins_the_next_attempt(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=3)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(2)
    assert len(prefill.received(Assignment)) == 2
    again = await assigned(world, prefill, 3)
    assert (again.phase, again.attempt, again.request.id) == ("prefill", 1, "a")
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["handover_unused"]
    decode.finish(busy, "stop")
    prefill.hand_over(again, PARAMS)
    second = await assigned(world, decode, 2)
    assert (second.phase, second.attempt, second.request.id) == ("decode", 1, "a")


@scenario_test
async def test_lease_of_the_engine_bounds_the_time_of_a_hand_over(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill)
    begun_ms = world.clock.wall_ms()
    prefill.hand_over(first, PARAMS, lease_until_ms=world.broker.now_ms() + 2000)
    second = await assigned(world, decode)
    assert 1600 <= second.handoff_until_ms - begun_ms < 1700  # .8 of the lease


HOUR_MS = 3_600_000


@pytest.mark.parametrize("ahead_ms", [-HOUR_MS, HOUR_MS])
@scenario_test
async def test_hand_over_ends_by_the_brokers_clock_at_a_router_with_another_one(
    world: MemoryWorld, ahead_ms: int
) -> None:
    """In time it is used, and the worker gets its end; late it is not."""
    prefill, decode = workers(world, max_runs=1)
    clock = VirtualClock(world.clock._loop, ahead_ms=ahead_ms)
    await start_router(world, clock=clock, handover_timeout_s=3)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    used = await assigned(world, decode)
    assert (used.phase, used.attempt) == ("decode", 0)
    assert 0 < used.handoff_until_ms - world.broker.now_ms() <= 3000
    busy = decode.start(used)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(2)
    assert len(prefill.received(Assignment)) == 2
    again = await assigned(world, prefill, 3)
    assert (again.phase, again.attempt, again.request.id) == ("prefill", 1, "a")
    decode.finish(busy, "stop")


@scenario_test
async def test_end_of_an_earlier_prefill_is_not_used_while_its_decode_waits_for_the_next_attempt(
    world: MemoryWorld,
) -> None:
    """The job of the next attempt runs, so that the earlier hand-over is still there."""
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=30)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill, 2)
    run = prefill.start(first)
    prefill.finish(run, "error", message="no connector")
    await world.wait_until(lambda: bool(read_records(world, RESPONSES, Fence, "a")))
    late = {name: value for name, value in run.items() if name != "run"}
    append_record(world, LEDGER, PrefillDone(run=1, handoff=PARAMS, **late))
    await world.sleep(2)
    append_record(world, REQUESTS, Cancel(id="a"))
    await world.sleep(2)
    decode.finish(busy, "stop")
    await world.sleep(2)
    assert ("a", 0, "decode") not in [
        (a.request.id, a.attempt, a.phase) for a in decode.received(Assignment)
    ]
    (end,) = read_records(world, RESPONSES, End, "a")
    assert end.code == "cancelled"


@scenario_test
async def test_hand_over_is_dropped_with_its_attempt_while_the_rest_runs_whole(
    world: MemoryWorld,
) -> None:
    """Its prompt would take room, and other prompts would wait for it, until the request ends."""
    prefill, decode = workers(world)
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    run = prefill.start(await assigned(world, prefill))
    assert sum(o._dispatcher.handovers.open_count for o in router._owners.values()) == 1
    prefill.finish(run, "error", message="no connector")
    whole = await assigned(world, decode)
    decode.start(whole)
    await world.sleep(1)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)
    assert not any(o._dispatcher.handovers.open_count for o in router._owners.values())


@scenario_test
async def test_refused_decode_begins_with_another_prefill(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world, max_attempts=1)  # a refusal is no failure
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    decode.reject(await assigned(world, decode))
    again = await assigned(world, prefill, 2)
    assert (again.phase, again.attempt) == ("prefill", 1)


@scenario_test
async def test_failed_prefill_and_failed_decode_make_the_rest_whole(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    run = prefill.start(await assigned(world, prefill))
    prefill.finish(run, "error", message="no connector")  # no reader sees it: it is no end
    whole = await assigned(world, decode)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    run = decode.start(await assigned(world, decode, 2))
    decode.finish(run, "broken")
    whole = await assigned(world, decode, 3)
    assert (whole.phase, whole.attempt, whole.request.id) == ("aggregated", 1, "b")


@scenario_test
async def test_death_of_the_prefill_worker_before_its_end(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.start(await assigned(world, prefill))
    prefill.heartbeat_task.cancel()
    whole = await assigned(world, decode)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)


@scenario_test
async def test_death_of_the_decode_worker_in_the_middle_of_an_answer(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    other = FakeWorker(world, "d2", role="decode", state="draining")
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    run = decode.start(await assigned(world, decode))
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1))
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    other.state = "ready"
    decode.heartbeat_task.cancel()
    rest = await assigned(world, other)
    assert (rest.phase, rest.attempt) == ("aggregated", 1)
    assert list(unpack_tokens(rest.taken)) == [70]


@scenario_test
async def test_next_owner_never_uses_a_hand_over_of_its_predecessor(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill)
    await world.sleep(1)
    await router.stop()
    prefill.hand_over(first, PARAMS)
    await start_router(world, "r2")
    again = await assigned(world, prefill, 2)
    assert (again.phase, again.attempt) == ("prefill", 1)
    assert not decode.received(Assignment)
    prefill.hand_over(again, PARAMS)
    assert (await assigned(world, decode)).attempt == 1


@scenario_test
async def test_pins_of_both_phases(world: MemoryWorld) -> None:
    workers(world)
    other_prefill = FakeWorker(world, "p2", role="prefill")
    other_decode = FakeWorker(world, "d2", role="decode")
    await start_router(world)
    hints = Hints(prefill_worker_id="p2", decode_worker_id="d2")
    append_record(world, REQUESTS, replace(LONG, hints=hints))
    other_prefill.hand_over(await assigned(world, other_prefill), PARAMS)
    assert (await assigned(world, other_decode)).phase == "decode"


@scenario_test
async def test_decode_worker_that_is_gone_ends_the_request(world: MemoryWorld) -> None:
    prefill, _ = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, hints=Hints(decode_worker_id="gone")))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "pinned_gone"


@scenario_test
async def test_decode_without_a_worker_is_planned_once_a_second(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays when prompts are refused for want of a worker."""
    prefill, decode = workers(world)
    await start_router(world, handover_timeout_s=40, no_worker_timeout_s=5)
    append_record(world, REQUESTS, LONG)
    assignment = await assigned(world, prefill)
    decode.heartbeat_task.cancel()
    await world.sleep(20)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    await world.wait_until(lambda: read_records(world, RESPONSES, End, "b") != [])
    prefill.hand_over(assignment, PARAMS)
    await world.sleep(2)
    planned = []
    schedule = Scheduler.schedule

    async def counted(self: Scheduler, wanted: LaneRequest) -> Decision:
        planned.append(wanted.phase)
        return await schedule(self, wanted)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    await world.sleep(10)
    assert set(planned) == {"decode"}
    assert 5 < len(planned) < 20


@scenario_test
async def test_policy_direct_needs_both_workers(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world, policy="direct")
    append_record(world, REQUESTS, replace(LONG, hints=Hints(decode_worker_id="d")))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "invalid"
    assert "prefill_worker_id" in end.message
    hints = Hints(prefill_worker_id="p", decode_worker_id="d")
    append_record(world, REQUESTS, replace(LONG, id="b", hints=hints))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    assert (await assigned(world, decode)).phase == "decode"


@scenario_test
async def test_round_robin_continues_per_phase_and_not_for_pinned_requests(
    world: MemoryWorld,
) -> None:
    prefills = [FakeWorker(world, f"p{n}", role="prefill") for n in range(2)]
    for n in range(2):
        FakeWorker(world, f"d{n}", role="decode")
    await start_router(world, policy="round_robin")
    placed = []
    for n in range(4):
        pin = "p0" if n == 1 else None
        asked = replace(LONG, id=f"{n}", hints=Hints(prefill_worker_id=pin))
        append_record(world, REQUESTS, asked)
        key = f"{n}"
        await wait_for_items(world, lambda key=key: read_records(world, LEDGER, Assigned, key))
        name = decisions(world, key)[0][2]
        worker = next(w for w in prefills if w.name == name)
        mine = [a for a in worker.received(Assignment) if a.request.id == key]
        worker.hand_over(mine[0], PARAMS)
        await wait_for_items(world, lambda key=key: read_records(world, LEDGER, Assigned, key), 2)
        placed.append((name, decisions(world, key)[1][2]))
    assert [place for place, _ in placed] in (["p0", "p0", "p1", "p0"], ["p1", "p0", "p0", "p1"])
    assert [place for _, place in placed] in (["d0", "d1"] * 2, ["d1", "d0"] * 2)


@scenario_test
async def test_sessions_bind_each_phase_separately(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    control = SessionControl(session_id="s", action="open")
    append_record(world, REQUESTS, replace(LONG, hints=Hints(session_control=control)))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    await assigned(world, decode)
    FakeWorker(world, "p2", role="prefill")
    FakeWorker(world, "d2", role="decode")
    bound = replace(control, action="bind")
    append_record(world, REQUESTS, replace(LONG, id="b", hints=Hints(session_control=bound)))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await assigned(world, decode, 2)
    uses = [d.session for d in read_records(world, LEDGER, Assigned, "b")]
    assert [use and use.bound_worker for use in uses] == ["p", "d"]


@scenario_test
async def test_decode_stays_in_the_required_domain(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill", taints=("gpu=x", "topology/zone=a"))
    far = FakeWorker(world, "d1", role="decode", taints=("gpu=x", "topology/zone=b"))
    near = FakeWorker(world, "d2", role="decode", taints=("gpu=x", "topology/zone=a"))
    await start_router(world, transfer_domain="zone", transfer_domain_required=True)
    asked = RoutingConstraints(required_taints=("gpu=x",))
    append_record(world, REQUESTS, replace(LONG, hints=Hints(routing_constraints=asked)))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    decoded = await assigned(world, near)
    assert decoded.request.hints.routing_constraints is not None
    required = decoded.request.hints.routing_constraints.required_taints
    assert required == ("gpu=x", "topology/zone=a")
    assert not far.received(Assignment)


@scenario_test
async def test_prefill_worker_outside_of_required_domains_gets_no_prompt(
    world: MemoryWorld,
) -> None:
    outside = FakeWorker(world, "p", role="prefill")
    alone = FakeWorker(world, "p2", role="prefill", taints=("topology/zone=b",))
    decode = FakeWorker(world, "d", role="decode", taints=("topology/zone=a",))
    await start_router(world, transfer_domain="zone", transfer_domain_required=True)
    append_record(world, REQUESTS, LONG)
    assert (await assigned(world, decode)).phase == "aggregated"
    inside = FakeWorker(world, "p3", role="prefill", taints=("topology/zone=a",))
    await world.sleep(2)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    assert (await assigned(world, inside)).phase == "prefill"
    assert not outside.received(Assignment)
    assert not alone.received(Assignment)


@scenario_test
async def test_required_domain_without_prefill_worker_ends_the_request_where_it_is_enforced(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world)
    await start_router(
        world, transfer_domain="zone", transfer_domain_required=True, enforce_disaggregation=True
    )
    append_record(world, REQUESTS, replace(LONG, deadline_s=5))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code in ("no_workers", "deadline")
    assert not prefill.received(Assignment)
    assert not decode.received(Assignment)


@scenario_test
async def test_prompt_without_an_eligible_prefill_worker_stays_whole(world: MemoryWorld) -> None:
    FakeWorker(world, "p", role="prefill")
    decode = FakeWorker(world, "d", role="decode", taints=("gpu=x",))
    await start_router(world)
    needs = RoutingConstraints(required_taints=("gpu=x",))
    for n, hints in enumerate((
        Hints(routing_constraints=needs), Hints(allowed_worker_ids=("d",)),
        Hints(backend_instance_id="d"),
    )):  # fmt: skip
        append_record(world, REQUESTS, replace(LONG, id=f"{n}", hints=hints))
        assert (await assigned(world, decode, n + 1)).phase == "aggregated"


@scenario_test
async def test_prompt_is_not_handed_over_to_an_engine_without_transfers(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    plain = FakeWorker(world, "w")
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    assert (await assigned(world, plain)).phase == "aggregated"
    able = FakeWorker(world, "w2", transfer_lease_s=30.0)
    await world.sleep(2)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    assert (await assigned(world, able)).phase == "decode"


@scenario_test
async def test_decode_worker_that_is_pinned_gets_the_decode(world: MemoryWorld) -> None:
    prefill, cached = workers(world, block_size=16)
    cached.publish_blocks(list(range(2900)), 16)
    pinned = FakeWorker(world, "d2", role="decode", block_size=16)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, hints=Hints(decode_worker_id="d2")))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    assert (await assigned(world, pinned)).phase == "decode"


@scenario_test
async def test_request_for_any_model_and_embeddings_stay_whole(world: MemoryWorld) -> None:
    _, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, model=""))
    append_record(world, REQUESTS, replace(LONG, id="b", prompt_embeds="AAAA"))
    await assigned(world, decode, 2)
    assert {a.phase for a in decode.received(Assignment)} == {"aggregated"}


@scenario_test
async def test_prompt_is_computed_for_a_hand_over_three_times_at_most(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    for attempt in range(3):
        first = await assigned(world, prefill, attempt + 1)
        prefill.hand_over(first, PARAMS, lease_until_ms=1)
    last = await assigned(world, decode)
    assert (last.phase, last.attempt) == ("aggregated", 3)


@scenario_test
async def test_cached_tokens_are_those_of_the_prefill_worker(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), PARAMS, cached_tokens=48)
    result = (await assigned(world, decode)).request.prefill_result
    assert result is not None
    assert result.prompt_tokens_details is not None
    assert result.prompt_tokens_details.cached_tokens == 48


@scenario_test
async def test_lease_counts_from_the_end_of_prefill_not_from_its_record(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill)
    prefill.hand_over(first, PARAMS, lease_until_ms=world.broker.now_ms() - 1000)
    again = await assigned(world, prefill, 2)
    assert (again.phase, again.attempt) == ("prefill", 1)
    assert not decode.received(Assignment)


@scenario_test
async def test_failed_twin_of_a_prefill_gives_no_second_end(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    twin = FakeWorker(world, "p2", role="prefill", state="draining")
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    first = await assigned(world, prefill)
    run = twin.start(replace(first, worker="p2", epoch=twin.epoch))  # of another owner's decision
    prefill.hand_over(first, PARAMS)
    decoding = decode.start(await assigned(world, decode))
    twin.finish(run, "broken")
    append_record(world, RESPONSES, chunk(0, 70, text="x", chars=1, finish_reason="stop"))
    decode.finish(decoding, "stop")
    await world.sleep(150)  # past the deadline
    assert not read_records(world, RESPONSES, End)
    assert not read_records(world, RESPONSES, Fence)


@scenario_test
async def test_preferred_domain_overrides_the_weight_of_the_client(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill", taints=("topology/zone=a",))
    decode = FakeWorker(world, "d", role="decode", taints=("topology/zone=a",))
    await start_router(world, transfer_domain="zone")
    asked = RoutingConstraints(preferred_taints={"topology/zone=a": 9.0, "gpu=x": 2.0})
    append_record(world, REQUESTS, replace(LONG, hints=Hints(routing_constraints=asked)))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    got = (await assigned(world, decode)).request.hints.routing_constraints
    assert got is not None
    assert got.preferred_taints == {"topology/zone=a": 1.0, "gpu=x": 2.0}


@scenario_test
async def test_decode_is_in_the_required_zone_and_preferably_in_the_rack(
    world: MemoryWorld,
) -> None:
    near = ("topology/zone=a", "topology/rack=7")
    prefill = FakeWorker(world, "p", role="prefill", taints=near)
    FakeWorker(world, "d0", role="decode", taints=("topology/zone=a", "topology/rack=8"))
    FakeWorker(world, "d1", role="decode", taints=("topology/zone=b", "topology/rack=7"))
    decode = FakeWorker(world, "d2", role="decode", taints=near)
    await start_router(
        world,
        transfer_domain="zone",
        transfer_domain_required=True,
        preferred_transfer_domain="rack",
    )
    asked = RoutingConstraints(preferred_taints={"topology/rack=7": 0.1, "gpu=x": 2.0})
    append_record(world, REQUESTS, replace(LONG, hints=Hints(routing_constraints=asked)))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    got = (await assigned(world, decode)).request.hints.routing_constraints
    assert got == RoutingConstraints(
        required_taints=("topology/zone=a",),
        preferred_taints={"topology/rack=7": 1.0, "gpu=x": 2.0},
    )


@scenario_test
async def test_domain_without_taints_adds_no_constraint(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world, transfer_domain="zone")
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    assert (await assigned(world, decode)).request.hints.routing_constraints is None


@scenario_test
async def test_batch_requests_stay_whole(world: MemoryWorld) -> None:
    _, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, service_class="batch"))
    assert (await assigned(world, decode)).phase == "aggregated"


@scenario_test
async def test_death_of_the_prefill_worker_while_its_hand_over_waits(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=60)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    prefill.heartbeat_task.cancel()
    await world.sleep(20)
    decode.finish(busy, "stop")
    whole = await assigned(world, decode, 2)
    assert (whole.phase, whole.attempt) == ("aggregated", 1)
    assert [f.reason for f in read_records(world, LEDGER, Fencing)] == ["handover_unused"]


@scenario_test
async def test_dry_run_gives_the_workers_of_both_phases(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    append_record(world, REQUESTS, replace(LONG, annotations=("query_instance_id:",)))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.placed is not None
    assert (end.placed.worker_id, end.placed.prefill_worker_id) == ("d", "p")
    assert not prefill.received(Assignment)
    assert not decode.received(Assignment)


@scenario_test
async def test_full_prefill_workers_refuse_as_full_workers_do(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, max_queued_requests=1)
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.start(await assigned(world, prefill))
    append_record(world, REQUESTS, replace(LONG, id="c"))
    await world.sleep(1)
    append_record(world, REQUESTS, LONG)
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "queue_full"
    assert end.retry_after_s
    assert not decode.received(Assignment)  # a full prefill worker is not passed by


@scenario_test
async def test_requests_stay_whole_while_prefill_workers_are_gone(world: MemoryWorld) -> None:
    prefill, decode = workers(world)
    await start_router(world)
    for n in range(2):
        prefill.heartbeat_task.cancel()
        await world.sleep(20)
        append_record(world, REQUESTS, replace(LONG, id=f"whole-{n}"))
        assert (await assigned(world, decode, n + 1)).phase == "aggregated"
        prefill = FakeWorker(world, f"p{n}", role="prefill")
        await world.sleep(2)
        append_record(world, REQUESTS, replace(LONG, id=f"split-{n}"))
        assert (await assigned(world, prefill)).phase == "prefill"


@scenario_test
async def test_cancel_during_prefill_and_after_it(world: MemoryWorld) -> None:
    prefill, decode = workers(world, max_runs=1)
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    run = prefill.start(await assigned(world, prefill))
    append_record(world, REQUESTS, Cancel(id="a"))
    (stopped,) = await wait_for_items(world, lambda: prefill.received(CancelRun))
    assert (stopped.id, stopped.phase) == ("a", "prefill")
    prefill.finish(run, "broken")
    append_record(world, REQUESTS, replace(LONG, id="busy"))
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, replace(LONG, id="b"))
    prefill.hand_over(await assigned(world, prefill, 3), PARAMS)
    append_record(world, REQUESTS, Cancel(id="b"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End, "b"))
    assert end.code == "cancelled"
    await world.sleep(20)
    assert [a.request.id for a in decode.received(Assignment)] == ["busy"]
    assert [owner._dispatcher.handovers.open_count for owner in router._owners.values()] == [0, 0]


@scenario_test
async def test_cancel_after_prefill_still_dispatches_decode_for_one_token(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    router = await start_router(world)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    busy = decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.code == "cancelled"  # at once, though no decode worker has room
    decode.finish(busy, "stop")
    second = await assigned(world, decode, 2)
    assert (second.phase, second.request.id) == ("decode", "a")
    assert (second.request.stop.max_tokens, second.request.stop.min_tokens) == (1, 0)
    assert second.request.prefill_result is not None
    assert second.request.prefill_result.disaggregated_params == PARAMS
    (ended,) = await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    assert ended.code == "cancelled"
    await world.sleep(5)
    assert not any(owner._dispatcher.handovers.open_count for owner in router._owners.values())


@scenario_test
async def test_cancelled_request_without_a_decode_worker_ends_with_its_hand_over(
    world: MemoryWorld,
) -> None:
    prefill, decode = workers(world, max_runs=1)
    await start_router(world, handover_timeout_s=3)
    append_record(world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2])))
    prefill.hand_over(await assigned(world, prefill), PARAMS)
    decode.start(await assigned(world, decode))
    append_record(world, REQUESTS, LONG)
    prefill.hand_over(await assigned(world, prefill, 2), PARAMS)
    await world.sleep(1)
    append_record(world, REQUESTS, Cancel(id="a"))
    await world.sleep(0.5)
    offset = append_record(world, REQUESTS, Cancel(id="a"))  # while the first one is not done
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 1)
    assert len(decode.received(Assignment)) == 1
    assert not read_records(world, LEDGER, Fencing)
