"""Tests of the objective of a deployment: the weight of decode by the latencies in the ledger."""

from __future__ import annotations

import pytest

from kvlane.app.routing.policy_names import Objective
from kvlane.app.routing.queueing.objective import DecodeWeight
from kvlane.streams.records import Assigned, Finished, LogRecord, RequestOffset


def weight_after(
    objective: Objective, answers: int, ttft_ms: float, itl_ms: float, held_ms: int = 0
) -> float:
    """The weight of decode after so many answers of 101 tokens."""
    weight = DecodeWeight(objective)
    for number in range(answers):
        decision = Assigned(
            id=f"{number}", attempt=0, phase="aggregated", worker="w", epoch=1, responses_from=0,
            origin=RequestOffset(topic="requests", partition=0, offset=0), deadline_ms=0,
            held_ms=held_ms,
        )  # fmt: skip
        end = Finished(
            id=f"{number}", attempt=0, phase="aggregated", worker="w", epoch=1, code="stop",
            output_tokens=101, ttft_ms=ttft_ms, itl_ms=itl_ms,
        )  # fmt: skip
        for record in (decision, end):
            weight.on_record(LogRecord(number, 0, record))
    return weight.value


def test_balanced_weight_follows_the_ratio_of_first_token_to_the_end() -> None:
    assert weight_after("balanced", 5000, 50, 9) == pytest.approx(50 / (2 * 50 + 900), abs=1e-3)
    assert weight_after("balanced", 5000, 200, 9) == pytest.approx(200 / 1300, abs=6e-3)
    waited = weight_after("balanced", 5000, 50, 9, held_ms=150)
    assert waited == pytest.approx(200 / 1300, abs=6e-3), "with the wait in the router"


def test_balanced_weight_begins_with_usual_latencies_and_ignores_answers_of_one_token() -> None:
    assert weight_after("balanced", 0, 1, 1) == 0.02
    weight = DecodeWeight("balanced")
    end = Finished(
        id="a", attempt=0, phase="aggregated", worker="w", epoch=1, code="stop",
        output_tokens=1, ttft_ms=9000.0,
    )  # fmt: skip
    weight.on_record(LogRecord(0, 0, end))
    assert weight.value == 0.02


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, 1e300])
def test_odd_times_leave_the_weight_as_it_is(odd: float) -> None:
    assert weight_after("balanced", 100, odd, 9) == weight_after("balanced", 0, 1, 1)
    assert weight_after("balanced", 100, 50, odd) == weight_after("balanced", 0, 1, 1)


def test_other_objectives_have_a_weight_of_their_own() -> None:
    first_token, throughput = (
        weight_after(objective, 100, 500, 9) for objective in ("first-token", "throughput")
    )
    assert first_token < 0.02 < throughput
