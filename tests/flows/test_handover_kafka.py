"""Tests of prefill and decode workers on a real Kafka: every answer is that of one engine, in
two runs."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvlane.app.audit.recompute import find_difference
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import Clock, SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Assigned, Chunk, LogRecord, PrefillDone, Role, Started
from kvlane.streams.topics import LEDGER, RESPONSES
from tests.harness.kafka_processes import provisioned
from tests.harness.model_servers import TOKENIZER
from tests.harness.sglang_servers import MeetingRooms, SglangServer

LANES = 2
REQUESTS, MAX_TOKENS = 60, 12
BLOCK = 16
DEATHS = 5
WAIT_S = 120.0
CLOCK, RNG = SystemClock(), random.Random(1)
ROLES: dict[str, Role] = {"p1": "prefill", "d1": "decode", "d2": "decode"}
FREE: dict[str, Role] = {"w1": "aggregated", "w2": "aggregated"}
CURVES = {"w1": PerfCurves((0.0, 1e-3, 1.0), (0.0, 0.0, 2000.0), 2000.0), "w2": PerfCurves()}
"""The first worker computes prompts fast and decodes slowly."""

pytestmark = pytest.mark.slow


EngineOf = Callable[[str, Clock], Engine]
"""Makes the engine of a worker."""


class Deployment:
    """A worker of each name in `roles`, a router and a preprocessor."""

    def __init__(self, settings: Settings, engine_of: EngineOf, roles: Mapping[str, Role]) -> None:
        self._settings = settings
        self._engine_of = engine_of
        self._roles = roles
        self._running: dict[str, tuple[KafkaLog, ProcessContext, Worker | Router | Preprocessor]]
        self._running = {}

    async def start(self, name: str) -> None:
        settings, ctx = self._settings, ProcessContext(name)
        log = open_log(settings, name)
        await log.start()
        part: Worker | Router | Preprocessor
        if name in self._roles:
            own = settings.model_copy(update={"worker_role": self._roles[name], "worker_id": name})
            part = Worker(log, own, ctx, self._engine_of(name, ctx.clock))
        else:
            part = (Router if name == "router" else Preprocessor)(log, settings, ctx)
        await part.start()
        self._running[name] = log, ctx, part

    async def end(self, name: str) -> None:
        """End a process; a worker at once, with its work undone."""
        log, ctx, part = self._running.pop(name)
        if not isinstance(part, Worker):
            await part.stop()
        await ctx.cancel_tasks()
        assert ctx.error is None
        await log.close()  # the engine of a worker may still report to it, and fail

    async def end_all(self) -> None:
        for name in reversed(list(self._running)):
            await self.end(name)


@asynccontextmanager
async def deployment(
    settings: Settings, engine_of: EngineOf, roles: Mapping[str, Role]
) -> AsyncIterator[Deployment]:
    """A running deployment."""
    there = Deployment(settings, engine_of, roles)
    for name in (*roles, "router", "preprocessor"):
        await there.start(name)
    try:
        yield there
    finally:
        await there.end_all()


async def all_records(log: KafkaLog, topic: str) -> list[LogRecord]:
    ends = await log.end_offsets(topic, range(LANES))
    reader = log.reader()
    reader.assign({Partition(topic, lane): 0 for lane in ends})
    found: list[LogRecord] = []
    while any(reader.position(Partition(topic, lane)) < end for lane, end in ends.items()):
        for records in (await reader.poll(1.0)).values():
            found += [LogRecord(r.offset, r.timestamp, decode(r)) for r in records]
    await reader.close()
    return found


def simulated(
    transfers: KvTransfers | None,
    clock: Clock,
    curves: PerfCurves = CURVES["w2"],
    speedup: float = 20,
) -> SimulatedEngine:
    limits = EngineLimits(block_size=BLOCK, cache_blocks=4096, curves=curves)
    return SimulatedEngine(
        clock, limits, model="demo", context_length=8192, speedup=speedup, transfers=transfers
    )


@pytest.mark.parametrize("path", ["sequential", "bootstrap"])
async def test_answers_of_two_engines_are_those_of_one(
    kafka: Broker, topic_prefix: str, path: str
) -> None:
    transfers = None if path == "sequential" else KvTransfers(CLOCK, has_bootstrap=True)
    lengths = [*range(1, BLOCK + 2), *(RNG.randint(1, 4000) for _ in range(REQUESTS))][:REQUESTS]
    settings = deployment_settings(kafka, topic_prefix, enforce_disaggregation=True)
    ledger = await answered(settings, lengths, lambda _, clock: simulated(transfers, clock))
    assert {f.record.worker for f in ledger if isinstance(f.record, Assigned)} == set(ROLES)
    early = {f.record.id for f in ledger if is_phase(f, Assigned, "decode")}
    for log_record in ledger:
        if is_phase(log_record, PrefillDone, "prefill"):
            decoded = next(f for f in ledger if is_decode_of(f, log_record))
            early -= {log_record.record.id} if decoded.offset > log_record.offset else set()
    assert bool(early) == (path == "bootstrap")
    if transfers is not None:
        failed = (transfers.taken_twice, transfers.taken_late, transfers.invalid)
        assert (failed, transfers.held_blocks, transfers._rooms) == ((0, 0, 0), 0, {})


async def test_answers_of_servers_that_meet_are_those_of_one(
    kafka: Broker, topic_prefix: str
) -> None:
    rooms = MeetingRooms()
    async with AsyncExitStack() as stack:
        servers = {}
        for name, role in ROLES.items():
            behind = EchoEngine(CLOCK, 0.001, max_num_seqs=64)
            await behind.start("behind")
            server = SglangServer(behind, "prefill" if role == "prefill" else "decode", rooms)
            servers[name] = await stack.enter_async_context(server)

        def engine_of(name: str, clock: Clock) -> Engine:
            return AttachedEngine(
                clock, ServerAddress(servers[name].url), TOKENIZER,
                AssumedLimits(8192, BLOCK, 4096), served_name="demo", transfer_lease_s=300.0,
                bootstrap=("10.0.0.7", 8998) if ROLES[name] == "prefill" else None,
            )  # fmt: skip

        settings = deployment_settings(kafka, topic_prefix, enforce_disaggregation=True)
        lengths = [RNG.randint(1, 400) for _ in range(REQUESTS)]
        await answered(settings, lengths, engine_of)
    assert not rooms.faults
    assert len(set(rooms.met)) == len(rooms.met) == REQUESTS


async def test_answers_are_equal_while_prefill_and_decode_workers_die(
    kafka: Broker, topic_prefix: str
) -> None:
    roles: dict[str, Role] = {"p1": "prefill", "d1": "decode"}
    settings = deployment_settings(
        kafka, topic_prefix, enforce_disaggregation=True, max_attempts=20
    )
    rng = random.Random(3)

    async def kill_workers(there: Deployment) -> None:
        for _ in range(DEATHS):
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            name = rng.choice([*roles])
            await there.end(name)
            await there.start(name)

    lengths = [rng.randint(1, 4000) for _ in range(REQUESTS)]
    ids, ledger, _ = await exchanged(
        settings, lengths, lambda _, clock: simulated(None, clock, speedup=2), roles, kill_workers
    )
    decisions = [r.record for r in ledger if isinstance(r.record, Assigned)]
    assert {each.phase for each in decisions} == {"prefill", "decode"}
    assert {each.id for each in decisions} == set(ids)
    epochs = {(each.worker, each.epoch) for each in decisions}
    assert len(epochs) > len(roles), "requests went to workers that had died"
    assert any(each.attempt for each in decisions), "a death was in the way of a request"


def deployment_settings(kafka: Broker, topic_prefix: str, **over: Any) -> Settings:
    return Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="-", router_id="r", status_port=None, hash_secret="tests", **over,
    )  # fmt: skip


async def test_workers_without_a_role_share_requests(kafka: Broker, topic_prefix: str) -> None:
    settings = deployment_settings(
        kafka, topic_prefix, transfer_bandwidth=1e15, transfer_latency_ms=0.0
    )
    lengths = [RNG.randint(1, 4000) for _ in range(REQUESTS)]
    ids, ledger, _ = await exchanged(
        settings, lengths, lambda name, clock: simulated(None, clock, CURVES[name]), FREE
    )
    decisions = [r.record for r in ledger if isinstance(r.record, Assigned)]
    assert {each.id for each in decisions} == set(ids)
    workers = defaultdict(list)
    for each in decisions:
        workers[each.id].append((each.phase, each.worker))
    assert [("prefill", "w1"), ("decode", "w2")] in workers.values()
    # After a failed attempt, as on a busy machine, the next one may be whole on the same worker.
    prefilled_by: dict[str, str] = {}
    for each in decisions:
        if each.phase == "prefill":
            prefilled_by[each.id] = each.worker
        elif each.phase == "decode":
            assert each.worker != prefilled_by[each.id], "decode is on another worker"
    assert [find_difference(each) for each in decisions] == [""] * len(decisions)


async def answered(
    settings: Settings, lengths: Sequence[int], engine_of: EngineOf
) -> list[LogRecord]:
    """The ledger of prompts that were all handed over once."""
    ids, ledger, responses = await exchanged(settings, lengths, engine_of, ROLES)
    phases = defaultdict(list)
    for log_record in ledger:
        if isinstance(log_record.record, Assigned):
            phases[log_record.record.id].append(log_record.record.phase)
    assert [phases[name] for name in ids] == [["prefill", "decode"]] * len(ids)
    prefills = {str(f.record.run) for f in ledger if is_phase(f, Started, "prefill")}
    assert len(prefills) == len(ids)
    assert not prefills & {f.record.run for f in responses if isinstance(f.record, Chunk)}
    return ledger


async def exchanged(
    settings: Settings,
    lengths: Sequence[int],
    engine_of: EngineOf,
    roles: Mapping[str, Role],
    meanwhile: Callable[[Deployment], Awaitable[None]] | None = None,
) -> tuple[list[str], list[LogRecord], list[LogRecord]]:
    """The ids of prompts of these lengths, the ledger and the responses, after their answers were
    checked. `meanwhile`: what is done to the deployment after their publication."""
    prompts = [[RNG.randrange(97, 123) for _ in range(length)] + [258] for length in lengths]
    async with provisioned(settings) as log, Client(log, SystemClock()) as client:
        async with deployment(settings, engine_of, roles) as there:
            ids = []
            for prompt in prompts:
                ids.append(client.new_request_id())
                body = {"token_ids": prompt, "max_tokens": MAX_TOKENS}
                await client.publish(Prompt(id=ids[-1], kind="tokens", body=body))
            if meanwhile is not None:
                await meanwhile(there)
            async with asyncio.timeout(WAIT_S):
                answers = [await client.result(name, WAIT_S) for name in ids]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.tokens) == echo_answer(prompt, MAX_TOKENS)
        ledger, responses = await all_records(log, LEDGER), await all_records(log, RESPONSES)
    return ids, ledger, responses


def is_decode_of(log_record: LogRecord, prefilled: LogRecord) -> bool:
    """Whether a record is the decision about the decode of this prefill."""
    return is_phase(log_record, Assigned, "decode") and log_record.record.id == prefilled.record.id


def is_phase(log_record: LogRecord, kind: type, phase: str) -> bool:
    return isinstance(log_record.record, kind) and log_record.record.phase == phase
