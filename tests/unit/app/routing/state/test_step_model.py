"""Tests of the step model: equations of runs, and curves fitted to engines of other shapes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.state import step_model
from kvlane.app.routing.state.performance import EngineProfile
from kvlane.app.routing.state.step_model import (
    JOINT_MS,
    Answer,
    FirstToken,
    StepFit,
    WorkerRuns,
    fit_steps,
)

CHUNK, CAPACITY = 2048, 200_000
PRIOR = PerfCurves()
SHAPES = {
    "constant": PerfCurves((4.2e-7, 1.518e-2, 66.0), (-25.74, 54.01, 22.96)),
    "linear": PerfCurves((4.2e-7, 6.07e-2, 16.5), (-102.96, 216.04, 5.74)),
    "quadratic": PerfCurves((8.4e-6, 1.518e-2, 16.5), (-25.74, 54.01, 5.74)),
}


def runs_of(
    curves: PerfCurves, count: int, seed: int = 0, factor: float = 1.0, wrong: float = 0.0
) -> WorkerRuns:
    """Runs of an engine, one prompt after the other; `wrong`: share of ten times too long ones."""
    rng, profile = Random(seed), EngineProfile(curves, factor, CHUNK, CAPACITY)
    firsts, answers, now_ms = [], [], 0
    for n in range(count):
        tokens, context = rng.randint(20, 6000), rng.choice((0, rng.randint(1000, 150_000)))
        step_ms = profile.decode_ms(context) if context else 0.0
        took_ms = rng.random() * step_ms + profile.prefill_ms(tokens, step_ms)
        took_ms *= 10.0 if rng.random() < wrong else 1.0
        now_ms += int(took_ms) + 50
        firsts.append(FirstToken(now_ms, 2 * n, took_ms, tokens, float(context), tokens, True))
        since_ms, steps = now_ms, rng.randint(20, 200)
        took_ms = steps * profile.decode_ms(context + tokens + steps / 2)
        now_ms += int(took_ms) + 50
        answers.append(Answer(now_ms, 2 * n + 1, since_ms, took_ms, steps))
    return WorkerRuns(firsts, answers)


def fitted(runs: dict[str, WorkerRuns]) -> StepFit | None:
    return fit_steps(runs, PRIOR, CHUNK, CAPACITY)


def prefill_error(found: PerfCurves, truth: PerfCurves, factor: float = 1.0) -> float:
    return max(
        abs(found.prefill_ms(tokens) * factor / truth.prefill_ms(tokens) - 1)
        for tokens in (50, 500, 2000)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_of_a_foreign_engine_is_found(shape: str) -> None:
    truth = SHAPES[shape]
    found = fitted({"w1": runs_of(truth, 60), "w2": runs_of(truth, 60, 1)})
    assert found is not None
    assert prefill_error(found.curves, truth) < 0.06
    for usage in (0.1, 0.5):
        assert found.curves.decode_ms(usage) == pytest.approx(truth.decode_ms(usage), rel=0.06)
    assert list(found.factors) == ["w1", "w2"]
    assert max(abs(factor - 1) for factor in found.factors.values()) < 0.03


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_true_prior_with_a_factor_stays(factor: float) -> None:
    found = fitted({"w1": runs_of(PRIOR, 60, factor=factor), "w2": runs_of(PRIOR, 60, 1)})
    assert found is not None
    assert found.curves == PRIOR
    assert found.factors == pytest.approx({"w1": factor, "w2": 1.0})


def test_prompts_that_come_at_once_do_not_make_a_worker_slower() -> None:
    took_ms = PRIOR.prefill_ms(12 * 100)
    firsts = [
        FirstToken(1000 * n, 12 * n + i, took_ms, 100, 0.0, 100, found_none=not i)
        for n in range(30)
        for i in range(12)
    ]
    assert fitted({"w1": WorkerRuns(firsts, [])}) == StepFit(PRIOR, {"w1": pytest.approx(1.0)})


def test_few_runs_change_nothing() -> None:
    assert fitted({}) is None
    assert fitted({"w1": WorkerRuns([], [])}) is None
    assert fitted({"w1": runs_of(SHAPES["linear"], 4)}) is None


def test_few_runs_give_a_factor_on_the_prior_and_no_other_shape() -> None:
    found = fitted({"w1": runs_of(PRIOR, 6, factor=3.0), "w2": WorkerRuns([], [])})
    assert found == StepFit(PRIOR, {"w1": pytest.approx(3.0, rel=0.1)})


def noisy_runs(count: int, seed: int, factor: float = 1.0, at_once: int = 1) -> WorkerRuns:
    """Runs of an engine of which a step varies by some 30 %, so many with each first token."""
    rng, firsts, answers, now_ms = Random(seed), [], [], 0
    for n in range(0, count, at_once):
        took_ms = factor * PRIOR.prefill_ms(100 * at_once) * rng.lognormvariate(0, 0.3)
        step_ms = factor * PRIOR.decode_ms(0.0) * rng.lognormvariate(0, 0.3)
        now_ms += int(took_ms)
        for i in range(at_once):
            firsts.append(FirstToken(now_ms, n + i, took_ms, 100, 0.0, 100, not i))
            end_ms = now_ms + int(50 * step_ms)
            answers.append(Answer(end_ms, n + i, now_ms, 50 * step_ms, 50))
        now_ms += int(50 * step_ms) + 50
    return WorkerRuns(firsts, answers)


@pytest.mark.parametrize("at_once", [1, 10])
@pytest.mark.parametrize("factor", [0.4, 4.0])
def test_noise_of_equal_engines_makes_none_of_them_faster(factor: float, at_once: int) -> None:
    equal = 0
    for seed in range(0, 40, 4):
        names = {f"w{n}": noisy_runs(60, seed + n, factor, at_once) for n in range(4)}
        found = fitted(names)
        assert found is not None
        factors = sorted(found.factors.values())
        assert factors[-1] < 1.4 * factors[0]
        equal += factors[-1] < 1.05 * factors[0]
    assert equal >= 7, "by their errors, one of twenty factors differs"


def test_slower_engine_differs_from_noisy_ones() -> None:
    found = fitted({f"w{n}": noisy_runs(60, n, 2.0 if n == 3 else 1.0) for n in range(4)})
    assert found is not None
    assert found.factors["w3"] > 1.3 * max(found.factors[f"w{n}"] for n in range(3))


def test_burst_is_decoded_beside_its_own_tokens() -> None:
    """Its decisions saw no load, so that noise decided on the slope of decode."""
    found = fitted({f"w{n}": noisy_runs(120, n, at_once=20) for n in range(3)})
    assert found is not None
    full = found.factors["w0"] * found.curves.decode_ms(0.5)
    assert full < 20 * PRIOR.decode_ms(0.0)


def test_outliers_do_not_move_the_coefficients() -> None:
    truth = SHAPES["linear"]
    found = fitted({"w1": runs_of(truth, 120, wrong=0.2)})
    assert found is not None
    assert prefill_error(found.curves, truth) < 0.06


def test_slower_worker_of_a_kind_has_a_factor_of_its_own() -> None:
    truth = SHAPES["quadratic"]
    found = fitted({
        name: runs_of(truth, 60, n, 2.0 if name == "w3" else 1.0)
        for n, name in enumerate(("w1", "w2", "w3"))
    })  # fmt: skip
    assert found is not None
    assert found.factors["w3"] / found.factors["w1"] == pytest.approx(2.0, rel=0.05)
    assert prefill_error(found.curves, truth, found.factors["w1"]) < 0.06


def test_worker_that_became_slower_counts_as_it_is_now() -> None:
    truth = SHAPES["linear"]
    before, after = runs_of(truth, 60), runs_of(truth, 12, 1, factor=2.0)
    late_ms = before.answers[-1].at_ms
    changed = WorkerRuns(
        [*before.first_tokens, *(f._replace(at_ms=f.at_ms + late_ms) for f in after.first_tokens)],
        [
            *before.answers,
            *(
                a._replace(at_ms=a.at_ms + late_ms, since_ms=a.since_ms + late_ms)
                for a in after.answers
            ),
        ],
    )
    found = fitted({"w1": changed})
    assert found is not None
    assert prefill_error(found.curves, truth, found.factors["w1"] / 2.0) < 0.06


def reference_terms(runs: WorkerRuns, bend: float) -> list[tuple[list[float], float]]:
    """The equations of a worker, run by run."""

    def chunks(tokens: float) -> tuple[float, float, float]:
        whole, rest = divmod(tokens, CHUNK)
        return whole * CHUNK**2 + rest**2, tokens, whole + (rest > 0)

    def bent(tokens: float) -> float:
        usage = min(tokens / CAPACITY, 1.0)
        return (bend * usage + 1) * usage

    steps: list[list[FirstToken]] = []
    for first in runs.first_tokens:
        if steps and first.at_ms - steps[-1][-1].at_ms <= JOINT_MS:
            steps[-1].append(first)
        else:
            steps.append([first])

    def kept(answer: Answer) -> float:
        own = next(f for f in runs.first_tokens if f.at_ms >= answer.since_ms)
        return own.prompt_tokens + answer.steps / 2

    def mean_load(of: Answer) -> float:
        shared_ms = [
            (min(of.at_ms, each.at_ms) - max(of.since_ms, each.since_ms), kept(each))
            for each in runs.answers
        ]
        return sum(max(ms, 0) * tokens for ms, tokens in shared_ms) / (of.at_ms - of.since_ms)

    found = []
    for step in steps:
        measured = [first for first in step if first.found_none]
        if not measured:
            continue
        longest = max(measured, key=lambda first: first.took_ms)
        squares, tokens, count = chunks(sum(first.tokens for first in step))
        beside = (count + 0.5) * (longest.context > 0)
        terms = [squares, tokens, count, beside * bent(longest.context), beside]
        found.append((terms, longest.took_ms))
    for answer in runs.answers:
        between = [
            chunks(sum(first.tokens for first in step))
            for step in steps
            if answer.since_ms + JOINT_MS < step[0].at_ms <= answer.at_ms
        ]
        sums = [sum(each[n] for each in between) for n in range(3)]
        seen = [f for f in runs.first_tokens if answer.since_ms <= f.at_ms <= answer.at_ms]
        held = (sum(f.context for f in seen) + kept(answer)) / len(seen)
        load = bent(max(held, mean_load(answer)))
        found.append(([*sums, answer.steps * load, answer.steps], answer.took_ms))
    return found


FIRSTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 3, 40]), st.integers(1, 9000),
        st.sampled_from([0.0, 5000.0, 300_000.0]), st.booleans(), st.integers(0, 3),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def drawn_runs(rows: list[tuple[int, int, float, bool, int]]) -> WorkerRuns:
    firsts, answers, now_ms = [], [], 0
    for n, (later_ms, tokens, context, found_none, lasts) in enumerate(rows):
        now_ms += later_ms
        firsts.append(FirstToken(now_ms, n, 10.0 + n, tokens, context, tokens + 16, found_none))
        if lasts and later_ms:  # else the place of its first token is not unique
            answers.append(Answer(now_ms + 30 * lasts, 100 + n, now_ms, 25.0 + n, 7 * lasts))
    return WorkerRuns(firsts, sorted(answers))


@given(st.lists(FIRSTS, min_size=1, max_size=3), st.floats(-0.5, 0.5))
def test_equations_are_those_of_a_plain_reading(
    drawn: list[list[tuple[int, int, float, bool, int]]], bend: float
) -> None:
    workers = [drawn_runs(rows) for rows in drawn]
    found = step_model._equations(workers, CHUNK, CAPACITY, bend)
    begin = 0
    for runs, count in zip(workers, found.counts.tolist(), strict=True):
        of_worker, begin = slice(begin, begin + count), begin + count
        equations = zip(found.terms[of_worker], found.took_ms[of_worker], strict=True)
        got = sorted((terms.tolist(), took_ms) for terms, took_ms in equations)
        expected = sorted(reference_terms(runs, bend))
        assert len(got) == len(expected)
        for (terms, took_ms), (wanted, wanted_ms) in zip(got, expected, strict=True):
            assert took_ms == wanted_ms
            assert terms == pytest.approx(wanted)
    assert begin == len(found.took_ms)
