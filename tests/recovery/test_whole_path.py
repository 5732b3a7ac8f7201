"""Tests of the whole path: every part a process, a real broker, OpenAI's own client.

Whatever is killed or stopped, every answer is exactly what the engine says, told once. All tests
share one deployment; each finds it whole and leaves it to the next as it is.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.codecs import decode
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import PROMPTS, RESPONSES, lane_of
from tests.deployments import Deployment
from tests.harness.http_and_kafka_clients import ANSWER_S, CLOCK, DeploymentClients, SseListener
from tests.harness.java_tools import java_publishes, java_reads, transcript_of
from tests.harness.topic_cleanup import delete_topics

LANES = 8
GRACE_S = 30.0
"""Several times what the longest answer takes."""
STOP_S = GRACE_S + 10
"""The grace, and what a stopping process takes for its notice and its last words."""
ROUTERS = ("router-1", "router-2", "router-3")
GATEWAYS = ("gateway-1", "gateway-2")
STREAMS, WHOLES = 200, 40
TOKENS, LONG_TOKENS = 30, 120
"""Long answers take 20 s, so that some still run at the kill on a slow machine."""
PACE_S = 0.1
OBSERVER_TIMEOUT_MS = 20_000
"""Of the test's own connection, whose event loop 240 clients share: on a busy machine the default
of 4 s passed three times in a row before it read an answer."""

pytestmark = pytest.mark.slow


class Ground(NamedTuple):
    """The processes, and how to reach them."""

    deployment: Deployment
    settings: Settings
    urls: tuple[str, ...]
    """Of the gateways."""


async def set_up(settings: Settings) -> None:
    log = open_log(settings, "test")
    await log.start()
    await provision.create_topics(log, lanes=LANES, replication=1, min_insync=1)
    await log.close()


@pytest.fixture(scope="module")
def ground(kafka: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    prefix = f"whole{random.randbytes(4).hex()}."
    common: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "topic_prefix": prefix,
        "lanes": LANES,
        "cache_dir": tmp_path_factory.mktemp("cache"),
        "heartbeat_interval_s": 0.4,
        "worker_timeout_s": 2,
        "session_timeout_ms": 2000,
        "drain_grace_s": GRACE_S,
        "max_attempts": 10,  # on a busy machine a worker that lives may count as dead
        "engine_speedup": 0.05,  # answers of seconds in few pieces, so that users keep up
        "validate_engine": True,
    }
    ports = [free_port() for _ in GATEWAYS]
    parts = [
        DeploymentPart("worker-1", "worker"),
        DeploymentPart("worker-2", "worker"),
        DeploymentPart("worker-3", "worker", {"drain_grace_s": 1}),  # less than most answers take
        *(DeploymentPart(name, "router") for name in ROUTERS),
        DeploymentPart("preprocessor-1", "preprocessor"),
        DeploymentPart("indexer-1", "indexer", {"indexer_port": free_port()}),
        *(
            DeploymentPart(
                name, "gateway", {"http_port": port, "gateway_count": 2, "gateway_index": number}
            )
            for number, (name, port) in enumerate(zip(GATEWAYS, ports, strict=True))
        ),
    ]
    settings = Settings(**common)
    asyncio.run(set_up(settings))
    deployment = Deployment(parts, common)
    try:
        yield Ground(deployment, settings, tuple(f"http://127.0.0.1:{port}" for port in ports))
        asyncio.run(deployment.terminate(deployment.processes, STOP_S))
    finally:
        deployment.close()
        asyncio.run(delete_topics(kafka.bootstrap_servers, prefix))


@pytest.fixture
async def users(ground: Ground) -> AsyncIterator[DeploymentClients]:
    """Everything runs, whatever the test before has left."""
    deployment, settings = ground.deployment, ground.settings
    deployment.launch(*deployment.parts.keys() - deployment.processes.keys())
    await deployment.wait_ready(*deployment.parts)
    patient = settings.model_copy(update={"request_timeout_ms": OBSERVER_TIMEOUT_MS})
    log = KafkaLog(patient.kafka_connection("users"), prefix=settings.topic_prefix)
    await log.start()
    users = DeploymentClients(log, settings, ground.urls)
    await users.judge.load()
    await users.wait_model()
    try:
        async with users.client:
            yield users
        deployment.check()
    finally:
        for client in users.openai:
            await client.close()
        await log.close()


# --- what is asked, and the account of it ---------------------------------------------------------


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


def completion(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": text, **more}


def question(number: int, tokens: int = TOKENS) -> tuple[TokenizedKind, dict[str, Any]]:
    """Chats and completions in turn; every fourth is as long as the model likes."""
    limits: dict[str, Any] = {"max_tokens": tokens + number % 7}
    if number % 4 != 3:
        limits["ignore_eos"] = True
    send = completion if number % 2 else chat
    return ("completion" if number % 2 else "chat"), send(f"Tell me about lane {number}.", **limits)


async def ends(log: KafkaLog) -> dict[Partition, int]:
    found = await log.end_offsets(RESPONSES, range(LANES))
    return {Partition(RESPONSES, lane): end for lane, end in found.items()}


async def transcripts(log: KafkaLog) -> dict[str, Transcript]:
    """What somebody sees of every request who reads the responses now, from the beginning."""
    seen: dict[str, Transcript] = {}
    until = await ends(log)
    reader = log.reader()
    reader.assign(dict.fromkeys(until, 0))
    try:
        async with asyncio.timeout(ANSWER_S):
            while any(reader.position(source) < end for source, end in until.items()):
                for records in (await reader.poll(0.2)).values():
                    for record in map(decode, records):
                        assert isinstance(record, Chunk | Fence | End)
                        seen.setdefault(record.id, Transcript(record.id)).apply(record)
    finally:
        await reader.close()
    return seen


async def check(users: DeploymentClients, sent: list[DemoAnswer]) -> dict[str, Transcript]:
    """Every answer is right for the one who asked, and for one who reads it afterwards."""
    wrong = [
        (a.id, a.finish_reason, len(a.text), len(a.expected.text)) for a in sent if not a.is_correct
    ]
    assert not wrong, f"{len(wrong)} of {len(sent)}: {wrong[:5]}"
    seen = await transcripts(users.log)
    got = {a.id: seen[a.id] for a in sent if a.id}
    for a in sent:
        if a.id:
            assert (got[a.id].text, got[a.id].gaps) == (a.expected.text, 0)
            assert tuple(got[a.id].tokens) == a.expected.token_ids
    return got


async def until(condition: Callable[[], bool], deployment: Deployment) -> None:
    deadline = CLOCK.now() + ANSWER_S
    while not condition():
        deployment.check()
        assert CLOCK.now() < deadline, "it never came true"
        await CLOCK.sleep(0.01)


async def first_fence(log: KafkaLog, sources: dict[Partition, int]) -> None:
    """Wait until a router has begun to give requests to other workers."""
    reader = log.reader()
    reader.assign(sources)
    try:
        async with asyncio.timeout(ANSWER_S):
            while True:
                for records in (await reader.poll(0.2)).values():
                    if any(isinstance(decode(record), Fence) for record in records):
                        return
    finally:
        await reader.close()


async def test_answers_are_correct_although_a_worker_and_all_routers_are_killed(
    ground: Ground, users: DeploymentClients
) -> None:
    deployment = ground.deployment
    questions = [
        question(number, LONG_TOKENS if number % 8 == 0 else TOKENS)
        for number in range(STREAMS + WHOLES)
    ]
    sent = [await users.judge.expect_answer("", *each) for each in questions]
    async with asyncio.TaskGroup() as group:
        for number, (kind, body) in enumerate(questions):
            write = users.stream if number < STREAMS else users.complete
            group.create_task(write(number // 2 % 2, kind, body, sent[number]))
        await until(lambda: sum(bool(a.text_times) for a in sent) >= STREAMS // 4, deployment)
        sources = await ends(users.log)
        assert not all(a.finish_reason for a in sent), "all answers were over before"
        await deployment.kill("worker-1")
        await first_fence(users.log, sources)
        await deployment.kill(*ROUTERS)
        deployment.launch("worker-1", *ROUTERS)
    got = await check(users, sent)
    assert any(t.attempt for t in got.values()), "nothing ran on the worker that was killed"


async def test_published_prompts_are_answered_although_every_router_is_killed(
    ground: Ground, users: DeploymentClients
) -> None:
    deployment = ground.deployment
    async with asyncio.TaskGroup() as group:

        async def publish() -> None:
            for _ in range(20):
                number = len(users.published)
                group.create_task(users.read(await users.publish(*question(number))))

        await publish()
        for name in (*ROUTERS, "preprocessor-1"):
            await deployment.kill(name)
            await publish()
            deployment.launch(name)
            await publish()
            await deployment.wait_ready(name)
    got = await check(users, users.published)
    assert len(got) == 180


async def test_streams_continue_at_another_gateway_when_theirs_is_killed(
    ground: Ground, users: DeploymentClients
) -> None:
    questions = [question(2 * number)[1] for number in range(40)]  # chats
    listeners = [
        SseListener(await users.judge.expect_answer("", "chat", body)) for body in questions
    ]
    first, second = (httpx.AsyncClient(base_url=url, timeout=ANSWER_S) for url in ground.urls)
    async with first, second, asyncio.TaskGroup() as group:
        listening = [
            group.create_task(listener.send(first, body))
            for listener, body in zip(listeners, questions, strict=True)
        ]
        await until(
            lambda: all(each.sent.text_times or each.sent.finish_reason for each in listeners),
            ground.deployment,
        )
        await ground.deployment.kill("gateway-1")
        await asyncio.wait(listening)
        broken = [each for each in listeners if each.breaks]
        assert broken, "all streams were over before"
        for listener in broken:
            group.create_task(listener.resume(second))
    await check(users, [listener.sent for listener in listeners])


@pytest.mark.parametrize(  # the next test stops both routers
    "name", ["worker-1", "worker-3", "preprocessor-1", "indexer-1", "gateway-1"]
)
async def test_process_stopped_under_load_ends_in_order_and_loses_nothing(
    name: str, ground: Ground, users: DeploymentClients
) -> None:
    deployment = ground.deployment
    questions = [question(number) for number in range(60)]
    sent = [await users.judge.expect_answer("", *each) for each in questions]
    async with asyncio.TaskGroup() as group:
        for number, (kind, body) in enumerate(questions):
            group.create_task(users.stream(number // 2 % 2, kind, body, sent[number]))
        await until(lambda: all(a.text_times or a.finish_reason for a in sent), deployment)
        stopping = group.create_task(deployment.terminate([name], STOP_S))
        while not stopping.done():
            number = len(users.published)
            group.create_task(users.read(await users.publish(*question(number))))
            await CLOCK.sleep(PACE_S)
        deployment.launch(name)
    await check(users, sent + users.published)


async def test_routers_restarted_one_after_the_other_lose_and_double_nothing(
    ground: Ground, users: DeploymentClients
) -> None:
    deployment = ground.deployment
    sent: list[DemoAnswer] = []

    async def restart_routers() -> None:
        for name in ROUTERS:
            await deployment.terminate([name], STOP_S)
            deployment.launch(name)
            await deployment.wait_ready(name)

    async with asyncio.TaskGroup() as group:
        restarting = group.create_task(restart_routers())
        while not restarting.done():
            number = len(sent)
            kind, body = question(number)
            sent.append(await users.judge.expect_answer("", kind, body))
            group.create_task(users.stream(number // 2 % 2, kind, body, sent[-1]))
            group.create_task(users.read(await users.publish(*question(number))))
            await CLOCK.sleep(2 * PACE_S)
    await check(users, sent + users.published)


async def test_java_program_publishes_and_reads_the_answer_by_its_key(
    kafka: Broker, ground: Ground, users: DeploymentClients
) -> None:
    prefix = ground.settings.topic_prefix
    body = chat("grüße", max_tokens=20)
    sent = await users.judge.expect_answer("job-17", "chat", body)
    prompt = json.dumps({"id": sent.id, "body": body}, ensure_ascii=False)
    await java_publishes(kafka, prefix + PROMPTS, {sent.id: prompt})
    await users.read(sent)  # so that the whole answer is there
    lane = lane_of(sent.id, LANES)
    count = (await users.log.end_offsets(RESPONSES, [lane]))[lane]
    printed = await java_reads(kafka, prefix + RESPONSES, lane, count)
    answer = transcript_of([value for key, value in printed if key == sent.id])
    assert (answer.text, answer.finish_reason) == (sent.expected.text, sent.expected.finish_reason)
    assert sent.is_correct
