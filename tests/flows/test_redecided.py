"""A captured period, played as it was decided and as other policies would have decided."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from app.captured import AnyLine, Asked, Decided, Worker
from app.cli import app
from app.simulation.figures import Figures, figures
from app.simulation.redecided import Period, Reading, as_decided, as_it_happened, redecided, regret
from app.trace import BadTrace
from tests.captures import captured, put, requests, serve, staff
from tests.worlds import World, play

COUNT = 150


def lines_under(policy: str, every_s: float = 0.03) -> list[AnyLine]:
    found: list[AnyLine] = []

    async def scenario(world: World) -> None:
        await staff(world, policy=policy)
        await serve(world, requests(world, COUNT), every_s)
        found.extend(await captured(world))

    play(scenario, lanes=4)
    return found


def period_of(lines: list[AnyLine]) -> Period:
    reading = Reading()
    for line in lines:
        reading.take(line)
    return reading.period()


@pytest.fixture(scope="module")
def at_random() -> list[AnyLine]:
    return lines_under("random", every_s=0.15)


def assert_close(one: Figures, other: Figures) -> None:
    assert one.requests == other.requests == COUNT
    assert one.reuse == pytest.approx(other.reuse, abs=0.01)
    assert one.ttft_mean == pytest.approx(other.ttft_mean, rel=0.05)
    assert one.itl_mean == pytest.approx(other.itl_mean, rel=0.05)
    assert one.e2e_mean == pytest.approx(other.e2e_mean, rel=0.05)


@pytest.mark.parametrize("policy", ["predictive", "random"])
def test_the_decisions_that_were_taken_come_out_as_they_did(policy: str) -> None:
    """The engines are simulated ones too, and nothing else takes time; answers' blocks differ."""
    period = period_of(lines_under(policy))
    assert period.workers == 3
    assert (period.shape.block_size, period.shape.blocks) == (16, 400)
    assert_close(as_it_happened(period), figures(as_decided(period)))


def test_other_policies_are_compared_request_by_request(at_random: list[AnyLine]) -> None:
    period = period_of(at_random)
    taken, other = as_decided(period), redecided(period, "predictive", 0)
    assert [life.id for life in taken] == [life.id for life in other]
    lost = regret(taken, other)
    assert lost.ttft_ms == pytest.approx(figures(taken).ttft_mean - figures(other).ttft_mean)
    assert lost.e2e_ms == pytest.approx(figures(taken).e2e_mean - figures(other).e2e_mean)
    assert lost.ttft_ms > lost.ttft_error > 0, "at random is worse, and not by chance"


def test_decisions_have_no_regret_of_themselves(at_random: list[AnyLine]) -> None:
    period = period_of(at_random)
    assert regret(as_decided(period), as_decided(period)) == (0, 0, 0, 0)


def test_what_cannot_be_played_is_left_out_and_counted(at_random: list[AnyLine]) -> None:
    lines = [line for line in at_random if not isinstance(line, Asked)]
    asked = [line for line in at_random if isinstance(line, Asked)]
    asked[0] = replace(asked[0], model="another")
    last = asked[-1].id
    lines = [x for x in lines if not isinstance(x, Decided) or x.decision.id != last]
    period = period_of([*lines, *asked])
    assert period.left_out == {"for another model": 1, "not decided in the period": 1}
    assert len(period.requests) == COUNT - 2


def test_a_capture_without_requests_or_workers_says_so(at_random: list[AnyLine]) -> None:
    with pytest.raises(BadTrace, match="requests are kept for an hour"):
        period_of([line for line in at_random if not isinstance(line, Asked)])
    with pytest.raises(BadTrace, match="no worker of demo"):
        period_of([line for line in at_random if not isinstance(line, Worker)])
    with pytest.raises(BadTrace, match="150 not decided in the period"):
        period_of([line for line in at_random if not isinstance(line, Decided)])


def test_the_command_shows_what_happened_beside_the_policies(
    at_random: list[AnyLine], tmp_path: Path
) -> None:
    file = put(at_random, tmp_path / "run.jsonl.zst")
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
    at_random: list[AnyLine], tmp_path: Path, option: tuple[str, str]
) -> None:
    file = put(at_random, tmp_path / "run.jsonl")
    shown = CliRunner().invoke(app, ["simulate", "--from-ledger", str(file), *option])
    assert shown.exit_code == 2
    assert option[0] in shown.output
