"""Tests of a worker beside a real vLLM server: the contract, its cache events, and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from kvlane.app.demo import tiny_model
from kvlane.app.engine.attached.passthrough_engine import BodyKind, PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AttachedEngine
from kvlane.app.engine.interface import EngineError, GenerateContext, InvalidRequest
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.engine.vllm.versions import installed_version
from kvlane.indexer.block_hashes import derive_secret
from kvlane.indexer.cache_events.engine_events import EngineEvent, EventsLost
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer
from kvlane.indexer.events import EventKind
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import (
    GuidedDecoding,
    Hints,
    OpenAiBody,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
)
from tests.conformance import Conformance, Subject, first_of
from tests.vllm.servers import START_S, RunningServer, end, running

pytestmark = pytest.mark.timeout(2.5 * START_S)  # a server is started twice
SECRET = derive_secret(b"s")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(
    model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    async with running(model, log, adapters) as server:
        await server.wait_ready()
        yield server


@dataclass
class Beside(Subject):
    """With all events that were ever told; `got` is emptied by some."""

    history: list[EngineEvent] = field(default_factory=list)

    def receive(self, events: Sequence[EngineEvent], rank: int = 0, /) -> None:
        self.got += events
        self.history += events


async def begun(attached: AttachedEngine) -> Beside:
    engine = ValidatingEngine(attached)
    subject = Beside(engine, EngineConfig(model="-"))
    engine.set_kv_event_listener(subject.receive)
    subject.config = await engine.start("w")
    return subject


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(server: RunningServer) -> AsyncIterator[Beside]:
    subject = await begun(server.attached())
    yield subject
    await subject.engine.cleanup()


class TestAttachedVllm(Conformance):
    @pytest.fixture
    def subject(self, shared: Beside) -> Beside:
        return shared


def keys_of(events: list[EngineEvent]) -> set[int]:
    """What one knows to be cached who was told all that."""
    bridge, known = EventNormalizer(tiny_model.BLOCK_SIZE, SECRET), set[int]()
    bridge.on_events(events, 0.0)
    while batch := bridge.take_batch():
        for event in batch.events:
            if event.kind is EventKind.CLEARED:
                known.clear()
            elif event.kind is EventKind.STORED:
                known |= set(event.keys)
            else:
                known -= set(event.keys)
    return known


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.05)


BODIES: dict[BodyKind, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}], "logprobs": True},
    "completion": {"prompt": "hello", "logprobs": 1},
}


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_text_request_has_the_text_that_clients_get(
    server: RunningServer, shared: Beside, kind: BodyKind
) -> None:
    engine = ValidatingEngine(
        PassthroughEngine(SystemClock(), ServerAddress(server.url, start_timeout_s=START_S), kind)
    )
    body = BODIES[kind] | {"model": "tiny", "max_tokens": 12, "temperature": 0, "seed": 1}
    try:
        config = await engine.start("w")
        assert (config.kind, config.gives_tokens, config.context_length) == (kind, False, 512)
        sent = Request(id="r", body=OpenAiBody(kind=kind, json=msgspec.json.encode(body)))
        outputs = [output async for output in engine.generate(sent, GenerateContext("r"))]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            expected = (await client.post(path, json=body)).raise_for_status().json()
    finally:
        await engine.cleanup()
    (choice,), counts = expected["choices"], outputs[-1].usage
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    assert "".join(output.text for output in outputs) == text
    assert outputs[-1].finish_reason == choice["finish_reason"] == "length"
    assert counts is not None
    assert counts.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert counts.completion_tokens == expected["usage"]["completion_tokens"] == 12
    got = [aside.choice["logprobs"] for output in outputs for aside in output.data if aside.choice]
    name = "content" if kind == "chat" else "tokens"
    assert [each for part in got for each in part[name]] == choice["logprobs"][name]


async def test_server_properties_are_discovered(shared: Beside) -> None:
    config = shared.config
    assert (config.model, config.context_length) == ("tiny", 512)
    assert (config.kv_cache_block_size, config.total_kv_blocks) == (tiny_model.BLOCK_SIZE, 40)
    assert set(config.lora_names or ()) == {"one", "two"}
    assert shared.engine.adapters() == ("one", "two")
    assert shared.engine.versions() == {"vllm": installed_version()}
    assert config.gives_tokens
    assert not config.guesses_cache


async def test_abandoned_stream_is_aborted_at_the_server(
    shared: Beside, server: RunningServer
) -> None:
    async def counted(name: str) -> float:
        text = (await attached._server.get("/metrics", 10)).decode()
        return sum(map(float, re.findall(rf"(?m)^vllm:{name}\{{.*\}} (\S+)$", text)))

    attached = shared.engine._engine
    before = await counted("generation_tokens_total")
    stream = shared.engine.generate(
        shared.make_request(shared.prompt(20), 450), GenerateContext("r")
    )
    async with aclosing(stream):
        await first_of(stream)
    async with asyncio.timeout(60):
        while await counted("num_requests_running"):  # noqa: ASYNC110 - the server decides
            await asyncio.sleep(0.1)
    assert 0 < await counted("generation_tokens_total") - before < 450


async def test_heartbeats_have_the_metrics_of_the_server(shared: Beside) -> None:
    figures = shared.engine.stats()
    assert figures is not None
    assert figures.kv_total_blocks == 40
    before = figures.steps
    await shared.run(shared.make_request(shared.prompt(20), 4))
    await until(lambda: (now := shared.engine.stats()) is not None and now.steps >= before + 4)


async def test_adapter_answers_differently_and_an_unknown_one_is_refused(shared: Beside) -> None:
    prompt = shared.prompt(40)
    plain = (await shared.run(shared.make_request(prompt))).tokens
    adapted = (await shared.run(shared.make_request(prompt, hints=Hints(lora_name="one")))).tokens
    assert adapted != plain
    with pytest.raises(InvalidRequest, match="no adapter 'three'"):
        await shared.run(shared.make_request(prompt, hints=Hints(lora_name="three")))


async def test_salts_keep_caches_apart(shared: Beside) -> None:
    prompt = shared.prompt(2 * tiny_model.BLOCK_SIZE + 1)
    for salt, cached in (("a", 0), ("b", 0), ("a", 2 * tiny_model.BLOCK_SIZE)):
        counts = (await shared.run(shared.make_request(prompt, 2, cache_salt=salt))).last.usage
        assert counts is not None
        assert counts.cached_tokens == cached


async def test_log_probabilities_name_tokens(shared: Beside) -> None:
    sent = shared.make_request(shared.prompt(20), 3, output=OutputOptions(logprobs=2))
    answer = await shared.run(sent)
    ranked = [at for output in answer.outputs for at in output.log_probs or ()]
    assert [at[0].token_id for at in ranked] == answer.tokens
    assert all(at[1].log_prob >= at[2].log_prob for at in ranked)
    assert all(at[0].token_id == at[1].token_id for at in ranked), "greedy takes the likeliest"


async def test_guided_choice_is_respected(shared: Beside, model: Path) -> None:
    guided = GuidedDecoding(choice=("walking", "swimming"))
    sampling = SamplingOptions(temperature=0.0, guided_decoding=guided)
    stop = StopConditions(max_tokens=16)
    answer = await shared.run(shared.make_request(shared.prompt(20), sampling=sampling, stop=stop))
    text = shared.engine._engine._tokenizer.decode(answer.tokens)
    assert text in guided.choice
    assert answer.last.finish_reason == "stop"


@pytest.mark.parametrize(
    "sampling", [SamplingOptions(temperature=-1.0), SamplingOptions(logit_bias={10**6: 1.0})]
)
async def test_refusal_by_the_server_is_reported(shared: Beside, sampling: SamplingOptions) -> None:
    with pytest.raises(EngineError) as refused:
        await shared.run(shared.make_request(shared.prompt(20), sampling=sampling))
    assert not refused.value.retryable
    assert str(refused.value)


# --- cache events ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def lossy(endpoint: str, lost: Callable[[int], bool]) -> AsyncIterator[str]:
    """A line to a publisher that loses some of its messages."""
    context = zmq.asyncio.Context()
    source, sink = context.socket(zmq.SUB), context.socket(zmq.PUB)
    source.subscribe(b"")
    source.connect(endpoint)
    sink.bind("tcp://127.0.0.1:*")

    async def pass_on() -> None:
        while True:
            frames = await source.recv_multipart()
            if not lost(int.from_bytes(frames[1], "big")):
                await sink.send_multipart(frames)

    passing = asyncio.create_task(pass_on())
    try:
        yield sink.get_string(zmq.LAST_ENDPOINT)
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        context.destroy(linger=0)


async def test_lost_messages_are_replayed(shared: Beside, server: RunningServer) -> None:
    dropped: list[int] = []

    def is_lost(number: int) -> bool:
        if number % 3:
            dropped.append(number)
        return bool(number % 3)

    async with lossy(server.events, is_lost) as line:
        other = await begun(server.attached(events_endpoint=line))
        for _ in range(12):  # the cache holds about ten of these
            await other.run(other.make_request(shared.prompt(4 * tiny_model.BLOCK_SIZE), 3))
        await shared.run(shared.make_request(shared.prompt(tiny_model.BLOCK_SIZE), 1))
        await until(lambda: keys_of(other.history) == keys_of(shared.history))
        assert dropped
        assert EventsLost() not in other.history
        await other.engine.cleanup()


async def test_without_replays_possibly_evicted_blocks_are_dropped(
    shared: Beside, server: RunningServer
) -> None:
    losing = False
    async with lossy(server.events, lambda _: losing) as line:
        other = await begun(server.attached(events_endpoint=line, replay_endpoint=""))
        await asyncio.sleep(0.5)
        for n in range(24):
            losing = 8 <= n < 16
            await other.run(other.make_request(shared.prompt(4 * tiny_model.BLOCK_SIZE), 3))
            await asyncio.sleep(0.05)
        await until(lambda: EventsLost() in other.history)
        await asyncio.sleep(0.5)
        believed, held = keys_of(other.history), keys_of(shared.history)
        assert believed
        assert believed <= held
        await other.engine.cleanup()


async def test_restarted_server_has_an_empty_cache(model: Path, tmp_path: Path) -> None:
    ports = free_ports(3)
    async with running(model, tmp_path / "log", ports=ports) as server:
        subject = await begun(server.attached())
        prompt = subject.prompt(3 * tiny_model.BLOCK_SIZE + 1)
        await subject.run(subject.make_request(prompt))
        await until(lambda: len(keys_of(subject.history)) >= 3)
        await end(server.process, kill=True)
        with pytest.raises(EngineError) as failed:
            await subject.run(subject.make_request(prompt))
        assert failed.value.retryable
        await until(lambda: not keys_of(subject.history))
    async with running(model, tmp_path / "log", ports=ports):
        await back(subject)
        counts = (await subject.run(subject.make_request(prompt))).last.usage
        assert counts is not None
        assert counts.cached_tokens == 0
        await until(lambda: len(keys_of(subject.history)) >= 3)
        await subject.engine.cleanup()


async def back(subject: Beside) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(EngineError):
                await subject.run(subject.make_request(subject.prompt(3), 1))
                return
            await asyncio.sleep(1)
