"""Tests of the latencies of answers in a gateway's metrics."""

from __future__ import annotations

import pytest

from kvlane.app.metrics.gateway_metrics import BLOCK_TOKENS, GatewayMetrics, TokenTimes
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, run_virtual


def observed(metrics: GatewayMetrics, name: str) -> tuple[float, float]:
    count = metrics.registry.get_sample_value(f"kvlane_gateway_{name}_seconds_count")
    total = metrics.registry.get_sample_value(f"kvlane_gateway_{name}_seconds_sum")
    assert count is not None
    assert total is not None
    return count, total


def got(steps: list[tuple[float, int]], tokens: int | None = None) -> GatewayMetrics:
    """The figures of an answer of which so many tokens were shown, each after so long; `tokens`:
    of one of which so many characters were."""
    metrics = GatewayMetrics()

    async def scenario(loop: VirtualLoop) -> None:
        clock = VirtualClock(loop)
        pace, shown = TokenTimes(clock, clock.now()), 0
        for after_s, shown in steps:
            await clock.sleep(after_s)
            pace.on_tokens(shown)
        pace.report(metrics, shown, shown if tokens is None else tokens)

    run_virtual(scenario)
    return metrics


def test_answer_without_a_token_has_no_times() -> None:
    metrics = got([(1.0, 0)])
    assert (
        observed(metrics, "time_to_first_token")
        == observed(metrics, "inter_token_latency")
        == (0, 0)
    )


def test_first_token_is_counted_once_whatever_follows() -> None:
    metrics = got([(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)])
    assert observed(metrics, "time_to_first_token") == (1, pytest.approx(2))


def test_times_from_token_to_token_are_counted_by_blocks() -> None:
    even = [(0.5, 1)] + [(0.1, n) for n in range(2, 2 * BLOCK_TOKENS + 4)]
    assert observed(got(even), "inter_token_latency") == (3, pytest.approx(0.3))
    stall = [(0.5, 1), (0.1 * BLOCK_TOKENS, 1 + BLOCK_TOKENS), (9.0 * 2, 3 + BLOCK_TOKENS)]
    assert observed(got(stall), "inter_token_latency") == (2, pytest.approx(0.1 + 9.0))


def test_answer_of_one_piece_has_no_time_from_token_to_token() -> None:
    assert observed(got([(1.0, 40)]), "inter_token_latency") == (0, 0)


def test_answer_in_text_has_its_times_by_the_tokens_that_were_counted() -> None:
    dead_letters = [(0.5, 4)] + [(0.1, 4 * n) for n in range(2, 2 * BLOCK_TOKENS + 2)]
    metrics = got(dead_letters, 2 * BLOCK_TOKENS + 1)
    assert observed(metrics, "time_to_first_token") == (1, pytest.approx(0.5))
    count, total = observed(metrics, "inter_token_latency")
    assert total / count == pytest.approx(0.1, rel=0.1)
    assert observed(got(dead_letters, 0), "inter_token_latency") == (0, 0), "nobody counted them"
