"""Tests of captures: a period of the log in a file, and its decisions repeated to the last bit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvlane.app.audit.recompute import RecomputeReport
from kvlane.app.routing.selection.policies.registry import SIMULATED
from kvlane.app.simulation.counterfactual import CaptureReader
from kvlane.app.traces.capture_format import (
    AnyCaptureLine,
    CapturedDecision,
    CapturedRequest,
    CapturedRun,
    CapturedWorker,
    CaptureHeader,
    CaptureTotals,
    read_capture,
)
from kvlane.indexer.block_hashes import derive_secret, local_hashes
from kvlane.streams.codecs import decode, pack_tokens, unpack_tokens
from kvlane.streams.ports import Entry
from kvlane.streams.records import (
    Assigned,
    EngineConfig,
    Finished,
    PrefillDone,
    RequestOffset,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, lane_of
from tests.harness.capture_harness import (
    capture_lines,
    make_requests,
    serve_requests,
    start_deployment,
    write_capture,
)
from tests.harness.fake_worker import append_record
from tests.harness.memory_world import MemoryWorld, scenario_test

COUNT = 300


@pytest.mark.parametrize("policy", SIMULATED)
@partial(scenario_test, lanes=4)
async def test_every_decision_of_a_captured_run_is_recomputed_bit_for_bit(
    world: MemoryWorld, policy: str, tmp_path: Path
) -> None:
    await start_deployment(world, policy=policy)
    await serve_requests(world, make_requests(world, COUNT))
    file = write_capture(await capture_lines(world), tmp_path / "run.jsonl.zst")
    got = [decode(record) for record in world.all_records(LEDGER)]
    assigned = [record for record in got if isinstance(record, Assigned)]
    lines = list(read_capture(file))
    assert sorted(a.id for a in assigned) == sorted(
        line.decision.id for line in lines if isinstance(line, CapturedDecision)
    )
    again = RecomputeReport()
    for line in lines:
        again.add_line(line)
    assert (again.differ, again.first) == (0, "")
    assert again.same == again.decisions == len(assigned)
    assert len({record.id for record in assigned}) == COUNT
    assert set(again.policies) == {policy}
    assert_varied(lines, policy)


@scenario_test
async def test_id_that_was_published_again_counts_by_its_first_publish(world: MemoryWorld) -> None:
    await start_deployment(world)
    sent = make_requests(world, 5)
    await serve_requests(world, sent)
    await world.sleep(6)
    await serve_requests(world, sent[:2])
    lines = await capture_lines(world)
    assert sorted(line.id for line in lines if isinstance(line, CapturedRequest)) == sorted(
        request.id for request in sent
    )
    reading = CaptureReader()
    for line in lines:
        reading.add_line(line)
        if isinstance(line, CapturedRequest):  # captures of earlier versions hold duplicates
            reading.add_line(replace(line, at_ms=line.at_ms + 6000))
    period = reading.build_period()
    assert len(period.requests) == 5
    assert all(0 <= r.arrived_ms <= r.first_token_ms <= r.last_token_ms for r in period.requests)


@scenario_test
async def test_id_whose_first_publish_is_not_of_the_period_does_not_count(
    world: MemoryWorld,
) -> None:
    await start_deployment(world)
    sent = make_requests(world, 3)
    await serve_requests(world, sent)
    reading = CaptureReader()
    for line in await capture_lines(world):
        is_cut = isinstance(line, CapturedRequest) and line.id == sent[0].id
        reading.add_line(replace(line, at_ms=line.at_ms + 6000) if is_cut else line)
    period = reading.build_period()
    assert [each.request.id for each in period.requests] == [r.id for r in sent[1:]]
    assert period.left_out == {"published before the period, and again in it": 1}


def card(name: str) -> WorkerCard:
    return WorkerCard(id=name, slot=0, model="demo", config=EngineConfig(model="demo"))


def assert_varied(lines: list[AnyCaptureLine], policy: str) -> None:
    """The run was no trivial one: all workers, caches and queues of different lengths."""
    decisions = [line.decision for line in lines if isinstance(line, CapturedDecision)]
    candidates = [each for decision in decisions for each in decision.candidates]
    assert len(Counter(decision.worker for decision in decisions)) == 3
    assert len({each.overlap_blocks for each in candidates}) > 10
    assert len({each.open_tokens for each in candidates}) > 10
    if policy == "predictive":
        assert len({each.slowness for each in candidates}) > 3
        assert any(each.ahead_ms for each in candidates)
        assert any(decision.held_ms for decision in decisions)
    ends = [line for line in lines if isinstance(line, CapturedRun)]
    assert len({line.end.cached_tokens for line in ends}) > 10
    assert isinstance(lines[0], CaptureHeader)
    assert isinstance(lines[-1], CaptureTotals)
    assert sum(isinstance(line, CapturedRequest) for line in lines) == COUNT


@scenario_test
async def test_changed_decision_is_found_and_named(world: MemoryWorld) -> None:
    await start_deployment(world)
    await serve_requests(world, make_requests(world, 30))
    lines = await capture_lines(world)
    at, line = next((n, line) for n, line in enumerate(lines) if isinstance(line, CapturedDecision))
    first, *others = line.decision.candidates
    forged = replace(line.decision, listed=(replace(first, cost=first.cost + 1e-9), *others))
    lines[at] = replace(line, decision=forged)
    again = RecomputeReport()
    for each in lines:
        again.add_line(each)
    assert (again.differ, again.same) == (1, again.decisions - 1)
    assert again.first.startswith(f"{forged.id} at ledger/{line.lane}:{line.offset}: the cost of")


@scenario_test
async def test_capture_holds_no_prompt_answer_tenant_salt_or_message(world: MemoryWorld) -> None:
    await start_deployment(world)
    secret = replace(
        make_requests(world, 1)[0], tenant="acme", cache_salt="pepper", agent_context=b'"whisper"',
        annotations=("sesame",), extra_args=b'{"x": "open"}',
    )  # fmt: skip
    await serve_requests(world, [secret])
    run = {"id": secret.id, "attempt": 1, "phase": "aggregated", "worker": "w0", "epoch": 1}
    lane = lane_of(secret.id, world.lanes)
    origin = RequestOffset(topic="requests", partition=lane, offset=0)
    world.append(LEDGER, lane, Assigned(**run, origin=origin, responses_from=0, deadline_ms=1))
    world.append(LEDGER, lane, PrefillDone(**run, run=1, handoff=b"blocks"))
    world.append(LEDGER, lane, Finished(**run, code="error", message="cannot parse 'mellon'"))
    lines = await capture_lines(world)
    text = b"".join(map(msgspec.json.encode, lines))
    for word in (b"acme", b"pepper", b"whisper", b"sesame", b"open", b"blocks\\", b"mellon"):
        assert word not in text, word
    tokens = unpack_tokens(secret.token_ids)
    assert str(list(tokens))[1:40].replace(" ", "").encode() not in text
    (sent,) = (line for line in lines if isinstance(line, CapturedRequest))
    local = local_hashes(tokens, 16, cache_salt="pepper")
    assert len(sent.block_hashes) == len(tokens) // 16
    assert not {*sent.block_hashes.tolist()} & {*local.tolist()}
    assert any(isinstance(line, CapturedRun) and line.end.code == "error" for line in lines)


@scenario_test
async def test_prefixes_are_renamed_consistently_in_one_file_and_differently_in_the_next(
    world: MemoryWorld,
) -> None:
    await start_deployment(world)
    tokens = list(range(160))
    for name, change in (("a", 160), ("b", 100), ("c", 0)):
        changed = [*tokens[:change], *(token + 1 for token in tokens[change:])]
        append_record(
            world, REQUESTS, Request(id=name, model="demo", token_ids=pack_tokens(changed))
        )
    await world.sleep(5)

    def names(lines: list[AnyCaptureLine]) -> dict[str, list[int]]:
        return {x.id: x.block_hashes.tolist() for x in lines if isinstance(x, CapturedRequest)}

    one, two = (
        names(await capture_lines(world)),
        names(await capture_lines(world, secret=derive_secret(b"next"))),
    )
    assert one["a"][:6] == one["b"][:6]
    assert not {*one["a"][6:]} & {*one["b"][6:]}
    assert not {*one["a"]} & {*one["c"]}
    assert not {*one["a"]} & {*two["a"]}


@scenario_test
async def test_period_has_its_own_decisions_and_their_outcomes(world: MemoryWorld) -> None:
    await start_deployment(world)
    first, last = make_requests(world, 80)[:40], make_requests(world, 80, seed=8)[40:]
    await serve_requests(world, first)
    await world.sleep(1)
    from_ms = world.clock.wall_ms()
    for request in last[:20]:
        append_record(world, REQUESTS, request)
        await world.sleep(0.01)
    to_ms = world.clock.wall_ms()
    await serve_requests(world, last[20:])
    lines = await capture_lines(world, from_ms, to_ms)
    decided = [line for line in lines if isinstance(line, CapturedDecision)]
    assert {line.decision.id for line in decided} <= {request.id for request in last[:20]}
    assert all(from_ms <= line.at_ms < to_ms for line in decided)
    ends = [line for line in lines if isinstance(line, CapturedRun)]
    assert {line.end.id for line in ends} == {line.decision.id for line in decided}
    assert any(line.at_ms >= to_ms for line in ends)
    whole = [line for line in await capture_lines(world) if isinstance(line, CapturedDecision)]
    assert len(whole) == 80


@scenario_test
async def test_workers_are_those_of_the_period(world: MemoryWorld) -> None:
    def write(record: Any, worker: str) -> int:
        world.append(REGISTRY, 0, record, key=f"worker/{worker}")
        return world.clock.wall_ms()

    async def started(from_ms: int, to_ms: int) -> list[tuple[str, int]]:
        lines = await capture_lines(world, from_ms, to_ms)
        return [(line.id, line.epoch) for line in lines if isinstance(line, CapturedWorker)]

    born_ms = write(card("a"), "a")
    write(replace(card("a"), epoch=0), "a")
    write(card("b"), "b")
    await world.sleep(10)
    gone_ms = write(Tombstone(key="worker/a"), "a")
    await world.sleep(10)
    again_ms = write(card("b"), "b")
    await world.sleep(10)
    assert await started(0, born_ms) == []
    assert await started(born_ms, born_ms + 1) == [("a", 0), ("b", 2)]
    assert await started(gone_ms, again_ms) == [("b", 2)]
    assert await started(again_ms - 1, again_ms + 1) == [("b", 2), ("b", 4)]
    assert await started(again_ms, again_ms + 1) == [("b", 4)]


@scenario_test
async def test_decisions_whose_requests_are_gone_are_captured_and_counted(
    world: MemoryWorld,
) -> None:
    await start_deployment(world, policy="session_hash")
    await serve_requests(world, make_requests(world, 40))
    for lane in range(world.lanes):
        end = len(world.records(REQUESTS, lane))
        world.broker.delete_records(REQUESTS, lane, end)
    lines = await capture_lines(world)
    last = lines[-1]
    assert isinstance(last, CaptureTotals)
    assert (last.without_request, last.lines["Decided"]) == (40, 40)
    assert "Asked" not in last.lines
    again = RecomputeReport()
    for line in lines:
        again.add_line(line)
    assert (again.without_session, again.differ) == (40, 0)


@scenario_test
async def test_unreadable_records_are_counted(world: MemoryWorld) -> None:
    await start_deployment(world)
    await serve_requests(world, make_requests(world, 3))
    world.broker.append(LEDGER, 0, [Entry(b"a", b"\xff", (("t", b"Ended"),))])
    last = (await capture_lines(world))[-1]
    assert isinstance(last, CaptureTotals)
    assert last.unread == 1
