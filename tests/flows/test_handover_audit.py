"""Tests of a request with two decisions, in request metrics, in captures and on `kvlane
explain`."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvlane.app.audit.recompute import RecomputeReport
from kvlane.app.audit.timeline import explain_request
from kvlane.app.commands.explain_view import show_timeline
from kvlane.app.router import Router
from kvlane.app.simulation.counterfactual import CaptureReader
from kvlane.app.traces.capture_format import CapturedDecision, CapturedPrefill, CapturedRun
from kvlane.app.traces.mooncake_trace import InvalidTrace
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assignment, PrefillDone
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.topics import LEDGER, REQUESTS
from tests.harness.capture_harness import capture_lines
from tests.harness.fake_worker import FakeWorker, append_record, start_router, wait_for_items
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test

LONG = Request(
    id="a", model="demo", token_ids=pack_tokens(list(range(3000))), deadline_s=100,
    stop=StopConditions(max_tokens=50),
)  # fmt: skip
PREFILL_S, DECODE_S = 2.0, 5.0


async def assigned_to(world: MemoryWorld, worker: FakeWorker) -> Assignment:
    return (await wait_for_items(world, lambda: worker.received(Assignment)))[-1]


async def serve_in_two_phases(
    world: MemoryWorld, *, is_finished_late: bool = False, **over: Any
) -> Router:
    """Serve `LONG` by worker p for PREFILL_S, then by worker d with the first token after DECODE_S.

    `is_finished_late`: the Finished of p is behind the second decision.
    """
    prefill = FakeWorker(world, "p", role="prefill", block_size=16)
    decode = FakeWorker(world, "d", role="decode", block_size=16)
    router = await start_router(world)
    await world.sleep(2)
    append_record(world, REQUESTS, replace(LONG, received_ms=world.clock.wall_ms(), **over))
    run = prefill.start(await assigned_to(world, prefill))
    await world.sleep(PREFILL_S)
    append_record(world, LEDGER, PrefillDone(run=1, handoff=b"{}", ttft_ms=2000, **run))
    if not is_finished_late:
        prefill.finish(run, "handed_off", ttft_ms=2000)
    second = await assigned_to(world, decode)
    if is_finished_late:
        prefill.finish(run, "handed_off", ttft_ms=2000)
    run = decode.start(second)
    await world.sleep(DECODE_S)
    append_record(world, LEDGER, PrefillDone(run=1, ttft_ms=5000, **run))
    decode.finish(run, "stop", output_tokens=10, ttft_ms=5000)
    await world.sleep(1)
    return router


async def request_metrics(router: Router) -> dict[str, float]:
    page = (await HttpExchange(router.http, "GET", "/metrics").wait_done()).content.decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    start = "kvlane_router_request"
    return {name: float(value) for name, _, value in lines if name.startswith(start)}


@scenario_test
async def test_queue_time_of_a_split_request_ends_with_its_first_decision(
    world: MemoryWorld,
) -> None:
    got = await request_metrics(await serve_in_two_phases(world))
    assert got['kvlane_router_request_queue_time_seconds_count{model="demo"}'] == 1
    assert got['kvlane_router_request_queue_time_seconds_sum{model="demo"}'] < 1


@scenario_test
async def test_first_token_of_a_split_request_is_that_of_decode(world: MemoryWorld) -> None:
    got = await request_metrics(await serve_in_two_phases(world))
    assert got['kvlane_router_request_time_to_first_token_seconds_count{model="demo"}'] == 1
    seconds = got['kvlane_router_request_time_to_first_token_seconds_sum{model="demo"}']
    assert seconds == pytest.approx(PREFILL_S + DECODE_S, abs=0.5)


@scenario_test
async def test_failed_prefill_is_no_outcome_of_its_request(world: MemoryWorld) -> None:
    prefill = FakeWorker(world, "p", role="prefill")
    decode = FakeWorker(world, "d", role="decode")
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    prefill.finish(prefill.start(await assigned_to(world, prefill)), "error")
    decode.finish(decode.start(await assigned_to(world, decode)), "stop")
    await world.sleep(1)
    got = await request_metrics(router)
    ended = {name: count for name, count in got.items() if "requests_total" in name and count}
    assert ended == {'kvlane_router_requests_total{model="demo",outcome="stop"}': 1}


@pytest.mark.parametrize("is_finished_late", [False, True])
@scenario_test
async def test_capture_has_the_runs_of_both_phases(
    world: MemoryWorld, *, is_finished_late: bool
) -> None:
    await serve_in_two_phases(world, is_finished_late=is_finished_late)
    lines = await capture_lines(world)
    decided = [line.decision.phase for line in lines if isinstance(line, CapturedDecision)]
    prefilled = [line.done.phase for line in lines if isinstance(line, CapturedPrefill)]
    ran = [line.end.phase for line in lines if isinstance(line, CapturedRun)]
    assert decided == prefilled == ran == ["prefill", "decode"]


@scenario_test
async def test_both_decisions_of_a_captured_request_are_recomputed(world: MemoryWorld) -> None:
    await serve_in_two_phases(world)
    report = RecomputeReport()
    for line in await capture_lines(world):
        report.add_line(line)
    assert (report.decisions, report.same, report.first) == (2, 2, "")


@scenario_test
async def test_counterfactual_leaves_out_split_requests_with_their_reason(
    world: MemoryWorld,
) -> None:
    await serve_in_two_phases(world)
    reader = CaptureReader()
    for line in await capture_lines(world):
        reader.add_line(line)
    with pytest.raises(InvalidTrace, match="1 handed over from a prefill worker"):
        reader.build_period()


@scenario_test
async def test_explain_shows_the_candidates_and_outcome_of_each_phase(world: MemoryWorld) -> None:
    await serve_in_two_phases(world)
    timeline = await explain_request(await world.connect("explain"), world.clock, "a")
    out = StringIO()
    show_timeline(timeline, Console(file=out, width=200))
    lines = [line.split() for line in out.getvalue().splitlines()]
    summary = {tuple(row[:3]): " ".join(row) for row in lines if row[:1] == ["0"]}
    assert summary.keys() == {("0", "prefill", "p"), ("0", "decode", "d")}
    assert " 2000.0 ms " in summary["0", "prefill", "p"]
    assert " 5000.0 ms " in summary["0", "decode", "d"]
    assert [row[1] for row in lines if row[:1] == ["*"]] == ["p", "d"]
    assert "differs" not in out.getvalue()
