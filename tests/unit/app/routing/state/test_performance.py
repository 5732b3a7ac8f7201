"""Tests of the speed of workers: a prior from their cards, and updates by first tokens."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvlane.app.perf_curves import PerfCurves, curves_from
from kvlane.app.routing.state import performance
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import (
    EXPLORATION_INTERVAL,
    MAX_REMEMBERED,
    EngineProfile,
    PerformanceModel,
    WorkerKind,
    profile_from_card,
)
from kvlane.app.routing.state.step_model import StepFit, fit_steps
from kvlane.streams.records import (
    Assigned,
    Candidate,
    EngineConfig,
    Finished,
    LogRecord,
    PrefillDone,
    RequestOffset,
)

RUN: dict[str, Any] = {"attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": 3}


def assigned(name: str = "a", policy: str = "predictive", **over: Any) -> Assigned:
    candidates = tuple(
        Candidate(worker=worker, epoch=3, **(over if worker == "w1" else {"prefill_runs": 9}))
        for worker in ("w0", "w1")
    )
    return Assigned(
        id=name, origin=RequestOffset(topic="requests", partition=0, offset=0), responses_from=0,
        deadline_ms=0, prompt_tokens=900, base_tokens=100, policy=policy, listed=candidates,
        **RUN,
    )  # fmt: skip


def prefilled(took_ms: float, name: str = "a", **over: Any) -> PrefillDone:
    return PrefillDone(id=name, run=1, prefill_ms=took_ms, **(RUN | over))


def finished(output_tokens: int, code: Any = "stop", name: str = "a") -> Finished:
    return Finished(id=name, code=code, output_tokens=output_tokens, **RUN)


def write(paces: PerformanceModel, *records: Any, at_ms: int = 0) -> PerformanceModel:
    for record in records:
        paces.on_record(LogRecord(0, at_ms, record))
    return paces


KIND = WorkerKind("m", EngineProfile(chunk_tokens=8192, capacity_tokens=100_000))
RUNS = 20


def measured(
    paces: PerformanceModel, worker: str, ratio: float, times: int = RUNS, since_ms: int = 0
) -> int:
    """So many runs of a worker, of w1 and w2 as candidates; returns the time of the end."""
    for n in range(times):
        begun = replace(
            assigned(f"{worker} {n}"),
            worker=worker,
            listed=tuple(Candidate(each, epoch=3) for each in ("w1", "w2")),
        )
        done = prefilled(ratio * PerfCurves().prefill_ms(1000), f"{worker} {n}", worker=worker)
        write(paces, begun, done, at_ms=since_ms + 500 * n)
    return since_ms + 500 * times


def learned(paces: PerformanceModel, now_ms: int) -> dict[str, float]:
    """The factors on the prior, as a decision then reads them."""
    paces.refresh(now_ms + 5000)
    assert set(paces.curves.values()) <= {PerfCurves()}
    return dict(paces.slowdown)


def of_one_kind() -> PerformanceModel:
    paces = PerformanceModel()
    paces.set_kinds({"w1": KIND, "w2": KIND})
    return paces


def test_slowdown_of_a_skipped_worker_decays() -> None:
    paces = of_one_kind()
    now_ms = measured(paces, "w1", 9.0)
    now_ms = measured(paces, "w2", 2.0, 2 * EXPLORATION_INTERVAL, now_ms)
    assert learned(paces, now_ms) == pytest.approx({"w1": 9.0, "w2": 2.0})
    now_ms = measured(paces, "w1", 9.0, 1, now_ms)
    now_ms = measured(paces, "w2", 2.0, 2 * EXPLORATION_INTERVAL, now_ms)
    assert set(learned(paces, now_ms)) == {"w1", "w2"}, "it had a turn in between"
    now_ms = measured(paces, "w2", 2.0, 1, now_ms)
    assert learned(paces, now_ms) == {"w2": pytest.approx(2.0)}, "w1 may be no slower by now"


def test_slowdown_is_learned_from_uncached_tokens() -> None:
    paces, expected_ms = of_one_kind(), PerfCurves().prefill_ms(600)
    for n in range(RUNS):
        done = prefilled(2.5 * expected_ms, f"r{n}", cached_tokens=400)
        write(paces, assigned(f"r{n}"), done, at_ms=500 * n)
    assert learned(paces, 10_000) == {"w1": pytest.approx(2.5)}


@pytest.mark.parametrize("believed", [0.5, 1.0, 3.0])
def test_concurrent_decode_step_does_not_slow_down_a_worker(believed: float) -> None:
    paces = of_one_kind()
    usage = (50 + 2 * paces.mean_output_tokens / 2) / KIND.profile.capacity_tokens
    took_ms = 2 * (PerfCurves().prefill_ms(1000) + 1.5 * PerfCurves().decode_ms(usage))
    for n in range(RUNS):
        begun = assigned(f"r{n}", open_runs=2, prompt_tokens=50, slowness=believed)
        write(paces, begun, prefilled(took_ms, f"r{n}"), at_ms=500 * n)
    assert learned(paces, 10_000) == {"w1": pytest.approx(2.0)}


def test_runs_that_waited_for_others_are_not_learned() -> None:
    paces = of_one_kind()
    for n in range(RUNS):
        a, b, c, d = (f"{name}{n}" for name in "abcd")
        write(
            paces,
            *(assigned(a, prefill_runs=1), prefilled(900.0, a)),
            *(assigned(b, policy="dynamo"), prefilled(900.0, b)),
            *(assigned(c), prefilled(900.0, c, worker="w0")),
            *(assigned(d), finished(5, name=d), prefilled(900.0, d)),
            prefilled(900.0, f"unknown{n}"),
            at_ms=500 * n,
        )
    assert learned(paces, 10_000) == {}


def test_mean_output_length_moves_from_its_prior_to_observations() -> None:
    paces = PerformanceModel()
    assert paces.mean_output_tokens == 200
    write(paces, finished(200 + 51))
    assert paces.mean_output_tokens == pytest.approx(201)
    write(paces, finished(0, "broken"), finished(0, "cancelled"), finished(0, "worker_full"))
    assert paces.mean_output_tokens == pytest.approx(201), "those did not come to their end"
    write(paces, *[finished(0)] * 1000)
    assert paces.mean_output_tokens == pytest.approx(201), (
        "nor is there a length in what is no text"
    )
    write(paces, *[finished(60, "length")] * 30_000)
    assert paces.mean_output_tokens == pytest.approx(60, abs=0.1)


def test_mean_prefill_is_that_of_recent_interactive_runs() -> None:
    def mean_of(*prompts: tuple[int, str]) -> float:
        paces = PerformanceModel()
        for tokens, service_class in prompts:
            write(
                paces,
                replace(assigned(slowness=2.0), prefill_tokens=tokens, service_class=service_class),
            )
        return paces.mean_prefill_ms

    short_ms, long_ms = (2 * PerfCurves().prefill_ms(tokens) for tokens in (1000, 8000))
    short, long = (1000, "interactive"), (8000, "interactive")
    assert PerformanceModel().mean_prefill_ms == 0
    assert mean_of(short) == pytest.approx(short_ms)
    assert mean_of(short, long) == pytest.approx((short_ms + long_ms) / 2)
    assert mean_of(short, (8000, "batch")) == pytest.approx(short_ms)
    assert mean_of(*[long] * 300, *[short] * 2000) == pytest.approx(short_ms, rel=0.01)


def test_cache_hits_give_the_expected_followups() -> None:
    def led_to(held: float) -> float:
        paces = PerformanceModel()
        for n in range(3000):
            got = replace(assigned(f"{n}"), params={"most_held_tokens": held})
            write(paces, got)
        return paces.expected_followups

    tokens = assigned().prompt_tokens
    assert PerformanceModel().expected_followups == 1
    assert led_to(0.0) == 1
    assert led_to(0.75 * tokens) == pytest.approx(4, rel=0.05)
    assert led_to(tokens) == 10


def test_usual_load_is_the_mean_of_tokens_in_the_cache() -> None:
    paces, place = PerformanceModel(), WorkerRank("w1", 3)
    run = replace(
        assigned(), ttft_ms_predicted=100.0, itl_ms_predicted=10.0, params={"output_tokens": 200.0}
    )
    none = [
        replace(run, service_class="batch"), replace(run, phase="prefill"),
        replace(run, phase="decode"), replace(run, policy="dynamo"),
        replace(run, params={"output_tokens": math.nan}), replace(run, ttft_ms_predicted=-1e9),
        assigned(),
    ]  # fmt: skip
    write(paces, *none)
    assert paces.usual_load.sum(place, 0) == 0
    # One such run after the other, 2.1 s each, with 1000 tokens: after many, that is the mean.
    for n in range(40):
        write(paces, run, at_ms=2100 * n)
    assert paces.usual_load.sum(place, 2100 * 39 + 1050) == pytest.approx(1000, rel=0.01)
    assert paces.usual_load.sum(WorkerRank("w1", 4), 2100 * 39) == 0, "of another epoch"


def test_answer_of_any_expected_length_counts_its_prompt_once() -> None:
    run = replace(assigned(), itl_ms_predicted=10.0, params={"output_tokens": math.inf})
    paces = write(PerformanceModel(), run)
    assert paces.usual_load.sum(WorkerRank("w1", 3), 0) == 1000


def test_learned_state_is_bounded() -> None:
    paces = write(PerformanceModel(), *[assigned(f"r{n}") for n in range(MAX_REMEMBERED + 5)])
    assert len(paces._begun) == MAX_REMEMBERED


def test_profile_of_a_card_is_completed_with_published_values() -> None:
    assert profile_from_card(EngineConfig(model="m")) == EngineProfile()
    curve = PerfCurves((0.0, 1.0, 2.0), (3.0, 4.0, 5.0), 6.0)
    config = EngineConfig(
        model="m", kv_cache_block_size=16, total_kv_blocks=100, max_num_batched_tokens=512,
        curve=curve.coefficients(),
    )  # fmt: skip
    assert profile_from_card(config) == EngineProfile(curve, 1.0, 512, 1600)
    broken = EngineConfig(model="m", max_num_batched_tokens=-5, total_kv_blocks=-1, curve=())
    assert profile_from_card(broken).chunk_tokens == 1


def test_numbers_are_curves_and_back() -> None:
    assert curves_from(PerfCurves().coefficients()) == PerfCurves()
    twice = curves_from(PerfCurves().coefficients(speedup=2.0))
    assert twice is not None
    assert twice.prefill_ms(1000) == pytest.approx(PerfCurves().prefill_ms(1000) / 2)


def foreign_runs(count: int, engine: PerfCurves) -> list[LogRecord]:
    """Records of runs on idle workers of one kind, in order of time."""
    log_records: list[LogRecord] = []
    for n in range(count):
        worker, tokens, at_ms = f"w{n % 2}", 100 + 37 * (n % 50), 400 * n
        run: dict[str, Any] = {
            "id": f"r{n}",
            "attempt": 0,
            "phase": "aggregated",
            "worker": worker,
            "epoch": 3,
        }
        begun = replace(
            assigned(f"r{n}"), worker=worker, prompt_tokens=tokens, base_tokens=0,
            listed=(Candidate(worker, 3), Candidate("w9", 3)),
        )  # fmt: skip
        took_ms, itl_ms = engine.prefill_ms(tokens), engine.decode_ms(tokens / 100_000)
        done = PrefillDone(run=1, prefill_ms=took_ms, **run)
        end = Finished(code="stop", output_tokens=11, itl_ms=itl_ms, **run)
        last_ms = at_ms + int(took_ms + 10 * itl_ms) + 1
        log_records += [
            LogRecord(2 * n, at_ms, begun), LogRecord(2 * n + 1, at_ms + int(took_ms), done),
            LogRecord(2 * n + 2, last_ms, end)
        ]  # fmt: skip
    return sorted(log_records, key=lambda log_record: log_record.timestamp_ms)


LATER_MS = 1_000_000
FOREIGN = PerfCurves((4e-7, 0.06, 16.5), (-100.0, 216.0, 5.74))


def test_workers_of_a_kind_get_the_curves_that_their_runs_show() -> None:
    paces = PerformanceModel()
    paces.set_kinds({"w0": KIND, "w1": KIND, "new": KIND, "other": WorkerKind("n", KIND.profile)})
    for log_record in foreign_runs(60, FOREIGN):
        paces.on_record(log_record)
    paces.refresh(LATER_MS)
    assert set(paces.curves) == {"w0", "w1", "new"}
    assert len({*paces.curves.values()}) == 1
    for tokens in (100, 1000, 2000):
        found_ms = paces.curves["new"].prefill_ms(tokens) * paces.slowdown["w0"]
        assert found_ms == pytest.approx(FOREIGN.prefill_ms(tokens), rel=0.05)
    assert "new" not in paces.slowdown, "it counts as the fastest of its kind"
    paces.set_kinds({"w0": KIND, "w1": WorkerKind("n", KIND.profile)})
    assert set(paces.curves) == {"w0", "w1"}, "until a decision"
    paces.refresh(2 * LATER_MS)
    assert set(paces.curves) == {"w0"}, "no run of the other kind has been read"


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
@settings(max_examples=4)
def test_lanes_read_in_any_order_give_the_same_curves(seed: int, lanes: int) -> None:
    log_records, rng = foreign_runs(40, FOREIGN), Random(seed)
    by_lane = [[f for f in log_records if hash_of(f) % lanes == lane] for lane in range(lanes)]

    def curves(in_order: list[LogRecord]) -> tuple[dict[str, PerfCurves], dict[str, float]]:
        paces = PerformanceModel()
        paces.set_kinds({"w0": KIND, "w1": KIND})
        for log_record in in_order:
            paces.on_record(log_record)
            if rng.random() < 0.1:
                paces.refresh(log_record.timestamp_ms)
        paces.refresh(LATER_MS)
        return paces.curves, {worker: paces.slowdown[worker] for worker in paces.curves}

    mixed: list[LogRecord] = []
    while left := [lane for lane in by_lane if lane]:
        mixed.append(rng.choice(left).pop(0))
    found = curves(log_records)
    assert found[0]
    assert curves(mixed) == found


def test_late_records_lead_to_one_fit_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []

    def count_fits(runs: Any, *shape: Any) -> StepFit | None:
        fits.append(len(runs))
        return fit_steps(runs, *shape)

    monkeypatch.setattr(performance, "fit_steps", count_fits)
    log_records = foreign_runs(200, FOREIGN)
    paces, now_ms = PerformanceModel(), log_records[-1].timestamp_ms
    paces.set_kinds({"w0": KIND, "w1": KIND})
    for lane in (0, 1):
        for log_record in log_records:
            if hash_of(log_record) % 2 == lane:
                paces.on_record(log_record)
                assert not fits, "records are read without a fit"
    for log_record in log_records:
        paces.on_record(log_record)
        paces.refresh(now_ms)
    assert len(fits) == 1
    for log_record in foreign_runs(20, FOREIGN):
        paces.on_record(log_record)
        now_ms += 100
        paces.refresh(now_ms)
    assert len(fits) == 1 + 20 * 3 // 10
    paces.refresh(LATER_MS)
    before = len(fits)
    paces.refresh(2 * LATER_MS)
    assert len(fits) == before, "no run came"


def test_catching_up_with_a_ledger_leads_to_one_fit_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits: list[Any] = []
    monkeypatch.setattr(performance, "fit_steps", lambda *runs: fits.append(runs))
    paces = PerformanceModel()
    paces.set_kinds({"w0": KIND, "w1": KIND})
    for log_record in foreign_runs(200, FOREIGN):
        paces.on_record(log_record)
        paces.refresh(LATER_MS)
    assert len(fits) == 1
    for log_record in foreign_runs(400, FOREIGN):
        paces.on_record(log_record)
        paces.refresh(log_record.timestamp_ms)
    assert len(fits) > 50, "in the present, once a second of the ledger"


def hash_of(log_record: LogRecord) -> int:
    """A number by the id of the request, whose records are in one lane."""
    assert isinstance(log_record.record, Assigned | PrefillDone | Finished)
    return int(log_record.record.id[1:]) * 7919
