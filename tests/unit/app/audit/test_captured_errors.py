"""Tests of the errors of predicted times in a capture, by model and worker."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvlane.app.audit.captured_errors import CapturedErrors
from kvlane.app.audit.drift import MIN_RUNS
from kvlane.app.commands.audit_commands import show_errors
from kvlane.app.traces.capture_format import CapturedDecision, CapturedRun, CapturedWorker
from kvlane.streams.records import Assigned, EngineConfig, Finished, RequestOffset

ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)


def add_run(
    errors: CapturedErrors,
    name: str,
    worker: str,
    ttft_ms: float,
    *,
    predicted_ms: float = 100.0,
    code: str = "stop",
) -> None:
    """A decision, and its run with a tenth of that time between tokens."""
    decision = Assigned(
        id=name, attempt=0, phase="aggregated", worker=worker, epoch=1, origin=ORIGIN,
        responses_from=0, deadline_ms=0, ttft_ms_predicted=predicted_ms,
        itl_ms_predicted=predicted_ms / 10,
    )  # fmt: skip
    end = Finished(
        id=name, attempt=0, phase="aggregated", worker=worker, epoch=1, code=code,
        output_tokens=5, ttft_ms=ttft_ms, itl_ms=ttft_ms / 10,
    )  # fmt: skip
    errors.add_line(CapturedDecision(at_ms=0, lane=0, offset=0, decision=decision))
    errors.add_line(CapturedRun(at_ms=0, end=end))


def captured(*workers: tuple[str, str]) -> CapturedErrors:
    errors = CapturedErrors()
    for name, model in workers:
        config = EngineConfig(model=model)
        errors.add_line(CapturedWorker(id=name, epoch=1, since_ms=0, model=model, config=config))
    return errors


def test_errors_are_of_each_worker_and_of_all_of_a_model() -> None:
    errors = captured(("w1", "m"), ("w2", "m"), ("w3", "other"))
    for n in range(MIN_RUNS):
        add_run(errors, f"a{n}", "w1", 80.0)
        add_run(errors, f"b{n}", "w2", 200.0)
        add_run(errors, f"c{n}", "w3", 100.0)
    found = {(each.model, each.worker): each for each in errors.summaries()}
    assert [*found] == [("m", ""), ("m", "w1"), ("m", "w2"), ("other", ""), ("other", "w3")]
    assert found["m", "w1"].ttft == found["m", "w1"].itl == pytest.approx((0.25, 0.25))
    assert found["m", ""].ttft == pytest.approx((0.25, 0.5))
    assert found["m", ""].runs == 2 * MIN_RUNS
    assert found["other", "w3"].ttft == (0.0, 0.0)


def test_failed_runs_and_decisions_without_a_forecast_do_not_count() -> None:
    errors = captured(("w1", "m"))
    add_run(errors, "failed", "w1", 900.0, code="error")
    add_run(errors, "unpredicted", "w1", 900.0, predicted_ms=0.0)
    assert errors.summaries() == []


def test_few_runs_have_no_percentile() -> None:
    errors = captured(("w1", "m"))
    add_run(errors, "only", "w1", 50.0)
    assert [(each.runs, each.ttft, each.itl) for each in errors.summaries()] == [
        (1, None, None), (1, None, None),
    ]  # fmt: skip


def test_errors_are_shown_as_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    errors = captured(("w1", "m"))
    for n in range(MIN_RUNS):
        add_run(errors, str(n), "w1", 80.0)
    show_errors(errors, Console(width=100))
    _, of_model, of_worker = capsys.readouterr().out.splitlines()
    assert of_model.split() == ["m", "all", "20", "25%", "25%", "25%", "25%"]
    assert of_worker.split() == ["m", "w1", "20", "25%", "25%", "25%", "25%"]
