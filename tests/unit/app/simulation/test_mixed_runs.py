"""Tests of batch work beside a trace, simulated with the shipped code."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvlane.app.perf_curves import PROFILES
from kvlane.app.routing.selection.batch_placement import BatchBounds
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.simulation.batch_work import MODES, BatchWork
from kvlane.app.simulation.mixed_runs import Mix, MixedRun
from kvlane.app.simulation.simulator import Simulator
from kvlane.app.simulation.synthetic_traces import TraceSize, generate_trace
from kvlane.app.simulation.trace_requests import trace_requests
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, read_trace
from workbench.bench.routing.mix import MixScale, bench_mix, thresholds

ROWS = read_trace(BUNDLED_TRACE)[:30]
BATCH = generate_trace("offline", TraceSize(400))


def test_batch_work_is_preempted_and_continues_from_its_last_token() -> None:
    alone, mixed, still = Mix(ROWS, BATCH, MixedRun(2)).compare(["classes", "no preemption"])
    assert alone.batch is None
    assert mixed.batch is not None
    assert still.batch is not None
    assert mixed.batch.preemptions > 0
    assert still.batch.preemptions == 0
    assert mixed.batch.finished > 50
    assert mixed.requests.itl_mean < still.requests.itl_mean
    assert {each.name: each.passed for each in thresholds("here", [alone, mixed])}[
        "here: ITL with batch work to that without"
    ]


def test_mix_is_compared_on_each_profile_of_engines() -> None:
    scale = MixScale(8, 200, 2)
    report = asyncio.run(bench_mix(scale, None, lambda _: None, lambda _: None))
    profiles = [row["profile"] for row in report.rows]
    assert profiles == [name for name in PROFILES for _ in range(1 + len(MODES))]
    steps_ms = {row["profile"]: row["itl_ms"] for row in report.rows if row["batch"] == "no batch"}
    assert steps_ms["published"] != steps_ms["h100"]


def test_every_token_of_a_request_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, int] = {}
    wanted: dict[str, int] = {}
    finish = BatchWork.on_finished

    def on_finished(self: BatchWork, task: object) -> None:
        made[task.id] = task.made + task.sequence.max_tokens  # type: ignore[attr-defined]
        wanted[task.id] = task.output_tokens  # type: ignore[attr-defined]
        finish(self, task)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchWork, "on_finished", on_finished)
    Mix(ROWS, BATCH, MixedRun(2)).compare(["classes"])
    assert made == wanted


def test_batch_work_goes_on_between_the_requests_of_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[float] = []
    send = Simulator._send_batch

    def on_send(self: Simulator, request_id: str, decision: Placement, now_ms: float) -> None:
        starts.append(now_ms)
        send(self, request_id, decision, now_ms)

    monkeypatch.setattr(Simulator, "_send_batch", on_send)
    rows = [replace(ROWS[0], timestamp=0), replace(ROWS[1], timestamp=30_000)]
    mix = Mix(rows, BATCH, MixedRun(2))
    mix._simulator(mix._arrivals, "classes", BatchBounds()).run()
    assert {start // 5000 for start in starts} >= set(range(6))


def test_trace_without_batch_work_is_simulated_as_before() -> None:
    chunked = trace_requests(ROWS)
    assert [len(each.chunks) for each in chunked] == [len(row.full_chunks) for row in ROWS]
