"""Tests of keys, tenants and TLS on a real broker: the gateway as `faststream run` starts it, in
debug."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from aiokafka import AIOKafkaConsumer
from pydantic import SecretStr
from typer.testing import CliRunner

from kvlane.app.cli import app as cli
from kvlane.app.collector import Collector
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.gateway import Gateway
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.topics import TOPICS_BY_NAME
from tests.flows.test_access_sockets import BLOCK, cached, certificate, complete
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned, wait_answered
from tests.harness.key_files import SECRET, KeyFileHarness, auth_headers

LANES = 4

pytestmark = pytest.mark.slow


@pytest.fixture
async def settings(kafka: Broker, topic_prefix: str) -> AsyncIterator[Settings]:
    """A deployment with a router and a worker in this process."""
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers,
        topic_prefix=topic_prefix,
        lanes=LANES,
        http_port=free_ports(1)[0],
    )
    async with provisioned(settings) as log:
        ctx = ProcessContext("parts", rng=random.Random(1))
        router = Router(log, settings, ctx)
        shape = EngineLimits(block_size=BLOCK, cache_blocks=1024)
        engine = SimulatedEngine(ctx.clock, shape, model="demo", context_length=2000, speedup=20)
        worker = Worker(log, settings, ctx, engine, worker_id="w1")
        await worker.start()
        await router.start()
        yield settings
        assert ctx.error is None
        await router.stop()
        await ctx.cancel_tasks()


async def test_tenants_are_kept_apart_and_no_key_leaves_the_gateway(
    settings: Settings, tmp_path: Path
) -> None:
    keys, tls = KeyFileHarness(tmp_path), certificate(tmp_path)
    ours, theirs = keys.add("acme"), keys.add("globex")
    trust = ssl.create_default_context(cafile=tls.certificate)
    variables = {
        "BOOTSTRAP_SERVERS": settings.bootstrap_servers, "TOPIC_PREFIX": settings.topic_prefix,
        "LANES": LANES, "HTTP_PORT": settings.http_port, "LOG_LEVEL": "DEBUG", "DEBUG": "true",
        "API_KEYS_FILE": keys.path, "STREAM_SECRET": SECRET, "HTTP_HOST": "0.0.0.0",
        "HTTP_TLS_CERT": tls.certificate, "HTTP_TLS_KEY": tls.key,
    }  # fmt: skip
    env = os.environ | {f"KVLANE_{name}": str(value) for name, value in variables.items()}
    output = tmp_path / "gateway.log"
    with app_process("gateway", output, env) as gateway:
        await _share_nothing(gateway, settings, keys, trust)
        gateway.terminate()
        code = gateway.wait(WAIT_S)
    got = output.read_bytes()
    assert code == 0, got.decode()
    log = await _bytes_of(settings)
    assert b"acme" in log
    for token in (ours, theirs, ours[:-4] + "abcd"):
        for part in (token, token.split("_", 2)[2], token.split("_", 2)[2][:12]):
            assert part.encode() not in got
            assert part.encode() not in log


@asynccontextmanager
async def guarded_gateways(
    settings: Settings, keys: KeyFileHarness, names: Sequence[str]
) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """A client with the first key for each of these gateways."""
    guarded = settings.model_copy(
        update={
            "api_keys_file": keys.path, "stream_secret": SecretStr(SECRET),
            "http_port": 0, "drain_grace_s": 1,
        }
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        clients = []
        for name in names:
            log, ctx = open_log(guarded, name), ProcessContext(name)
            await log.start()
            stack.push_async_callback(log.close)
            stack.push_async_callback(ctx.cancel_tasks)
            gateway = Gateway(log, guarded, ctx)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            client = openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key=keys.tokens[0], max_retries=0, timeout=WAIT_S
            )
            clients.append(await stack.enter_async_context(client))
        yield clients


async def test_limit_holds_over_two_gateways(settings: Settings, tmp_path: Path) -> None:
    keys = KeyFileHarness(tmp_path)
    keys.add("acme")
    keys.limit("acme", requests=4)
    async with guarded_gateways(settings, keys, ["g1", "g2"]) as clients:

        async def ask(number: int) -> openai.AsyncStream[Any] | None:
            try:
                return await clients[number % 2].completions.create(
                    model="demo", prompt="a", max_tokens=1900, stream=True
                )
            except openai.RateLimitError:
                return None

        begun = [each for each in await asyncio.gather(*map(ask, range(60))) if each]
        assert len(begun) == 4
        for stream in begun:
            await stream.close()
        clock = SystemClock()
        late = clock.now() + WAIT_S
        for number in range(2):
            while (answer := await ask(number)) is None:
                assert clock.now() < late, "closed streams count on"
                await clock.sleep(0.1)
            await answer.close()


async def test_budget_holds_over_three_gateways(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under parallel load, by the answers that clients got and by the usage that was written."""
    budget, longest = 1200, 1 + 60
    keys = KeyFileHarness(tmp_path)
    keys.add("acme")
    keys.limit("acme", tokens_per_day=budget)
    used = 0
    log, ctx = open_log(settings, "collector"), ProcessContext("collector")
    async with AsyncExitStack() as stack:
        await log.start()
        stack.push_async_callback(log.close)
        stack.push_async_callback(ctx.cancel_tasks)
        collector = Collector(log, settings, ctx)
        await collector.start()
        stack.push_async_callback(collector.stop)
        clients = await stack.enter_async_context(
            guarded_gateways(settings, keys, ["g1", "g2", "g3"])
        )
        late_s = SystemClock().now() + WAIT_S

        async def ask_until_refused(number: int) -> openai.RateLimitError:
            nonlocal used
            rng = random.Random(number)
            while SystemClock().now() < late_s:
                try:
                    answer = await rng.choice(clients).completions.create(
                        model="demo", prompt="a", max_tokens=rng.randint(10, longest - 1)
                    )
                except openai.RateLimitError as e:
                    if e.code != "rate_limit_exceeded":
                        return e
                    await asyncio.sleep(0.1)
                else:
                    assert answer.usage is not None
                    used += answer.usage.total_tokens
            raise AssertionError("the budget is never used up")

        refusals = await asyncio.gather(*map(ask_until_refused, range(9)))
        assert budget <= used < budget + longest
        for refusal in refusals:
            assert refusal.code == "insufficient_quota"
            assert 0 < int(refusal.response.headers["retry-after"]) <= 86_400
        rows = await asyncio.to_thread(_budget_rows, settings, keys, monkeypatch, used)
    assert [(row["limit"], row["budget"], row["left"]) for row in rows] == [
        ("tokens_per_day", budget, 0)
    ]


def _budget_rows(
    settings: Settings, keys: KeyFileHarness, monkeypatch: pytest.MonkeyPatch, used: int
) -> list[dict[str, Any]]:
    """The rows of `kvlane usage --budgets`, once all usage is written; its table and the sums of
    `kvlane usage` have the same tokens."""
    for name in ("bootstrap_servers", "topic_prefix", "lanes"):
        monkeypatch.setenv(f"KVLANE_{name.upper()}", str(getattr(settings, name)))
    monkeypatch.setenv("KVLANE_API_KEYS_FILE", str(keys.path))
    monkeypatch.setenv("KVLANE_STREAM_SECRET", SECRET)

    def usage(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["usage", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    late_s = SystemClock().now() + WAIT_S
    while SystemClock().now() < late_s:
        rows: list[dict[str, Any]] = msgspec.json.decode(usage("--budgets", "--json", "-"))[
            "budgets"
        ]
        if rows[0]["used"] == used:
            head, row = usage("--by", "tenant", "--csv", "-").splitlines()
            sums = dict(zip(head.split(","), row.split(","), strict=True))
            assert sums["tenant"] == "acme"
            assert int(sums["prompt_tokens"]) + int(sums["output_tokens"]) == used
            head, row = usage("--budgets").splitlines()
            assert head.split()[:5] == ["tenant", "limit", "budget", "used", "left"]
            assert head.endswith("begins anew (UTC)")
            assert row.split()[:5] == ["acme", "tokens_per_day", "1200", str(used), "0"]
            assert row.endswith(" 00:00")
            return rows
    raise AssertionError(f"{rows} have not the {used} tokens of the answers")


async def _share_nothing(
    gateway: subprocess.Popen[bytes],
    settings: Settings,
    keys: KeyFileHarness,
    trust: ssl.SSLContext,
) -> None:
    ours, theirs = keys.tokens
    url = f"https://127.0.0.1:{settings.http_port}"
    clock = SystemClock()
    async with httpx.AsyncClient(base_url=url, verify=trust, timeout=WAIT_S) as http:

        async def status(path: str, token: str, method: str = "GET") -> int:
            return (await http.request(method, path, headers=auth_headers(token))).status_code

        models = "/v1/models"
        await wait_answered(gateway, http, models, lambda a: a.json()["data"], auth_headers(ours))
        mine, other = (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, http_client=http, max_retries=0)
            for token in (ours, theirs)
        )
        counts = [cached(await complete(client)) for client in (mine, other, mine, other)]
        assert counts == [0, 0, 8 * BLOCK, 8 * BLOCK]
        answer = await mine.completions.with_raw_response.create(
            model="demo", prompt="a", max_tokens=1500, stream=True
        )
        stream = f"/v1/streams/{answer.headers['x-kvlane-id']}"
        assert await status(stream, theirs) == await status(stream, theirs, "DELETE") == 404
        assert await status(stream, ours[:-4] + "abcd") == await status(stream, "none") == 401
        assert await status("/metrics", ours) == 403
        assert await status(stream, ours, "DELETE") == 202
        keys.revoke(theirs)
        deadline = clock.now() + WAIT_S
        while (code := await status("/v1/models", theirs)) != 401:
            assert code == 200
            assert clock.now() < deadline, "the key is never revoked"
            await clock.sleep(0.1)
        assert await status("/v1/models", ours) == 200


async def _bytes_of(settings: Settings) -> bytes:
    """Keys, values and headers of all records of the deployment."""
    async with AIOKafkaConsumer(
        *(f"{settings.topic_prefix}{name}" for name in TOPICS_BY_NAME),
        bootstrap_servers=settings.bootstrap_servers,
        auto_offset_reset="earliest",
    ) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        parts: list[bytes] = []
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    parts += [record.key or b"", record.value or b""]
                    parts.append(repr(record.headers).encode())
    return b"\n".join(parts)


@pytest.mark.parametrize("kind", ["gateway", "indexer"])
def test_process_that_others_reach_does_not_start_without_keys(kind: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVLANE_")}
    more = {"KVLANE_BOOTSTRAP_SERVERS": "127.0.0.1:1", "KVLANE_HTTP_HOST": "0.0.0.0"}
    done = subprocess.run(
        [sys.executable, "-m", "faststream", "run", f"kvlane.app.{kind}:app"],
        env=env | more, capture_output=True, text=True, timeout=90, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1
    (first,) = done.stderr.splitlines()
    assert "KVLANE_HTTP_HOST=0.0.0.0 is reached from other machines" in first
    assert "KVLANE_API_KEYS_FILE" in first
    assert "KVLANE_HTTP_ALLOW_ANONYMOUS=true" in first
