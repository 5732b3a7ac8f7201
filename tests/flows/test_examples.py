"""Tests of the programs of `examples/`, beside a deployment on a real Kafka."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from faststream.kafka import TestKafkaBroker

from examples import faststream_service, faststream_tools
from examples.faststream_service import Answer, Question, Result, ResultError, Usage
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker, java_tool
from kvlane.streams.prompt import Prompt, encode_prompt
from kvlane.testing import ScriptedEngine, memory_deployment
from tests.harness.kafka_processes import provisioned

ROOT = Path(__file__).resolve().parents[2]
LANES = 4
WAIT_S = 120.0
TOOLS = {
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
}


class Deployment(NamedTuple):
    """A running deployment, as its clients see it."""

    servers: str
    prefix: str
    url: str


@pytest.fixture
async def deployment(kafka: Broker, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
        engine_speedup=20, reply_topic_prefixes="replies-",
    )  # fmt: skip
    ctx = ProcessContext("standalone", rng=random.Random(1))
    async with provisioned(settings) as log:
        everything = StandaloneProcess(log, settings, ctx)
        await everything.start()
        yield Deployment(kafka.bootstrap_servers, topic_prefix, everything.gateway.url)
        await everything.stop()
        assert ctx.error is None
        await ctx.cancel_tasks()


async def start(*command: str, cwd: Path = ROOT, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def output_of(*command: str, **environment: str) -> str:
    process = await start(*command, **environment)
    try:
        out, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_index_is_used_alone() -> None:
    lines = (await output_of(sys.executable, "examples/index_alone.py")).splitlines()
    assert sorted(lines) == [
        "worker-1 holds 96 of 100 tokens",
        "worker-1 holds 96 of 100 tokens",
        "worker-2 holds 16 of 100 tokens",
        "worker-2 holds 32 of 100 tokens",
    ]


@pytest.mark.kafka
async def test_openai_package_streams_a_chat(deployment: Deployment) -> None:
    shown = await output_of(
        sys.executable, "examples/openai_client.py", OPENAI_BASE_URL=f"{deployment.url}/v1"
    )
    text, counted = shown.rstrip().rsplit("\n", 1)
    assert text
    assert counted.endswith(" tokens")


@pytest.mark.kafka
async def test_prompt_is_published_and_followed(deployment: Deployment) -> None:
    shown = await output_of(
        sys.executable, "examples/publish_and_follow.py", deployment.servers, deployment.prefix
    )
    text, counted = shown.rstrip().rsplit("\n", 1)
    assert text
    assert counted.endswith(" tokens")


@pytest.mark.kafka
async def test_console_tools_publish_and_read(deployment: Deployment, tmp_path: Path) -> None:
    for name, main in TOOLS.items():
        wrapper = tmp_path / name
        command = " ".join(f"'{part}'" for part in java_tool(main))
        wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        wrapper.chmod(0o755)
    shown = await output_of(
        "bash", "examples/console_clients.sh", deployment.servers, deployment.prefix,
        KAFKA_BIN=str(tmp_path),
    )  # fmt: skip
    assert '"t":"Chunk"' in shown
    assert '"finish_reason":"length"' in shown


@pytest.mark.kafka
async def test_custom_engine_serves_a_model(deployment: Deployment) -> None:
    worker = await start(
        sys.executable, "-m", "faststream", "run", "examples.custom_engine:app",
        KVLANE_BOOTSTRAP_SERVERS=deployment.servers, KVLANE_TOPIC_PREFIX=deployment.prefix,
        KVLANE_LANES=str(LANES), KVLANE_WORKER_ID="shouter", KVLANE_VALIDATE_ENGINE="true",
    )  # fmt: skip
    try:
        body = {"model": "shout", "prompt": "hello", "max_tokens": 5}
        async with httpx.AsyncClient(base_url=deployment.url, timeout=WAIT_S) as http:
            async with asyncio.timeout(WAIT_S):
                while (answer := await http.post("/v1/completions", json=body)).is_error:
                    assert worker.returncode is None
                    await asyncio.sleep(0.2)
        assert answer.json()["choices"][0]["text"] == "HELLO"
    finally:
        worker.terminate()
        await asyncio.wait_for(worker.communicate(), WAIT_S)
    assert worker.returncode == 0


# --- results --------------------------------------------------------------------------------------


@asynccontextmanager
async def topics(servers: str, *names: str) -> AsyncIterator[None]:
    """Topics of a program outside of the deployment."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1) for name in names])
        yield
        await admin.delete_topics(list(names))
    finally:
        await admin.close()


async def test_faststream_service_publishes_prompts_and_handles_results() -> None:
    service = faststream_service

    @service.broker.subscriber(service.prompts.topic)
    async def answer(prompt: Prompt) -> Result:
        """In place of kvlane: what a handler returns goes to the topic of `reply_to`."""
        if prompt.id == "q2":
            return Result(id=prompt.id, status="failed", error=ResultError(message="no worker"))
        text = f"Answer to: {prompt.body['messages'][0]['content']}"
        body = {"choices": [{"message": {"content": text}}]}
        usage = Usage(completion_tokens=3)
        return Result(id=prompt.id, status="completed", body=body, usage=usage)

    async with TestKafkaBroker(service.broker) as broker:
        for name in ("q1", "q2"):
            await broker.publish(Question(id=name, text="What is a log?"), service.QUESTIONS)
        answers = [call.args[0] for call in service.answers.mock.call_args_list]
    assert [Answer.model_validate(answer) for answer in answers] == [
        Answer(id="q1", text="Answer to: What is a log?", tokens=3),
        Answer(id="q2", error="no worker"),
    ]


async def test_faststream_service_executes_the_calls_of_results() -> None:
    service = faststream_tools
    script = json.loads((ROOT / "examples" / "agent_script.json").read_text())
    first = next(iter(script))
    ids = list[str]()
    async with memory_deployment(ScriptedEngine(script)) as deployment:
        http = httpx.AsyncClient(base_url=deployment.url)

        @service.broker.subscriber(service.prompts.topic)
        async def answer(prompt: Prompt) -> service.ToolResult:
            """The whole answer of a deployment, as its collector writes it."""
            ids.append(prompt.id)
            response = await http.post(
                "/v1/chat/completions", json=prompt.body | {"model": "scripted"}
            )
            status = "completed" if response.is_success else "failed"
            return service.ToolResult(
                id=prompt.id, status=status, metadata=prompt.metadata,
                body=response.json() if response.is_success else None,
            )  # fmt: skip

        async with TestKafkaBroker(service.broker) as broker:
            for name, text in (("q1", first), ("q2", "unknown")):
                await broker.publish(Question(id=name, text=text), service.QUESTIONS)
            answers = [call.args[0] for call in service.answers.mock.call_args_list]
        await http.aclose()
    assert ids == ["q1/0", "q1/1", "q1/2", "q2/0"]
    assert [Answer.model_validate(answer) for answer in answers] == [
        Answer(id="q1", text="Yes: it rains in Köln, and the train leaves at 9:41."),
        Answer(id="q2", error="failed"),
    ]


@pytest.mark.kafka
async def test_faststream_service_answers_requests(deployment: Deployment) -> None:
    servers, own = deployment.servers, f"replies-{deployment.prefix}"
    questions, replies, answers = (own + name for name in ("questions", "replies", "answers"))
    async with topics(servers, questions, replies, answers):
        service = await start(
            sys.executable, "-m", "faststream", "run", "examples.faststream_service:app",
            KVLANE_BOOTSTRAP_SERVERS=servers, KVLANE_TOPIC_PREFIX=deployment.prefix,
            EXAMPLE_TOPIC_PREFIX=own,
        )  # fmt: skip
        consumer = AIOKafkaConsumer(
            answers, bootstrap_servers=servers, auto_offset_reset="earliest"
        )
        producer = AIOKafkaProducer(bootstrap_servers=servers)
        await asyncio.gather(consumer.start(), producer.start())
        try:
            for n in range(3):
                question = Question(id=f"{own}{n}", text="What is a log?")
                await producer.send_and_wait(questions, question.model_dump_json().encode())
            found = []
            async with asyncio.timeout(WAIT_S):
                while len(found) < 3:
                    found.append(Answer.model_validate_json((await consumer.getone()).value))
        finally:
            await asyncio.gather(consumer.stop(), producer.stop())
            service.terminate()
            await asyncio.wait_for(service.communicate(), WAIT_S)
        assert {answer.id for answer in found} == {f"{own}{n}" for n in range(3)}
        assert all(answer.text and answer.tokens == 20 and not answer.error for answer in found)


takes_long = pytest.mark.skipif(
    "KVLANE_TEST_LONG" not in os.environ, reason="a minute of Maven: KVLANE_TEST_LONG=1 runs it"
)
needs_maven = pytest.mark.skipif(shutil.which("mvn") is None, reason="mvn is not installed")


async def build(project: Path) -> tuple[str, ...]:
    """Build a Maven project; the command that runs its goals."""
    maven = ("mvn", "-q", "-B", "-Dstyle.color=never", "-f", str(project))
    building = await start(*maven, "compile", "dependency:resolve")
    out, errors = await asyncio.wait_for(building.communicate(), 2 * WAIT_S)
    if building.returncode and b"Could not resolve" in out + errors:
        pytest.skip(f"mvn cannot fetch what {project.name} needs: no Maven repository answers")
    assert building.returncode == 0, (out + errors).decode()
    return maven


@takes_long
@needs_maven
@pytest.mark.slow
@pytest.mark.kafka
async def test_java_program_gets_replies_by_spring_kafka(
    deployment: Deployment, tmp_path: Path
) -> None:
    project = shutil.copytree(ROOT / "examples" / "spring-kafka", tmp_path / "spring-kafka")
    maven = await build(project)
    replies = f"replies-{deployment.prefix}spring"
    async with topics(deployment.servers, replies):
        arguments = f"-Dexec.args={deployment.servers} {deployment.prefix} {replies} 3"
        shown = await output_of(*maven, "exec:java", arguments)
    lines = [line for line in shown.splitlines() if "question-" in line]
    ends = [f"question-{n} completed" for n in (1, 2, 3)]
    assert all(line.partition(":")[0].endswith(end) for line, end in zip(lines, ends, strict=True))
    assert all(line.partition(": ")[2] for line in lines)


@takes_long
@needs_maven
@pytest.mark.slow
@pytest.mark.kafka
async def test_kafka_connect_writes_results_to_a_file(
    deployment: Deployment, tmp_path: Path
) -> None:
    project = shutil.copytree(ROOT / "examples" / "kafka-connect", tmp_path / "kafka-connect")
    maven = await build(project)
    names = [f"line-{number}" for number in range(20)]
    producer = AIOKafkaProducer(bootstrap_servers=deployment.servers)
    await producer.start()
    try:
        for name in names:
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 3}
            key, value, _ = encode_prompt(Prompt(id=name, body=body, result=True))
            await producer.send_and_wait(f"{deployment.prefix}prompts", value, key)
    finally:
        await producer.stop()
    connect = await start(
        *maven, "exec:java", cwd=project,
        KVLANE_BOOTSTRAP_SERVERS=deployment.servers, KVLANE_TOPIC_PREFIX=deployment.prefix,
    )  # fmt: skip
    file = project / "results.jsonl"
    try:
        async with asyncio.timeout(WAIT_S):
            while not file.exists() or file.read_text().count("\n") < len(names):
                assert connect.returncode is None
                await asyncio.sleep(0.2)
        results = [json.loads(line) for line in file.read_text().splitlines()]
    finally:
        if connect.returncode is None:
            connect.terminate()
        await asyncio.wait_for(connect.communicate(), WAIT_S)
    assert sorted(result["id"] for result in results) == sorted(names)
    assert {result["status"] for result in results} == {"completed"}
    assert all(result["body"]["choices"][0]["message"]["content"] for result in results)
