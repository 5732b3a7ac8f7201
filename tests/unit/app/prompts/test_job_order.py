"""Tests of the order of batch requests: jobs take turns, common prefixes follow each other."""

from __future__ import annotations

from kvlane.app.prompts.job_order import QUANTUM_REQUESTS, BatchItem, JobOrder


def test_common_prefixes_follow_each_other() -> None:
    prompts = [b"system a, 1", b"system b, 1", b"system a, 2", b"system b, 2"]
    order = JobOrder().arranged([BatchItem("", prompt, 10) for prompt in prompts])
    assert [prompts[i][:8] for i in order] == [b"system a"] * 2 + [b"system b"] * 2


def test_small_job_does_not_wait_for_a_large_one() -> None:
    items = [BatchItem("large", n, 10) for n in range(100)] + [BatchItem("small", 0, 10)]
    order = JobOrder().arranged(items)
    assert sorted(order) == list(range(101))
    assert order.index(100) <= QUANTUM_REQUESTS


def test_jobs_share_by_tokens_over_several_windows() -> None:
    jobs = JobOrder()
    for _ in range(5):
        order = jobs.arranged(
            [BatchItem("long", n, 1000) for n in range(60)]
            + [BatchItem("short", n, 10) for n in range(60)]
        )
    assert set(order[:60]) == set(range(60, 120))


def test_returning_job_has_no_claim_on_unused_shares() -> None:
    jobs = JobOrder()
    for _ in range(20):
        jobs.arranged([BatchItem("steady", n, 100) for n in range(50)])
    order = jobs.arranged(
        [BatchItem("steady", n, 100) for n in range(50)]
        + [BatchItem("new", n, 100) for n in range(50)]
    )
    assert min(order.index(n) for n in range(50)) <= 2 * QUANTUM_REQUESTS
