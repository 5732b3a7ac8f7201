"""Tests of a worker's runs of phase prefill and decode; the test acts as the router between
them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import (
    EngineDead,
    EngineError,
    EngineFull,
    EngineOutput,
    InvalidRequest,
)
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.settings import SettingsError
from kvlane.streams.codecs import AnyRecord, decode, pack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import (
    CancelRun,
    EngineConfig,
    Finished,
    PrefillDone,
    Started,
    Usage,
    WorkerCard,
)
from kvlane.streams.request import (
    BootstrapInfo,
    PrefillResult,
    PromptTokensDetails,
    Request,
    StopConditions,
)
from kvlane.streams.topics import LEDGER, REGISTRY, RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import PROMPT, TOKEN, ScriptedEngine, WorkerHarness, visible

LEASE_S = 2.0
TRANSFER = b'{"where": 1}'
HANDED_OVER = EngineOutput(token_ids=(65,), finish_reason="length", transfer=TRANSFER)
SHAPE = EngineLimits(block_size=4, cache_blocks=64)


class HandingOver(ScriptedEngine):
    """A scripted engine that advertises a lease."""

    async def start(self, worker_id: str) -> EngineConfig:
        return EngineConfig(model="m", transfer_lease_s=LEASE_S)


def ledger(harness: WorkerHarness) -> list[AnyRecord]:
    records = harness.world.records(LEDGER, lane_of("a", harness.world.lanes))
    return [decode(record) for record in records]


def cancel(harness: WorkerHarness, phase: Any, reason: str = "") -> None:
    harness.send(
        CancelRun(
            worker=harness.name, epoch=harness.epoch, id="a", attempt=0, phase=phase, reason=reason
        )
    )


def decode_request(transfer: bytes, max_tokens: int = 20) -> Request:
    return Request(
        id="a",
        token_ids=pack_tokens(PROMPT),
        stop=StopConditions(max_tokens=max_tokens),
        prefill_result=PrefillResult(
            disaggregated_params=transfer,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=3),
        ),
    )


# --- prefill -------------------------------------------------------------------------------------


@scenario_test
async def test_prefill_hands_over_and_writes_no_chunk(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, 0.5, HANDED_OVER))
    harness.assign(phase="prefill", max_tokens=1)
    finished = await harness.wait_finished()
    started, done, _ = ledger(harness)
    assert isinstance(started, Started)
    assert isinstance(done, PrefillDone)
    assert (done.phase, done.handoff, done.run) == ("prefill", TRANSFER, started.run)
    assert done.prefill_ms == pytest.approx(500)
    assert (finished.code, finished.phase, finished.output_tokens) == ("handed_off", "prefill", 0)
    assert not world.all_records(RESPONSES)


@scenario_test
async def test_prefill_computes_one_token_of_a_resumed_request_too(world: MemoryWorld) -> None:
    engine = HandingOver(world, HANDED_OVER)
    harness = await WorkerHarness.started(world, engine)
    harness.assign(phase="prefill", max_tokens=1, taken=pack_tokens([7, 8]))
    assert (await harness.wait_finished()).code == "handed_off"
    (request,) = engine.requests
    assert (request.token_ids, request.stop.max_tokens) == (pack_tokens([*PROMPT, 7, 8]), 1)


@scenario_test
async def test_time_before_its_record_counts_against_the_lease(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, HANDED_OVER))
    world.faults.slow["append"] = 0.5
    begun_ms = world.broker.now_ms()
    harness.assign(phase="prefill")  # Started takes a second, there and back
    await harness.wait_finished()
    (done,) = harness.lane_records(LEDGER, PrefillDone)
    lease_ms = done.lease_until_ms - begun_ms
    assert LEASE_S * 1000 - 600 < lease_ms <= LEASE_S * 1000 + 50  # half a second behind the broker


@scenario_test
async def test_lease_is_counted_from_the_start_of_the_prefill(world: MemoryWorld) -> None:
    # A stalled worker reads the end of the prefill when the lease has long begun.
    harness = await WorkerHarness.started(world, HandingOver(world, 0.5, HANDED_OVER))
    begun_ms = world.broker.now_ms()
    harness.assign(phase="prefill")
    await harness.wait_finished()
    (done,) = harness.lane_records(LEDGER, PrefillDone)
    assert LEASE_S * 1000 - 100 < done.lease_until_ms - begun_ms <= LEASE_S * 1000 + 50


@scenario_test
async def test_prefill_done_is_repeated_until_it_is_acknowledged(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, 0.5, HANDED_OVER))
    harness.assign(phase="prefill")
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    world.faults.next_fates(LEDGER, AppendFate.LOST)
    assert (await harness.wait_finished()).code == "handed_off"
    (done,) = harness.lane_records(LEDGER, PrefillDone)
    assert 0 < done.lease_until_ms - world.broker.now_ms() < LEASE_S * 1000


@scenario_test
async def test_hand_over_that_is_not_acknowledged_in_its_lease_is_broken(
    world: MemoryWorld,
) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, 0.5, HANDED_OVER))
    harness.assign(phase="prefill")
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 12)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("broken", False)
    assert "PrefillDone was not acknowledged" in finished.message
    assert not harness.lane_records(LEDGER, PrefillDone)


@scenario_test
async def test_engine_without_a_transfer_is_named(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, EngineOutput(token_ids=(65,), finish_reason="length"))
    harness = await WorkerHarness.started(world, engine)
    harness.assign(phase="prefill")
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert finished.message == (
        "the engine of worker w gave no transfer parameters for request a: "
        "configure its KV connector"
    )
    assert not harness.lane_records(LEDGER, PrefillDone)
    assert not world.all_records(RESPONSES)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineError("broken"), "error"),
        (EngineError("later", retryable=True), "error"),
        (InvalidRequest("top_k: must be 1 or more"), "error"),
        (EngineOutput.error("final"), "error"),
        (EngineFull("full"), "worker_full"),
        (ValueError("bug"), "error"),
    ],
)
def test_every_failure_of_a_prefill_is_retryable(failure: Any, code: str) -> None:
    async def scenario(world: MemoryWorld) -> None:
        harness = await WorkerHarness.started(world, HandingOver(world, TOKEN, 0.1, failure))
        if code == "worker_full":
            harness = WorkerHarness(world, "w2")
            await harness.start(HandingOver(world, failure))
        harness.assign(phase="prefill")
        finished = await harness.wait_finished()
        assert (finished.code, finished.retryable) == (code, True)
        assert finished.message
        assert not world.all_records(RESPONSES)

    scenario_test(scenario)()


@scenario_test
async def test_dead_engine_ends_the_process_of_a_prefill_worker(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, EngineDead("gone")))
    harness.assign(phase="prefill")
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    await world.wait_until(lambda: not harness.worker.is_alive)
    assert not world.all_records(RESPONSES)


@scenario_test
async def test_cancelled_prefill_leaves_no_chunk(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ValidatingEngine(EchoEngine(world.clock, 0.1, max_num_seqs=4))
    )
    harness.assign(phase="prefill", max_tokens=50)
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    cancel(harness, "prefill")
    finished = await harness.wait_finished()
    assert (finished.code, finished.message) == ("broken", "cancelled during its prefill")
    assert not world.all_records(RESPONSES)


@scenario_test
async def test_prefill_past_its_deadline_is_expired_without_a_chunk(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, 100.0, HANDED_OVER))
    harness.assign(phase="prefill", budget_s=3.0)
    assert (await harness.wait_finished()).code == "expired"
    assert not harness.lane_records(LEDGER, PrefillDone)
    assert not world.all_records(RESPONSES)


@scenario_test
async def test_full_worker_refuses_a_prefill_too(world: MemoryWorld) -> None:
    engine = HandingOver(world, 1.0, HANDED_OVER)
    harness = await WorkerHarness.started(world, engine, max_num_seqs=1, worker_max_waiting=0)
    harness.assign("busy", phase="prefill")
    harness.assign(phase="prefill")
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("worker_full", True)
    assert (await harness.wait_finished("busy")).code == "handed_off"


@scenario_test
async def test_open_prefills_of_a_stopped_worker_are_broken(world: MemoryWorld) -> None:
    engine = HandingOver(world, 100.0, HANDED_OVER)
    harness = await WorkerHarness.started(world, engine, drain_grace_s=0.0)
    harness.assign(phase="prefill")
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    await harness.worker.stop()
    (finished,) = harness.lane_records(LEDGER, Finished)
    assert finished.code == "broken"
    assert not world.all_records(RESPONSES)


# --- decode --------------------------------------------------------------------------------------


@scenario_test
async def test_decode_in_time_is_passed_to_the_engine_with_its_transfer(world: MemoryWorld) -> None:
    engine = HandingOver(world, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    until_ms = world.broker.now_ms() + 1000
    harness.assign(phase="decode", request=decode_request(TRANSFER), handoff_until_ms=until_ms)
    assert (await harness.wait_finished()).code == "stop"
    (request,) = engine.requests
    assert request.prefill_result is not None
    assert request.prefill_result.disaggregated_params == TRANSFER


@scenario_test
async def test_cached_tokens_of_an_answer_are_those_of_its_prefill(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, HandingOver(world, TOKEN, EngineOutput.stop()))
    harness.assign(phase="decode", request=decode_request(TRANSFER))
    await harness.wait_finished()
    assert harness.chunks()[-1].usage == Usage(
        prompt_tokens=len(PROMPT), completion_tokens=1, cached_tokens=3
    )


@scenario_test
async def test_decode_past_its_hand_over_never_reaches_the_engine(world: MemoryWorld) -> None:
    engine = HandingOver(world, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    until_ms = world.broker.now_ms() - 1
    harness.assign(phase="decode", request=decode_request(TRANSFER), handoff_until_ms=until_ms)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("worker_full", False)
    assert finished.message == "the hand-off of its prefill has expired"
    assert not engine.requests
    assert not harness.lane_records(LEDGER, Started)


@scenario_test
async def test_wait_in_the_run_queue_counts_against_the_hand_over(world: MemoryWorld) -> None:
    engine = HandingOver(world, 1.0, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine, max_num_seqs=1)
    harness.assign("busy")
    until_ms = world.broker.now_ms() + 500
    harness.assign(phase="decode", request=decode_request(TRANSFER), handoff_until_ms=until_ms)
    harness.assign("next")
    assert (await harness.wait_finished()).code == "worker_full"
    assert (await harness.wait_finished("next")).code == "stop"
    assert [request.id for request in engine.requests] == ["busy", "next"]


# --- bootstrap path ------------------------------------------------------------------------------


def bootstrapped(max_tokens: int = 20) -> Request:
    return replace(
        Request(id="a", token_ids=pack_tokens(PROMPT), stop=StopConditions(max_tokens=max_tokens)),
        bootstrap_info=BootstrapInfo(bootstrap_host="p", bootstrap_port=1, bootstrap_room=7),
    )


@scenario_test
async def test_prefill_in_a_room_needs_no_transfer_parameters(world: MemoryWorld) -> None:
    engine = HandingOver(world, EngineOutput(token_ids=(65,), finish_reason="length"))
    harness = await WorkerHarness.started(world, engine)
    harness.assign(phase="prefill", request=bootstrapped())
    assert (await harness.wait_finished()).code == "handed_off"
    (done,) = harness.lane_records(LEDGER, PrefillDone)
    assert (done.handoff, done.lease_until_ms) == (b"", 0)
    assert not world.all_records(RESPONSES)
    (request,) = engine.requests
    assert request.bootstrap_info == bootstrapped().bootstrap_info


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_run_waits_for_its_transfer_for_a_limited_time(phase: str) -> None:
    async def scenario(world: MemoryWorld) -> None:
        engine = HandingOver(world, 50.0, TOKEN, EngineOutput.stop())
        harness = await WorkerHarness.started(world, engine)
        until_ms = world.broker.now_ms() + 5000
        harness.assign(phase=phase, request=bootstrapped(), handoff_until_ms=until_ms)
        finished = await harness.wait_finished()
        assert (finished.code, finished.message) == (
            "broken",
            "the blocks were not transferred in time",
        )
        assert 0 <= world.broker.now_ms() - until_ms < 2500
        assert engine.is_closed
        assert not world.all_records(RESPONSES)

    scenario_test(scenario)()


@scenario_test
async def test_time_limit_of_a_transfer_ends_with_its_first_token(world: MemoryWorld) -> None:
    engine = HandingOver(world, TOKEN, 10.0, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    until_ms = world.broker.now_ms() + 2000
    harness.assign(phase="decode", request=bootstrapped(), handoff_until_ms=until_ms)
    assert (await harness.wait_finished()).code == "stop"


@scenario_test
async def test_decode_that_waits_in_a_room_makes_no_stalled_engine(world: MemoryWorld) -> None:
    engine = HandingOver(world, 8.0, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine, engine_stall_timeout_s=3.0)
    until_ms = world.broker.now_ms() + 20_000
    harness.assign(phase="decode", request=bootstrapped(), handoff_until_ms=until_ms)
    assert (await harness.wait_finished()).code == "stop"


@scenario_test
async def test_cancel_by_a_client_interrupts_no_transfer(world: MemoryWorld) -> None:
    engine = HandingOver(world, 1.0, TOKEN, 1.0, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    harness.assign(phase="decode", request=bootstrapped())
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    cancel(harness, "decode", reason="cancelled")
    cancel(harness, "decode", reason="superseded")
    cancel(harness, "decode", reason="deadline")
    await world.sleep(0.5)
    assert "abort" not in engine.calls
    await world.wait_until(lambda: bool(harness.chunks()))
    await world.sleep(0.1)
    assert "abort" in engine.calls


@pytest.mark.parametrize("transfer_s", [5.0, 50.0])
def test_deadline_interrupts_no_transfer_that_is_in_time(transfer_s: float) -> None:
    async def scenario(world: MemoryWorld) -> None:
        engine = HandingOver(world, transfer_s, TOKEN, 50.0, TOKEN, EngineOutput.stop())
        harness = await WorkerHarness.started(world, engine)
        now_ms = world.broker.now_ms()
        until_ms = now_ms + 10_000
        request = decode_request(TRANSFER)
        harness.assign(phase="decode", request=request, budget_s=2.0, handoff_until_ms=until_ms)
        assert (await harness.wait_finished()).code == "expired"
        assert bool(harness.chunks()) == (transfer_s < 10.0)
        assert 4000 < world.broker.now_ms() - now_ms < 13_000

    scenario_test(scenario)()


@scenario_test
async def test_failed_transfer_is_not_waited_for(world: MemoryWorld) -> None:
    engine = HandingOver(world, 50.0, TOKEN, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    harness.assign(phase="decode", request=bootstrapped())
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Started)))
    cancel(harness, "decode", reason="lost")
    await world.sleep(0.1)
    assert "abort" in engine.calls


@scenario_test
async def test_prefill_that_a_decode_waits_for_is_not_cancelled(world: MemoryWorld) -> None:
    engine = HandingOver(world, 1.0, HANDED_OVER)
    harness = await WorkerHarness.started(world, engine, max_num_seqs=1)
    harness.assign("busy", phase="prefill")
    harness.assign(phase="prefill", request=bootstrapped())
    await world.sleep(0.5)
    cancel(harness, "prefill", reason="cancelled")  # while it waits for its turn
    assert (await harness.wait_finished()).code == "handed_off"
    assert "abort" not in engine.calls


# --- both, with the simulated engine -------------------------------------------------------------


@scenario_test
async def test_two_workers_answer_like_one(world: MemoryWorld) -> None:
    transfers, harnesses = KvTransfers(world.clock), {}
    for role in ("prefill", "decode"):
        harness = harnesses[role] = WorkerHarness(world, role)
        engine = SimulatedEngine(world.clock, SHAPE, context_length=200, transfers=transfers)
        await harness.start(ValidatingEngine(engine), worker_role=role)
    harnesses["prefill"].assign(phase="prefill", max_tokens=1)
    assert (await harnesses["prefill"].wait_finished()).code == "handed_off"
    assert transfers.held_blocks == -(-len(PROMPT) // SHAPE.block_size)
    (done,) = harnesses["prefill"].lane_records(LEDGER, PrefillDone)
    left_ms = done.lease_until_ms - world.broker.now_ms()
    assert LEASE_S * 900 < left_ms <= LEASE_S * 1000
    harnesses["decode"].assign(
        phase="decode",
        request=decode_request(done.handoff),
        handoff_until_ms=world.broker.now_ms() + left_ms // 2,
    )
    await world.wait_until(lambda: len(harness.lane_records(LEDGER, Finished)) == 2)
    tokens = visible(harnesses["decode"].chunks()).tokens
    assert list(tokens) == echo_answer(PROMPT, 20)
    assert (transfers.held_offers, transfers.held_blocks) == (0, 0)


async def start_pair(world: MemoryWorld, transfers: KvTransfers) -> tuple[WorkerHarness, ...]:
    """A prefill and a decode worker with simulated engines."""
    pair = []
    for role in ("prefill", "decode"):
        harness = WorkerHarness(world, role)
        engine = SimulatedEngine(world.clock, SHAPE, context_length=200, transfers=transfers)
        await harness.start(ValidatingEngine(engine), worker_role=role)
        pair.append(harness)
    return tuple(pair)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_two_workers_that_meet_in_a_room_answer_as_one_would(first: str) -> None:
    async def scenario(world: MemoryWorld) -> None:
        transfers = KvTransfers(world.clock, has_bootstrap=True)
        prefilling, decoding = await start_pair(world, transfers)
        cards = map(decode, world.all_records(REGISTRY))
        hosts = {c.config.bootstrap_host for c in cards if isinstance(c, WorkerCard)}
        assert hosts == {"prefill", "decode"}
        for phase in sorted(("prefill", "decode"), key=lambda phase: phase != first):
            harness = prefilling if phase == "prefill" else decoding
            harness.assign(phase=phase, request=bootstrapped())
            await world.sleep(1.0)
        await world.wait_until(lambda: len(decoding.lane_records(LEDGER, Finished)) == 2)
        assert list(visible(decoding.chunks()).tokens) == echo_answer(PROMPT, 20)
        assert (transfers.held_offers, transfers.held_blocks, transfers._rooms) == (0, 0, {})

    scenario_test(scenario)()


@scenario_test
async def test_decode_leaves_the_room_when_it_is_cancelled_for_a_failed_prefill(
    world: MemoryWorld,
) -> None:
    transfers = KvTransfers(world.clock, has_bootstrap=True)
    _, decoding = await start_pair(world, transfers)
    decoding.assign(phase="decode", request=bootstrapped())
    await world.sleep(1.0)
    decoding.send(
        CancelRun(
            worker="decode", epoch=decoding.epoch, id="a", attempt=0, phase="decode", reason="lost"
        )
    )
    assert (await decoding.wait_finished()).code == "cancelled"
    assert not transfers._rooms


@scenario_test
async def test_draining_worker_waits_for_its_transfers(world: MemoryWorld) -> None:
    harness, transfers = WorkerHarness(world), KvTransfers(world.clock)
    engine = SimulatedEngine(world.clock, SHAPE, context_length=200, transfers=transfers)
    await harness.start(engine, drain_grace_s=60.0, heartbeat_interval_s=0.1)
    harness.assign(phase="prefill")
    await harness.wait_finished()
    stopping = world.spawn(harness.worker.stop())
    await world.sleep(LEASE_S / 2)
    assert not stopping.done()
    (done,) = harness.lane_records(LEDGER, PrefillDone)
    transfers.take(done.handoff, len(PROMPT)).finish()
    await world.sleep(0.5)
    assert stopping.done()


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engine_without_hand_over_takes_no_such_role(role: str) -> None:
    async def scenario(world: MemoryWorld) -> None:
        engine = ScriptedEngine(world)
        with pytest.raises(SettingsError, match=f"KVLANE_WORKER_ROLE={role}.*kv_transfer_config"):
            await WorkerHarness(world).start(engine, worker_role=role)
        assert engine.calls == ["start", "cleanup"]

    scenario_test(scenario)()
