"""A period of the log in a file, and its decisions taken again, to the last bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from app.audit.recompute import Recomputed
from app.captured import AnyLine, Asked, Capture, Counted, Decided, Ran, Worker, lines_of
from indexer.hashing import local_hashes
from indexer.keys import derive
from streams.codecs import decode, pack_tokens, unpack_tokens
from streams.ports import Entry
from streams.records import (
    Assigned,
    EngineConfig,
    Finished,
    Origin,
    PrefillDone,
    Request,
    Tombstone,
    WorkerCard,
)
from streams.topics import LEDGER, REGISTRY, REQUESTS, lane_of
from tests.captures import captured, put, requests, serve, staff
from tests.routers import write
from tests.worlds import World, in_world, play

POLICIES = (
    "predictive", "dynamo", "round_robin", "random", "least_loaded", "power_of_two", "session_hash",
)  # fmt: skip
COUNT = 300


@pytest.mark.parametrize("policy", POLICIES)
def test_every_decision_of_a_captured_run_is_recomputed_bit_for_bit(
    policy: str, tmp_path: Path
) -> None:
    async def scenario(world: World) -> None:
        await staff(world, policy=policy)
        await serve(world, requests(world, COUNT))
        file = put(await captured(world), tmp_path / "run.jsonl.zst")
        told = [decode(record) for record in world.everywhere(LEDGER)]
        assigned = [record for record in told if isinstance(record, Assigned)]
        lines = list(lines_of(file))
        assert sorted(a.id for a in assigned) == sorted(
            line.decision.id for line in lines if isinstance(line, Decided)
        )
        again = Recomputed()
        for line in lines:
            again.take(line)
        assert (again.differ, again.first) == (0, "")
        assert again.same == again.decisions == len(assigned) == COUNT
        assert set(again.policies) == {policy}
        assert_varied(lines, policy)

    play(scenario, lanes=4)


def card(name: str) -> WorkerCard:
    return WorkerCard(id=name, slot=0, model="demo", config=EngineConfig(model="demo"))


def assert_varied(lines: list[AnyLine], policy: str) -> None:
    """The run was no trivial one: all workers, caches and queues of different lengths."""
    decisions = [line.decision for line in lines if isinstance(line, Decided)]
    candidates = [each for decision in decisions for each in decision.candidates]
    assert len(Counter(decision.worker for decision in decisions)) == 3
    assert len({each.overlap_blocks for each in candidates}) > 10
    assert len({each.open_tokens for each in candidates}) > 10
    if policy == "predictive":
        assert len({each.slowness for each in candidates}) > 3
        assert any(each.ahead_ms for each in candidates)
        assert any(decision.held_ms for decision in decisions)
    ends = [line for line in lines if isinstance(line, Ran)]
    assert len({line.end.cached_tokens for line in ends}) > 10
    assert isinstance(lines[0], Capture)
    assert isinstance(lines[-1], Counted)
    assert sum(isinstance(line, Asked) for line in lines) == COUNT


@in_world
async def test_a_changed_decision_is_found_and_named(world: World) -> None:
    await staff(world)
    await serve(world, requests(world, 30))
    lines = await captured(world)
    at, line = next((n, line) for n, line in enumerate(lines) if isinstance(line, Decided))
    first, *others = line.decision.candidates
    forged = replace(line.decision, candidates=(replace(first, cost=first.cost + 1e-9), *others))
    lines[at] = replace(line, decision=forged)
    again = Recomputed()
    for each in lines:
        again.take(each)
    assert (again.differ, again.same) == (1, again.decisions - 1)
    assert again.first.startswith(f"{forged.id} at ledger/{line.lane}:{line.offset}: the cost of")


@in_world
async def test_a_capture_holds_no_prompt_answer_tenant_salt_or_message(world: World) -> None:
    await staff(world)
    secret = replace(
        requests(world, 1)[0], tenant="acme", cache_salt="pepper", agent_context=b'"whisper"',
        annotations=("sesame",), extra_args=b'{"x": "open"}',
    )  # fmt: skip
    await serve(world, [secret])
    run = {"id": secret.id, "attempt": 1, "phase": "aggregated", "worker": "w0", "epoch": 1}
    lane = lane_of(secret.id, world.lanes)
    origin = Origin(topic="requests", partition=lane, offset=0)
    world.append(LEDGER, lane, Assigned(**run, origin=origin, responses_from=0, deadline_ms=1))
    world.append(LEDGER, lane, PrefillDone(**run, run=1, handoff=b"blocks"))
    world.append(LEDGER, lane, Finished(**run, code="error", message="cannot parse 'mellon'"))
    lines = await captured(world)
    text = b"".join(map(msgspec.json.encode, lines))
    for word in (b"acme", b"pepper", b"whisper", b"sesame", b"open", b"blocks\\", b"mellon"):
        assert word not in text, word
    tokens = unpack_tokens(secret.token_ids)
    assert str(list(tokens))[1:40].replace(" ", "").encode() not in text
    (asked,) = (line for line in lines if isinstance(line, Asked))
    local = local_hashes(tokens, 16, cache_salt="pepper")
    assert len(asked.block_names) == len(tokens) // 16
    assert not {*asked.block_names.tolist()} & {*local.tolist()}
    assert any(isinstance(line, Ran) and line.end.code == "error" for line in lines)


@in_world
async def test_equal_prefixes_have_equal_names_in_one_file_and_others_in_the_next(
    world: World,
) -> None:
    await staff(world)
    tokens = list(range(160))
    for name, change in (("a", 160), ("b", 100), ("c", 0)):
        changed = [*tokens[:change], *(token + 1 for token in tokens[change:])]
        write(world, REQUESTS, Request(id=name, model="demo", token_ids=pack_tokens(changed)))
    await world.sleep(5)

    def names(lines: list[AnyLine]) -> dict[str, list[int]]:
        return {x.id: x.block_names.tolist() for x in lines if isinstance(x, Asked)}

    one, two = names(await captured(world)), names(await captured(world, secret=derive(b"next")))
    assert one["a"][:6] == one["b"][:6]
    assert not {*one["a"][6:]} & {*one["b"][6:]}
    assert not {*one["a"]} & {*one["c"]}
    assert not {*one["a"]} & {*two["a"]}


@in_world
async def test_a_period_has_its_own_decisions_and_all_that_follows_from_them(world: World) -> None:
    await staff(world)
    first, last = requests(world, 80)[:40], requests(world, 80, seed=8)[40:]
    await serve(world, first)
    await world.sleep(1)
    from_ms = world.clock.wall_ms()
    for request in last[:20]:
        write(world, REQUESTS, request)
        await world.sleep(0.01)
    to_ms = world.clock.wall_ms()
    await serve(world, last[20:])
    lines = await captured(world, from_ms, to_ms)
    decided = [line for line in lines if isinstance(line, Decided)]
    assert {line.decision.id for line in decided} <= {request.id for request in last[:20]}
    assert all(from_ms <= line.at_ms < to_ms for line in decided)
    ends = [line for line in lines if isinstance(line, Ran)]
    assert {line.end.id for line in ends} == {line.decision.id for line in decided}
    assert any(line.at_ms >= to_ms for line in ends)
    whole = [line for line in await captured(world) if isinstance(line, Decided)]
    assert len(whole) == 80


@in_world
async def test_workers_are_those_there_were_in_the_period(world: World) -> None:
    def tell(record: Any, worker: str) -> int:
        world.append(REGISTRY, 0, record, key=f"worker/{worker}")
        return world.clock.wall_ms()

    async def lives(from_ms: int, to_ms: int) -> list[tuple[str, int]]:
        lines = await captured(world, from_ms, to_ms)
        return [(line.id, line.epoch) for line in lines if isinstance(line, Worker)]

    born_ms = tell(card("a"), "a")
    tell(replace(card("a"), epoch=0), "a")
    tell(card("b"), "b")
    await world.sleep(10)
    gone_ms = tell(Tombstone(key="worker/a"), "a")
    await world.sleep(10)
    again_ms = tell(card("b"), "b")
    await world.sleep(10)
    assert await lives(0, born_ms) == []
    assert await lives(born_ms, born_ms + 1) == [("a", 0), ("b", 2)]
    assert await lives(gone_ms, again_ms) == [("b", 2)]
    assert await lives(again_ms - 1, again_ms + 1) == [("b", 2), ("b", 4)]
    assert await lives(again_ms, again_ms + 1) == [("b", 4)]


@in_world
async def test_decisions_whose_requests_are_gone_are_captured_and_counted(world: World) -> None:
    await staff(world, policy="session_hash")
    await serve(world, requests(world, 40))
    for lane in range(world.lanes):
        end = len(world.records(REQUESTS, lane))
        world.broker.delete_records(REQUESTS, lane, end)
    lines = await captured(world)
    last = lines[-1]
    assert isinstance(last, Counted)
    assert (last.without_request, last.lines["Decided"]) == (40, 40)
    assert "Asked" not in last.lines
    again = Recomputed()
    for line in lines:
        again.take(line)
    assert (again.without_session, again.differ) == (40, 0)


@in_world
async def test_records_that_cannot_be_read_are_counted(world: World) -> None:
    await staff(world)
    await serve(world, requests(world, 3))
    world.broker.append(LEDGER, 0, [Entry(b"a", b"\xff", (("t", b"Ended"),))])
    last = (await captured(world))[-1]
    assert isinstance(last, Counted)
    assert last.unread == 1
