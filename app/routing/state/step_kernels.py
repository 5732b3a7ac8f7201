"""Robust regression of the step model, and changes of a level: the loops of `step_model.py`.

Arrays: f64 (equations, unknowns) and f64 (equations,), those of a worker together and in order of
time. `counts`: i64 (workers,), equations of each worker; `independent`: those of different steps.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.kernels import kernel

PRIOR_WEIGHT = 0.1
"""Of the prior, in equations, where a coefficient is measured by its share of the time: residuals
of 0.1, shares that differ by 0.3 from the prior's."""
MAX_ROUNDS, MIN_STEP = 8, 1e-5
"""Of the weights: most of them, and the least change of a share of the time for another one."""
HUBER, SPREAD = 1.345, 1.4826
"""Tuning constant of Huber's weights, and normal deviation by median deviation."""
MIN_RESIDUAL = 0.01
MIN_LEVEL = 6
"""Fewest residuals on each side of a change of level."""
MIN_CHANGE, MIN_EVIDENCE = 0.2, 6.0
"""Least change of the logarithm, and its least size in standard errors."""
FACTOR_WINDOW = 32
"""Residuals of different steps, of which a factor is the median."""
FACTOR_ERRORS = 2.0
"""Standard errors by which the factor of a worker differs from the others' before it does."""

FloatArray = NDArray[np.float64]


@kernel(allocates=True)
def solve(terms: FloatArray, took_ms: FloatArray, prior: FloatArray, found: FloatArray) -> None:
    """Set `found` to robust, regularized, non-negative coefficients."""
    shares = np.zeros(len(prior))
    for i in range(len(terms)):
        for j in range(len(prior)):
            shares[j] += terms[i, j] / took_ms[i] / len(terms)
    scaled, deviations = terms / np.where(shares > 0, shares, 1.0), np.empty(len(terms))
    matrix, vector = np.empty((len(prior), len(prior))), np.empty(len(prior))
    found[:] = prior
    for _ in range(MAX_ROUNDS):
        for i in range(len(terms)):
            deviations[i] = abs(took_ms[i] / _expected_ms(terms[i], found) - 1.0)
        spread = SPREAD * float(np.median(deviations))
        limit = HUBER * max(spread, MIN_RESIDUAL)
        matrix[:], vector[:] = PRIOR_WEIGHT * np.eye(len(prior)), PRIOR_WEIGHT * prior * shares
        for i in range(len(terms)):
            share = 1.0 / _expected_ms(terms[i], found)
            weight = min(1.0, limit / max(deviations[i], 1e-12)) * share * share
            _add_equation(scaled[i], weight, took_ms[i], matrix, vector)
        _solve_non_negative(matrix, vector)
        step = 0.0
        for j in range(len(prior)):
            if shares[j] > 0:
                step = max(step, abs(vector[j] - found[j] * shares[j]))
                found[j] = vector[j] / shares[j]
        if step < MIN_STEP:
            break


@kernel()
def _add_equation(
    terms: FloatArray, weight: float, took_ms: float, matrix: FloatArray, vector: FloatArray
) -> None:
    """Add an equation to the normal ones."""
    for j in range(len(terms)):
        weighted = weight * terms[j]
        vector[j] += weighted * took_ms
        for k in range(len(terms)):
            matrix[j, k] += weighted * terms[k]


@kernel(allocates=True)
def settle(
    terms: FloatArray,
    took_ms: FloatArray,
    counts: NDArray[np.int64],
    independent: NDArray[np.int64],
    found: FloatArray,
    levelled_ms: FloatArray,
    factors: FloatArray,
) -> float:
    """Set `levelled_ms` to the times at the present level of a worker with factor 1, and `factors`
    to those of the workers with equations. Returns the median error of the coefficients with these
    factors."""
    residuals, is_recent = np.empty(len(terms)), np.zeros(len(terms), np.bool_)
    deviations = np.empty(len(terms))
    spreads = np.zeros(len(counts))
    for i in range(len(terms)):
        residuals[i] = math.log(took_ms[i] / _expected_ms(terms[i], found))
    end = 0
    for w in range(len(counts)):
        begin, end = end, end + counts[w]
        if begin == end:
            continue
        own = residuals[begin:end]
        _level(own, independent[w])
        kept = int(FACTOR_WINDOW * len(own) / independent[w])
        recent = max(end - kept, begin)
        is_recent[recent:end] = True
        factors[w] = np.median(residuals[recent:end])
        for i in range(recent, end):
            deviations[i] = abs(residuals[i] - factors[w])
        spreads[w] = np.median(deviations[recent:end])
    common, spread = np.median(residuals[is_recent]), np.median(deviations[is_recent])
    end = 0
    for w in range(len(counts)):
        begin, end = end, end + counts[w]
        if begin == end:
            continue
        known = min(independent[w], FACTOR_WINDOW)
        error = FACTOR_ERRORS * 1.2533 * SPREAD * max(spreads[w], spread) / math.sqrt(known)
        own_part = factors[w] - common
        factor = common + math.copysign(max(abs(own_part) - error, 0.0), own_part)
        factors[w] = math.exp(factor)
        for i in range(begin, end):
            remaining = residuals[i] - factor
            deviations[i] = abs(remaining)
            levelled_ms[i] = _expected_ms(terms[i], found) * math.exp(remaining)
    return float(np.median(deviations))


@kernel()
def _expected_ms(terms: FloatArray, found: FloatArray) -> float:
    total = 0.0
    for j in range(len(found)):
        total += terms[j] * found[j]
    return max(total, 1e-6)


@kernel(allocates=True)
def _level(residuals: FloatArray, independent: int) -> None:
    """Where the level of a worker's residuals changes, move those before to the level after it.

    The noise is that between residuals of different steps.
    """
    count = len(residuals)
    if count < 2 * MIN_LEVEL:
        return
    total = 0.0
    for residual in residuals:
        total += min(max(residual, -1.0), 1.0)
    before, most, at = 0.0, -1.0, 0
    for size in range(1, count - MIN_LEVEL + 1):
        before += min(max(residuals[size - 1], -1.0), 1.0)
        if size >= MIN_LEVEL:
            others = count - size
            difference = abs(before / size - (total - before) / others)
            if difference * math.sqrt(size * others / count) > most:
                most, at = difference * math.sqrt(size * others / count), size
    change = np.median(residuals[at:]) - np.median(residuals[:at])
    step, noise = -(-count // independent), MIN_RESIDUAL
    if step < count:
        apart = np.median(np.abs(residuals[step:] - residuals[:-step]))
        noise = max(SPREAD * apart / math.sqrt(2.0), noise)
    evidence = abs(change) * math.sqrt(at * (count - at) / count * (independent / count)) / noise
    if abs(change) > MIN_CHANGE and evidence > MIN_EVIDENCE:
        residuals[:at] += change


@kernel(allocates=True)
def _solve_non_negative(matrix: FloatArray, vector: FloatArray) -> None:
    """Set `vector` to the solution of a linear system, without the unknowns that would be
    negative."""
    is_kept = np.ones(len(vector), np.bool_)
    while True:
        solution = _solve_kept(matrix.copy(), vector.copy(), is_kept)
        if solution.min() >= 0:
            break
        is_kept = solution > 0
    vector[:] = solution


@kernel(allocates=True)
def _solve_kept(matrix: FloatArray, vector: FloatArray, is_kept: NDArray[np.bool_]) -> FloatArray:
    """The solution of a positive definite system; unknowns that are not kept are 0."""
    for j in range(len(vector)):
        if is_kept[j]:
            for i in range(j + 1, len(vector)):
                if is_kept[i]:
                    share = matrix[i, j] / matrix[j, j]
                    matrix[i] -= share * matrix[j]
                    vector[i] -= share * vector[j]
    solution = np.zeros(len(vector))
    for j in range(len(vector) - 1, -1, -1):
        if is_kept[j]:
            left = vector[j]
            for k in range(j + 1, len(vector)):
                left -= matrix[j, k] * solution[k]
            solution[j] = left / matrix[j, j]
    return solution


def warm_up() -> None:
    """Compile the kernels by calling each once with the types of its arguments."""
    terms, times, found, factors = np.ones((1, 5)), np.ones(1), np.ones(5), np.ones(1)
    solve(terms, times, found, found.copy())
    settle(terms, times, np.ones(1, np.int64), np.ones(1, np.int64), found, times.copy(), factors)
