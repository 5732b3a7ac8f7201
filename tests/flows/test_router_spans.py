"""The spans of a router: where the time of a request went before its worker had it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.runtime import spans as process_spans
from streams.records import Assigned
from streams.topics import LEDGER, REQUESTS
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, run_scenario

TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(process_spans, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def test_selecting_and_routing_are_spans_with_what_was_decided(
    spans: InMemorySpanExporter,
) -> None:
    async def scenario(world: MemoryWorld) -> None:
        FakeWorker(world, block_size=1).publish_blocks([7, 8], 1)
        await start_router(world)
        append_record(world, REQUESTS, replace(PROMPT, traceparent=TRACEPARENT))
        await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
        await world.sleep(1)

    run_scenario(scenario)
    select, dispatch = spans.get_finished_spans()
    assert (select.name, dispatch.name) == ("router.select_worker", "router.route_request")
    assert dict(select.attributes or {}) == {"request_id": "a", "attempt": 0}
    assert dict(dispatch.attributes or {}) == {
        "request_id": "a", "worker_id": "w1", "dp_rank": 0, "overlap_blocks": 2,
        "phase": "aggregated", "attempt": 0,
    }  # fmt: skip
