"""Tests of the engine contract: every built-in engine keeps it, and its worker uses its config.

The real vLLM, in the worker and as a server, is held to the same in tests/vllm.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.engine_factory import create_engine
from kvlane.app.engine.interface import Engine, EngineError, KvEventListener
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.validator import ContractViolation, ValidatingEngine
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, card_of, read_folder
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.text.byte_level import ASSISTANT
from kvlane.app.worker import Worker
from kvlane.indexer.cache_events.engine_events import BlocksStored, EngineEvent
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Artifact, Blocks, EngineConfig, Lost, ModelCard, WorkerCard
from kvlane.streams.request import OpenAiBody, Request
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from tests.conformance import Conformance, Lifecycle, Subject
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.model_servers import TOKENIZER, EventPublisher, ModelServer, TextServer
from tests.harness.routing_harness import RoutingHarness
from tests.harness.worker_harness import TOKEN, ScriptedEngine, WorkerHarness

CONTEXT = 512
SHAPE = EngineLimits(block_size=16, cache_blocks=40)


def simulated() -> SimulatedEngine:
    return SimulatedEngine(SystemClock(), SHAPE, context_length=CONTEXT, speedup=20.0)


async def begun(engine: Engine) -> Subject:
    validated, got = ValidatingEngine(engine), list[EngineEvent]()
    validated.set_kv_event_listener(lambda events, rank=0: got.extend(events))
    return Subject(validated, await validated.start("w"), got=got, mark=(ASSISTANT,))


class TestSimulated(Conformance, Lifecycle):
    @pytest.fixture
    def make(self) -> Callable[[], Engine]:
        return simulated

    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        engine = simulated()
        subject = await begun(engine)
        subject.idle = lambda: (
            not (engine.running_count or engine.waiting_count or engine.used_blocks)
        )
        yield subject
        await subject.engine.cleanup()


class TestEcho(Conformance, Lifecycle):
    @pytest.fixture
    def make(self) -> Callable[[], Engine]:
        return lambda: EchoEngine(SystemClock(), 0.001, context_length=CONTEXT)

    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        engine = EchoEngine(SystemClock(), 0.001, context_length=CONTEXT)
        subject = await begun(engine)
        subject.idle = lambda: not engine.running_count
        yield subject
        await subject.engine.cleanup()


@pytest.fixture
async def behind() -> AsyncIterator[SimulatedEngine]:
    """The engine of a server, which runs."""
    engine = simulated()
    await engine.start("-")
    yield engine
    await engine.cleanup()


def beside(server: ModelServer | TextServer) -> ServerAddress:
    return ServerAddress(server.url, read_timeout_s=5.0, start_timeout_s=5.0)


def attached(server: ModelServer, publisher: EventPublisher | None = None) -> AttachedEngine:
    where = beside(server)
    if publisher is not None:
        where = where._replace(events_endpoint=publisher.endpoint, replay_endpoint=publisher.replay)
    return AttachedEngine(SystemClock(), where, TOKENIZER, AssumedLimits(CONTEXT, 16, 40))


class TestAttached(Conformance):
    """To a server that publishes its cache events, as vLLM does."""

    @pytest.fixture
    async def subject(self, behind: SimulatedEngine) -> AsyncIterator[Subject]:
        publisher = EventPublisher()
        behind.set_kv_event_listener(lambda events, rank=0: publisher.publish(events))
        async with ModelServer(behind) as server:
            subject = await begun(attached(server, publisher))
            subject.idle = lambda: not (server.running or behind.running_count)
            yield subject
            await subject.engine.cleanup()
        await publisher.close()


class TestAttachedWithoutEvents(Conformance, Lifecycle):
    """Its cache is guessed."""

    @pytest.fixture(params=["vllm", "llamacpp"])
    async def server(
        self, request: pytest.FixtureRequest, behind: SimulatedEngine
    ) -> AsyncIterator[ModelServer]:
        async with ModelServer(behind, request.param) as server:
            yield server

    @pytest.fixture
    def make(self, server: ModelServer) -> Callable[[], Engine]:
        return lambda: attached(server)

    @pytest.fixture
    async def subject(self, server: ModelServer) -> AsyncIterator[Subject]:
        subject = await begun(attached(server))
        subject.idle = lambda: not server.running
        assert subject.config.guesses_cache
        assert subject.config.gives_tokens
        yield subject
        await subject.engine.cleanup()


@dataclass
class InWords(Subject):
    """An engine of bodies beside a `TextServer`, whose tokens are characters."""

    def make_request(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Request:
        text = "".join(map(chr, prompt))
        kind: Any = self.config.kind
        output: dict[str, Any] = {"prompt": text}
        if kind == "chat":
            output = {"messages": [{"role": "user", "content": text}]}
        output |= {"max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True}
        body = OpenAiBody(kind=kind, json=msgspec.json.encode(output), prompt_tokens=len(prompt))
        return Request(id=f"r{self.salt}", body=body)


class TestPassing(Conformance, Lifecycle):
    """Bodies as they come."""

    kind = InWords

    @pytest.fixture(params=["chat", "completion"])
    async def server(
        self, request: pytest.FixtureRequest, behind: SimulatedEngine
    ) -> AsyncIterator[TextServer]:
        async with TextServer(behind, request.param) as server:
            yield server

    @pytest.fixture
    def make(self, server: TextServer) -> Callable[[], Engine]:
        kind: Any = "chat" if server.is_chat else "completion"
        return lambda: PassthroughEngine(SystemClock(), beside(server), kind)

    @pytest.fixture
    async def subject(
        self, server: TextServer, make: Callable[[], Engine]
    ) -> AsyncIterator[Subject]:
        engine = ValidatingEngine(make())
        subject = InWords(engine, await engine.start("w"), draws_tokens=False)
        subject.idle = lambda: not server.running
        yield subject
        await subject.engine.cleanup()


def test_real_vllm_conforms() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm holds it to the contract")


# --- what a worker does with it ------------------------------------------------------------------


class Described(ScriptedEngine):
    """An engine that is its config; it never ends an answer."""

    def __init__(self, world: MemoryWorld, **fields: Any) -> None:
        super().__init__(world, TOKEN, 1e6)
        self.fields = {"model": "m"} | fields
        self.worker_ids: list[str] = []

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self.listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        self.worker_ids.append(worker_id)
        return EngineConfig(**self.fields)


async def registered(world: MemoryWorld, **fields: Any) -> WorkerCard:
    harness = await WorkerHarness.started(world, Described(world, **fields))
    return harness.records_of(REGISTRY, WorkerCard)[-1]


@scenario_test
async def test_worker_id_is_that_of_the_card_in_every_epoch(world: MemoryWorld) -> None:
    harness, engine = WorkerHarness(world), Described(world)
    await harness.start(engine)
    harness.send(Lost(worker="w", epoch=harness.epoch))
    await world.wait_until(lambda: len(harness.records_of(REGISTRY, WorkerCard)) == 4)
    assert (
        {card.id for card in harness.records_of(REGISTRY, WorkerCard)}
        == set(engine.worker_ids)
        == {"w"}
    )
    assert len(engine.worker_ids) == 1


@scenario_test
async def test_without_a_served_name_the_model_is_served_as_itself(world: MemoryWorld) -> None:
    assert (await registered(world)).model == "m"


@scenario_test
async def test_clients_request_the_served_name(world: MemoryWorld) -> None:
    assert (await registered(world, served_model_name="public")).model == "public"


@scenario_test
async def test_without_a_block_size_no_cache_events_are_published(world: MemoryWorld) -> None:
    for block_size in (None, 2):
        harness, engine = WorkerHarness(world, f"w{block_size}"), Described(world)
        engine.fields["kv_cache_block_size"] = block_size
        await harness.start(engine)
        engine.listener([BlocksStored([1], None, [7, 8], 2)])
        await world.sleep(1)
        got = [
            r for r in harness.records_of(KV_EVENTS, Blocks) if r.worker == harness.name and r.keys
        ]
        assert bool(got) == (block_size is not None)


def test_without_a_block_size_requests_are_not_routed_by_cache() -> None:
    routing = RoutingHarness()
    routing.registry(ModelCard(name="m"))
    routing.add_blocks(routing.worker("w", block_size=None), 10)  # type: ignore[arg-type]
    assert [c.overlap_blocks for c in routing.chosen().candidates] == [0]


@scenario_test
async def test_without_max_num_seqs_the_setting_bounds_concurrent_runs(world: MemoryWorld) -> None:
    for name, advertised, running in (("a", None, 3), ("b", 1, 1)):
        harness = WorkerHarness(world, name)
        await harness.start(Described(world, max_num_seqs=advertised), max_num_seqs=3)
        for n in range(5):
            harness.assign(f"{name}{n}")
        await world.sleep(2)
        (beat,) = [b for b in harness.heartbeats() if b.worker == name][-1:]
        assert len(beat.running) - beat.waiting == running


def test_without_a_context_length_that_of_the_models_files_counts() -> None:
    files = read_folder(DEMO_MODEL_FOLDER)._replace(context_length=100)
    tokenizer = Artifact(sha256="-", size=1)
    cards = [card_of("m", files, tokenizer, None, context_length=n) for n in (None, 50, 200)]
    assert [card.context_length for card in cards] == [100, 50, 100]


def test_without_numbers_of_its_cache_and_steps_the_published_ones_count() -> None:
    pace = profile_from_card(EngineConfig(model="m"))
    assert (pace.capacity_tokens, pace.curves) == (0, PerfCurves())
    got = profile_from_card(
        EngineConfig(
            model="m", total_kv_blocks=10, kv_cache_block_size=16, max_num_batched_tokens=99,
            curve=PerfCurves().coefficients(2.0),
        )
    )  # fmt: skip
    assert (got.capacity_tokens, got.chunk_tokens) == (160, 99)
    assert got.curves != PerfCurves()


@scenario_test
async def test_bootstrap_host_and_port_are_on_the_card_both_or_not_at_all(
    world: MemoryWorld,
) -> None:
    card = await registered(world, bootstrap_host="h", bootstrap_port=7)
    assert (card.config.bootstrap_host, card.config.bootstrap_port) == ("h", 7)
    with pytest.raises(ContractViolation, match="both or not at all"):
        await WorkerHarness(world, "v").start(
            ValidatingEngine(Described(world, bootstrap_host="h"))
        )


@scenario_test
async def test_engine_is_cleaned_up_once_and_not_aborted_when_its_worker_ends(
    world: MemoryWorld,
) -> None:
    harness, engine = WorkerHarness(world), Described(world)
    await harness.start(engine, drain_grace_s=1)
    harness.assign()
    await world.wait_until(lambda: bool(harness.chunks()))
    await harness.worker.stop()
    await harness.ctx.cancel_tasks()
    assert engine.is_closed
    assert engine.calls == ["drain", "cleanup"]


@scenario_test
async def test_worker_whose_engine_fails_to_drain_and_to_clean_up_leaves(
    world: MemoryWorld,
) -> None:
    class Sticky(Described):
        async def drain(self) -> None:
            raise EngineError("stuck")

        async def cleanup(self) -> None:
            raise EngineError("stuck too")

    harness = await WorkerHarness.started(world, Sticky(world))
    await harness.worker.stop()
    await harness.ctx.cancel_tasks()
    assert harness.ctx.error is None
    assert world.all_records(REGISTRY)[-1].value is None


@scenario_test
async def test_engine_cancelled_during_its_start_is_cleaned_up(world: MemoryWorld) -> None:
    class Slow(Described):
        async def start(self, worker_id: str) -> EngineConfig:
            await world.sleep(1000)
            return EngineConfig(model="m")

    harness, engine = WorkerHarness(world), Slow(world)
    starting = world.spawn(harness.start(engine))
    await world.sleep(1)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert engine.calls == ["cleanup"]


@scenario_test
async def test_engine_that_was_never_started_is_not_cleaned_up(world: MemoryWorld) -> None:
    engine = Described(world)
    log = await world.connect("w")
    Worker(log, Settings(worker_id="w", router_id="-"), ProcessContext("w", world.clock), engine)
    await world.sleep(10)
    assert engine.calls == []


@scenario_test
async def test_debug_puts_the_validator_before_every_engine(world: MemoryWorld) -> None:
    for name in ("echo", "simulated"):
        for debug in (True, False):
            settings = Settings(worker_id="w", router_id="-", engine=name, validate_engine=debug)
            assert (
                isinstance(create_engine(settings, world.clock).engine, ValidatingEngine) == debug
            )
