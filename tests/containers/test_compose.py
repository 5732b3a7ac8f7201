"""Tests of the compose deployment: answers over HTTP and Kafka, while containers of every kind
are killed.

`make compose-up` has started it, with the ports of its file or those in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.kafka.provision import count_lagging_partitions
from tests.harness.http_and_kafka_clients import CLOCK, DeploymentClients, SseListener

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
DASHBOARDS = FOLDER.parent / "grafana" / "dashboards"
COMPOSE = (
    *shlex.split(os.environ.get("COMPOSE", "docker compose")),
    *("--project-directory", str(FOLDER), "--file", str(FOLDER / "compose.yaml")),
)
STREAMS, PROMPTS = 16, 8
"""Over HTTP and over Kafka, at every kill."""
ROUND_S = 120


def port(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


GATEWAYS = (
    f"http://127.0.0.1:{port('GATEWAY_PORT_1', 8000)}",
    f"http://127.0.0.1:{port('GATEWAY_PORT_2', 8001)}",
)
SERVERS = ",".join(
    f"localhost:{port(f'KAFKA_PORT_{number}', 8992 + 100 * number)}" for number in (1, 2, 3)
)
PROMETHEUS = f"http://127.0.0.1:{port('PROMETHEUS_PORT', 9090)}"
SCRAPE_S = 5.0
STALE_METADATA_S = 3.0
"""For this time a restarted broker may return stale metadata."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compose(*command: str) -> str:
    return run(*COMPOSE, *command)


@pytest.fixture
async def users() -> AsyncIterator[DeploymentClients]:
    settings = Settings(bootstrap_servers=SERVERS)
    log = open_log(settings, "users")
    await log.start()
    users = DeploymentClients(log, settings, GATEWAYS)
    await users.judge.load()
    await users.wait_model()
    try:
        async with users.client:
            yield users
    finally:
        for client in users.openai:
            await client.close()
        await log.close()


def chat(name: str) -> dict[str, object]:
    content = f"Describe {name}."
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 300,
        "ignore_eos": True,
    }


async def ask_at_both(
    users: DeploymentClients, about: str, begun: asyncio.Event | None = None
) -> list[DemoAnswer]:
    """Streams at both gateways, which resume at the other one, and prompts over Kafka.

    `begun` is set when every stream has begun.
    """
    bodies = [chat(f"{about} {number}") for number in range(STREAMS)]
    listeners = [SseListener(await users.judge.expect_answer("", "chat", b)) for b in bodies]
    first, second = (httpx.AsyncClient(base_url=url, timeout=ROUND_S) for url in GATEWAYS)

    async def listen(number: int, listener: SseListener) -> None:
        clients = (first, second) if number % 2 else (second, first)
        await listener.send(clients[0], bodies[number])
        while not listener.sent.finish_reason:
            try:
                await listener.resume(clients[1])
            except httpx.TransportError:
                clients = clients[::-1]
                await CLOCK.sleep(0.2)

    published = [
        await users.publish("chat", chat(f"{about}, on Kafka, {n}")) for n in range(PROMPTS)
    ]

    async def watch() -> None:
        while not all(each.sent.text_times or each.sent.finish_reason for each in listeners):
            await CLOCK.sleep(0.02)
        if begun is not None:
            begun.set()

    async with first, second, asyncio.TaskGroup() as group:
        group.create_task(watch())
        for number, listener in enumerate(listeners):
            group.create_task(listen(number, listener))
        for sent in published:
            group.create_task(users.read(sent))
    return [*(listener.sent for listener in listeners), *published]


def assert_right(answers: list[DemoAnswer]) -> None:
    wrong = [(a.id, a.finish_reason, len(a.text)) for a in answers if not a.is_correct]
    assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:5]}"


async def test_chats_and_prompts_on_kafka_are_answered(users: DeploymentClients) -> None:
    assert_right(await ask_at_both(users, uuid.uuid4().hex))


async def start_missing_containers() -> None:
    """Returns when all are ready."""
    await asyncio.to_thread(
        compose, "up", "--detach", "--no-recreate", "--wait", "--wait-timeout", "120"
    )


@pytest.mark.parametrize(
    "victim",
    ["gateway-1", "preprocessor", "router-1", "collector", "indexer", "worker-1", "kafka-1"],
)
async def test_killed_container_loses_nothing(users: DeploymentClients, victim: str) -> None:
    async with asyncio.timeout(ROUND_S * 2):
        begun = asyncio.Event()
        asking = asyncio.create_task(ask_at_both(users, f"{victim} {uuid.uuid4().hex}", begun))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            await asking  # raises the error, if there was one
        assert not asking.done(), "all answers were over before"
        await asyncio.to_thread(compose, "kill", victim)
        try:
            if victim == "preprocessor":  # the only one: its prompts wait
                await CLOCK.sleep(2)
                await asyncio.to_thread(compose, "up", "--detach", "--no-recreate", victim)
            assert_right(await asking)
        finally:
            await start_missing_containers()


async def test_broker_with_an_empty_disk_catches_up_and_loses_nothing(
    users: DeploymentClients,
) -> None:
    async with asyncio.timeout(ROUND_S * 2):
        begun = asyncio.Event()
        asking = asyncio.create_task(ask_at_both(users, f"disk {uuid.uuid4().hex}", begun))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not asking.done(), "all answers were over before"
        await asyncio.to_thread(compose, "kill", "kafka-2")
        await asyncio.to_thread(compose, "rm", "--force", "kafka-2")
        await asyncio.to_thread(run, "docker", "volume", "rm", "kvlane_kafka-2")
        await start_missing_containers()
        assert_right(await asking)
        await CLOCK.sleep(STALE_METADATA_S)
        while await count_lagging_partitions(users.log):
            await CLOCK.sleep(0.5)
    assert_right(await ask_at_both(users, uuid.uuid4().hex))


async def series(prometheus: httpx.AsyncClient, query: str) -> list[object]:
    """The series that a query finds now."""
    answer = (await prometheus.get("/api/v1/query", params={"query": query})).json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


def with_values(query: str) -> str:
    """The query as Grafana sends it, with all values of each variable."""
    return re.sub(r'"\$\w+"', '".*"', query.replace("$__rate_interval", "2m"))


async def test_queries_of_dashboards_have_data(users: DeploymentClients) -> None:
    async with httpx.AsyncClient(base_url=PROMETHEUS) as prometheus:
        try:
            (await prometheus.get("/-/ready")).raise_for_status()
        except httpx.HTTPError:
            pytest.skip(f"no Prometheus at {PROMETHEUS}: COMPOSE_PROFILES=monitoring")
        for _ in range(2):  # a rate needs an increase between two samples
            assert_right(await ask_at_both(users, uuid.uuid4().hex))
            await CLOCK.sleep(2 * SCRAPE_S)
        assert await series(prometheus, "up == 0") == []
        queries = [
            target["expr"]
            for file in sorted(DASHBOARDS.glob("*.json"))
            for panel in json.loads(file.read_text())["panels"]
            for target in panel["targets"]
        ]
        silent = {query for query in queries if not await series(prometheus, with_values(query))}
    assert queries
    assert silent == set()
