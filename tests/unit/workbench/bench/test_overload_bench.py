"""Tests of the report of the overload bench."""

from __future__ import annotations

from workbench.bench.chaos.overload import (
    MemorySample,
    OverloadOutcome,
    OverloadResult,
    memory_growth,
    overload_report,
    recovery_s,
    sse_text,
)

MB = 1024 * 1024


def answers(phase: str, start: float, count: int, **over: object) -> list[OverloadOutcome]:
    fields = {"status": 200, "ttft_s": 0.1, "retry_after": False, "is_right": True} | over
    return [OverloadOutcome(phase, start + n / 10, **fields) for n in range(count)]  # type: ignore[arg-type]


def seen(*more: OverloadOutcome, samples: list[MemorySample] | None = None) -> OverloadResult:
    usual = [*answers("unloaded", 0, 50), *answers("overload", 10, 50)]
    refused = answers("overload", 10, 50, status=529, ttft_s=0.02, retry_after=True)
    after = answers("afterwards", 100, 400)
    return OverloadResult(
        10.0, 2.0, [*usual, *refused, *after, *more], samples or [], ended_at=100.0
    )


def missed(found: OverloadResult) -> list[str]:
    return [each.name for each in overload_report(found).thresholds if not each.passed]


def test_early_and_clear_refusals_meet_all_bars() -> None:
    assert missed(seen()) == []


def test_refusal_without_retry_after_is_found() -> None:
    silent = answers("overload", 12, 1, status=529, ttft_s=0.02)
    assert missed(seen(*silent)) == ["refused without a time to come back"]


def test_late_first_texts_of_served_requests_fail_the_check() -> None:
    late = answers("overload", 12, 20, ttft_s=0.3)
    assert missed(seen(*late)) == ["p99 to the first text, of those served, to that without load"]


def test_requests_neither_served_nor_refused_fail_the_check() -> None:
    assert missed(seen(*answers("overload", 12, 1, status=500))) == ["neither served nor refused"]


def test_memory_growth_is_that_of_the_second_half() -> None:
    sizes = [100, 200, 210, 205, 215, 220]
    samples = [
        MemorySample("overload", float(n), "router-1", mb * MB) for n, mb in enumerate(sizes)
    ]
    assert memory_growth(samples) == [(10 * MB, "router-1")]


def test_recovery_ends_with_the_last_window_with_a_refusal_or_late_texts() -> None:
    assert recovery_s(seen()) == 0.0
    refusal = answers("afterwards", 105, 1, status=529, ttft_s=0.01, retry_after=True)
    assert recovery_s(seen(*refusal)) == 6.0
    late = answers("afterwards", 120, 60, ttft_s=0.5)
    assert recovery_s(seen(*late)) == 126.0 - 100.0


def test_text_of_a_stream_is_that_of_its_events() -> None:
    got = (
        b'id: 1\ndata: {"choices":[{"delta":{"role":"assistant","content":"Hel"}}]}\n\n'
        b": alive\n\n"
        b'id: 2\ndata: {"choices":[{"delta":{"content":"lo"}}]}\n\ndata: [DONE]\n\n'
    )
    assert sse_text(got) == "Hello"
