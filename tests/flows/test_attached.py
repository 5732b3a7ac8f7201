"""Tests of a worker beside servers of different kinds: its requests to them, and its use of
their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.engine.attached import server_engine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.engine_factory import create_engine
from kvlane.app.engine.interface import Engine
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.text_generator import TextGenerator, demo_sentences
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER
from kvlane.app.settings import Settings
from kvlane.indexer.cache_events.engine_events import AllCleared, BlocksStored, EngineEvent
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import REQUESTS, RESPONSES
from tests.conformance import Subject
from tests.contracts.test_engine import SHAPE
from tests.flows.test_attached_faults import RealWorld, until
from tests.harness.fake_worker import append_record, start_router
from tests.harness.model_servers import (
    EOS,
    TOKENIZER,
    CloseConnection,
    Handler,
    ModelServer,
    ServerExchange,
)
from tests.harness.worker_harness import WorkerHarness, visible

SAYS = TextGenerator(demo_sentences(), TOKENIZER.encode_now, EOS[0])
PROMPT = list(
    TOKENIZER.encode_now("Tell me of the book that walked to the sea, and what it found.")
)


@pytest.fixture
async def behind() -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(
        SystemClock(), SHAPE, context_length=512, speedup=50.0, continuation=SAYS
    )
    await engine.start("-")
    yield engine
    await engine.cleanup()


def beside(server: ModelServer, **over: Any) -> AttachedEngine:
    where = ServerAddress(server.url, read_timeout_s=5.0, start_timeout_s=5.0)._replace(**over)
    return AttachedEngine(SystemClock(), where, TOKENIZER, AssumedLimits(512, 8, 100))


async def begun(engine: Engine) -> Subject:
    got: list[EngineEvent] = []
    engine = ValidatingEngine(engine)
    engine.set_kv_event_listener(lambda events, rank=0: got.extend(events))
    return Subject(engine, await engine.start("w"), got=got)


def request(max_tokens: int = 20, **stop: Any) -> Request:
    conditions = StopConditions(max_tokens=max_tokens, **stop)
    return Request(id="a", token_ids=pack_tokens(PROMPT), stop=conditions, eos_token_ids=EOS)


@pytest.mark.parametrize(
    ("kind", "prompts", "answers"),
    [
        ("vllm", "tokens", "token_ids"),
        ("llamacpp", "tokens", "log_probs"),
        ("text", "tokens", "text"),
        ("words", "text", "text"),
    ],
)
async def test_best_api_of_a_server_is_detected_and_logged_in_words(
    behind: SimulatedEngine, kind: str, prompts: str, answers: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with ModelServer(behind, kind) as server:
        engine = beside(server)
        config = await engine.start("w")
        assert (engine._dialect.prompt_form, engine._dialect.answer_tokens) == (prompts, answers)
        assert config.gives_tokens == (answers != "text")
        assert f"serves tiny: prompts as {prompts}, answers with" in caplog.text
        assert "ServerDialect" not in caplog.text
        await engine.cleanup()


@pytest.mark.parametrize(("kind", "versions"), [("vllm", {"vllm": "0.32.1"}), ("text", {})])
async def test_version_of_a_server_is_detected(
    behind: SimulatedEngine, kind: str, versions: dict[str, str]
) -> None:
    async with ModelServer(behind, kind) as server:
        engine = ValidatingEngine(beside(server))
        await engine.start("w")
        assert engine.versions() == versions
        await engine.cleanup()


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "text", "words"])
async def test_text_is_always_the_servers(
    behind: SimulatedEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.app.serving.worker_model.ByteModel", Words)
    async with ModelServer(behind, kind) as server:
        world = RealWorld()
        harness = await WorkerHarness.started(
            world, ValidatingEngine(beside(server)), model="tiny", worker_timeout_s=60
        )
        harness.assign(request=request(40))
        finished = await harness.wait_finished()
        seen = visible(harness.chunks())
        text = TOKENIZER.decode(answer_of(40))
        assert (seen.text, finished.code) == (
            text,
            "length" if len(answer_of(40)) == 40 else "stop",
        )
        assert seen.tokens == (answer_of(40) if kind in ("vllm", "llamacpp") else [])
        await harness.ctx.cancel_tasks()


def answer_of(limit: int) -> list[int]:
    made: list[int] = []
    for token in SAYS(PROMPT, None):
        made.append(token)
        if token in EOS or len(made) == limit:
            break
    return made


class Words:
    """The demo's model, as a worker reads answers with it."""

    def text_stream(self, request: Request, taken: Any = ()) -> Any:
        from kvlane.app.text.stop_conditions import TextStream

        return TextStream(
            TOKENIZER.detokenizer(PROMPT), request.stop, eos_token_ids=EOS, taken=taken
        )


async def test_stop_string_is_found_in_text_that_was_tokenised_again(
    behind: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.app.serving.worker_model.ByteModel", Words)
    text = TOKENIZER.decode(answer_of(40))
    word = text.split()[3]
    async with ModelServer(behind, "words") as server:
        world = RealWorld()
        harness = await WorkerHarness.started(
            world, ValidatingEngine(beside(server)), model="tiny", worker_timeout_s=60
        )
        harness.assign(request=request(40, stop=(word,)))
        assert (await harness.wait_finished()).code == "stop"
        assert visible(harness.chunks()).text == text[: text.index(word)]
        assert harness.chunks()[-1].stop_reason == word
        await until(lambda: not server.running)
        await harness.ctx.cancel_tasks()


async def test_api_key_is_the_only_authorization_sent(behind: SimulatedEngine) -> None:
    async with ModelServer(behind) as server:
        engine = beside(server, api_key="secret")
        await engine.start("w")
        await engine.cleanup()
        assert {x.fields["authorization"] for x in server.exchanges} == {"bearer secret"}


async def test_connections_are_used_again(behind: SimulatedEngine) -> None:
    async with ModelServer(behind) as server:
        subject = await begun(beside(server))
        for _ in range(5):
            await subject.run(request())
        assert len(server._open) <= 2  # one for requests, one for metrics
        await subject.engine.cleanup()


# --- the guess ------------------------------------------------------------------------------------


async def guessed(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(server_engine, "CHECK_INTERVAL_S", 0.02)
    subject = await begun(beside(server))
    await subject.run(request())
    stored = [event for event in subject.got if isinstance(event, BlocksStored)]
    size = subject.config.kv_cache_block_size
    assert size is not None
    assert sum(len(event.block_hashes) for event in stored) >= len(PROMPT) // size > 0
    return subject


def cleared(subject: Subject) -> Callable[[], bool]:
    return lambda: any(isinstance(event, AllCleared) for event in subject.got)


async def test_estimated_cached_tokens_are_reported_with_the_first_token(
    behind: SimulatedEngine,
) -> None:
    async with ModelServer(behind) as server:
        subject = await begun(beside(server))
        prompt = subject.prompt(40)
        got = []
        for _ in range(2):
            answer = await subject.run(subject.make_request(prompt))
            counts = [output.usage for output in answer.outputs if output.usage is not None]
            got.append([(c.cached_tokens, c.completion_tokens) for c in counts])
        size = subject.config.kv_cache_block_size
        assert size == 16
        assert got == [[(0, 1), (0, 8)], [(32, 1), (32, 8)]]
        await subject.engine.cleanup()


async def test_restart_is_detected_by_the_start_time_of_a_server(
    behind: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ModelServer(behind) as server:
        subject = await guessed(server, monkeypatch)
        server.started_at += 1
        await until(cleared(subject))
        await subject.engine.cleanup()


async def test_server_that_was_unreachable_is_treated_as_restarted(
    behind: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ModelServer(behind, "llamacpp") as server:
        subject = await guessed(server, monkeypatch)
        await server.__aexit__()
        await until(lambda: subject.engine._engine._health._was_gone)
        await server.__aenter__()
        await until(cleared(subject))
        await subject.engine.cleanup()


async def test_heartbeats_have_the_metrics_of_a_server_or_none(behind: SimulatedEngine) -> None:
    for kind, has_some in (("vllm", True), ("text", False)):
        async with ModelServer(behind, kind) as server:
            engine = beside(server)
            config = await engine.start("w")
            figures = engine.stats()
            assert (figures is not None) == has_some
            assert config.total_kv_blocks == (40 if has_some else 100)
            assert config.kv_cache_block_size == (16 if has_some else 8)
            await engine.cleanup()


# --- by settings ----------------------------------------------------------------------------------


async def test_settings_attach_a_worker(behind: SimulatedEngine) -> None:
    async with ModelServer(behind) as server:
        for name, serves_as in (({}, "tiny"), ({"model": "public"}, "public")):
            settings = Settings(
                worker_id="w", router_id="-", engine="attached", attach_url=f"{server.url}/v1",
                model_path=DEMO_MODEL_FOLDER, **name,
            )  # fmt: skip
            engine, files = create_engine(settings, SystemClock())
            assert files is not None
            config = await engine.start("w")
            assert (config.model, config.served_model_name) == ("tiny", serves_as)
            await engine.cleanup()


# --- failover -------------------------------------------------------------------------------------


async def breaks_off(x: ServerExchange) -> None:
    raise CloseConnection


async def stalls(x: ServerExchange) -> None:
    await x.wait_closed()


async def fails(x: ServerExchange) -> None:
    await x.event({"error": {"message": "core died", "code": 500}})


class Pair:
    """A router and two workers, each beside a server of its own; the first fails in mid answer."""

    def __init__(self, behind: SimulatedEngine, kind: str, fault: Handler) -> None:
        self.world = RealWorld()
        self._servers = [ModelServer(behind, kind) for _ in range(2)]
        self._whole = self._servers[0].complete
        self._fault = fault
        self._may_fail = asyncio.Event()
        self._servers[0].handlers["/v1/completions"] = self._first

    async def _first(self, x: ServerExchange) -> None:
        if x.body["max_tokens"] < 40:
            await self._whole(x)  # the worker finds out how to speak
            return
        await x.head()
        for token in answer_of(5):
            choice = self._servers[0]._choice(x.body, [token])
            await x.event({"choices": [choice]})
        await self._may_fail.wait()
        await self._fault(x)

    async def answer(self) -> Transcript:
        world = self.world
        async with self._servers[0] as first, self._servers[1] as second:
            desks = [WorkerHarness(world, name) for name in ("w1", "w2")]
            await self._begin(desks[0], first)
            router = await start_router(world, worker_timeout_s=60)
            sent = request(40)
            append_record(world, REQUESTS, replace(sent, model="tiny"))
            await until(lambda: bool(desks[0].chunks()))
            await self._begin(desks[1], second)
            self._may_fail.set()
            await until(lambda: self._read().is_over)
            transcript = self._read()
            for ctx in (router._context.ctx, *(harness.ctx for harness in desks)):
                assert ctx.error is None
                await ctx.cancel_tasks()
        return transcript

    async def _begin(self, harness: WorkerHarness, server: ModelServer) -> None:
        engine = ValidatingEngine(beside(server, read_timeout_s=0.4))
        await harness.start(engine, model="tiny", worker_timeout_s=60)

    def _read(self) -> Transcript:
        transcript = Transcript("a")
        for record in map(decode, self.world.records(RESPONSES, key="a")):
            transcript.apply(record)  # type: ignore[arg-type]
        return transcript


@pytest.mark.parametrize("fault", [breaks_off, stalls, fails])
async def test_answer_whose_server_fails_continues_on_another_one(
    behind: SimulatedEngine, fault: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.app.serving.worker_model.ByteModel", Words)
    seen = await Pair(behind, "vllm", fault).answer()
    assert seen.attempt == 1
    assert seen.tokens == answer_of(40)
    assert seen.text == TOKENIZER.decode(answer_of(40))
    assert seen.finish_reason == "length"


async def test_text_whose_server_fails_ends_as_lost(
    behind: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.app.serving.worker_model.ByteModel", Words)
    seen = await Pair(behind, "text", breaks_off).answer()
    assert seen.end is not None
    assert seen.end.code == "lost"
    assert "no token ids" in seen.end.message
    assert seen.text
    assert TOKENIZER.decode(answer_of(5)).startswith(seen.text)
