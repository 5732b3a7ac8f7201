"""Tests of a captured period, repeated as it was decided and under other policies."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.simulation.counterfactual import (
    CapturedPeriod,
    CaptureReader,
    counterfactual,
    policy_regret,
    recorded_metrics,
    simulate_recorded,
)
from kvlane.app.simulation.simulation_runs import RunMetrics, metrics_of
from kvlane.app.traces.capture_format import (
    AnyCaptureLine,
    CapturedDecision,
    CapturedRequest,
    CapturedWorker,
)
from kvlane.app.traces.mooncake_trace import InvalidTrace
from tests.harness.capture_harness import (
    capture_lines,
    make_requests,
    serve_requests,
    start_deployment,
    write_capture,
)
from tests.harness.memory_world import MemoryWorld, run_scenario

COUNT = 150


def lines_under(policy: str, every_s: float = 0.03) -> list[AnyCaptureLine]:
    found: list[AnyCaptureLine] = []

    async def scenario(world: MemoryWorld) -> None:
        await start_deployment(world, policy=policy)
        await serve_requests(world, make_requests(world, COUNT), every_s)
        found.extend(await capture_lines(world))

    run_scenario(scenario, lanes=4)
    return found


def period_of(lines: list[AnyCaptureLine]) -> CapturedPeriod:
    reading = CaptureReader()
    for line in lines:
        reading.add_line(line)
    return reading.build_period()


@pytest.fixture(scope="module")
def at_random() -> list[AnyCaptureLine]:
    return lines_under("random", every_s=0.15)


def assert_close(one: RunMetrics, other: RunMetrics) -> None:
    assert one.requests == other.requests == COUNT
    assert one.reuse == pytest.approx(other.reuse, abs=0.01)
    assert one.ttft_mean == pytest.approx(other.ttft_mean, rel=0.05)
    assert one.itl_mean == pytest.approx(other.itl_mean, rel=0.05)
    assert one.e2e_mean == pytest.approx(other.e2e_mean, rel=0.05)


@pytest.mark.parametrize("policy", ["predictive", "random"])
def test_recomputed_decisions_equal_the_recorded_ones(policy: str) -> None:
    """The engines are simulated ones too, and nothing else takes time; answers' blocks differ."""
    period = period_of(lines_under(policy))
    assert period.workers == 3
    assert (period.shape.block_size, period.shape.cache_blocks) == (16, 400)
    assert_close(recorded_metrics(period), metrics_of(simulate_recorded(period)))


def test_other_policies_are_compared_request_by_request(at_random: list[AnyCaptureLine]) -> None:
    period = period_of(at_random)
    taken, other = simulate_recorded(period), counterfactual(period, "predictive", 0)
    assert [ctx.id for ctx in taken] == [ctx.id for ctx in other]
    lost = policy_regret(taken, other)
    assert lost.ttft_ms == pytest.approx(metrics_of(taken).ttft_mean - metrics_of(other).ttft_mean)
    assert lost.e2e_ms == pytest.approx(metrics_of(taken).e2e_mean - metrics_of(other).e2e_mean)
    assert lost.ttft_ms > lost.ttft_error > 0, "at random is worse, and not by chance"


def test_recorded_decisions_have_no_regret(at_random: list[AnyCaptureLine]) -> None:
    period = period_of(at_random)
    assert policy_regret(simulate_recorded(period), simulate_recorded(period)) == (0, 0, 0, 0)


def test_requests_that_cannot_be_replayed_are_counted(at_random: list[AnyCaptureLine]) -> None:
    lines = [line for line in at_random if not isinstance(line, CapturedRequest)]
    sent = [line for line in at_random if isinstance(line, CapturedRequest)]
    sent[0] = replace(sent[0], model="another")
    last = sent[-1].id
    lines = [x for x in lines if not isinstance(x, CapturedDecision) or x.decision.id != last]
    period = period_of([*lines, *sent])
    assert period.left_out == {"for another model": 1, "not decided in the period": 1}
    assert len(period.requests) == COUNT - 2


def test_capture_without_requests_or_workers_is_reported(at_random: list[AnyCaptureLine]) -> None:
    with pytest.raises(InvalidTrace, match="requests are kept for an hour"):
        period_of([line for line in at_random if not isinstance(line, CapturedRequest)])
    with pytest.raises(InvalidTrace, match="no worker of demo"):
        period_of([line for line in at_random if not isinstance(line, CapturedWorker)])
    with pytest.raises(InvalidTrace, match="150 not decided in the period"):
        period_of([line for line in at_random if not isinstance(line, CapturedDecision)])


def test_command_shows_the_recorded_figures_beside_the_policies(
    at_random: list[AnyCaptureLine], tmp_path: Path
) -> None:
    file = write_capture(at_random, tmp_path / "run.jsonl.zst")
    shown = CliRunner().invoke(
        app, ["simulate", "--from-ledger", str(file), "--policy", "dynamo", "--seeds", "2"]
    )
    assert shown.exit_code == 0, shown.output
    rows = [line.split("%")[0] for line in shown.stdout.splitlines() if "%" in line]
    assert [row.rsplit(maxsplit=1)[0] for row in rows] == [
        "as it happened", "decisions taken", "dynamo, seed 0", "dynamo, seed 1",
    ]  # fmt: skip
    assert "150 requests for demo, 3 workers of 400 blocks of 16 tokens" in shown.stdout
    assert "It is statistical" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("option", [("--workers", "4"), ("--trace", "x"), ("--speed", "2")])
def test_options_that_a_capture_answers_itself_are_refused(
    at_random: list[AnyCaptureLine], tmp_path: Path, option: tuple[str, str]
) -> None:
    file = write_capture(at_random, tmp_path / "run.jsonl")
    shown = CliRunner().invoke(app, ["simulate", "--from-ledger", str(file), *option])
    assert shown.exit_code == 2
    assert option[0] in shown.output
