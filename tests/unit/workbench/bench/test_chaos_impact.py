"""Tests of the cost of kills, computed from recorded answers and their times."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.engine.simulated.text_generator import ExpectedAnswer
from workbench.bench.chaos import impact
from workbench.bench.chaos.fault_injection import (
    BROKER_FAULTS,
    FAULT_KINDS,
    ROLLING,
    InjectedFault,
    draw_faults,
)
from workbench.bench.chaos.load_generator import Conversation
from workbench.bench.chaos.log_observer import ObservedRequest, WorkerLoss

PARTS = {
    "gateway": ["gateway-1", "gateway-2"],
    "router": ["router-1", "router-2"],
    "worker": [f"worker-{n}" for n in range(1, 7)],
    "indexer": ["indexer-1"],
    "preprocessor": ["preprocessor-1", "preprocessor-2"],
    "collector": ["collector-1", "collector-2"],
}


def talk(
    request_id: str = "a", times: Sequence[float] = (), text: str = "abc", due: str = "abc",
    gateway: str = "gateway-1",
) -> Conversation:  # fmt: skip
    sent = DemoAnswer(
        request_id, ExpectedAnswer((), due, "stop"), 1, 0.0, list(times), text, finish_reason="stop"
    )
    return Conversation(sent, 0, gateways=[(0.0, gateway)], ended_at=100.0)


def timeline(request_id: str = "a", worker: str = "worker-1", at: float = 0.0) -> ObservedRequest:
    found = ObservedRequest(request_id)
    found.assigned.append((at, worker))
    found.requested_at = at
    return found


def hit(kind: str, victim: str, at: float = 10.0, ready_at: float = 13.0) -> InjectedFault:
    return InjectedFault(kind, victim, at, ready_at)


def test_gap_counts_when_it_began_in_time() -> None:
    moments = [1.0, 2.0, 9.0, 15.0, 16.0, 40.0]
    assert impact.longest_silence(moments, 1.0, 20.0) == (24.0, 16.0)
    assert impact.longest_silence(moments, 1.0, 15.5) == (7.0, 2.0)
    assert impact.longest_silence(moments, 3.0, 15.5) == (6.0, 9.0)
    assert impact.longest_silence(moments, 50.0, 60.0) == (0.0, 50.0)


def test_gap_is_of_one_round_only() -> None:
    first, second = [hit("router", "router-1")], [hit("worker", "worker-1", 20.0, 23.0)]
    one, stories = talk(times=[9.0, 19.9, 26.0]), {"a": timeline()}
    assert [gap.seconds for gap in impact.stream_gaps(first, [one], stories)] == [
        pytest.approx(10.9)
    ]
    assert [gap.seconds for gap in impact.stream_gaps(second, [one], stories)] == [
        pytest.approx(6.1)
    ]


@pytest.mark.parametrize(
    ("hits", "cause"),
    [
        ([hit("worker", "worker-1")], "worker"),
        ([hit("worker", "worker-2")], impact.NO_CAUSE),
        ([hit("worker-pause", "worker-1")], "worker-pause"),
        ([hit("gateway", "gateway-1")], "gateway"),
        ([hit("gateway", "gateway-2"), hit("worker", "worker-1")], "worker"),
        ([hit("gateway", "gateway-1"), hit("worker", "worker-1")], impact.SEVERAL_CAUSES),
        ([hit("router", "router-2"), hit("worker", "worker-2")], "router"),
        ([hit("router", "router-2"), hit("worker", "worker-1")], impact.SEVERAL_CAUSES),
        ([hit("indexer", "indexer-1")], impact.NO_CAUSE),
    ],
)
def test_gap_is_attributed_to_a_process_of_its_stream(
    hits: list[InjectedFault], cause: str
) -> None:
    (gap,) = impact.stream_gaps(hits, [talk(times=[9.0, 9.9, 15.0])], {"a": timeline()})
    assert (gap.cause, gap.seconds) == (cause, pytest.approx(5.1))


@pytest.mark.parametrize("times", [[], [11.0, 12.0], [1.0, 2.0]])
def test_streams_not_running_at_the_fault_have_no_gap(times: list[float]) -> None:
    assert impact.stream_gaps([hit("router", "router-1")], [talk(times=times)], {}) == []


def test_streams_that_begin_during_a_rolling_restart_count() -> None:
    hits = [hit(ROLLING, "worker-1", 10.0, 20.0), hit(ROLLING, "worker-2", 20.0, 30.0)]
    found = impact.stream_gaps(hits, [talk(times=[22.0, 23.0, 27.0]), talk(times=[31.0, 39.0])], {})
    assert [(gap.cause, gap.seconds) for gap in found] == [(ROLLING, 4.0)]


def test_streams_that_begin_while_a_broker_is_away_count_and_so_does_its_return() -> None:
    hits = [hit("broker-pause", "1", 10.0, 30.0)]
    found = impact.stream_gaps(hits, [talk(times=[29.0, 29.5, 33.5]), talk(times=[31.0, 39.0])], {})
    assert [(gap.cause, gap.seconds) for gap in found] == [("broker-pause", 4.0)]


def test_requests_wait_for_their_first_text_during_a_broker_fault() -> None:
    before, during, after = talk(times=[25.0]), talk(times=[19.0]), talk(times=[70.0])
    before.expected.sent_at, during.expected.sent_at, after.expected.sent_at = 9.0, 12.0, 31.0
    talks = [before, during, after]
    assert impact.slowest_first_text([hit("broker", "1", 10.0, 30.0)], talks) is during
    assert impact.slowest_first_text([hit("router", "router-1")], talks) is None
    line = impact.round_line(0, [hit("broker", "1", 10.0, 30.0)], talks, {}, [])
    assert line["first_text_ms"] == 7000


def test_new_requests_wait_for_their_assignment_from_the_routers_end_on() -> None:
    before, after, other = timeline("b"), timeline("c", at=12.0), timeline("d", at=14.0)
    before.requested_at, before.assigned = 9.8, [(16.0, "worker-1")]
    after.assigned = [(17.0, "worker-1")]
    stories = [before, after, other]
    assert impact.longest_assignment_wait_s([hit("router", "router-1")], stories) == 6.0
    assert impact.longest_assignment_wait_s([hit("worker", "worker-1")], stories) == -1
    other.assigned.clear()
    assert impact.longest_assignment_wait_s([hit("router", "router-1")], stories) == float("inf")


@pytest.mark.parametrize(
    ("text", "repeated", "verdict"),
    [("abc", 0, "right"), ("ab", 0, "lost"), ("abcc", 0, "twice"), ("abc", 1, "twice"),
     ("axc", 0, "wrong"), ("", 0, "lost")],
)  # fmt: skip
def test_verdicts_of_texts(text: str, repeated: int, verdict: str) -> None:
    found = talk(text=text)
    found.repeated_chunks = repeated
    assert found.verdict == verdict


def test_text_is_right_only_when_the_log_has_the_same() -> None:
    got = impact.completed_line([talk()], {"a": timeline()})
    assert [bad["verdict"] for bad in got["bad"]] == ["wrong"]


def test_only_faulted_workers_may_be_declared_lost() -> None:
    deaths = [WorkerLoss(17.0, "worker-1", 5000), WorkerLoss(17.0, "worker-2", 5000)]
    assert impact.false_positives(deaths, [hit("worker", "worker-1")]) == deaths[1:]


def test_bars_name_the_kind_that_missed_them() -> None:
    line = impact.round_line(
        0, [hit("router", "router-1")], [talk(times=[9.0, 9.9, 11.2])], {"a": timeline()}, []
    )
    report = impact.chaos_report([line | impact.completed_line([], {})], 5.0)
    missed = [each.name for each in report.thresholds if not each.passed]
    assert missed == ["longest gap of a running stream, router"]


def test_times_of_batch_requests_have_no_limit() -> None:
    batch, alone = talk("b", times=[9.0, 9.9, 40.0]), talk(times=[9.0, 9.9, 10.5])
    batch.is_batch = True
    waiting = timeline("b", at=10.0)
    waiting.assigned.clear()
    line = impact.round_line(
        0, [hit("router", "router-1")], [batch, alone], {"a": timeline(), "b": waiting}, []
    )
    assert line["gaps_ms"] == {"router": [900]}
    assert line["assigned_ms"] == 0
    lines = [line | impact.completed_line([batch, alone], {}), {"preemptions": 3}]
    figures = {each.name: each.value for each in impact.chaos_report(lines, 5.0).thresholds}
    assert (figures["batch requests of them"], figures["preemptions"]) == (1, 3)
    assert figures["longest batch request"] == 100.0


def test_report_has_rate_and_lateness_of_the_clients() -> None:
    ends = [{"requests": 100, "asking_s": 4.0, "late_ms": 10}, {"requests": 50, "asking_s": 2.0}]
    thresholds = {each.name: each for each in impact.chaos_report(ends, 5.0).thresholds}
    assert thresholds["asked a second"].value == 25.0
    assert thresholds["greatest delay of the load generator"].passed
    (late,) = [b for b in impact.chaos_report([{"late_ms": 2500}], 5.0).thresholds if not b.passed]
    assert (late.name, late.value) == ("greatest delay of the load generator", 2.5)


def test_answers_have_one_result_each() -> None:
    line = {"without_result": ["a"], "several_results": ["b", "c"]}
    missed = {
        each.name: each.value
        for each in impact.chaos_report([line], 5.0).thresholds
        if not each.passed
    }
    assert missed == {"answers without results": 1, "answers with several results": 2}


def test_brokers_get_every_fault_in_turn() -> None:
    kinds = [strike.kind for n in range(4) for strike in draw_faults(1, n, BROKER_FAULTS, PARTS, 3)]
    assert sorted(kinds) == sorted(BROKER_FAULTS)


@pytest.mark.parametrize("number", range(60))
def test_rounds_follow_from_their_number_and_leave_a_working_deployment(number: int) -> None:
    strikes = draw_faults(7, number, FAULT_KINDS, PARTS, 3)
    assert strikes == draw_faults(7, number, FAULT_KINDS, PARTS, 3)
    assert strikes
    assert len({s.target for s in strikes}) == len(strikes)
    if strikes[0].kind != ROLLING:
        kinds = [s.kind for s in strikes]
        assert kinds.count("worker") <= 2
        assert sum(k.startswith(("router", "broker")) for k in kinds) <= 1


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_fault_kind_can_be_selected_alone(kind: str) -> None:
    numbers = random.Random(kind).sample(range(100), 5)
    assert all({s.kind for s in draw_faults(1, n, (kind,), PARTS, 3)} == {kind} for n in numbers)
