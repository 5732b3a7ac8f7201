"""Tests of the rows of workers, models, requests and queues, from made records."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.audit.drift import MIN_RUNS
from kvlane.app.audit.fleet.model_rows import ModelRow, model_rows
from kvlane.app.audit.fleet.queue_rows import LaneRow, lane_rows, wait_rows
from kvlane.app.audit.fleet.request_rows import open_requests_of
from kvlane.app.audit.fleet.worker_rows import worker_rows
from kvlane.streams.records import (
    Candidate,
    Cordon,
    Ended,
    EngineStats,
    Fencing,
    Finished,
    Lost,
    ModelCard,
    PrefillDone,
    Refused,
    ReportedWaits,
    RouterCapacity,
    RunProgress,
    Tombstone,
)
from kvlane.streams.topics import CAPACITY, KV_EVENTS, LEDGER, REGISTRY, REQUESTS
from tests.harness.made_fleet import NOW_MS, TIMEOUT_S, WINDOW_MS, MadeFleet


@pytest.fixture
def fleet() -> MadeFleet:
    return MadeFleet()


def models_of(fleet: MadeFleet) -> list[ModelRow]:
    workers = worker_rows(fleet.view, NOW_MS, TIMEOUT_S)
    return model_rows(fleet.view, workers, open_requests_of(fleet.view, NOW_MS))


def lanes_of(fleet: MadeFleet, now_ms: int) -> list[LaneRow]:
    return lane_rows(fleet.view, now_ms, open_requests_of(fleet.view, now_ms))


def test_worker_has_the_figures_of_its_last_heartbeat(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    stats = EngineStats(running=3, waiting=1, kv_used_blocks=25, kv_total_blocks=100)
    runs = tuple(RunProgress(id=str(n), attempt=0, phase="aggregated") for n in range(6))
    fleet.beat("w1", epoch, -900)
    fleet.beat("w1", epoch, -400, running=runs, waiting=2, engine=stats)
    row = fleet.workers()["w1"]
    assert (row.state, row.model, row.epoch, row.heartbeat_age_s) == ("ready", "demo", epoch, 0.4)
    assert (row.running, row.waiting, row.kv_use) == (3, 3, 0.25)
    assert row.versions == {"vllm": "0.32"}


def test_worker_without_engine_figures_has_its_own_counts(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    runs = tuple(RunProgress(id=str(n), attempt=0, phase="aggregated") for n in range(6))
    fleet.beat("w1", epoch, running=runs, waiting=2)
    row = fleet.workers()["w1"]
    assert (row.running, row.waiting, row.kv_use) == (4, 2, None)


def test_worker_with_an_order_is_not_ready_for_its_model(fleet: MadeFleet) -> None:
    for worker, evacuates in (("w1", False), ("w2", True)):
        fleet.beat(worker, fleet.register(worker))
        fleet.append(REGISTRY, Cordon(worker=worker, evacuates=evacuates))
    rows = fleet.workers()
    assert (rows["w1"].order, rows["w2"].order) == ("cordoned", "evacuating")
    (model,) = models_of(fleet)
    assert (model.workers, model.ready) == (2, 0)
    fleet.append(REGISTRY, Tombstone(key="cordon/w1"))
    assert fleet.workers()["w1"].order == ""


def test_worker_is_silent_after_its_time_out_and_unknown_before_a_heartbeat(
    fleet: MadeFleet,
) -> None:
    epoch = fleet.register("w1")
    fleet.beat("w1", epoch, state="draining")
    fleet.register("new", after_ms=-1000)
    fleet.register("old", after_ms=-60_000)
    fleet.register("other", after_ms=-60_000)
    fleet.beat("other", epoch=0)  # of an earlier epoch
    states = {name: row.state for name, row in fleet.workers(NOW_MS).items()}
    assert states == {"w1": "draining", "new": "starting", "old": "silent", "other": "silent"}
    later = fleet.workers(NOW_MS + 5001)
    assert (later["w1"].state, later["w1"].heartbeat_age_s) == ("silent", 5.001)
    assert later["old"].heartbeat_age_s is None


def test_step_time_is_that_of_a_busy_engine_between_two_heartbeats(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    times = []
    for running, steps in ((0, 100), (2, 110), (2, 160), (1, 160), (1, 180)):
        fleet.beat("w1", epoch, len(times) * 1000, engine=EngineStats(running=running, steps=steps))
        times.append(fleet.workers()["w1"].step_ms)
    assert times == [None, None, 20.0, None, 50.0]
    again = fleet.register("w1")
    assert fleet.workers()["w1"].step_ms is None
    fleet.beat("w1", again, 6000, engine=EngineStats(running=1, steps=400))
    assert fleet.workers()["w1"].step_ms is None


def test_lost_worker_is_shown_after_its_card_is_removed(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.append(KV_EVENTS, Lost(worker="w1", epoch=epoch, silent_ms=5000), -2000)
    assert fleet.workers()["w1"].state == "lost"
    fleet.append(REGISTRY, Tombstone(key="worker/w1", epoch=epoch), -2000)
    row = fleet.workers()["w1"]
    assert (row.state, row.model, row.heartbeat_age_s) == ("lost", "demo", 7.0)
    again = fleet.register("w1", after_ms=-1000)
    fleet.beat("w1", again)
    assert fleet.workers()["w1"].state == "ready"
    fleet.append(REGISTRY, Tombstone(key="worker/w1", epoch=again))
    assert fleet.workers() == {}, "it has stopped by itself"


def test_loss_is_forgotten_after_the_window(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.append(KV_EVENTS, Lost(worker="w1", epoch=epoch))
    fleet.append(REGISTRY, Tombstone(key="worker/w1", epoch=epoch))
    fleet.append(CAPACITY, RouterCapacity(router="r1"), WINDOW_MS + 60_000)
    assert fleet.workers() == {}


def test_hit_rate_is_the_cached_part_of_prompts_by_the_engine_at_the_end_of_runs(
    fleet: MadeFleet,
) -> None:
    """Before the end the figure of an attached server is an estimate."""
    epoch = fleet.register("w1")
    over: dict[str, Any] = {"block_size": 16, "listed": (Candidate(worker="w1", epoch=epoch),)}
    for number, cached in enumerate((150, 50, 0)):
        fleet.ask(f"r{number}")
        run = fleet.assign(f"r{number}", epoch, **over)
        fleet.append(LEDGER, PrefillDone(**run, run=1, cached_tokens=7))
        assert number or fleet.workers()["w1"].hit_rate is None
        fleet.append(LEDGER, Finished(**run, code="stop", cached_tokens=cached))
    for name, phase, code in (("fetched", "decode", "stop"), ("failed", "aggregated", "error")):
        run = fleet.assign(name, epoch, phase=phase, **over)
        fleet.append(LEDGER, Finished(**run, code=code, cached_tokens=100))
    assert fleet.workers()["w1"].hit_rate == 0.5


def test_errors_of_predictions_are_those_of_the_view_of_routers(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    candidate = Candidate(worker="w1", epoch=epoch)
    for number in range(MIN_RUNS):
        run = fleet.assign(
            f"r{number}", epoch, ttft_ms_predicted=80.0, itl_ms_predicted=12.0, block_size=16,
            listed=(candidate,),
        )  # fmt: skip
        assert fleet.workers()["w1"].ttft_error is None
        fleet.append(LEDGER, Finished(**run, code="stop", ttft_ms=100.0, itl_ms=10.0))
    row = fleet.workers()["w1"]
    assert (row.ttft_error, row.itl_error) == (0.2, 0.2)


def test_open_request_is_shown_in_each_phase(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.ask("a", -4000)
    row = fleet.open()["a"]
    assert (row.phase, row.worker, row.age_s, row.wait_ms) == ("queued", "", 4.0, None)
    assert (row.model, row.tenant, row.service_class) == ("demo", "acme", "interactive")
    run = fleet.assign("a", epoch, -3000)
    row = fleet.open()["a"]
    assert (row.phase, row.worker, row.wait_ms) == ("assigned", "w1", 1000)
    fleet.start(run, -2500)
    assert fleet.open()["a"].phase == "prefill"
    fleet.append(LEDGER, PrefillDone(**run, run=1), -2000)
    fleet.beat(
        "w1", epoch, running=(RunProgress(id="a", attempt=0, phase="aggregated", output_tokens=17),)
    )
    row = fleet.open()["a"]
    assert (row.phase, row.ttft_ms, row.output_tokens) == ("decode", 2000, 17)
    fleet.append(LEDGER, Finished(**run, code="stop", output_tokens=20), -1000)
    assert fleet.open() == {}
    row = fleet.ended()["a"]
    assert (row.phase, row.code, row.output_tokens) == ("ended", "stop", 20)
    assert (row.wait_ms, row.ttft_ms, row.total_ms, row.age_s) == (1000, 2000, 3000, 3.0)


def test_times_of_a_prompt_count_from_its_own_append(fleet: MadeFleet) -> None:
    fleet.ask("a", -1000, queued_ms=NOW_MS - 9000, service_class="batch")
    row = fleet.open()["a"]
    assert (row.age_s, row.service_class) == (9.0, "batch")


def test_request_between_two_workers_is_queued_and_counts_a_retry(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.ask("a", -4000)
    fleet.start(fleet.assign("a", epoch, -3000), -3000)
    fleet.append(LEDGER, Fencing(id="a", attempt=1, reason="lost"), -1000)
    row = fleet.open()["a"]
    assert (row.phase, row.worker, row.retries, row.reason) == ("queued", "", 1, "lost")
    fleet.assign("a", epoch, attempt=1, worker="w2", base_tokens=30)
    row = fleet.open()["a"]
    assert (row.phase, row.worker, row.output_tokens, row.retries) == ("assigned", "w2", 30, 1)


def test_run_that_began_before_the_window_is_known_by_heartbeats(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    progress = RunProgress(id="early", attempt=2, phase="aggregated", output_tokens=400)
    fleet.beat("w1", epoch, running=(progress,))
    row = fleet.open()["early"]
    assert (row.model, row.worker, row.phase, row.retries) == ("demo", "w1", "decode", 2)
    assert (row.output_tokens, row.age_s, row.tenant) == (400, None, "")
    fleet.append(LEDGER, Finished(
        id="early", attempt=2, phase="aggregated", worker="w1", epoch=epoch, code="stop",
    ))  # fmt: skip
    assert fleet.open() == {}
    row = fleet.ended()["early"]
    assert (row.code, row.ended_ms, row.service_class) == ("stop", NOW_MS, "")
    assert (row.age_s, row.wait_ms, row.ttft_ms, row.total_ms) == (None, None, None, None)
    fleet.append(LEDGER, Ended(id="failed", code="overloaded"))
    assert fleet.ended()["failed"].code == "overloaded"


def test_request_of_two_reported_runs_has_one_row_that_of_its_decode(fleet: MadeFleet) -> None:
    for worker, phase in (("w1", "prefill"), ("w2", "decode")):
        run = RunProgress(id="early", attempt=0, phase=phase)  # type: ignore[arg-type]
        fleet.beat(worker, fleet.register(worker), running=(run,))
    assert fleet.open()["early"].worker == "w2"
    assert len(open_requests_of(fleet.view, NOW_MS)) == 1


def test_early_request_that_lost_its_run_is_queued_by_the_report_of_its_router(
    fleet: MadeFleet,
) -> None:
    fleet.append(LEDGER, Fencing(id="early", attempt=1, reason="lost"))
    assert fleet.open() == {}
    waits = ReportedWaits(reasons=("full",), requests=(("early", NOW_MS, 0),))
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}, waits=waits))
    assert fleet.open()["early"].phase == "queued"


def test_request_that_ends_before_its_record_is_read_is_not_open(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.append(LEDGER, Finished(**fleet.assign("a", epoch), code="length"))
    fleet.ask("a", -1000)
    assert fleet.open() == {}
    assert fleet.ended()["a"].code == "length"


def test_failed_request_has_its_reason(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.ask("engine", -1000)
    run = fleet.assign("engine", epoch)
    fleet.append(LEDGER, Finished(**run, code="error", reason="out of memory", message="secret"))
    fleet.append(REQUESTS, Refused(id="wrong", code="invalid", message="field `n`"), -500)
    assert fleet.open()["wrong"].phase == "queued"
    fleet.append(LEDGER, Ended(id="wrong", code="invalid"))
    ended = fleet.ended()
    assert (ended["engine"].code, ended["engine"].reason) == ("error", "out of memory")
    assert (ended["wrong"].code, ended["wrong"].reason) == ("invalid", "field `n`")
    assert fleet.open() == {}


def test_late_end_of_an_older_attempt_is_no_reason_of_the_open_one(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.ask("a")
    old = fleet.assign("a", epoch)
    fleet.append(LEDGER, Fencing(id="a", attempt=1, reason="silent"))
    fleet.assign("a", epoch, attempt=1)
    fleet.append(LEDGER, Finished(**old, code="error", reason="out of memory", output_tokens=9))
    row = fleet.open()["a"]
    assert (row.reason, row.output_tokens) == ("silent", 0)


def test_copy_of_an_old_request_does_not_wait_for_ever(fleet: MadeFleet) -> None:
    fleet.ask("a", deadline_s=100.0)
    assert "a" in fleet.open(NOW_MS + 100_000)
    assert fleet.open(NOW_MS + 200_000) == {}


def test_model_counts_workers_and_open_requests(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.beat("w1", epoch)
    fleet.register("w2")
    fleet.append(REGISTRY, ModelCard(name="demo", context_length=4096, checksum="c"))
    fleet.append(REGISTRY, ModelCard(name="idle"))
    fleet.ask("a")
    fleet.ask("b")
    fleet.ask("c", model="unknown")
    fleet.assign("b", epoch)
    rows = {row.name: row for row in models_of(fleet)}
    assert list(rows) == ["demo", "idle", "unknown"]
    demo = rows["demo"]
    assert (demo.workers, demo.ready, demo.open, demo.queued) == (2, 1, 2, 1)
    assert (demo.context_length, demo.checksum, demo.versions) == (4096, "c", ["vllm 0.32"])
    assert (rows["unknown"].workers, rows["unknown"].open) == (0, 1)


def test_lane_has_its_router_its_queue_and_its_unread_records(fleet: MadeFleet) -> None:
    for number in range(3):
        fleet.ask(f"r{number}", -1000 * number)
    fleet.ask("batch", -9000, service_class="batch")
    (lane,) = lanes_of(fleet, NOW_MS)
    assert (lane.router, lane.unread) == ("", None)
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 3}))
    (lane,) = lanes_of(fleet, NOW_MS)
    assert (lane.router, lane.unread, lane.queued, lane.queued_batch) == ("r1", 1, 3, 1)
    assert lane.oldest_s == 9.0


def test_lane_of_a_silent_router_has_no_owner(fleet: MadeFleet) -> None:
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 3}))
    assert lanes_of(fleet, NOW_MS + 4000)[0].router == "r1"
    (lane,) = lanes_of(fleet, NOW_MS + 6000)
    assert (lane.router, lane.unread) == ("", None)


def test_lane_that_has_moved_is_that_of_the_newer_report(fleet: MadeFleet) -> None:
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 3}))
    fleet.append(CAPACITY, RouterCapacity(router="r2", positions={0: 3}), 100)
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 4}), 200)
    assert lanes_of(fleet, NOW_MS + 300)[0].router == "r1"


def test_wait_from_before_the_window_has_its_age_and_an_unknown_class(fleet: MadeFleet) -> None:
    waits = ReportedWaits(reasons=("full",), requests=(("early", NOW_MS - 900_000, 0),))
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}, waits=waits))
    (lane,) = lanes_of(fleet, NOW_MS)
    assert (lane.queued, lane.queued_batch, lane.queued_unknown) == (0, 0, 1)
    assert lane.oldest_s == 900.0


def test_prefill_workers_alone_do_not_make_a_model_ready(fleet: MadeFleet) -> None:
    fleet.beat("p1", fleet.register("p1", role="prefill"))
    (model,) = models_of(fleet)
    assert (model.workers, model.ready) == (1, 0)
    fleet.beat("d1", fleet.register("d1", role="decode"))
    (model,) = models_of(fleet)
    assert (model.workers, model.ready) == (2, 1)


def test_reasons_count_the_requests_that_still_wait(fleet: MadeFleet) -> None:
    epoch = fleet.register("w1")
    fleet.ask("waits")
    fleet.ask("placed")
    waits = ReportedWaits(
        reasons=("all workers are full", "no taint"),
        requests=tuple((name, NOW_MS, number) for name, number in (
            ("waits", 0), ("placed", 0), ("early", 1),
        )),
        left_out=7,
    )  # fmt: skip
    fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 2}, waits=waits))
    fleet.assign("placed", epoch)
    rows = wait_rows(fleet.view, open_requests_of(fleet.view, NOW_MS))
    assert [(row.reason, row.requests) for row in rows] == [
        ("all workers are full", 1), ("no taint", 1), ("not listed", 7),
    ]  # fmt: skip
    assert fleet.open()["early"].phase == "queued"
