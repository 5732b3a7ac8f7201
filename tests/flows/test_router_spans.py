"""The spans of a router: where the time of a request went before its worker had it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.lanes import procedures
from streams.records import Assigned
from streams.topics import LEDGER, REQUESTS
from tests.routers import PROMPT, Hand, read, route, some, write
from tests.worlds import World, play


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(procedures, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def test_selecting_and_routing_are_spans_with_what_was_decided(
    spans: InMemorySpanExporter,
) -> None:
    async def scenario(world: World) -> None:
        Hand(world, block_size=1).holds([7, 8], 1)
        await route(world)
        write(world, REQUESTS, PROMPT)
        await some(world, lambda: read(world, LEDGER, Assigned))
        await world.sleep(1)

    play(scenario)
    select, dispatch = spans.get_finished_spans()
    assert (select.name, dispatch.name) == ("router.select_worker", "router.route_request")
    assert dict(select.attributes or {}) == {"request_id": "a"}
    assert dict(dispatch.attributes or {}) == {
        "request_id": "a", "worker_id": "w1", "dp_rank": 0, "overlap_blocks": 2,
        "phase": "aggregated",
    }  # fmt: skip
