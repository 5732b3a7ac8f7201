"""Tests of the spans of a router: the parts of a request's time before its worker had it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvlane.app.runtime import spans as process_spans
from kvlane.streams.records import Assigned, Assignment
from kvlane.streams.request import BootstrapInfo
from kvlane.streams.topics import LEDGER, REQUESTS
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


def test_selecting_and_routing_are_spans_with_the_decision(spans: InMemorySpanExporter) -> None:
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


def test_run_of_decode_is_linked_to_that_of_its_prefill(spans: InMemorySpanExporter) -> None:
    request = replace(PROMPT, traceparent=TRACEPARENT)
    for phase in ("prefill", "decode"):
        process_spans.start_span(
            "worker.run", request, {"phase": phase}, 2,
            below=process_spans.route_of(phase), own_id=process_spans.run_of(phase),
        ).end()  # fmt: skip
    prefill, decode = spans.get_finished_spans()
    (link,) = decode.links
    assert link.context.span_id == process_spans._span_id("a", 2, process_spans.RUN)
    assert prefill.links[0].context.span_id == process_spans._span_id("a", 1, process_spans.RUN)
    assert prefill.parent is not None
    assert decode.parent is not None
    assert prefill.parent.span_id != decode.parent.span_id


def test_run_of_decode_beside_its_prefill_is_not_linked_to_it(spans: InMemorySpanExporter) -> None:
    request = replace(PROMPT, traceparent=TRACEPARENT, bootstrap_info=BootstrapInfo())
    process_spans.start_span("worker.run", request, {}, 2, own_id=process_spans.DECODE_RUN).end()
    (decode,) = spans.get_finished_spans()
    assert not decode.links


def test_both_decisions_of_a_hand_over_have_a_span(spans: InMemorySpanExporter) -> None:
    async def scenario(world: MemoryWorld) -> None:
        prefill = FakeWorker(world, "p", role="prefill")
        decode = FakeWorker(world, "d", role="decode")
        await start_router(world)
        append_record(world, REQUESTS, replace(PROMPT, traceparent=TRACEPARENT))
        (first,) = await wait_for_items(world, lambda: prefill.received(Assignment))
        prefill.hand_over(first)
        await wait_for_items(world, lambda: decode.received(Assignment))
        await world.sleep(1)

    run_scenario(scenario)
    found = [s for s in spans.get_finished_spans() if s.name == "router.route_request"]
    assert [(s.attributes or {})["phase"] for s in found] == ["prefill", "decode"]
    assert len({s.context.span_id for s in found if s.context}) == 2
