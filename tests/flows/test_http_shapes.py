"""Tests of HTTP on raw sockets, shape by shape, against the ports of a deployment with API keys."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.http_process import HttpProcess, http_process
from tests.harness.key_files import KeyFileHarness
from tests.harness.raw_http import Conversation, converse

HOST = b"host: localhost\r\n"
JSON = b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
UPGRADES = (
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    b"UPGRADE: TLS/1.0\r\nconnection: keep-alive, upgrade\r\n",
)
BODY = json.dumps({"model": "demo", "prompt": "abc", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "demo", "prompt": "abc", "max_tokens": 3, "stream": True}).encode()


class Gateway(NamedTuple):
    """A deployment with keys, and the header of a good one."""

    process: HttpProcess
    key: bytes

    def head(self, line: str, *more: bytes, key: bool = True) -> bytes:
        """The head of a request."""
        fields = (HOST, self.key if key else b"", *more)
        return f"{line} HTTP/1.1\r\n".encode() + b"".join(fields) + b"\r\n"

    def post(
        self, path: str = "/v1/completions", *more: bytes, body: bytes = BODY, key: bool = True
    ) -> bytes:
        """A whole request."""
        length = b"content-length: %d\r\n" % len(body)
        return self.head(f"POST {path}", JSON, *more, length, key=key) + body

    def chunked(self, *more: bytes, key: bool = True) -> bytes:
        """The head of a request with chunks."""
        return self.head("POST /v1/completions", JSON, CHUNKED, *more, key=key)

    def get(self, path: str = "/v1/models") -> bytes:
        return self.head(f"GET {path}")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("shapes")
    keys = KeyFileHarness(folder)
    key = f"authorization: Bearer {keys.add('acme', 'operator')}\r\n".encode()
    with http_process(folder / "log", **keys.settings, http_keep_alive_s=2) as process:
        yield Gateway(process, key)


async def ask(gateway: Gateway, *parts: bytes | float, **more: Any) -> Conversation:
    return await converse(gateway.process.gateway, *parts, **more)


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


END = b"0\r\n\r\n"

# --- shapes that are answered, and leave the connection open --------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost:", "127.0.0.1:80", "[::1]", "[fe80::1%25eth0]:8000", "my_pod.internal"]
)
async def test_each_form_of_a_host_is_answered(gateway: Gateway, host: str) -> None:
    sent = f"GET /livez HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    assert (await ask(gateway, sent)).responses[0].status in (200, 403)


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/demo", "/openapi.json",
             "/v1/files", "/v1/batches"],
)  # fmt: skip
async def test_head_has_the_headers_of_get_and_no_body(gateway: Gateway, path: str) -> None:
    got = await ask(
        gateway, gateway.get(path), gateway.head(f"HEAD {path}"), gateway.get(),
        methods=["GET", "HEAD"], count=3,
    )  # fmt: skip
    whole, head, after = got.responses
    assert (whole.status, head.status, after.status) == (200, 200, 200)
    changing = {"date", "x-request-id", *(("content-length",) if path == "/metrics" else ())}
    kept = whole.headers.keys() - changing
    assert {name: head.headers.get(name) for name in kept} == {
        name: whole.headers[name] for name in kept
    }


@pytest.mark.parametrize("port", ["worker", "indexer"])
@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
async def test_other_ports_answer_head(gateway: Gateway, port: str, path: str) -> None:
    sent = gateway.head(f"HEAD {path}") + gateway.get(path)
    got = await converse(getattr(gateway.process, port), sent, methods=["HEAD"], count=2)
    assert got.statuses == [200, 200]


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/batches", "/v1/none"])
async def test_upgrade_is_ignored(gateway: Gateway, path: str, upgrade: bytes) -> None:
    plain = await ask(gateway, gateway.post(path) + gateway.get(), count=2)
    got = await ask(gateway, gateway.post(path, upgrade) + gateway.get(), count=2)
    assert got.statuses == plain.statuses
    late = [gateway.post(path, upgrade)[: -len(BODY)], 0.05, BODY, 0.05, gateway.get()]
    assert (await ask(gateway, *late, count=1)).responses[0].status == plain.responses[0].status
    assert "upgrade" not in gateway.process.errors.read_text().lower()


async def test_upgrade_of_a_last_request_is_ignored(gateway: Gateway) -> None:
    last = b"connection: close, upgrade\r\nupgrade: h2c\r\n"
    got = await ask(gateway, gateway.post("/v1/completions", last), more_s=1)
    assert (got.statuses, got.is_closed) == ([200], True)


@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_body_of_an_upgrade_is_no_request(gateway: Gateway, upgrade: bytes) -> None:
    inner = gateway.get()
    head = gateway.post("/v1/completions", upgrade, body=inner)[: -len(inner)]
    got = await ask(gateway, head, 0.05, inner, more_s=0.2)
    assert got.statuses == [400]
    chunks = [gateway.chunked(upgrade), 0.05, chunk(inner), END]
    assert (await ask(gateway, *chunks, more_s=0.2)).statuses == [400]


@pytest.mark.parametrize("port", ["worker", "indexer"])
async def test_other_ports_ignore_an_upgrade(gateway: Gateway, port: str) -> None:
    sent = gateway.head("GET /livez", UPGRADES[0]) * 2
    assert (await converse(getattr(gateway.process, port), sent, count=2)).statuses == [200, 200]


@pytest.mark.parametrize(
    "parts",
    [
        [chunk(BODY) + END],
        [chunk(BODY, b";name=value") + END],
        [b"".join(chunk(bytes([byte])) for byte in BODY) + END],
        [chunk(BODY), b"0", 0.02, b"\r\nx-trailer: 1\r\n", 0.02, b"\r\n"],
    ],
)
async def test_chunked_body_is_read(gateway: Gateway, parts: list[bytes | float]) -> None:
    got = await ask(gateway, gateway.chunked(), *parts, gateway.get(), count=2)
    assert got.statuses == [200, 200]


@pytest.mark.parametrize("cut", [5, len(BODY) + 10])
async def test_client_that_closes_its_side_gets_the_answers_to_whole_requests(
    gateway: Gateway, cut: int
) -> None:
    sent = gateway.post(body=STREAM) + gateway.post() + gateway.post()[:-cut]
    got = await ask(gateway, sent, ends="half", count=2, more_s=1)
    assert (got.statuses, got.is_closed) == ([200, 200], True)


async def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    ids = [b"x-request-id: r%d\r\n" % n for n in range(6)]
    bodies = [STREAM, BODY, b"{", STREAM, BODY, BODY]
    sent = b"".join(
        gateway.post("/v1/completions", name, body=body)
        for name, body in zip(ids, bodies, strict=True)
    )
    got = await ask(gateway, sent, count=6)
    assert got.statuses == [200, 200, 400, 200, 200, 200]
    names = [response.headers["x-request-id"] for response in got.responses]
    assert names == [[f"r{n}"] for n in range(6)]


# --- headers that trailers cannot be --------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://localhost", 404), ("http://localhost?a=b", 404), ("http://localhost/livez", 200),
     ("*", 404), ("/livez?a=%ff", 200), ("/%ff%00", 404)],
)  # fmt: skip
async def test_each_form_of_a_target_is_answered(
    gateway: Gateway, target: str, status: int
) -> None:
    odd = gateway.head(f"{'OPTIONS' if target == '*' else 'GET'} {target}")
    sent = gateway.get() + odd + gateway.get()
    got = await ask(gateway, sent, count=3)
    assert got.statuses == [200, status, 200]


async def test_trailer_is_no_header(gateway: Gateway) -> None:
    body = chunk(BODY) + b"0\r\n"
    sent = gateway.chunked(key=False) + body + gateway.key + b"\r\n"
    assert (await ask(gateway, sent)).statuses == [401]
    routed = gateway.chunked() + body + b"x-worker-instance-id: none\r\nx-request-id: t\r\n\r\n"
    (answer,) = (await ask(gateway, routed)).responses
    assert answer.status == 200
    assert answer.headers["x-request-id"] != ["t"]


# --- requests that are refused, and end their connection ------------------------------------------

GET = b"GET /v1/models HTTP/1.1\r\n" + HOST
POST = b"POST /v1/files HTTP/1.1\r\n" + HOST
CODING = b"transfer-encoding: %b\r\n"
BAD_HEADS = {
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n",
    "two equal hosts": GET + HOST,
    "no host": b"GET /v1/models HTTP/1.1\r\n",
    "two hosts by 1.0": b"GET /v1/models HTTP/1.0\r\n" + HOST + HOST,
    "host with userinfo": b"GET /v1/models HTTP/1.1\r\nhost: evil.example@localhost\r\n",
    "host with a path": b"GET /v1/models HTTP/1.1\r\nhost: localhost/evil\r\n",
    "host with a query": b"GET /v1/models HTTP/1.1\r\nhost: localhost?evil\r\n",
    "host of two words": b"GET /v1/models HTTP/1.1\r\nhost: local host\r\n",
    "host with a name for a port": b"GET /v1/models HTTP/1.1\r\nhost: localhost:http\r\n",
    "host with a space": b"GET /v1/models HTTP/1.1\r\nhost : localhost\r\n",
    "CONNECT": b"CONNECT localhost:443 HTTP/1.1\r\n" + HOST,
    "HTTP/2": b"PRI * HTTP/2.0\r\n",
    "HTTP/2.0 in a request": b"GET /v1/models HTTP/2.0\r\n" + HOST,
    "HTTP/1.2": b"GET /v1/models HTTP/1.2\r\n" + HOST,
    "no version": b"GET /v1/models\r\n" + HOST,
    "bare line feeds": b"GET /v1/models HTTP/1.1\nhost: localhost\n",
    "NUL in a value": GET + b"x: a\0b\r\n",
    "CR in a value": GET + b"x: a\rb\r\n",
    "folded header": GET + b"x: a\r\n b\r\n",
    "no colon": GET + b"nonsense\r\n",
    "no name": GET + b": x\r\n",
    "URL of other characters": b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST,
    "long value": GET + b"x: " + b"a" * 70_000 + b"\r\n",
    "long URL": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST,
    "many headers": GET + b"a:b\r\n" * 1000,
    "two lengths": POST + b"content-length: 1\r\n" * 2,
    "signed length": POST + b"content-length: +2\r\n",
    "hexadecimal length": POST + b"content-length: 0x2\r\n",
    "huge length": POST + b"content-length: %d\r\n" % 10**30,
    "length and chunks": POST + CHUNKED + b"content-length: 5\r\n",
    "gzip, chunked": POST + CODING % b"gzip, chunked",
    "unknown coding": POST + CODING % b"xchunked",
    "chunked twice": POST + CHUNKED + CHUNKED,
    "chunked behind a control character": POST + CODING % b"\x0bchunked",
    "another method": b"NONSENSE /v1/models HTTP/1.1\r\n" + HOST,
    "port beyond all": b"GET http://localhost:99999/livez HTTP/1.1\r\n" + HOST,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("head", BAD_HEADS.values(), ids=BAD_HEADS)
async def test_bad_head_is_refused_in_openai_form(gateway: Gateway, head: bytes) -> None:
    """The request behind it is not read."""
    got = await ask(gateway, head + b"\r\n" + gateway.get(), more_s=1)
    assert (got.statuses, got.is_closed) == ([400], True)
    (refused,) = got.responses
    assert refused.error["code"] == "bad_request"
    assert refused.headers["connection"] == ["close"]


@pytest.mark.parametrize("head", BAD_HEADS.values(), ids=BAD_HEADS)
async def test_bad_head_is_answered_behind_the_request_before(
    gateway: Gateway, head: bytes
) -> None:
    sent = gateway.post(body=STREAM) + gateway.post() + head + b"\r\n" + gateway.get()
    got = await ask(gateway, sent, count=3, more_s=1)
    assert (got.statuses, got.is_closed) == ([200, 200, 400], True)
    assert got.responses[0].body.endswith(b"data: [DONE]\n\n")


async def test_bad_head_of_head_is_refused_without_a_body(gateway: Gateway) -> None:
    sent = b"HEAD /v1/models HTTP/1.1\r\n" + HOST + HOST + b"\r\n"
    got = await ask(gateway, sent, methods=["HEAD"], more_s=1)
    assert (got.statuses, got.is_closed) == ([400], True)


BAD_BODIES = {
    "trailers without end": chunk(BODY) + b"0\r\n" + b"x-a: b\r\n" * 40_000,
    "one trailer without end": chunk(BODY) + b"0\r\nx-a: " + b"b" * 400_000,
    "chunk extension without end": b"2;a=" + b"b" * 400_000,
    "leading zeros without end": b"0" * 400_000,
    "size of 65 bits": b"1ffffffffffffffff\r\n{}",
    "size that is no number": b"zz\r\n{}\r\n",
    "chunk without its line end": b"2\r\n{}0\r\n\r\n",
    "extension with a bare line feed": b"2;\nxx\r\n{}\r\n0\r\n\r\n",
    "bare line feeds": b"2\n{}\n0\n\n",
    "trailer without a colon": chunk(BODY) + b"0\r\nnonsense\r\n\r\n",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
@pytest.mark.parametrize("key", [True, False])
async def test_bad_chunks_are_refused(gateway: Gateway, body: bytes, key: bool) -> None:
    got = await ask(gateway, gateway.chunked(key=key), 0.05, body, 0.05, gateway.get(), more_s=2)
    assert got.statuses == [400 if key else 401]
    assert got.is_closed
    assert got.responses[0].error


async def test_endless_trailers_take_no_memory(gateway: Gateway) -> None:
    await ask(gateway, gateway.get("/livez"))
    before = gateway.process.memory_mb
    lines = (b"x-a: " + b"b" * 1000 + b"\r\n") * 1000
    for key, end in (
        (True, chunk(BODY) + b"0\r\n"),
        (False, b"0\r\n"),
        (False, b"2\r\n{}\r\n0\r\n"),
    ):
        await ask(gateway, gateway.chunked(key=key) + end, *[lines] * 20, wait_s=3)
    assert gateway.process.memory_mb - before < 20


async def test_pipelined_heads_are_bounded(gateway: Gateway) -> None:
    slow = json.dumps({"model": "demo", "prompt": "x" * 40, "stream": True}).encode()
    before = gateway.process.memory_mb
    got = await ask(gateway, gateway.post(body=slow), gateway.get("/livez") * 8000, count=20)
    assert got.statuses == [200] * (len(got.statuses) - 1) + [400]
    assert len(got.statuses) < 20
    assert gateway.process.memory_mb - before < 20


# --- answers before the end of the body -----------------------------------------------------------

UNREAD = {
    "401": ("POST /v1/completions", False, 401),
    "404": ("POST /v1/none", True, 404),
    "405": ("POST /v1/models", True, 405),
    "415": ("POST /v1/completions", True, 415),
    "413": ("POST /v1/completions", True, 413),
    "GET": ("GET /v1/models", True, 200),
    "DELETE": ("DELETE /v1/files/none", True, 404),
}


@pytest.mark.parametrize(("line", "key", "status"), UNREAD.values(), ids=UNREAD)
async def test_answer_before_the_end_of_the_body_closes(
    gateway: Gateway, line: str, key: bool, status: int
) -> None:
    size = 9_000_000 if status == 413 else 1_000_000
    more = JSON if status == 413 else b""
    head = gateway.head(line, more, b"content-length: %d\r\n" % size, key=key)
    for body in ([], [0.1, b"x"], [0.1, b"x" * size]):  # none, a byte, all
        got = await ask(gateway, head, *body, more_s=3)
        assert (got.statuses, got.is_closed) == ([status], True)
        assert got.responses[0].headers["connection"] == ["close"]
    chunks = [gateway.head(line, more, CHUNKED, key=key), 0.1, *[chunk(b"x" * 100_000)] * 100]
    got = await ask(gateway, *chunks, more_s=3)
    assert (got.statuses, got.is_closed) == ([status], True)


LAST = {
    "GET": b"GET /v1/models HTTP/1.1\r\n%bconnection: close\r\n\r\n",
    "GET by 1.0": b"GET /v1/models HTTP/1.0\r\n%b\r\n",
    "POST": b"POST /v1/none HTTP/1.1\r\nconnection: close\r\n%bcontent-length: 2\r\n\r\n{}",
    "401": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close, upgrade\r\n\r\n",
    "400": b"GET /v1/models HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", LAST.values(), ids=LAST)
async def test_input_behind_the_last_request_resets_no_connection(
    gateway: Gateway, request_bytes: bytes
) -> None:
    """A reset would destroy the answer, if it is still under way."""
    incoming, out = await asyncio.open_connection("127.0.0.1", gateway.process.gateway)
    out.write(request_bytes.replace(b"%b", HOST + gateway.key))
    for _ in range(3):
        await asyncio.sleep(0.05)
        out.write(gateway.post())
        await out.drain()
    async with asyncio.timeout(3):
        got = await incoming.read()
    assert got.count(b"HTTP/1.1 ") == 1
    out.close()


# --- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_old_clients_get_no_chunks(gateway: Gateway, body: bytes, more: bytes) -> None:
    sent = gateway.post("/v1/completions", more, body=body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    got = await ask(gateway, sent, more_s=2)
    (old,) = got.responses
    assert (old.status, got.is_closed) == (200, True)
    assert "transfer-encoding" not in old.headers
    assert old.headers["connection"] == ["close"]
    if body == STREAM:
        *events, done, end = old.body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        data = [json.loads(event.partition(b"data: ")[2]) for event in events]
        assert "".join(each["choices"][0]["text"] for each in data) == "abc"
    else:
        assert json.loads(old.body)["choices"][0]["text"] == "abc"


async def test_old_clients_need_no_host(gateway: Gateway) -> None:
    sent = b"GET /v1/models HTTP/1.0\r\n" + gateway.key + b"\r\n"
    assert (await ask(gateway, sent, more_s=1)).statuses == [200]


# --- answers that help ----------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate, gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
async def test_compressed_body_is_refused_by_name(gateway: Gateway, path: str, coding: str) -> None:
    kind = b"content-type: multipart/form-data; boundary=x\r\n"
    head = f"content-encoding: {coding}\r\n".encode()
    sent = (
        gateway.post(path, head)
        if path != "/v1/files"
        else gateway.head(f"POST {path}", kind, head, b"content-length: 0\r\n")
    )
    (refused,) = (await ask(gateway, sent)).responses
    assert refused.status == 415
    assert "content-encoding" in refused.error["message"]


async def test_uncompressed_body_may_say_so(gateway: Gateway) -> None:
    sent = gateway.post("/v1/completions", b"content-encoding: identity\r\n")
    assert (await ask(gateway, sent)).statuses == [200]


@pytest.mark.parametrize(
    ("line", "methods"),
    [
        ("PUT /v1/files", "GET, HEAD, POST"),
        ("PUT /v1/files/f", "DELETE, GET, HEAD"),
        ("POST /livez", "GET, HEAD"),
        ("HEAD /v1/completions", "POST"),
    ],
)
async def test_another_method_names_all_methods_once(
    gateway: Gateway, line: str, methods: str
) -> None:
    sent = gateway.head(line, b"content-length: 0\r\n")
    (refused,) = (await ask(gateway, sent, methods=[line.split(maxsplit=1)[0]])).responses
    assert (refused.status, refused.headers["allow"]) == (405, [methods])


# --- descriptors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.0\r\n\r\n"], ids=["idle", "answered"])
async def test_connections_that_clients_leave_open_lock_nobody_out(
    tmp_path: Path, sent: bytes
) -> None:
    """With as many files as the connections of one client: the oldest ones are closed."""
    with http_process(tmp_path / "log", soft_file_limit=256, hard_file_limit=512) as process:
        sockets = []
        for _ in range(600):
            sockets.append(await asyncio.open_connection("127.0.0.1", process.gateway))
            sockets[-1][1].write(sent)
            if len(sockets) % 100 == 0:
                request = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
                assert (await converse(process.gateway, request, wait_s=2)).statuses == [200]
        page = (await converse(process.gateway, b"GET /metrics HTTP/1.0\r\n\r\n")).responses[0].body
        open_files, lines = process.open_files, process.errors.read_text().splitlines()
        for _, writer in sockets:
            writer.transport.abort()
    assert open_files < 450
    (closed,) = re.findall(rb"\nkvlane_http_over_limit_connections_total (\S+)", page)
    assert 300 < float(closed) < 500
    assert len([line for line in lines if "HTTP connections of this port are in use" in line]) == 1
    assert len([line for line in lines if "the limit of open files is 512" in line]) == 1
    assert len([line for line in lines if "KVLANE_HTTP_MAX_STREAMS=2000 is lowered" in line]) == 1
