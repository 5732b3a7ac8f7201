"""Tests of random HTTP conversations on raw sockets: generated from the grammar of RFC 9112,
with faults.

Some hundred with fixed seeds; with KVLANE_TEST_LONG=1 10 000, of which the figures are printed
(`pytest -s`), with the seeds from KVLANE_TEST_SEED on. Each request has an id, which its response
repeats, so a response in the wrong place is seen; bodies contain requests with an id of their own,
which no response may have.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.http_prober import probing
from tests.harness.http_process import HttpProcess, http_process
from tests.harness.key_files import KeyFileHarness
from tests.harness.raw_http import Conversation, converse
from workbench.bench.statistics import percentile

IS_LONG = bool(os.environ.get("KVLANE_TEST_LONG"))
FIRST = int(os.environ.get("KVLANE_TEST_SEED", "0"))
COUNT = 10_000 if IS_LONG else 250
AT_A_TIME = 32
MEMORY_MB = 50
"""Growth that is allowed, at the peak. The log of the deployment is in its memory too."""
WARM_UP = 100
"""Conversations before the memory is measured: allocators and caches fill."""
OTHERS_MS = 100
"""Within which each request of others is served, in the long form, on an idle machine."""

SMUGGLED = "smuggled"
INNER = f"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-request-id: {SMUGGLED}\r\n\r\n"


class Sent(NamedTuple):
    """A request. `must`: it is valid, and so are those before it: it gets a response."""

    id: str
    method: str
    parts: list[bytes]
    must: bool
    closes: bool
    """Requests after it need no answer."""
    is_old: bool
    """The request has the version HTTP/1.0."""


class Generator:
    """Requests and conversations."""

    def __init__(self, seed: int, key: str) -> None:
        self._rng = random.Random(seed)
        self._key = key

    def conversation(self, number: int) -> tuple[list[Sent], list[bytes | float], str]:
        """The requests of a connection, what to send, and how the client ends."""
        rng = self._rng
        requests: list[Sent] = []
        for n in range(rng.choice((1, 1, 2, 3, 5))):
            is_faulty = rng.random() < 0.25
            in_step = not is_faulty and all(request.must for request in requests)
            name = f"c{number}-{n}"
            requests.append(self._request(name, is_faulty=is_faulty, in_step=in_step))
            if not requests[-1].must and rng.random() < 0.7:
                break
        ends = rng.choice(("", "", "", "half", "abort"))
        if rng.random() < 0.1:
            *whole, last = requests[-1].parts
            cut = [*whole, last[: rng.randrange(len(last))]]
            requests[-1] = requests[-1]._replace(parts=cut, must=False)
        pieces = [part for request in requests for part in request.parts]
        if rng.random() < 0.5:
            pieces = [b"".join(pieces)]
        parts: list[bytes | float] = []
        for piece in pieces:
            at = 0
            while at < len(piece):
                size = rng.choice((1, 7, 100, 10_000, 1_000_000))
                parts.append(piece[at : at + size])
                at += size
                if len(parts) > 50:
                    parts.append(piece[at:])
                    break
                if rng.random() < 0.1:
                    parts.append(rng.choice((0.0, 0.001, 0.02)))
        return requests, parts, ends

    def _request(self, name: str, *, is_faulty: bool, in_step: bool) -> Sent:
        """`in_step`: no fault so far; behind one it is open which response has no body."""
        rng = self._rng
        method, path, body = self._target()
        method = "GET" if method == "HEAD" and not in_step else method
        version = "1.0" if rng.random() < 0.05 else "1.1"
        fields = [f"Host: {rng.choice(('localhost', '127.0.0.1:80', '[::1]'))}"]
        fields += [f"x-request-id: {name}"]
        if rng.random() < 0.8:
            fields.append(f"Authorization: Bearer {self._key}")
        if rng.random() < 0.3:
            fields.append(self._case("connection") + ": keep-alive")
        closes = version == "1.0"
        if rng.random() < 0.1:
            fields.append("Connection: close")
            closes = True
        if rng.random() < 0.2:
            fields += rng.choice((
                ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"],
                ["connection: upgrade", "upgrade: websocket", "sec-websocket-key: eA=="],
                ["upgrade: TLS/1.0"],
            ))  # fmt: skip
        for _ in range(rng.choice((0, 0, 3, 20))):
            fields.append(f"x-{rng.randrange(9)}: {'v' * rng.choice((0, 3, 500))}")
        frame = self._frame(body, fields)
        rng.shuffle(fields)
        line = f"{method} {path} HTTP/{version}"
        if is_faulty:
            line, fields, frame = self._spoil(line, fields, frame)
        head = "\r\n".join([line, *fields]).encode("latin-1") + b"\r\n\r\n"
        # A body that its endpoint does not read ends the connection, unless it was there already.
        return Sent(
            name, method, [head, *frame], not is_faulty, closes or bool(frame), version == "1.0"
        )

    def _target(self) -> tuple[str, str, bytes]:
        rng = self._rng
        text = rng.choice(("abc", INNER, "\r\n\r\n0\r\n\r\n", "x" * 300))
        chat = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        complete = {"model": "demo", "prompt": text, "max_tokens": 3}
        body = rng.choice((
            json.dumps(chat | {"stream": rng.random() < 0.5}),
            json.dumps(complete | {"stream": rng.random() < 0.5, "n": rng.choice((1, 2))}),
            json.dumps(complete)[:-5], INNER, INNER * 50, "", "x" * 200_000,
        )).encode()  # fmt: skip
        return rng.choice((
            ("GET", "/livez", b""), ("HEAD", "/v1/models", b""), ("GET", "/v1/models?x=%20", b""),
            ("GET", "/metrics", body), ("GET", "/v1/files/none", b""),
            ("OPTIONS", "/v1/files", b""),
            ("DELETE", "/v1/streams/none", b""), ("PUT", "/v1/batches", body),
            ("POST", "/v1/none", body), ("POST", "//v1/chat/completions", body),
            ("POST", "/v1/chat/completions", body), ("POST", "/v1/completions", body),
            ("POST", "/v1/completions", body), ("POST", "http://x/v1/chat/completions", body),
        ))  # fmt: skip

    def _frame(self, body: bytes, fields: list[str]) -> list[bytes]:
        """The body in parts, and the header fields that announce it."""
        rng = self._rng
        if rng.random() < 0.9:
            fields.append("Content-Type: application/json")
        if body and rng.random() < 0.1:
            fields.append("Expect: 100-continue")
        if not body and rng.random() < 0.8:
            return []
        if rng.random() < 0.5:
            fields.append(f"{self._case('content-length')}: {len(body)}")
            return [body] if body else []
        fields.append(f"{self._case('transfer-encoding')}: {rng.choice(('chunked', 'Chunked'))}")
        parts, at = [], 0
        while at < len(body):
            data = body[at : at + rng.choice((1, 16, 5000, 100_000))]
            at += len(data)
            extension = rng.choice((b"", b"", b";a=b", b';a="b c"'))
            size = rng.choice((b"%x", b"%X", b"0%x")) % len(data)
            parts.append(b"%b%b\r\n%b\r\n" % (size, extension, data))
            if len(parts) > 100 and at < len(body):
                parts.append(b"%x\r\n%b\r\n" % (len(body) - at, body[at:]))
                break
        trailer = rng.choice((b"", b"x-request-id: smuggled\r\n", b"authorization: Bearer x\r\n"))
        return [*parts, b"0\r\n" + trailer + b"\r\n"]

    def _spoil(
        self, line: str, fields: list[str], frame: list[bytes]
    ) -> tuple[str, list[str], list[bytes]]:
        """The request with a fault."""
        rng = self._rng
        field = rng.choice((
            "Host: other", "Content-Length: 5", "Content-Length: -1", "Content-Length: 1e3",
            "Content-Length: 99999999999999999999", "Content-Length: 20000000",
            "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity",
            "Transfer-Encoding: chunked", "Transfer-Encoding : chunked", "no colon", ": no name",
            " folded", "x: \x00", "x: a\rb", "x: a\nb", f"x: {'y' * 70_000}",
            "content-encoding: gzip", "\x80: x", "x y: z",
        ))  # fmt: skip
        kind = rng.randrange(7)
        if kind < 3:
            fields.insert(rng.randrange(len(fields) + 1), field)
        elif kind == 3:
            fields = [each for each in fields if not each.lower().startswith("host")]
        elif kind == 4:
            line = rng.choice((
                "GET /", "GET  / HTTP/1.1", "GET / HTTP/1.1 x", "get / HTTP/1.1", "GET / HTTP/3.0",
                "CONNECT localhost:1 HTTP/1.1", "PRI * HTTP/2.0", "\x16\x03\x01",
                "GET /\x80 HTTP/1.1", line[: rng.randrange(len(line))],
            ))  # fmt: skip
        elif kind == 5 and frame:
            at = rng.randrange(len(frame))
            part = frame[at]
            cut = rng.randrange(len(part) + 1)
            frame[at] = part[:cut] + rng.choice((b"", b"\r\n", b"zz", b"\0")) + part[cut + 1 :]
        else:
            fields.append(f"Content-Length: {rng.randrange(10_000)}")
        return line, fields, frame

    def _case(self, name: str) -> str:
        return self._rng.choice((name, name.upper(), name.title()))


class Figures(NamedTuple):
    statuses: Counter[int]
    wrong: list[str]


async def hold(port: int, generator: Generator, number: int, figures: Figures) -> None:
    """One conversation, and what is wrong about its responses."""
    requests, parts, ends = generator.conversation(number)
    certain = 0
    for request in requests:
        if not request.must or ends == "abort" or (ends == "half" and request.is_old):
            break
        certain += 1
        if request.closes:
            break
    try:
        got = await converse(
            port, *parts, methods=[request.method for request in requests], count=certain,
            ends=ends, more_s=0.02,
        )  # fmt: skip
    except AssertionError as e:
        figures.wrong.append(f"{number}: not a response: {e!r:.300}")
        return
    figures.statuses.update(got.statuses)
    figures.wrong.extend(f"{number}: {fault}" for fault in faults(requests, got, certain))


def faults(requests: list[Sent], got: Conversation, certain: int) -> Iterator[str]:
    """The faults of the responses.

    Each response is that of the request in its place, up to the first invalid request. Behind
    that, the server may read other requests than the client meant, but none twice and none earlier.
    """
    valid = next((n for n, request in enumerate(requests) if not request.must), len(requests))
    names = [request.id for request in requests]
    if len(got.responses) < certain:
        yield f"{len(got.responses)} of {certain} responses: {got.statuses}"
    if len(got.responses) > valid and valid == len(requests):
        yield f"{len(got.responses)} responses to {valid} requests: {got.statuses}"
    last = -1
    for n, response in enumerate(got.responses):
        (name,) = response.headers.get("x-request-id", [""])
        if response.status >= 500:
            yield f"{response.status}: {response.body[:200]!r}"
        if not name and (response.status != 400 or n < max(valid, len(got.responses) - 1)):
            yield f"{response.status} without an id at {n}"
        is_known = n < valid or (n == valid < len(names) and name)
        if is_known and name != names[n]:
            yield f"the response {n} is that of {name}"
        if name in names:
            if names.index(name) <= last:
                yield f"{name} is answered twice, or late"
            last = names.index(name)


async def run(process: HttpProcess, key: str, numbers: range, figures: Figures) -> None:
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            await hold(process.gateway, Generator(number, key), number, figures)

    await asyncio.gather(*(client() for _ in range(AT_A_TIME)))


@pytest.mark.timeout(1800 if IS_LONG else 300)
async def test_random_conversations_stay_in_step_and_within_bounds(tmp_path: Path) -> None:
    keys = KeyFileHarness(tmp_path)
    key = keys.add("acme")
    figures, times_ms = Figures(Counter(), []), list[float]()
    with http_process(tmp_path / "log", **keys.settings) as process:
        await run(process, key, range(FIRST, FIRST + WARM_UP), figures)
        before_mb = process.memory_mb
        process.forget_peak_memory()
        with probing(process.gateway, key, times_ms):
            await run(process, key, range(FIRST + WARM_UP, FIRST + COUNT), figures)
        grown_mb = process.peak_memory_mb - before_mb
        lines = process.errors.read_text()
    p50, p99, most = (percentile(times_ms, share) for share in (0.5, 0.99, 1.0))
    report = (
        f"{COUNT} conversations: memory {grown_mb:+.1f} MB, statuses {dict(figures.statuses)}, "
        f"{len(times_ms)} requests of another client: p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"most {most:.1f} ms"
    )
    sys.stdout.write(f"{report}\n")
    assert not figures.wrong, "\n".join(figures.wrong[:20])
    assert grown_mb < MEMORY_MB, report
    assert "Traceback" not in lines, lines[-3000:]
    assert min(figures.statuses[200], figures.statuses[400]) > COUNT / 10, report
    if IS_LONG:
        assert most < OTHERS_MS, report
