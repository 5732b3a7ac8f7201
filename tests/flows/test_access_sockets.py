"""Tests of API keys and TLS over real sockets, with OpenAI's own client; the log is in memory."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.http.server.http_server import TlsFiles
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings, SettingsError
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from tests.harness.http_harness import WAIT_S, HttpHarness, connect_to, until
from tests.harness.key_files import KeyFileHarness, auth_headers

LANES = 4
BLOCK = 16
TEXT = "".join(chr(97 + n % 26) for n in range(8 * BLOCK))


class Deployment(HttpHarness):
    """A gateway that asks for keys, and a worker with a cache."""

    def __init__(self, keys: KeyFileHarness, **over: Any) -> None:
        self.broker = MemoryBroker(SystemClock(), lanes=LANES)
        self.clients: list[openai.AsyncOpenAI] = []
        settings = {
            "model": "demo",
            "context_length": 2000,
            "lanes": LANES,
            "validate_engine": True,
        }
        super().__init__(connect_to(self.broker), **(settings | keys.settings | over))

    async def open(self) -> None:
        await self.start_worker("w1", self._simulated)
        await super().open()
        await until(lambda: bool(self.gateway.parts.served_models.models()))

    def client(self, token: str, **more: Any) -> openai.AsyncOpenAI:
        url = f"{self.gateway.url}/v1"
        client = openai.AsyncOpenAI(
            base_url=url, api_key=token, max_retries=0, timeout=WAIT_S, **more
        )
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await super().close()

    def bytes_of_the_log(self) -> bytes:
        """Keys, values and headers of all records of all topics."""
        parts: list[bytes] = []
        for topic, count in self.broker.partitions.items():
            for partition in range(count):
                for record in self.broker.records(topic, partition):
                    parts += [record.key or b"", record.value or b"", repr(record.headers).encode()]
        return b"\n".join(parts)

    @staticmethod
    def _simulated(ctx: ProcessContext) -> SimulatedEngine:
        shape = EngineLimits(block_size=BLOCK, cache_blocks=1024)
        return SimulatedEngine(ctx.clock, shape, model="demo", context_length=2000, speedup=20)


@asynccontextmanager
async def deployed(keys: KeyFileHarness, **over: Any) -> AsyncIterator[Deployment]:
    deployment = Deployment(keys, **over)
    await deployment.open()
    try:
        yield deployment
    finally:
        await deployment.close()


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


async def complete(client: openai.AsyncOpenAI, **over: Any) -> Any:
    return await client.completions.create(model="demo", prompt=TEXT, max_tokens=4, **over)


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


async def test_openai_client_sees_nothing_of_another_tenant(keys: KeyFileHarness) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    async with deployed(keys) as deployment:
        mine, other = deployment.client(ours), deployment.client(theirs)
        counts = [cached(await complete(client)) for client in (mine, other, mine, other)]
        assert counts == [0, 0, 8 * BLOCK, 8 * BLOCK]
        dry = {"nvext": {"annotations": ["query_instance_id:x"]}}
        with pytest.raises(openai.PermissionDeniedError):
            await complete(other, extra_body=dry)

        stream = await mine.completions.with_raw_response.create(
            model="demo", prompt=TEXT, max_tokens=1500, stream=True
        )
        name = stream.headers["x-kvlane-id"]
        async with httpx.AsyncClient(base_url=deployment.gateway.url, timeout=WAIT_S) as http:
            for token, status in ((theirs, 404), ("kvl_a_b", 401), (ours, 202)):
                url = f"/v1/streams/{name}"
                if status != 202:
                    assert (await http.get(url, headers=auth_headers(token))).status_code == status
                assert (await http.delete(url, headers=auth_headers(token))).status_code == status
        await stream.http_response.aclose()


async def test_openai_client_raises_its_own_error_types(keys: KeyFileHarness) -> None:
    good, limited = keys.add("acme"), keys.add("small")
    keys.limit("small", requests_per_minute=1)
    async with deployed(keys) as deployment:
        for wrong in ("none", good[:-1]):
            with pytest.raises(openai.AuthenticationError) as refused:
                await complete(deployment.client(wrong))
            assert refused.value.code == "invalid_api_key"
        await complete(deployment.client(limited))
        with pytest.raises(openai.RateLimitError) as over:
            await complete(deployment.client(limited))
        assert over.value.code == "rate_limit_exceeded"
        assert int(over.value.response.headers["retry-after"]) > 50
        client = deployment.client(good)
        assert [model.id async for model in client.models.list()] == ["demo"]
        keys.revoke(good)
        store = deployment.gateway.parts.access.store
        assert store is not None
        await until(lambda: store.find(good) is None)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_no_key_is_in_a_log_line_or_on_a_topic(
    keys: KeyFileHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    good, small = keys.add("acme"), keys.add("small")
    keys.limit("small", requests=0)
    wrong = good[:-4] + "abcd"
    async with deployed(keys, log_level="DEBUG") as deployment:
        await complete(deployment.client(good))
        for token, error in ((wrong, openai.AuthenticationError), (small, openai.RateLimitError)):
            with pytest.raises(error):
                await complete(deployment.client(token))
        async with httpx.AsyncClient(base_url=deployment.gateway.url, timeout=WAIT_S) as http:
            for token in (good, wrong):
                for body in (b"{", b'{"model": "none", "prompt": "a"}'):
                    await http.post("/v1/completions", content=body, headers=auth_headers(token))
                await http.get("/v1/streams/none", headers=auth_headers(token))
                await http.get("/metrics", headers=auth_headers(token))
        # An error that nobody foresaw is logged with its traceback.
        deployment.gateway.parts.streams.check_capacity = None  # type: ignore[assignment,method-assign]
        with pytest.raises(openai.InternalServerError):
            await complete(deployment.client(good))
        log = deployment.bytes_of_the_log()
    clients = ("openai", "httpx", "httpcore")
    lines = [
        caplog.handler.format(record)
        for record in caplog.records
        if not record.name.startswith(clients)
    ]
    assert any("Traceback" in line for line in lines)
    assert b"acme" in log
    assert len(log) > 1000
    for token in (good, wrong, small):
        secret = token.split("_", 2)[2]
        for part in (token, secret, secret[:12]):
            assert part.encode() not in log
            assert not [line for line in lines if part in line]


async def test_without_a_key_the_body_is_not_awaited(keys: KeyFileHarness) -> None:
    async with deployed(keys) as deployment:
        port = int(deployment.gateway.url.rpartition(":")[2])
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        for more in (b"", b"expect: 100-continue\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + more + b"content-length: 8000000\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                status = await reader.readline()
            assert status.startswith(b"HTTP/1.1 401")
            writer.close()
            await writer.wait_closed()
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            url = f"{deployment.gateway.url}/v1/chat/completions"
            answer = await http.post(url, content=b"x" * 8_000_000)
            assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_streams_and_refusals_leave_nothing_counted(keys: KeyFileHarness) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests=3, tokens=100_000)
    async with deployed(keys) as deployment:
        client = deployment.client(token)

        async def hang_up(after: int) -> None:
            stream = await client.completions.create(
                model="demo", prompt=TEXT, max_tokens=1500, stream=True
            )
            async for _ in stream:
                if not (after := after - 1):
                    break
            await stream.close()

        for _ in range(5):
            outcomes = await asyncio.gather(
                *(hang_up(after) for after in (1, 2, 3, 4, 5)), return_exceptions=True
            )
            refused = [each for each in outcomes if each is not None]
            assert all(isinstance(each, openai.RateLimitError) for each in refused)
            assert len(refused) == 2
            await until(lambda: not deployment.gateway.parts.streams.open_streams)
        store = deployment.gateway.parts.access.store
        assert store is not None
        quota = store.quota("acme")
        await until(lambda: quota.is_idle)


# --- TLS ------------------------------------------------------------------------------------------


def certificate(folder: Path, *more: str) -> TlsFiles:
    """A self-signed certificate for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the command openssl is missing")
    tls = TlsFiles(folder / "tls.crt", folder / "tls.key")
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            *(more or ("-nodes",)), "-days", "2", "-subj", "/CN=kvlane",
            "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(tls.key), "-out", str(tls.certificate),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return tls


async def test_openai_client_connects_over_tls(keys: KeyFileHarness, tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    token = keys.add("acme")
    trust = ssl.create_default_context(cafile=tls.certificate)
    over = {"http_tls_cert": tls.certificate, "http_tls_key": tls.key}
    async with deployed(keys, **over) as deployment:
        assert deployment.gateway.url.startswith("https://")
        client = deployment.client(token, http_client=httpx.AsyncClient(verify=trust))
        stream = await client.completions.create(
            model="demo", prompt=TEXT, max_tokens=20, stream=True
        )
        assert len([chunk async for chunk in stream]) > 1
        with pytest.raises(openai.APIConnectionError):
            await complete(deployment.client(token))  # it does not trust the certificate
        plain = deployment.gateway.url.replace("https:", "http:")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{plain}/livez")


def test_files_that_are_no_certificate_and_key_are_refused(tmp_path: Path) -> None:
    good = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    locked = certificate(tmp_path / "other", "-passout", "pass:x")
    for cert, key in (
        (good.certificate, locked.key),
        (locked.certificate, locked.key),
        (good.key, good.key),
        (good.certificate, good.certificate),
    ):
        with pytest.raises(SettingsError, match=r"KVLANE_HTTP_TLS_CERT=.* cannot be used"):
            TlsFiles.of(Settings(http_tls_cert=cert, http_tls_key=key))
    with pytest.raises(SettingsError, match="belong together"):
        Settings(http_tls_cert=good.certificate)
    assert TlsFiles.of(Settings()) is None
