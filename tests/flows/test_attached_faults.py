"""Tests of a worker beside a faulty server: every request ends, and the worker lives."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from kvlane.app.engine.attached import answer_stream as attached_answer
from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import (
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
)
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import Finished
from kvlane.streams.request import OpenAiBody, Request, StopConditions
from kvlane.streams.topics import LEDGER
from tests.conformance import WITHIN_S
from tests.harness.memory_world import MemoryWorld, ScriptedFaults
from tests.harness.model_servers import (
    TOKENIZER,
    CloseConnection,
    Handler,
    ModelServer,
    ServerExchange,
    collect,
)
from tests.harness.worker_harness import WorkerHarness

SILENCE_S = 0.8
PIECE = {"choices": [{"text": "a", "token_ids": [64]}]}
LAST = {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]}
PROMPT = list(range(50, 60))


# --- what it does wrong ---------------------------------------------------------------------------


async def sends_nothing(x: ServerExchange) -> None:
    await x.wait_closed()


async def stalls_behind_the_head(x: ServerExchange) -> None:
    await x.head()
    await x.wait_closed()


async def stalls_in_the_middle(x: ServerExchange) -> None:
    await x.head()
    await x.event(PIECE)
    await x.wait_closed()


async def only_pings(x: ServerExchange) -> None:
    await x.head()
    for _ in range(1000):
        await x.chunk(b": ping\n\n")
        await asyncio.sleep(0.01)


async def closes_at_once(x: ServerExchange) -> None:
    raise CloseConnection


async def closes_in_the_middle(x: ServerExchange) -> None:
    await x.head()
    await x.event(PIECE)
    raise CloseConnection


async def resets(x: ServerExchange) -> None:
    await x.head()
    await x.event(PIECE)
    sock = x._writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    x._writer.transport.abort()
    raise CloseConnection


async def sends_half_a_chunk(x: ServerExchange) -> None:
    await x.head()
    await x.event(PIECE)
    await x.send(b"ff\r\ndata: {")
    raise CloseConnection


async def sends_a_chunk_of_no_size(x: ServerExchange) -> None:
    await x.head()
    await x.send(b"many\r\ndata: {}\r\n")
    await x.wait_closed()


async def ends_without_an_end(x: ServerExchange) -> None:
    await x.head()
    await x.event(PIECE)
    await x.event(b"[DONE]")
    await x.end()


async def floods_headers(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 200 -\r\n")
    for number in range(100_000):
        await x.send(f"x-{number}: {'y' * 100}\r\n".encode())


async def one_header_without_an_end(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 200 -\r\nx: ")
    for _ in range(1000):
        await x.send(b"y" * 10_000)


async def drips_headers(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 200 -\r\n")
    for number in range(1000):
        await x.send(f"x-{number}: y\r\n".encode())
        await asyncio.sleep(0.02)


async def speaks_no_http(x: ServerExchange) -> None:
    await x.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await x.wait_closed()


async def one_event_without_an_end(x: ServerExchange) -> None:
    await x.head()
    for _ in range(1000):
        await x.chunk(b"x" * 65536)


async def redirects(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 307 -\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")


async def a_long_error(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 500 -\r\ncontent-length: 1000000000\r\n\r\n")
    for _ in range(1000):
        await x.send(b"x" * 65536)


async def stalls_in_an_error(x: ServerExchange) -> None:
    await x.send(b"HTTP/1.1 500 -\r\ncontent-length: 100\r\n\r\n{")
    await x.wait_closed()


def sends(*events: object) -> Handler:
    async def handler(x: ServerExchange) -> None:
        await x.head()
        for event in events:
            await x.event(event)
        await x.end()

    return handler


def answers(status: int, body: object = b"") -> Handler:
    async def handler(x: ServerExchange) -> None:
        await x.answer(body, status)

    return handler


OTHERS_MAY_SUCCEED: dict[str, Handler] = {
    f.__name__: f
    for f in (
        sends_nothing, stalls_behind_the_head, stalls_in_the_middle, only_pings, closes_at_once,
        closes_in_the_middle, resets, sends_half_a_chunk, sends_a_chunk_of_no_size,
        ends_without_an_end, floods_headers, one_header_without_an_end, drips_headers,
        speaks_no_http, redirects, a_long_error, stalls_in_an_error,
    )
} | {
    "500": answers(500, {"error": {"message": "out of memory"}}),
    "500_without_a_body": answers(500),
    "503_in_html": answers(503, b"<html>busy</html>"),
    "429": answers(429, {"message": "too many"}),
    "401": answers(401, {"error": "no key"}),
    "wrong_model": answers(404, {"error": {"message": "The model does not exist", "code": 404}}),
    "json_cut_off": sends(b'{"choices": [{"token_ids": [1,'),
    "json_of_another_kind": sends(b'["choices"]'),
    "json_without_an_end": sends(b"[" * 100_000),
    "no_json": sends(b"hello"),
    "no_utf8": sends(b'{"choices": [{"text": "\xff"}]}'),
    "no_token_ids": sends({"choices": [{"text": "hello"}]}),
    "no_tokens": sends({"choices": [{"token_ids": [-1]}]}),
    "words_as_tokens": sends({"choices": [{"token_ids": ["a"]}]}),
    "an_error_in_the_stream": sends(PIECE, {"error": {"message": "core died", "code": 500}}),
    "no_reason_at_all": sends({"choices": [{"text": "a", "token_ids": [64], "finish_reason": {}}]}),
    "given_up": sends(PIECE, {"choices": [{"token_ids": [], "finish_reason": "abort"}]}),
}  # fmt: skip
IS_FULL = frozenset({"503_in_html", "429"})
NOBODY_WILL: dict[str, Handler] = {
    "400": answers(400, {"error": {"message": "max_tokens is too large"}}),
    "422": answers(422, {"detail": [{"loc": ["body", "prompt"]}]}),
    "413": answers(413, b"too large"),
    "a_refusal_in_the_stream": sends({"error": {"message": "bad grammar", "code": 400}}),
}


# --- what comes of it -----------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    behind = EchoEngine(SystemClock(), 0.0)
    async with ModelServer(behind) as server:
        yield server


def beside(server: ModelServer, **over: object) -> AttachedEngine:
    where = ServerAddress(server.url, read_timeout_s=SILENCE_S, start_timeout_s=1.0)._replace(
        **over
    )
    return AttachedEngine(SystemClock(), where, TOKENIZER, AssumedLimits(512, 16, 40))


def passing(server: ModelServer, **over: object) -> PassthroughEngine:
    where = ServerAddress(server.url, read_timeout_s=SILENCE_S, start_timeout_s=1.0)._replace(
        **over
    )
    return PassthroughEngine(SystemClock(), where, "completion")


BESIDE: dict[str, Callable[..., Engine]] = {"tokens": beside, "bodies": passing}


@pytest.fixture(params=BESIDE)
async def engine(
    server: ModelServer, request: pytest.FixtureRequest
) -> AsyncIterator[ValidatingEngine]:
    engine = ValidatingEngine(BESIDE[request.param](server))
    await engine.start("w")
    yield engine
    await engine.cleanup()


def request(max_tokens: int = 4, name: str = "r") -> Request:
    """One that can be read in both ways."""
    body = msgspec.json.encode({"prompt": "once", "max_tokens": max_tokens})
    return Request(
        id=name,
        token_ids=pack_tokens(PROMPT),
        stop=StopConditions(max_tokens=max_tokens),
        body=OpenAiBody(kind="completion", json=body),
    )


async def make_request(
    engine: ValidatingEngine, context: GenerateContext | None = None
) -> list[EngineOutput]:
    async with asyncio.timeout(WITHIN_S):
        return await collect(engine.generate(request(), context or GenerateContext("r")))


def test_engine_beside_a_server_gives_its_longest_silence() -> None:
    where = ServerAddress("http://127.0.0.1:1", read_timeout_s=7.0)
    assert ValidatingEngine(PassthroughEngine(SystemClock(), where, "chat")).output_timeout_s == 7.0


@pytest.mark.parametrize("fault", OTHERS_MAY_SUCCEED)
async def test_server_fault_is_retryable_on_another_worker(
    server: ModelServer, engine: ValidatingEngine, fault: str
) -> None:
    good = server.handlers["/v1/completions"]
    server.handlers["/v1/completions"] = OTHERS_MAY_SUCCEED[fault]
    with pytest.raises(EngineError) as failed:
        await make_request(engine)
    assert failed.value.retryable
    assert str(failed.value)
    server.handlers["/v1/completions"] = good
    assert (await make_request(engine))[-1].finish_reason == "length"


async def test_event_without_an_end_is_a_fault_of_the_server_for_both_apis(
    server: ModelServer, engine: ValidatingEngine, request: pytest.FixtureRequest
) -> None:
    server.handlers["/v1/completions"] = one_event_without_an_end
    with pytest.raises(EngineError, match="an event of more than") as failed:
        await make_request(engine)
    in_tokens = request.node.callspec.params["engine"] == "tokens"
    assert (failed.value.retryable, isinstance(failed.value, InvalidRequest)) == (
        in_tokens,
        not in_tokens,
    )


@pytest.mark.parametrize("path", BESIDE)
async def test_endless_answer_is_aborted(server: ModelServer, path: str) -> None:
    async def goes_on(x: ServerExchange) -> None:
        await x.head()
        piece = {"choices": [{"index": 0, "text": "a" * 1000, "token_ids": []}]}
        while True:
            await x.event(piece)

    engine = ValidatingEngine(BESIDE[path](server, max_response_bytes=20_000))
    await engine.start("w")
    server.handlers["/v1/completions"] = goes_on
    with pytest.raises(
        EngineError, match=r"more than 20000 bytes \(KVLANE_ATTACH_MAX_RESPONSE_BYTES"
    ):
        await make_request(engine)
    await engine.cleanup()


async def test_probe_has_the_options_of_later_requests(server: ModelServer) -> None:
    engine = ValidatingEngine(passing(server))
    await engine.start("w")
    await make_request(engine)
    tried, sent = server.received_bodies()
    ours = {"model", "stream", "stream_options"}
    assert {name: tried[name] for name in ours} == {name: sent[name] for name in ours}
    await engine.cleanup()


async def test_passed_through_event_may_be_large(server: ModelServer) -> None:
    drawn = "a" * 3 * 1024 * 1024
    engine = ValidatingEngine(passing(server))
    await engine.start("w")
    server.handlers["/v1/completions"] = sends(
        {"choices": [{"index": 0, "text": drawn, "finish_reason": "stop"}]}
    )
    outputs = await make_request(engine)
    assert outputs[-1].text == drawn
    await engine.cleanup()


async def test_fields_after_the_end_are_placed_after_the_text(server: ModelServer) -> None:
    engine = ValidatingEngine(passing(server))
    await engine.start("w")
    last = {"index": 0, "text": "ab", "logprobs": {"tokens": ["ab"]}, "finish_reason": "length"}
    server.handlers["/v1/completions"] = sends(
        {"choices": [last]}, {"choices": [], "system_fingerprint": "fp"}, b"[DONE]"
    )
    (output,) = await make_request(engine)
    assert [(aside.at, bool(aside.choice), bool(aside.event)) for aside in output.data] == [
        (0, True, False),
        (2, False, True),
    ]
    await engine.cleanup()


async def test_empty_finish_reason_is_no_end(server: ModelServer) -> None:
    engine = ValidatingEngine(passing(server))
    await engine.start("w")
    going_on = {"choices": [{"index": 0, "text": "a", "finish_reason": ""}]}
    server.handlers["/v1/completions"] = sends(going_on, going_on, LAST)
    outputs = await make_request(engine)
    assert [output.text for output in outputs] == ["a", "a", ""]
    await engine.cleanup()


async def test_unreadable_input_is_not_quoted(
    server: ModelServer, engine: ValidatingEngine
) -> None:
    server.handlers["/v1/completions"] = sends(b"mellon")
    with pytest.raises(EngineError) as failed:
        await make_request(engine)
    assert "mellon" not in str(failed.value)


@pytest.mark.parametrize("fault", NOBODY_WILL)
async def test_refusal_by_the_server_is_a_refusal(
    server: ModelServer, engine: ValidatingEngine, fault: str
) -> None:
    server.handlers["/v1/completions"] = NOBODY_WILL[fault]
    with pytest.raises(EngineError) as failed:
        await make_request(engine)
    assert not failed.value.retryable


async def test_unreachable_server_is_an_error_until_it_returns(
    server: ModelServer, engine: ValidatingEngine
) -> None:
    await server.__aexit__()
    with pytest.raises(EngineError, match=r"cannot be reached|the connection broke") as failed:
        await make_request(engine)
    assert failed.value.retryable
    await server.__aenter__()
    assert (await make_request(engine))[-1].finish_reason == "length"


@pytest.mark.parametrize("path", BESIDE)
async def test_slow_first_byte_is_awaited(server: ModelServer, path: str) -> None:
    engine = ValidatingEngine(BESIDE[path](server, read_timeout_s=30.0))
    await engine.start("w")
    good = server.handlers["/v1/completions"]

    async def slow(x: ServerExchange) -> None:
        await asyncio.sleep(SILENCE_S)
        await good(x)

    server.handlers["/v1/completions"] = slow
    assert (await make_request(engine))[-1].finish_reason == "length"
    await engine.cleanup()


@pytest.mark.parametrize("path", BESIDE)
@pytest.mark.parametrize("fault", ["sends_nothing", "stalls_in_the_middle", "only_pings"])
async def test_cancel_ends_the_wait_for_a_server_that_stalls(
    server: ModelServer, fault: str, path: str
) -> None:
    engine = ValidatingEngine(BESIDE[path](server, read_timeout_s=1000.0))
    await engine.start("w")
    server.handlers["/v1/completions"] = OTHERS_MAY_SUCCEED[fault]
    context = GenerateContext("r")
    sending = asyncio.create_task(make_request(engine, context))
    await asyncio.sleep(0.1)
    context.cancel()
    await engine.abort(context)
    assert (await sending)[-1].finish_reason == "cancelled"
    await engine.cleanup()


async def test_answer_without_trailing_usage_is_complete(
    server: ModelServer, engine: ValidatingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalls_behind_the_end(x: ServerExchange) -> None:
        await x.head()
        await x.event(PIECE)
        await x.event(LAST)
        await x.wait_closed()

    monkeypatch.setattr(attached_answer, "END_TIMEOUT_S", 0.1)
    server.handlers["/v1/completions"] = stalls_behind_the_end
    first, last = await make_request(engine)
    assert (first.token_ids or first.text, last.finish_reason) in (((64,), "stop"), ("a", "stop"))


async def test_server_that_exceeds_the_token_limit_fails(server: ModelServer) -> None:
    engine = ValidatingEngine(beside(server))
    await engine.start("w")

    async def never_ends(x: ServerExchange) -> None:
        await x.head()
        while True:
            await x.event(PIECE)
            await asyncio.sleep(0)

    server.handlers["/v1/completions"] = never_ends
    with pytest.raises(EngineError, match="more than requested"):
        await make_request(engine)
    await engine.cleanup()


# --- in a worker ----------------------------------------------------------------------------------


class RealWorld(MemoryWorld):
    """The log in memory by the machine's clock: sockets know no other."""

    def __init__(self) -> None:
        self.clock = SystemClock()  # type: ignore[assignment]
        self.faults = ScriptedFaults()
        self.broker = MemoryBroker(self.clock, lanes=2, faults=self.faults)
        self.lanes = 2


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - sockets decide
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", BESIDE)
async def test_worker_reports_every_fault_and_continues(server: ModelServer, path: str) -> None:
    world = RealWorld()
    engine = ValidatingEngine(BESIDE[path](server))
    harness = await WorkerHarness.started(world, engine, model="tiny", worker_timeout_s=60)
    good = server.handlers["/v1/completions"]
    faults = OTHERS_MAY_SUCCEED | NOBODY_WILL
    for name, fault in faults.items():
        server.handlers["/v1/completions"] = fault
        harness.assign(name, request=request(name=name), budget_s=WITHIN_S)
        finished = await harness.wait_finished(name)
        code = "worker_full" if name in IS_FULL else "error"
        assert (finished.code, finished.retryable) == (code, name in OTHERS_MAY_SUCCEED), name
        assert finished.message
    server.handlers["/v1/completions"] = good
    harness.assign("good", request=request(name="good"))
    assert (await harness.wait_finished("good")).code == "length"
    assert harness.ctx.error is None
    assert len({f.id for f in harness.records_of(LEDGER, Finished)}) == len(faults) + 1
    await harness.ctx.cancel_tasks()


# --- at the start ---------------------------------------------------------------------------------


def lists(*models: object) -> Handler:
    return answers(200, {"data": list(models)})


@pytest.mark.parametrize("handler", [answers(404), answers(400), answers(500), sends_nothing])
async def test_server_that_fails_its_probe_is_reported_with_a_remedy(
    server: ModelServer, handler: Handler
) -> None:
    server.handlers["/v1/completions"] = handler
    engine = ValidatingEngine(passing(server))
    with pytest.raises(EngineError, match=r"KVLANE_ATTACH_KIND.*POST /v1/completions"):
        await engine.start("w")
    await engine.cleanup()


@pytest.mark.parametrize(
    ("path", "handler", "over", "words"),
    [
        ("/health", answers(503), {}, "no server is ready there.*KVLANE_ATTACH_START_TIMEOUT_S"),
        ("/v1/models", answers(404), {}, "OpenAI-compatible"),
        ("/v1/models", answers(200, b"<html>"), {}, "OpenAI-compatible"),
        ("/v1/models", answers(200, b'{"data":[{"id":"\xff"}]}'), {}, "OpenAI-compatible"),
        ("/v1/models", answers(401), {}, "KVLANE_ATTACH_API_KEY"),
        ("/v1/models", lists(), {}, "serves no model"),
        ("/v1/models", lists({"id": "a"}, {"id": "b"}), {}, "'a', 'b'.*KVLANE_ATTACH_MODEL"),
        ("/v1/models", lists({"id": "a"}), {"model": "c"}, "KVLANE_ATTACH_MODEL=c.*serves 'a'"),
        ("/tokenize", answers(200, {"tokens": [1, 2]}), {}, "KVLANE_MODEL_PATH.*'tiny'"),
        ("/v1/completions", answers(400), {}, "completes no prompt"),
        ("/v1/completions", answers(500), {}, "500"),
        ("/v1/completions", sends_nothing, {}, "sent nothing for"),
        ("/v1/completions", OTHERS_MAY_SUCCEED["resets"], {}, "the connection broke"),
        ("/v1/models", sends_nothing, {}, "KVLANE_ATTACH_URL"),
    ],
)
async def test_invalid_attachment_is_reported_with_a_remedy(
    server: ModelServer, path: str, handler: Handler, over: dict[str, object], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvlane.app.engine.attached.discovery.REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvlane.app.engine.attached.discovery.RETRY_INTERVAL_S", 0.05)
    server.handlers[path] = handler
    engine = ValidatingEngine(beside(server, **over))
    with pytest.raises(EngineError, match=words):
        await engine.start("w")
    await engine.cleanup()


async def test_worker_waits_for_its_server(server: ModelServer) -> None:
    sent = 0
    good = server.handlers["/health"]

    async def loads(x: ServerExchange) -> None:
        nonlocal sent
        sent += 1
        await (good(x) if sent > 2 else x.answer({"error": "loading"}, 503))

    server.handlers["/health"] = loads
    engine = beside(server, start_timeout_s=30.0)
    assert (await engine.start("w")).model == "tiny"
    await engine.cleanup()


async def test_url_without_a_listener_is_reported() -> None:
    where = ServerAddress("http://127.0.0.1:1", start_timeout_s=0.0)
    engine = AttachedEngine(SystemClock(), where, TOKENIZER, AssumedLimits(512, 16, 40))
    with pytest.raises(EngineError, match=r"KVLANE_ATTACH_URL=http://127\.0\.0\.1:1: no server"):
        await engine.start("w")
    await engine.cleanup()


async def test_ranks_of_one_server_are_refused(server: ModelServer) -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 0.0' for rank in (0, 1)]
    server.handlers["/metrics"] = answers(200, "\n".join(lines).encode())
    engine = beside(server)
    with pytest.raises(EngineError, match="2 data-parallel ranks"):
        await engine.start("w")
    await engine.cleanup()
