"""Tests of the gateway over a real socket, with OpenAI's own client; the log is in memory, time
is real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.gateway import Gateway
from kvlane.app.http.server import http_protocol
from kvlane.app.http.server.http_server import CannotListen
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.text.byte_level import ASSISTANT, encode_bytes, render_chat
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode as decode_record
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import Cancel
from kvlane.streams.topics import REQUESTS
from tests.harness.decoded import decode_bytes
from tests.harness.http_harness import WAIT_S, HttpHarness, connect_to, until

LANES = 4
CONTEXT = 2000


class Deployment(HttpHarness):
    """With two workers on the log in memory."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(SystemClock(), lanes=LANES)
        super().__init__(connect_to(self.broker), model="demo", context_length=CONTEXT, lanes=LANES)

    async def open(self) -> None:
        for name in ("w1", "w2"):
            await self.start_worker(name, self._echo)
        await super().open()
        await until(lambda: bool(self.gateway.parts.served_models.models()))

    @property
    def connections(self) -> set[Any]:
        assert self.gateway._server is not None
        return self.gateway._server._server.server_state.connections

    def cancels(self) -> list[str]:
        lanes = (self.broker.records(REQUESTS, lane) for lane in range(LANES))
        records = [decode_record(r) for lane in lanes for r in lane]
        return [r.id for r in records if isinstance(r, Cancel)]

    @staticmethod
    def _echo(ctx: ProcessContext) -> EchoEngine:
        return EchoEngine(ctx.clock, 0.005, model="demo", context_length=CONTEXT, max_num_seqs=256)


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    deployment = Deployment()
    await deployment.open()
    yield deployment
    await deployment.close()


@pytest.fixture
def client(deployment: Deployment) -> openai.AsyncOpenAI:
    return deployment.openai


def chat_answer(text: str, max_tokens: int | None = None) -> str:
    return decode_bytes(echo_answer(render_chat([("user", text)]), max_tokens))


def completion(text: str, max_tokens: int | None = None) -> str:
    return decode_bytes(echo_answer([*encode_bytes(text), ASSISTANT], max_tokens))


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_openai_client_gets_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=user("grüße"), max_tokens=20
    )
    assert answer.choices[0].message.content == chat_answer("grüße", 20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


async def test_small_writes_are_not_delayed(deployment: Deployment) -> None:
    async with httpx.AsyncClient() as http:
        await http.get(f"{deployment.gateway.url}/livez")
        (connection,) = deployment.connections
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_openai_client_streams_a_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=user("hello"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat_answer("hello")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_openai_client_completes_a_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="demo", prompt="abc", max_tokens=7, n=2)
    assert [choice.text for choice in answer.choices] == [completion("abc", 7)] * 2


async def test_openai_client_streams_a_completion(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="demo", prompt="abc", max_tokens=7, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == completion("abc", 7)


async def test_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"


async def test_errors_come_as_the_errors_of_the_openai_client(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nonsense", messages=user("hi"))
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="demo", messages=[])
    assert (wrong.value.param, wrong.value.type) == ("messages", "invalid_request_error")


async def test_prompt_beyond_the_context_has_the_code_that_libraries_expect(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="demo", messages=user("x" * CONTEXT))
    assert refused.value.code == "context_length_exceeded"


async def test_call_that_cannot_be_enforced_is_refused(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="demo", messages=user("hi"), tools=[tool], tool_choice="required"
        )
    assert refused.value.param == "tool_choice"
    form: Any = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="demo", messages=user("hi"), response_format=form
        )
    assert refused.value.param == "response_format"


async def test_openai_client_has_a_request_id_for_every_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=user("hi"), max_tokens=2)
    assert answer._request_id == answer.id
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nonsense", messages=user("hi"))
    assert unknown.value.request_id
    assert unknown.value.request_id.startswith("req-")


async def test_large_body_is_answered_before_the_connection_closes(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.APIStatusError) as large:
        await client.completions.create(model="demo", prompt="x" * 9_000_000)
    assert large.value.status_code == 413
    assert (await client.completions.create(model="demo", prompt="abc")).choices


async def test_body_without_end_is_answered_and_the_connection_closed(
    deployment: Deployment,
) -> None:
    url = httpx.URL(deployment.gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}:{url.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {2**40}\r\n\r\n".encode()
    )
    try:
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()  # to the end of the connection
    finally:
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


async def read_all(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_failure_under_way_is_an_error_of_the_stream(
    deployment: Deployment, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=user("x" * 800), stream=True
    )
    first = await anext(stream)
    response = await client.delete(f"/streams/{first.id}", cast_to=httpx.Response)
    assert response.status_code == 202
    with pytest.raises(openai.APIError) as failure:
        await read_all(stream)
    assert failure.value.code == "cancelled"


async def test_client_that_closes_its_connection_cancels(
    deployment: Deployment, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=user("x" * 1500), stream=True
    )
    first = await anext(stream)
    await stream.close()
    await until(lambda: deployment.cancels() == [first.id])
    await until(lambda: deployment.gateway.parts.streams.open_streams == 0)


async def test_broken_connection_resumes_where_it_broke(
    deployment: Deployment, client: openai.AsyncOpenAI
) -> None:
    text = "".join(chr(33 + n % 90) for n in range(300))
    url = f"{deployment.gateway.url}/v1"
    body = {"model": "demo", "messages": user(text), "stream": True}
    got, position, stream_id = "", 0, ""
    async with (
        httpx.AsyncClient() as http,
        http.stream(
            "POST", f"{url}/chat/completions", json=body, headers={"x-kvlane-detach": "true"}
        ) as response,
    ):
        stream_id = response.headers["x-kvlane-id"]
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                position = int(line[4:])
            elif line.startswith("data: "):
                got += json.loads(line[6:])["choices"][0]["delta"]["content"]
                if len(got) > 50:
                    break
    async with httpx.AsyncClient() as http:
        rest = await http.get(
            f"{url}/streams/{stream_id}", headers={"last-event-id": f"{position}"}
        )
    data = [line[6:] for line in rest.text.splitlines() if line.startswith("data: {")]
    got += "".join(json.loads(d)["choices"][0]["delta"].get("content", "") for d in data)
    assert got == text
    assert rest.text.endswith("data: [DONE]\n\n")
    assert deployment.cancels() == []


async def test_each_of_200_concurrent_streams_gets_its_own_answer(
    deployment: Deployment, client: openai.AsyncOpenAI
) -> None:
    async def send(number: int) -> tuple[str, str]:
        text = f"stream {number} says {'é' * (number % 7)} "
        stream = await client.chat.completions.create(
            model="demo", messages=user(text), max_tokens=20 + number % 30, stream=True
        )
        got = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return got, chat_answer(text, 20 + number % 30)

    answers = await asyncio.gather(*(send(number) for number in range(200)))
    assert [got for got, _ in answers] == [expected for _, expected in answers]
    assert deployment.gateway.parts.streams.open_streams == 0
    page = (await client.get("/../metrics", cast_to=httpx.Response)).text
    assert "\nkvlane_gateway_stream_gaps_total 0.0\n" in page
    assert '\nkvlane_gateway_http_responses_total{endpoint="chat",status="200"} 200.0\n' in page


async def test_port_in_use_is_an_error_of_the_start(deployment: Deployment) -> None:
    port = int(deployment.gateway.url.rsplit(":", 1)[1])
    log, settings, ctx = await deployment.process_arguments("g2")
    second = Gateway(log, settings.model_copy(update={"http_port": port}), ctx)
    with pytest.raises(CannotListen, match="in use"):
        await second.start()


async def test_server_that_stops_unexpectedly_fails_the_process() -> None:
    deployment = Deployment()
    log, settings, ctx = await deployment.process_arguments("g1")
    gateway = Gateway(log, settings, ctx)
    await gateway.start()
    assert gateway._server is not None
    gateway._server._server.limit_max_requests = 0
    await until(lambda: ctx.error is not None)
    await ctx.cancel_tasks()


# --- below HTTP -----------------------------------------------------------------------------------


async def connect(deployment: Deployment) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(deployment.gateway.url.rsplit(":", 1)[1])
    return await asyncio.open_connection("127.0.0.1", port)


def post(path: str, version: str = "1.1", **body: Any) -> bytes:
    content = json.dumps({"model": "demo"} | body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def half_closed(deployment: Deployment, sent: bytes) -> bytes:
    """All that a client reads that closes its sending side behind its request."""
    incoming, out = await connect(deployment)
    out.write(sent)
    out.write_eof()
    async with asyncio.timeout(WAIT_S):
        got = await incoming.read()
    out.close()
    return got.removeprefix(http_protocol.INTERIM)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_closes_its_sending_side_gets_its_answer(
    deployment: Deployment, stream: bool
) -> None:
    request = post("/v1/chat/completions", messages=user("half"), max_tokens=50, stream=stream)
    got = await half_closed(deployment, request)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if stream:
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == chat_answer("half", 50)
    assert deployment.cancels() == []


async def test_half_closed_client_gets_the_answers_to_all_its_requests(
    deployment: Deployment,
) -> None:
    request = post("/v1/completions", prompt="abc", max_tokens=3)
    got = await half_closed(deployment, request * 3)
    assert got.count(b"HTTP/1.1 200") == 3


async def test_half_closed_client_gets_the_end_of_an_answer_that_had_begun(
    deployment: Deployment,
) -> None:
    incoming, out = await connect(deployment)
    out.write(post("/v1/chat/completions", messages=user("x" * 200), stream=True))
    async with asyncio.timeout(WAIT_S):
        await incoming.readuntil(b"data: ")
        out.write_eof()
        assert (await incoming.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    out.close()
    assert deployment.cancels() == []


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_closes_before_its_answer_cancels(
    deployment: Deployment, stream: bool, version: str
) -> None:
    _, out = await connect(deployment)
    out.write(post("/v1/completions", version, prompt="x" * 1500, stream=stream))
    streams = deployment.gateway.parts.streams
    await until(lambda: streams.open_streams == 1)
    out.close()
    await until(lambda: len(deployment.cancels()) == 1)
    await until(lambda: streams.open_streams == 0)


async def test_partial_request_is_not_awaited(deployment: Deployment) -> None:
    whole = post("/v1/completions", prompt="abc")
    for half in (whole[:30], whole[:-5], b""):
        assert await half_closed(deployment, half) == b""


async def test_missing_head_is_not_awaited(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    silent, silent_out = await connect(deployment)
    slow, slow_out = await connect(deployment)
    slow_out.write(b"GET /livez HTTP/1.1\r\nho")
    async with asyncio.timeout(WAIT_S):
        assert await silent.read() == b""
        assert await slow.read() == b""
    silent_out.close()
    slow_out.close()


async def test_empty_line_after_a_body_begins_no_head(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    incoming, out = await connect(deployment)
    out.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await incoming.readuntil(b"}")
        out.write(b"\r\n")
        await asyncio.sleep(0.5)
        out.write(b"\r\nGET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await incoming.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    out.close()


async def test_head_without_end_is_refused(deployment: Deployment) -> None:
    incoming, out = await connect(deployment)
    out.write(b"GET /livez HTTP/1.1\r\nx: ")
    got = asyncio.create_task(incoming.read())
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionError):  # cut off while we send, that is
            while not got.done():
                out.write(b"x" * 65536)
                await out.drain()
        await asyncio.wait([got])
    out.close()
    assert isinstance(got.exception(), ConnectionError) or b" 400 " in got.result()
    assert (await deployment.openai.models.retrieve("demo")).id == "demo"


async def drip(out: asyncio.StreamWriter) -> None:
    while True:
        out.write(b"x")
        await out.drain()
        await asyncio.sleep(0.05)


async def test_client_that_drips_cannot_hold_its_connection(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of an unread body has a limited time, however it comes."""
    monkeypatch.setattr(http_protocol, "CLOSE_TIMEOUT_S", 0.5)
    incoming, out = await connect(deployment)
    out.write(b"POST /v1/none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        assert (await incoming.readuntil(b"}")).startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            await drip(out)
    out.close()


async def test_client_that_reads_nothing_cannot_hold_its_connection(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.5)
    _, out = await connect(deployment)
    connections = deployment.connections
    await until(lambda: len(connections) == 1)
    (connection,) = connections
    connection.transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )
    connection.transport.write(b"x" * 8_000_000)  # as a response without a reader
    await until(lambda: not connections)
    out.transport.abort()


async def test_idle_connection_is_closed_after_the_time_of_the_setting(
    deployment: Deployment,
) -> None:
    incoming, out = await connect(deployment)
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with asyncio.timeout(WAIT_S):
        out.write(request)
        await incoming.readuntil(b"}")
        (connection,) = deployment.connections
        assert connection.timeout_keep_alive == deployment.settings.http_keep_alive_s == 75
        connection.timeout_keep_alive = 0.5
        out.write(request)
        await incoming.readuntil(b"}")
        out.write(b"\r\n")  # no request
        assert await incoming.read() == b""
    out.close()


async def test_client_that_pipelines_and_leaves_cancels(deployment: Deployment) -> None:
    _, out = await connect(deployment)
    long = post("/v1/completions", prompt="x" * 1500, stream=True)
    out.write(long + post("/v1/completions", prompt="abc"))
    streams = deployment.gateway.parts.streams
    await until(lambda: streams.open_streams == 1)
    out.close()
    await until(lambda: len(deployment.cancels()) == 1)
    await until(lambda: streams.open_streams == 0)


async def test_head_of_a_stream_ends_with_its_headers(
    deployment: Deployment, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=user("x" * 800), stream=True
    )
    first = await anext(stream)
    async with httpx.AsyncClient(base_url=deployment.gateway.url, timeout=2) as http:
        head = await http.head(f"/v1/streams/{first.id}")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream")
        assert (await http.get("/livez")).status_code == 200
    await stream.close()


async def test_probes_are_answered_while_every_connection_has_a_request(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = deployment.gateway._server
    assert server is not None
    monkeypatch.setattr(server._server.table, "_most", 2)
    busy = [await connect(deployment) for _ in range(2)]
    for incoming, out in busy:
        out.write(post("/v1/completions", prompt="x" * 800, stream=True))
        await incoming.readuntil(b"data: ")
    for path, status in ((b"/v1/models", b"529"), (b"/livez", b"200"), (b"/metrics", b"200")) * 20:
        incoming, out = await connect(deployment)
        out.write(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
        async with asyncio.timeout(WAIT_S):
            got = await incoming.read()
        assert got.startswith(b"HTTP/1.1 " + status)
        assert b"\r\nconnection: close\r\n" in got
        out.close()
    for incoming, out in busy:
        await incoming.readuntil(b"data: ")
        out.close()


async def test_connection_may_be_idle_and_its_body_slow(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    incoming, out = await connect(deployment)
    body = json.dumps({"model": "demo", "prompt": "abc", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            out.write(head + body[:10])
            await asyncio.sleep(0.5)
            out.write(body[10:])
            got = await incoming.readuntil(b"}}}")
            assert got.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)
    out.close()
