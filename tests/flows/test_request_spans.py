"""Tests of the spans of requests through a whole deployment in memory, and at a receiver of
OTLP."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvlane.app.gateway import Gateway
from kvlane.app.local.deployment import InProcessDeployment, deployment_parts
from kvlane.app.runtime import spans
from kvlane.app.settings import Settings
from kvlane.app.standalone import PROCESS_FACTORIES
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, PROMPTS, REQUESTS

TRACE, CALLER = "1" * 32, "2" * 16
SAMPLED = f"00-{TRACE}-{CALLER}-01"
NOT_SAMPLED = f"00-{TRACE}-{CALLER}-00"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
LANES = 2
WAIT_S = 120.0


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = spans.new_provider(0, SimpleSpanProcessor(exporter), "test")
    monkeypatch.setattr(spans, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


class World:
    """A deployment with two workers that are as slow as a GPU, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self.broker = MemoryBroker(self.clock, lanes=LANES)
        settings = Settings(
            lanes=LANES, cache_dir=folder, http_port=0, indexer_port=0, heartbeat_interval_s=0.1,
            worker_timeout_s=0.5,
        )  # fmt: skip
        self.parts = InProcessDeployment(
            deployment_parts(workers=2), PROCESS_FACTORIES, settings, self.broker, random.Random(1)
        )

    async def chat(self, traceparent: str, *, tokens: int = 3, kill: bool = False) -> str:
        """The answer to a streamed chat. `kill`: its worker, at its first token."""
        gateway = self.parts._running["gateway-1"][2]
        assert isinstance(gateway, Gateway)
        headers = {"traceparent": traceparent} if traceparent else {}
        body = BODY | {"stream": True, "max_tokens": tokens}
        answer = ""
        async with (
            httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S, headers=headers) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
            aclosing(response.aiter_lines()) as lines,
        ):
            async for line in lines:
                if not line.startswith("data: {"):
                    continue
                answer += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if answer and kill:
                    kill = False
                    await self.parts.kill(self._assigned_worker())
        return answer

    def _assigned_worker(self) -> str:
        for lane in range(LANES):
            for record in self.broker.records("ledger", lane):
                if (worker := getattr(decode(record), "worker", "")) != "":
                    return str(worker)
        raise AssertionError("nothing is assigned")

    async def publish(self, prompt_id: str, traceparent: str, topic: str) -> None:
        """Publish a prompt to a topic, and read its answer."""
        log = MemoryLog(self.broker, "client")
        await log.start()
        value = json.dumps({"id": prompt_id, "kind": "chat", "body": BODY | {"max_tokens": 3}})
        headers = (("traceparent", traceparent.encode()),)
        await log.append(topic, Entry(prompt_id.encode(), value.encode(), headers), 0)
        async with Client(log, self.clock) as client, asyncio.timeout(WAIT_S):
            async for _ in client.stream(prompt_id, timeout_s=WAIT_S):
                pass
        await log.close()

    def requests(self) -> list[Request]:
        found = [decode(r) for lane in range(LANES) for r in self.broker.records(REQUESTS, lane)]
        return [each for each in found if isinstance(each, Request)]


def run(folder: Path, **asked: object) -> World:
    async def scenario() -> World:
        world = World(folder)
        await world.parts.start()
        try:
            if "publish" in asked:
                await world.publish("p", str(asked["publish"]), str(asked.get("topic", PROMPTS)))
            else:
                await world.chat(**asked)  # type: ignore[arg-type]
        finally:
            await world.parts.stop()
        return world

    return asyncio.run(scenario())


def parents(exporter: InMemorySpanExporter) -> dict[str, str]:
    """By name of a span and its attempt, those of its parent."""
    found = exporter.get_finished_spans()
    names = {f"{CALLER}": "caller"} | {span_id(each): named(each) for each in found}
    return {named(each): names[f"{each.parent.span_id:016x}"] for each in found if each.parent}


def named(span: ReadableSpan) -> str:
    return f"{span.name} {(span.attributes or {}).get('attempt', '')}".strip()


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_each_process_adds_its_spans_below_that_of_the_client(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    run(tmp_path, traceparent=SAMPLED)
    assert parents(exporter) == {
        "gateway.request": "caller",
        "router.select_worker 0": "gateway.request",
        "router.route_request 0": "gateway.request",
        "worker.run 0": "router.route_request 0",
        "engine.generate 0": "worker.run 0",
    }
    assert {f"{each.context.trace_id:032x}" for each in exporter.get_finished_spans()} == {TRACE}
    by_name = {each.name: each for each in exporter.get_finished_spans()}
    assert (by_name["engine.generate"].attributes or {})["output_tokens"] == 3
    assert (by_name["worker.run"].attributes or {})["code"] == "length"


def test_prompt_on_kafka_continues_the_trace_of_its_header(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    run(tmp_path, publish=SAMPLED)
    found = parents(exporter)
    assert found["preprocessor.prompt"] == "caller"
    assert found["router.route_request 0"] == "preprocessor.prompt"
    assert found["engine.generate 0"] == "worker.run 0"


def test_batch_prompt_has_spans_of_faststream_and_continues_its_trace(
    exporter: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = spans.new_provider(1, SimpleSpanProcessor(exporter), "test")
    monkeypatch.setattr(spans, "provider", provider)
    run(tmp_path, publish=SAMPLED, topic=BATCH)
    found = parents(exporter)
    assert found["preprocessor.prompt"] == "caller"
    assert found["router.route_request 0"] == "preprocessor.prompt"
    assert found["kvlane.batch process"] == "kvlane.batch create"
    assert found["kvlane.requests publish"] == "kvlane.requests create"


def test_run_of_a_second_attempt_is_linked_to_the_first(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    run(tmp_path, traceparent=SAMPLED, tokens=100, kill=True)
    runs = {named(each): each for each in exporter.get_finished_spans()}
    second = runs["worker.run 1"]
    assert parents(exporter)["worker.run 1"] == "router.route_request 1"
    [link] = second.links
    assert f"{link.context.span_id:016x}" == span_id(runs["worker.run 0"])


@pytest.mark.parametrize("traceparent", ["", NOT_SAMPLED, "00-not-a-parent-01"])
def test_unsampled_request_leaves_no_spans(
    exporter: InMemorySpanExporter, tmp_path: Path, traceparent: str
) -> None:
    world = run(tmp_path, traceparent=traceparent)
    assert exporter.get_finished_spans() == ()
    assert [each.traceparent for each in world.requests()] == [""]


@pytest.mark.parametrize(("received", "carried"), [(SAMPLED, SAMPLED), (NOT_SAMPLED, ""), ("", "")])
def test_without_a_receiver_the_trace_of_the_client_is_propagated(
    tmp_path: Path, received: str, carried: str
) -> None:
    world = run(tmp_path, traceparent=received)
    assert [each.traceparent for each in world.requests()] == [carried]


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP receiver: its URL, and what it has received."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        serving.join()


def test_spans_reach_an_otlp_receiver_before_the_process_ends(
    receiver: tuple[str, list[ExportTraceServiceRequest]],
) -> None:
    url, received = receiver
    settings = Settings(trace_endpoint=url, trace_sample_ratio=1)
    with spans.exported(settings, "gateway"):
        spans.start_first_span("gateway.request", "", SpanKind.SERVER).end()
    [[of_process]] = [each.resource_spans for each in received]
    names = {a.key: a.value.string_value for a in of_process.resource.attributes}
    assert names["service.name"] == "kvlane-gateway"
    assert [each.name for each in of_process.scope_spans[0].spans] == ["gateway.request"]


def test_without_an_endpoint_nothing_is_set_up() -> None:
    with spans.exported(Settings(), "gateway"):
        assert spans.tracer is None
        assert spans.start_first_span("gateway.request", SAMPLED, SpanKind.SERVER) is spans.NO_SPAN
