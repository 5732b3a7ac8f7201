"""Tests of the regression's kernels: equal to plain references with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlane.app.routing.state import step_kernels
from kvlane.app.routing.state.step_kernels import (
    FACTOR_ERRORS,
    FACTOR_WINDOW,
    HUBER,
    MAX_ROUNDS,
    MIN_CHANGE,
    MIN_EVIDENCE,
    MIN_LEVEL,
    MIN_RESIDUAL,
    PRIOR_WEIGHT,
    SPREAD,
    settle,
    solve,
)

Floats = NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)


def reference_solve(terms: Floats, took_ms: Floats, prior: Floats) -> Floats:
    shares = (terms / took_ms[:, None]).mean(axis=0)
    is_seen = shares > 0
    unit = np.where(is_seen, 1.0 / np.where(is_seen, shares, 1.0), 0.0)
    found = prior
    for _ in range(MAX_ROUNDS):
        expected_ms = np.maximum(terms @ found, 1e-6)
        ratios = took_ms / expected_ms
        deviations = np.abs(ratios - 1)
        limit = HUBER * max(SPREAD * np.median(deviations), MIN_RESIDUAL)
        rows = terms * unit / expected_ms[:, None]
        weighted = rows * np.minimum(1.0, limit / np.maximum(deviations, 1e-12))[:, None]
        matrix = weighted.T @ rows + PRIOR_WEIGHT * np.eye(len(prior))
        solution = reference_non_negative(
            matrix, weighted.T @ ratios + PRIOR_WEIGHT * np.where(is_seen, prior * shares, 0.0)
        )
        found = np.where(is_seen, solution * unit, prior)
    return found


def reference_non_negative(matrix: Floats, vector: Floats) -> Floats:
    found: Floats = np.linalg.solve(matrix, vector)
    while found.min() < 0:
        is_kept = found > 0
        found = np.zeros(len(vector))
        found[is_kept] = np.linalg.solve(matrix[np.ix_(is_kept, is_kept)], vector[is_kept])
    return found


def reference_level(residuals: list[float], independent: int) -> list[float]:
    """The residuals, those before a change of their level moved to the level after it."""
    count = len(residuals)
    if count < 2 * MIN_LEVEL:
        return residuals
    clipped = np.clip(residuals, -1.0, 1.0)
    evidence = {
        size: abs(clipped[:size].mean() - clipped[size:].mean())
        * math.sqrt(size * (count - size) / count)
        for size in range(MIN_LEVEL, count - MIN_LEVEL + 1)
    }
    at = max(evidence, key=lambda size: (round(evidence[size], 12), -size))
    change = float(np.median(residuals[at:]) - np.median(residuals[:at]))
    step = math.ceil(count / independent)
    gaps = [abs(b - a) for a, b in zip(residuals, residuals[step:], strict=False)] or [0.0]
    noise = max(SPREAD * float(np.median(gaps)) / math.sqrt(2), MIN_RESIDUAL)
    errors = abs(change) / noise * math.sqrt(at * (count - at) / count * independent / count)
    if abs(change) <= MIN_CHANGE or errors <= MIN_EVIDENCE:
        return residuals
    return [each + change for each in residuals[:at]] + residuals[at:]


def reference_settle(
    residuals: list[list[float]], independent: list[int]
) -> tuple[list[list[float]], list[float], float]:
    """What remains of the residuals of each worker, their factors, and the median error."""
    levelled = [reference_level(*each) for each in zip(residuals, independent, strict=True)]
    recent = [
        own[max(len(own) - int(FACTOR_WINDOW * len(own) / steps), 0) :]
        for own, steps in zip(levelled, independent, strict=True)
    ]
    middles = [float(np.median(own)) for own in recent]
    deviations = [
        [abs(each - middle) for each in own] for own, middle in zip(recent, middles, strict=True)
    ]
    common = float(np.median(np.concatenate(recent)))
    spread = float(np.median(np.concatenate(deviations)))
    factors = []
    for middle, own_deviations, steps in zip(middles, deviations, independent, strict=True):
        widest = max(float(np.median(own_deviations)), spread)
        error = FACTOR_ERRORS * 1.2533 * SPREAD * widest / math.sqrt(min(steps, FACTOR_WINDOW))
        beyond = max(abs(middle - common) - error, 0.0)
        factors.append(common + math.copysign(beyond, middle - common))
    remaining = [
        [each - factor for each in own] for own, factor in zip(levelled, factors, strict=True)
    ]
    error = float(np.median([abs(each) for own in remaining for each in own]))
    return remaining, [math.exp(factor) for factor in factors], error


def drawn_equations(rng: np.random.Generator, count: int) -> tuple[Floats, Floats, Floats]:
    """Terms, times and a prior; some unknowns in no equation, some without a share of the time."""
    terms = rng.uniform(0, 3, (count, 5)) * rng.integers(0, 2, 5)
    terms[:, rng.integers(5)] = 1.0
    truth = rng.uniform(0, 5, 5) * rng.integers(0, 2, 5) + 0.1
    took_ms = np.maximum(terms @ truth, 0.5) * np.exp(rng.normal(0, rng.uniform(0, 0.5), count))
    return terms, took_ms, rng.uniform(0, 5, 5)


@given(SEEDS, st.integers(1, 60))
def test_solution_is_that_of_the_reference(seed: int, count: int) -> None:
    terms, took_ms, prior = drawn_equations(np.random.default_rng(seed), count)
    found = np.empty(5)
    solve(terms, took_ms, prior, found)
    assert found == pytest.approx(reference_solve(terms, took_ms, prior), rel=1e-4, abs=1e-4)


@given(SEEDS, st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any), st.booleans())
def test_levels_and_factors_are_those_of_the_reference(
    seed: int, counts: list[int], changes: bool
) -> None:
    rng = np.random.default_rng(seed)
    independent = [int(rng.integers(1, count + 1)) if count else 0 for count in counts]
    residuals = [
        rng.normal(rng.normal(0, 1), 0.2, count)
        + changes * 0.8 * (np.arange(count) < rng.integers(count + 1))
        for count in counts
    ]
    terms = rng.uniform(1, 3, (sum(counts), 5))
    found = rng.uniform(0, 5, 5)
    took_ms = terms @ found * np.exp(np.concatenate(residuals))
    levelled_ms, factors = np.empty(len(terms)), np.zeros(len(counts))
    error = settle(
        terms, took_ms, np.array(counts), np.array(independent), found, levelled_ms, factors
    )
    is_seen = [count > 0 for count in counts]
    remaining, expected, expected_error = reference_settle(
        [list(own) for own in residuals if len(own)], [steps for steps in independent if steps]
    )
    assert factors[is_seen] == pytest.approx(expected)
    assert error == pytest.approx(expected_error, abs=1e-9)
    assert levelled_ms == pytest.approx(terms @ found * np.exp(np.concatenate(remaining)))


@given(SEEDS, st.integers(1, 5))
def test_non_negative_solution_has_no_better_neighbour(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rows, wanted = rng.normal(size=(12, size)), rng.normal(size=12)
    matrix, vector = rows.T @ rows + 0.1 * np.eye(size), rows.T @ wanted
    found = vector.copy()
    step_kernels._solve_non_negative(matrix, found)
    assert (found >= 0).all()
    slope = matrix @ found - vector
    assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-6
