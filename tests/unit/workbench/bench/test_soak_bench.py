"""Tests of the report of the soak bench."""

from __future__ import annotations

from workbench.bench.chaos.soak import ProcessSample, SoakAnswer, SoakResult, soak_report

MB = 1024 * 1024
SECONDS = 400


def result(
    mb_per_s: float = 0.0, cpu_s_per_s: float = 0.1, slowdown: float = 1.0, verdict: str = "right"
) -> SoakResult:
    """A request a second; memory, CPU time and latency change only after a quarter of the time."""
    answers, samples, cpu_s = [], [], 0.0
    for second in range(SECONDS):
        late = second >= SECONDS * 3 // 4
        cpu_s += cpu_s_per_s if late else 0.1
        steady_s = max(0, second - SECONDS // 4)
        samples.append(
            ProcessSample(
                second,
                {"router-1": int((100 + mb_per_s * steady_s) * MB), "worker-1": 90 * MB},
                {"router-1": cpu_s, "worker-1": 0.0},
                0.003,
            )
        )
        answers.append(SoakAnswer(second, 0.1 * (slowdown if late else 1.0), verdict))
    return SoakResult(SECONDS, answers, samples, [])


def missed(found: SoakResult) -> list[str]:
    return [each.name for each in soak_report(found).thresholds if not each.passed]


def test_steady_deployment_meets_all_bars() -> None:
    assert missed(result()) == []


def test_growth_of_one_process_is_found() -> None:
    assert missed(result(mb_per_s=0.01)) == ["memory per request, most of all router-1"]


def test_growth_in_the_warm_up_is_allowed() -> None:
    samples = [
        sample._replace(rss_bytes={"router-1": int(min(sample.at, 100) * MB)})
        for sample in result().samples
    ]
    assert missed(result()._replace(samples=samples)) == []


def test_requests_with_growing_cost_are_found() -> None:
    assert missed(result(cpu_s_per_s=0.12)) == ["CPU time of a request, last part to second"]


def test_later_first_texts_are_found() -> None:
    assert missed(result(slowdown=1.3)) == ["time to first text, p50, last part to second"]


def test_wrong_texts_and_ended_processes_are_found() -> None:
    found = result(verdict="twice")._replace(crashes=["worker-1"])
    assert missed(found) == ["answers with repeated or wrong text", "processes that ended"]
