"""Tests of answers of servers in the shapes that are in use, by both APIs: the order and form of
one server give the same answer as those of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvlane.app.engine.attached import answer_stream
from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import (
    Engine,
    EngineError,
    EngineFull,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
)
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import OpenAiBody, Request, StopConditions
from tests.conformance import WITHIN_S
from tests.harness.model_servers import (
    TOKENIZER,
    HttpServer,
    ModelServer,
    ScriptedServer,
    ServerExchange,
    collect,
    stream_of,
    usage_event,
)

DONE = b"[DONE]"
USAGE = usage_event(11, 3)
NO_USAGE: dict[str, Any] = {"choices": [], "usage": None}
SHAPES: dict[str, tuple[Any, ...]] = {
    "usual": ("a", "b", "c", ("", "stop"), USAGE, DONE),
    "reason_with_the_last_text": ("a", "b", ("c", "stop"), USAGE, DONE),
    "reason_twice": ("a", "b", ("c", "stop"), ("", "stop"), USAGE, DONE),
    "reason_with_each_text": (("a", "stop"), ("b", "stop"), ("c", "stop"), USAGE, DONE),
    "text_after_the_reason": ("a", ("b", "stop"), "c", USAGE, DONE),
    "reason_before_the_text": (("", "stop"), "a", "b", "c", USAGE, DONE),
    "reason_before_and_after": (("", "stop"), "a", "b", "c", ("", "stop"), USAGE, DONE),
    "empty_reasons": (("a", ""), ("b", ""), ("c", ""), ("", "stop"), USAGE, DONE),
    "empty_reason_at_the_end": ("a", "b", ("c", "stop"), ("", ""), USAGE, DONE),
    "reason_in_capitals": ("a", "b", "c", ("", "STOP"), USAGE, DONE),
    "usage_first": (usage_event(11, 0), "a", "b", "c", ("", "stop"), USAGE, DONE),
    "usage_before_the_reason": ("a", "b", "c", USAGE, ("", "stop"), DONE),
    "usage_before_the_text": (USAGE, "a", "b", "c", ("", "stop"), DONE),
    "usage_is_null_first": (NO_USAGE, "a", "b", "c", ("", "stop"), NO_USAGE, USAGE, DONE),
    "usage_then_null": ("a", "b", "c", ("", "stop"), USAGE, NO_USAGE, DONE),
    "text_after_usage": ("a", ("b", "stop"), USAGE, "c", DONE),
    "no_done": ("a", "b", "c", ("", "stop"), USAGE),
    "done_twice": ("a", "b", "c", ("", "stop"), USAGE, DONE, DONE),
    "choices_are_null": ({"choices": None}, "a", "b", "c", ("", "stop"), USAGE, DONE),
    "error_is_null": ({"choices": [], "error": None}, "a", "b", ("c", "stop"), USAGE, DONE),
}
NO_COUNTS: dict[str, tuple[Any, ...]] = {
    "no_usage": ("a", "b", "c", ("", "stop"), DONE),
    "usage_is_null": ("a", "b", "c", ("", "stop"), NO_USAGE, DONE),
    "usage_is_empty": ("a", "b", "c", ("", "stop"), {"choices": [], "usage": {}}, DONE),
    "usage_is_no_object": ("a", "b", "c", ("", "stop"), {"choices": [], "usage": [1]}, DONE),
    "nothing_behind_the_reason": ("a", "b", ("c", "stop")),
}


def raw(data: bytes) -> Callable[[ServerExchange], Any]:
    async def send(x: ServerExchange) -> None:
        await x.chunk(data)

    return send


class ShapedServer:
    """A server whose next answers are events, or other bytes with a status and a type."""

    def __init__(self, kind: str, server: HttpServer, path: str, engine: Engine) -> None:
        self.kind, self.engine = kind, ValidatingEngine(engine)
        self._server, self._path = server, path

    def answers(self, *parts: Any) -> None:
        async def handler(x: ServerExchange) -> None:
            await x.head()
            for event in stream_of(self.kind, *parts):
                await (event(x) if callable(event) else x.event(event))
            await x.end()

        self._server.handlers[self._path] = handler

    def responds(self, status: int, content_type: str, body: bytes) -> None:
        async def handler(x: ServerExchange) -> None:
            await x.head(status, content_type)
            if body:
                await x.chunk(body)
            await x.end()

        self._server.handlers[self._path] = handler

    async def outputs(self) -> list[EngineOutput]:
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]})
        request = Request(
            id="r",
            token_ids=pack_tokens([50, 51]),
            stop=StopConditions(max_tokens=9),
            body=OpenAiBody(kind="chat", json=body) if self.kind == "chat" else None,
        )
        async with asyncio.timeout(WITHIN_S):
            return await collect(self.engine.generate(request, GenerateContext("r")))


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text or "".join(map(chr, output.token_ids)) for output in outputs)


@pytest.fixture(params=["chat", "tokens"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[ShapedServer]:
    clock, kind = SystemClock(), request.param
    behind = ScriptedServer() if kind == "chat" else ModelServer(EchoEngine(clock, 0.0))
    async with behind:
        where = ServerAddress(behind.url, read_timeout_s=1.0, start_timeout_s=1.0)
        engine: Engine = PassthroughEngine(clock, where, "chat")
        path = "/v1/chat/completions"
        if kind == "tokens":
            path = "/v1/completions"
            engine = AttachedEngine(clock, where, TOKENIZER, AssumedLimits(512, 16, 40))
        shaped = ShapedServer(kind, behind, path, engine)
        await shaped.engine.start("w")
        yield shaped
        await shaped.engine.cleanup()


@pytest.mark.parametrize("shape", SHAPES)
async def test_answer_in_any_shape_has_all_its_text_one_end_and_its_counts(
    server: ShapedServer, shape: str
) -> None:
    server.answers(*SHAPES[shape])
    outputs = await server.outputs()
    assert (text_of(outputs), outputs[-1].finish_reason) == ("abc", "stop")
    usage = outputs[-1].usage
    assert usage is not None
    expected = (11, 3) if server.kind == "chat" else (2, 3)
    assert (usage.prompt_tokens, usage.completion_tokens) == expected


@pytest.mark.parametrize("shape", NO_COUNTS)
async def test_counts_that_a_server_does_not_report_are_unknown_and_not_zero(
    server: ShapedServer, shape: str
) -> None:
    server.answers(*NO_COUNTS[shape])
    outputs = await server.outputs()
    assert (text_of(outputs), outputs[-1].finish_reason) == ("abc", "stop")
    usage = outputs[-1].usage
    if server.kind == "chat":
        assert usage is None
    else:  # its tokens are counted here
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 3)


async def test_counts_that_are_reported_in_part_are_unknown_in_part(server: ShapedServer) -> None:
    server.answers("abc", ("", "stop"), {"choices": [], "usage": {"completion_tokens": 3}}, DONE)
    usage = (await server.outputs())[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 3
    unknown = ("prompt_tokens", "cached_tokens") if server.kind == "chat" else ()
    assert usage.unknown == unknown


async def test_late_counts_and_late_text_are_awaited(server: ShapedServer) -> None:
    async def pause(_: ServerExchange) -> None:
        await asyncio.sleep(0.5)

    server.answers("a", ("b", "stop"), pause, "c", pause, USAGE, DONE)
    outputs = await server.outputs()
    assert text_of(outputs) == "abc"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 3


async def test_connection_that_breaks_or_stays_open_after_the_reason_ends_a_whole_answer(
    server: ShapedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(x: ServerExchange) -> None:
        await x.send(b"ff\r\ndata: {")
        raise ConnectionError

    async def stays(x: ServerExchange) -> None:
        await x.wait_closed()

    monkeypatch.setattr(answer_stream, "END_TIMEOUT_S", 0.1)
    for end in (breaks, stays):
        server.answers("ab", ("c", "stop"), end)
        outputs = await server.outputs()
        assert (text_of(outputs), outputs[-1].finish_reason) == ("abc", "stop")


async def test_answer_without_text_ends_shortly_after_its_reason(
    server: ShapedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def repeats_nothing(x: ServerExchange) -> None:
        while True:
            await x.event(NO_USAGE)
            await asyncio.sleep(0.02)

    async def stays(x: ServerExchange) -> None:
        await x.wait_closed()

    monkeypatch.setattr(answer_stream, "EMPTY_END_TIMEOUT_S", 0.1)
    for end in (stays, repeats_nothing):
        server.answers(("", "stop"), end)
        (last,) = await server.outputs()
        assert (last.text, last.token_ids, last.finish_reason) == ("", (), "stop")


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("stop", "length"), "length"),
        (("length", "stop"), "length"),
        (("content_filter", "stop"), "content_filter"),
        (("stop", ""), "stop"),
    ],
)
async def test_last_reason_counts_and_stop_replaces_no_other(
    server: ShapedServer, reasons: tuple[str, str], expected: str
) -> None:
    server.answers(("a", reasons[0]), ("b", reasons[1]), USAGE, DONE)
    assert (await server.outputs())[-1].finish_reason == expected


async def test_last_event_may_lack_its_blank_line(server: ShapedServer) -> None:
    (last,) = stream_of(server.kind, ("c", "stop"))
    server.answers("a", "b", raw(b"data: " + msgspec.json.encode(last)))
    assert text_of(await server.outputs()) == "abc"


async def test_server_that_streams_nothing_is_read(server: ShapedServer) -> None:
    message = {"message": {"role": "assistant", "content": "abc"}, "index": 0}
    choice = message if server.kind == "chat" else {"text": "abc", "token_ids": [97, 98, 99]}
    body = {"choices": [choice | {"finish_reason": "stop"}]} | {"usage": USAGE["usage"]}
    pretty = msgspec.json.format(msgspec.json.encode(body), indent=2)
    server.responds(200, "application/json", pretty)
    outputs = await server.outputs()
    assert (text_of(outputs), outputs[-1].finish_reason) == ("abc", "stop")


REFUSALS: dict[str, tuple[Any, ...]] = {
    "code_is_a_number": ({"error": {"message": "too long", "code": 400}},),
    "code_is_a_number_in_text": ({"error": {"message": "too long", "code": "400"}},),
    "code_is_a_word": ({"error": {"message": "too long", "code": "context_length_exceeded"}},),
    "code_is_null": (
        {"error": {"message": "too long", "type": "invalid_request_error", "code": None}},
    ),
    "nested": ({"error": {"error": {"message": "too long", "code": 400}}},),
    "in_the_choice": ({"choices": [{"error": {"message": "too long", "code": 400}}]},),
    "older": ({"object": "error", "message": "too long", "code": 400},),
    "a_list": ({"error": [{"message": "too long", "status": 400}]},),
    "of_google": ({"error": {"code": 400, "message": "too long", "status": "INVALID_ARGUMENT"}},),
    "in_the_middle": ("a", "b", {"error": {"message": "too long", "code": "400"}}),
    "after_a_reason": (("a", "stop"), {"error": {"message": "too long", "code": "400"}}),
    "event_of_the_type_error": (
        raw(b'event: error\ndata: {"message": "too long", "code": 400}\n\n'),
    ),
    "field_of_the_name_error": (raw(b'error: {"code": 400, "message": "too long"}\n\n'),),
}


@pytest.mark.parametrize("end", [(), (DONE,)], ids=["no_done", "done"])
@pytest.mark.parametrize("shape", REFUSALS)
async def test_refusal_in_a_stream_ends_the_request_with_the_words_of_the_server(
    server: ShapedServer, shape: str, end: tuple[bytes, ...]
) -> None:
    server.answers(*REFUSALS[shape], *end)
    with pytest.raises(InvalidRequest, match=r"^too long$") as refused:
        await server.outputs()
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b'{"error":{"message":"used up","code":"insufficient_quota"}}',
         "the server answered 429: used up"),
        (200, b'{\n "error": {\n "message": "core died",\n "code": "internal" }}',
         "the server answered 500: core died"),
        (200, b'{"success":false,"msg":"no such key"}', "the server answered 500: no such key"),
        (200, b'{"code":1210,"msg":"too long"}', "the server answered 500: too long"),
        (200, b"upstream connect error", "the server sent no answer: upstream connect error"),
        (200, b"<html><body>Bad Gateway</body></html>", "the server sent no answer: Bad Gateway"),
        (502, b"<html><body>Bad Gateway</body></html>", "the server answered 502: Bad Gateway"),
        (500, b'{"error":"core died"}', "the server answered 500: core died"),
        (500, b"", "the server answered 500"),
    ],
)  # fmt: skip
async def test_failure_is_retryable_and_has_the_words_of_the_server_for_the_client(
    server: ShapedServer, status: int, body: bytes, reason: str
) -> None:
    server.responds(status, "application/json" if body[:1] == b"{" else "text/html", body)
    with pytest.raises(EngineError) as failed:
        await server.outputs()
    assert failed.value.retryable
    assert not isinstance(failed.value, EngineFull)
    assert failed.value.reason == reason


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(429, None, EngineFull), (503, None, EngineFull), (200, "rate_limit_exceeded", EngineFull),
     (200, "overloaded_error", EngineFull), (422, None, InvalidRequest),
     (413, None, InvalidRequest)],
)  # fmt: skip
async def test_status_of_an_error_decides_about_other_workers(
    server: ShapedServer, status: int, code: str | None, kind: type[EngineError]
) -> None:
    body = msgspec.json.encode({"error": {"message": "no", "code": code}})
    server.responds(status, "application/json", body)
    with pytest.raises(kind) as failed:
        await server.outputs()
    assert failed.value.retryable == (kind is EngineFull)
    if isinstance(failed.value, InvalidRequest):
        assert failed.value.status == status
