"""Tests of probes and metrics of workers, preprocessors and whole requests."""

from __future__ import annotations

import random

import httpx
import pytest

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.metrics.metric_set import MetricSet
from kvlane.app.metrics.router_metrics import RequestMetrics
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.worker import Worker
from kvlane.indexer.cache_events.engine_events import EventsLost
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import AppendFate, MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS, PROMPTS
from tests.flows.test_preprocessor import begin, publish, send
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import WorkerHarness

Process = Worker | Preprocessor | Router


async def get(process: Process, path: str) -> HttpExchange:
    return await HttpExchange(process.http, "GET", path).wait_done()


async def figures(process: Process) -> dict[str, float]:
    page = (await get(process, "/metrics")).content.decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name.removeprefix("kvlane_"): float(value) for name, _, value in lines}


@scenario_test
async def test_worker_is_ready_once_it_is_registered(world: MemoryWorld) -> None:
    engine = EchoEngine(world.clock, 0.01)
    ctx = ProcessContext("w", world.clock, random.Random(1))
    worker = Worker(await world.connect("w"), memory_settings(), ctx, engine, worker_id="w")
    ready = await get(worker, "/readyz")
    assert (ready.status, ready.json["registered"]) == (503, False)
    await worker.start()
    ready = await get(worker, "/readyz")
    assert (ready.status, ready.json["ready"]) == (200, True)
    assert (await get(worker, "/livez")).status == 200


@scenario_test
async def test_worker_whose_heartbeats_are_not_acknowledged_is_not_ready(
    world: MemoryWorld,
) -> None:
    worker_harness = WorkerHarness(world)
    worker = await worker_harness.start()
    world.faults.next_fates(KV_EVENTS, *[AppendFate.LOST] * 1000)
    await world.sleep(6)
    ready = await get(worker, "/readyz")
    assert (ready.status, ready.json["heartbeats_acknowledged"]) == (503, False)
    assert (await get(worker, "/livez")).status == 200, "a restart does not mend the log"


@scenario_test
async def test_worker_that_drains_is_not_ready(world: MemoryWorld) -> None:
    worker_harness = WorkerHarness(world)
    worker = await worker_harness.start()
    world.spawn(worker.stop())
    await world.sleep(0.5)
    ready = await get(worker, "/readyz")
    assert (ready.status, ready.json["taking_requests"]) == (503, False)


@scenario_test
async def test_worker_that_failed_is_not_alive(world: MemoryWorld) -> None:
    worker_harness = WorkerHarness(world)
    worker = await worker_harness.start()
    worker_harness.ctx.fail(RuntimeError("broken"))
    assert (await get(worker, "/livez")).status == 503


@scenario_test
async def test_runs_of_a_worker_are_counted_with_their_tokens_and_times(world: MemoryWorld) -> None:
    worker_harness = WorkerHarness(world)
    worker = await worker_harness.start()
    assignment = worker_harness.assign(max_tokens=5)
    worker._on_engine_events([EventsLost()])
    await world.sleep(0.3)
    assert (await figures(worker))["worker_requests_running"] == 1
    await worker_harness.wait_finished()
    await world.sleep(1)
    got = await figures(worker)
    assert got["worker_requests_running"] == got["worker_requests_waiting"] == 0
    assert got['worker_runs_total{code="length",model="echo"}'] == 1
    assert got['worker_skipped_kv_events_total{reason="gaps"}'] == 1
    assert got['worker_skipped_kv_events_total{reason="malformed"}'] == 0
    assert got['worker_output_tokens_total{model="echo"}'] == 5
    prompt = assignment.request.prompt_tokens
    assert got['worker_prompt_tokens_total{model="echo"}'] == prompt
    assert got['worker_time_to_first_token_seconds_count{model="echo"}'] == 1
    assert got['worker_inter_token_latency_seconds_sum{model="echo"}'] == pytest.approx(
        0.1, rel=0.2
    )


@scenario_test
async def test_prompts_are_counted_by_outcome(world: MemoryWorld) -> None:
    preprocessor, _ = await begin(world)
    send(world, "a")
    send(world, "b", body={})
    send(world, "c", kind="cancel")
    publish(world, None, b"no prompt")
    await world.sleep(5)
    got = await figures(preprocessor)
    for outcome in ("request", "refused", "cancel", "dead_letter"):
        assert got[f'preprocessor_prompts_total{{outcome="{outcome}"}}'] == 1
    assert got['preprocessor_rejected_prompts_total{code="invalid"}'] == 1
    assert got["preprocessor_prompt_age_seconds_count"] == 4
    assert got["preprocessor_models"] == 1


@scenario_test
async def test_preprocessor_is_ready_when_it_has_read_the_registry(world: MemoryWorld) -> None:
    preprocessor, _ = await begin(world)
    ready = await get(preprocessor, "/readyz")
    assert (ready.status, ready.json["models"]) == (200, 1)


@scenario_test
async def test_prompts_over_kafka_are_timed_from_their_append_with_their_model(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    router = await harness.start_router()
    await begin(world, models=False)
    send(world, "a", body={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    await world.sleep(3)
    await harness.start_worker("w1")
    await world.sleep(10)
    got = await figures(router)
    assert got['router_requests_total{model="demo",outcome="length"}'] == 1
    (prompt,) = world.all_records(PROMPTS)
    assert prompt.timestamp > 0
    assert 3 <= got['router_request_queue_time_seconds_sum{model="demo"}'] < 5
    waited_s = got['router_request_queue_time_seconds_sum{model="demo"}']
    assert (
        waited_s
        < got['router_request_time_to_first_token_seconds_sum{model="demo"}']
        < waited_s + 1
    )
    assert got['router_request_inter_token_latency_seconds_sum{model="demo"}'] == pytest.approx(
        0.02, rel=0.2
    )


@scenario_test
async def test_requests_over_http_are_in_the_same_metrics(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    router = await harness.start_router()
    await harness.start_worker("w1")
    assert (await harness.chat(max_tokens=4).wait_done()).status == 200
    await world.sleep(2)
    got = await figures(router)
    assert got['router_requests_total{model="demo",outcome="length"}'] == 1
    assert got['router_request_time_to_first_token_seconds_count{model="demo"}'] == 1


@scenario_test
async def test_name_of_a_model_that_no_worker_serves_is_no_label(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    router = await harness.start_router()
    await harness.start_worker("w1")
    request = Request(id="a", model="made-up", deadline_s=5)
    world.append("requests", 0, request, key="a")
    await world.sleep(20)
    got = await figures(router)
    assert not [name for name in got if "made-up" in name]
    assert [name for name in got if name.startswith('router_requests_total{model="unknown"')]


def test_unfinished_requests_are_dropped_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr("kvlane.app.metrics.router_metrics.MAX_TRACKED_REQUESTS", 10)
    metrics = RequestMetrics(MetricSet())
    for n in range(100):
        metrics.on_accepted(Request(id=f"r{n}", model="m"), is_served=True)
    assert len(metrics._open) == 10


async def test_every_process_listens_on_a_port_of_its_own() -> None:
    broker = MemoryBroker(SystemClock(), lanes=2)
    settings = memory_settings(status_port=0)
    contexts = [ProcessContext(name, rng=random.Random(1)) for name in ("w1", "p1", "r1")]
    logs = [MemoryLog(broker, ctx.name) for ctx in contexts]
    for log in logs:
        await log.start()
    processes: list[Process] = [
        Worker(logs[0], settings, contexts[0], EchoEngine(SystemClock(), 0.01), worker_id="w1"),
        Preprocessor(logs[1], settings, contexts[1]),
        Router(logs[2], settings, contexts[2]),
    ]
    try:
        for process in processes:
            await process.start()
        assert len({process.url for process in processes}) == 3
        async with httpx.AsyncClient(timeout=20) as http:
            for process in processes:
                assert (await http.get(f"{process.url}/readyz")).status_code == 200
                page_of_another_site = {"host": "rebound.example"}
                sent = await http.get(f"{process.url}/metrics", headers=page_of_another_site)
                assert sent.status_code == 403
                page = (await http.get(f"{process.url}/metrics")).text
                assert "kvlane_event_loop_delay_seconds" in page
    finally:
        for process, ctx, log in zip(processes, contexts, logs, strict=True):
            await process.stop()
            await ctx.cancel_tasks()
            await log.close()
