"""Step model: the durations of an engine's steps, by robust regression over runs in the ledger.

    prefill   a · n² + b · n + c     n prompt tokens in the step
    decode    B · s(u) + C           u: used share of the cache, s(u) = u + (A/B of the prior) · u²

Each run gives up to two equations that are linear in these five coefficients:

    first token   of a prompt that found no other: the steps with all prompts that ended with it,
                  a step of decode beside each, and half of one under way before them
    answer        one step of decode a token, and the steps with prompts of others in between

Residuals are relative. Huber weights bound the influence of each equation, and a ridge pulls each
coefficient to the prior's, scaled by one factor; no coefficient is negative. Where the residuals of
a worker change their level, runs before the change count at the level after it, so that the shape
stays known. Workers of one kind share the coefficients; each has a factor of its own, 1 unless its
residuals differ from that by more than their spread explains.

The result is used only if it explains the runs better than the prior with factors does: with a true
prior, nothing changes.

Pure: a function of a set of runs. Forgets by the number of runs that its caller keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.app.perf_curves import PerfCurves

MIN_EQUATIONS = 24
"""Fewest equations of a kind of engine from which coefficients are taken."""
MAX_ERROR_SHARE, MIN_GAIN = 0.5, 0.004
"""Largest median error of the coefficients, as a share of that of the prior with factors, and by
how much less it has to be. With the true prior it is 0.7 to 1 times as large, on simulated engines;
with a constant part four times as large 0.1 to 0.5."""
JOINT_MS = 2.0
"""First tokens of a worker that are no further apart are of one step, which takes longer."""
PRIOR_WEIGHT = 0.1
"""Of the prior, in equations, where a coefficient is measured by its share of the time: residuals
of 0.1, shares that differ by 0.3 from the prior's."""
ROUNDS = 8
HUBER, SPREAD = 1.345, 1.4826
"""Tuning constant of Huber's weights, and normal deviation by median deviation."""
MIN_RESIDUAL = 0.01
MIN_LEVEL = 6
"""Fewest residuals on each side of a change of level."""
MIN_CHANGE, MIN_EVIDENCE = 0.2, 6.0
"""Least change of the logarithm, and its least size in standard errors."""
FACTOR_WINDOW = 32
FACTOR_ERRORS = 2.0
"""Standard errors by which a factor differs from 1 before it does."""

FloatArray = NDArray[np.float64]


class FirstToken(NamedTuple):
    """The first token of a run, in order of time. `tokens`: computed ones of its prompt.

    `context`: tokens in the cache when it came, 0 if nothing was decoded; `prompt_tokens`: that it
    adds. `found_none`: no other prompt was before it.
    """

    at_ms: int
    offset: int
    took_ms: float
    tokens: int
    context: float
    prompt_tokens: int
    found_none: bool


class Answer(NamedTuple):
    """The tokens of a run after its first one, from `since_ms` on; `steps`: so many."""

    at_ms: int
    offset: int
    since_ms: int
    took_ms: float
    steps: int


class WorkerRuns(NamedTuple):
    """The runs of a worker, in order."""

    first_tokens: Sequence[FirstToken]
    answers: Sequence[Answer]


class StepFit(NamedTuple):
    """Learned curves of a kind of engine, and the factor of each worker on them."""

    curves: PerfCurves
    factors: Mapping[str, float]


class _Equations(NamedTuple):
    """f64 (equations, 5): terms of a², b, c, B and C; the times, and when they were measured."""

    terms: FloatArray
    took_ms: FloatArray
    at_ms: FloatArray


def fit_steps(
    runs: Mapping[str, WorkerRuns], prior: PerfCurves, chunk_tokens: int, capacity_tokens: int
) -> StepFit | None:
    """Fit the coefficients of workers of one kind; None if the prior explains their runs as well.

    `chunk_tokens` and `capacity_tokens`: as in `EngineProfile`.
    """
    known = _coefficients(prior)
    bend = prior.decode[0] / prior.decode[1] if prior.decode[1] > 0 else 0.0
    each = {
        worker: _equations(of, chunk_tokens, capacity_tokens, bend)
        for worker, of in sorted(runs.items())
    }
    each = {worker: of for worker, of in each.items() if len(of.took_ms)}
    if sum([len(of.took_ms) for of in each.values()]) < MIN_EQUATIONS:
        return None
    terms = np.concatenate([of.terms for of in each.values()])
    took_ms = np.concatenate([of.took_ms for of in each.values()])
    prior_error = _settle(each, known)[2]
    typical = float(np.median(took_ms / np.maximum(terms @ known, 1e-9)))
    start = found = known * typical
    found = _solve(terms, took_ms, start)
    for _ in range(2):
        levelled, factors, error = _settle(each, found)
        found = _solve(terms, levelled, start)
    levelled, factors, error = _settle(each, found)
    curves = _curves(found, prior, bend)
    if curves is None or error > min(MAX_ERROR_SHARE * prior_error, prior_error - MIN_GAIN):
        return None
    return StepFit(curves, factors)


def _coefficients(curves: PerfCurves) -> FloatArray:
    return np.array([*curves.prefill, max(curves.decode[1], 0.0), max(curves.decode[2], 0.0)])


def _curves(found: FloatArray, prior: PerfCurves, bend: float) -> PerfCurves | None:
    a, b, c, slope, constant = map(float, found)
    if not all(map(math.isfinite, found)) or constant + slope <= 0:
        return None
    floor_ms = min(prior.min_decode_ms, constant)
    return PerfCurves((a, b, c), (bend * slope, slope, constant), floor_ms)


def _equations(of: WorkerRuns, chunk: int, capacity: int, bend: float) -> _Equations:
    """The equations of a worker, in order of time."""
    none = _Equations(np.empty((0, 5)), np.empty(0), np.empty(0))
    if not of.first_tokens:
        return none
    at_ms, _, took_ms, tokens, context, prompt_tokens, found_none = np.array(
        of.first_tokens, np.float64
    ).T
    starts = np.flatnonzero(np.diff(at_ms, prepend=-np.inf) > JOINT_MS)
    group = np.cumsum(np.diff(at_ms, prepend=-np.inf) > JOINT_MS) - 1
    totals = np.add.reduceat(tokens, starts)
    whole, rest = np.divmod(totals, chunk)
    steps = whole + (rest > 0)
    squares = whole * float(chunk) ** 2 + rest**2
    # Of each group the run that waited longest, of those that found no other prompt.
    order = np.lexsort((took_ms, found_none, group))
    last = order[np.append(starts[1:], len(order)) - 1]
    is_usable = found_none[last] > 0
    last = last[is_usable]
    beside = (steps[is_usable] + 0.5) * (context[last] > 0)
    firsts = np.column_stack((
        squares[is_usable], totals[is_usable], steps[is_usable],
        beside * _bent(context[last], capacity, bend), beside,
    ))  # fmt: skip
    terms, times, moments = firsts, took_ms[last], at_ms[last]
    if of.answers:
        answers = np.array(of.answers, np.float64)
        answers = answers[answers[:, 2] >= at_ms[0]]
        end_ms, since_ms, answer_ms, made = answers[:, [0, 2, 3, 4]].T
        ends = at_ms[starts]
        low = np.searchsorted(ends, since_ms + JOINT_MS, "right")
        high = np.maximum(np.searchsorted(ends, end_ms, "right"), low)
        sums = np.vstack((np.zeros(3), np.cumsum((squares, totals, steps), axis=1).T))
        before = np.searchsorted(at_ms, since_ms, "left")
        own = np.minimum(before, len(at_ms) - 1)
        after = np.maximum(np.searchsorted(at_ms, end_ms, "right"), own + 1)
        loads = np.append(0.0, np.cumsum(context))
        held = loads[after] - loads[own] + prompt_tokens[own]
        held = held / (after - own) + made / 2 / (after - own)
        decode = np.column_stack((made * _bent(held, capacity, bend), made))
        terms = np.vstack((firsts, np.hstack((sums[high] - sums[low], decode))))
        times, moments = np.append(times, answer_ms), np.append(moments, end_ms)
    is_kept = times > 0
    order = np.argsort(moments[is_kept], kind="stable")
    return _Equations(*(each[is_kept][order] for each in (terms, times, moments)))


def _bent(tokens: FloatArray, capacity: int, bend: float) -> FloatArray:
    """s(u) of the used share of the cache."""
    if not capacity:
        return np.zeros_like(tokens)
    usage = np.minimum(tokens / capacity, 1.0)
    bent: FloatArray = (bend * usage + 1.0) * usage
    return bent


def _solve(terms: FloatArray, took_ms: FloatArray, prior: FloatArray) -> FloatArray:
    """Robust, regularized, non-negative coefficients."""
    shares = (terms / took_ms[:, None]).mean(axis=0)
    is_seen = shares > 0
    unit = np.where(is_seen, 1.0 / np.where(is_seen, shares, 1.0), 0.0)
    wanted, found = np.where(is_seen, prior * shares, 0.0), prior
    for _ in range(ROUNDS):
        expected_ms = np.maximum(terms @ found, 1e-6)
        residuals = took_ms / expected_ms - 1
        limit = HUBER * max(SPREAD * float(np.median(np.abs(residuals))), MIN_RESIDUAL)
        weights = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-12))
        rows = terms * unit / expected_ms[:, None]
        weighted = rows * weights[:, None]
        matrix = weighted.T @ rows + PRIOR_WEIGHT * np.eye(len(prior))
        vector = weighted.T @ (took_ms / expected_ms) + PRIOR_WEIGHT * wanted
        found = np.where(is_seen, _non_negative(matrix, vector) * unit, prior)
    return found


def _non_negative(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    """The solution of a linear system, without the unknowns that would be negative."""
    is_kept = np.ones(len(vector), bool)
    while True:
        found = np.zeros(len(vector))
        found[is_kept] = np.linalg.solve(matrix[np.ix_(is_kept, is_kept)], vector[is_kept])
        if (found >= 0).all():
            return found
        is_kept &= found > 0


def _settle(
    each: Mapping[str, _Equations], found: FloatArray
) -> tuple[FloatArray, dict[str, float], float]:
    """The times at the present level of a worker with factor 1, the factor of each worker, and the
    median error of the coefficients with these factors."""
    levelled, factors, errors = [], {}, []
    for worker, of in each.items():
        residuals = np.log(of.took_ms / np.maximum(of.terms @ found, 1e-6))
        at = _change_at(residuals)
        residuals[:at] += _level_after(residuals, at)
        recent = residuals[-FACTOR_WINDOW:]
        middle = float(np.median(recent))
        spread = SPREAD * float(np.median(np.abs(recent - middle)))
        error = FACTOR_ERRORS * 1.2533 * spread / math.sqrt(len(recent))
        factor = math.copysign(max(abs(middle) - error, 0.0), middle)
        factors[worker] = math.exp(factor)
        residuals -= factor
        levelled.append(np.maximum(of.terms @ found, 1e-6) * np.exp(residuals))
        errors.append(np.abs(residuals))
    return np.concatenate(levelled), factors, float(np.median(np.concatenate(errors)))


def _level_after(residuals: FloatArray, at: int) -> float:
    if not at:
        return 0.0
    return float(np.median(residuals[at:]) - np.median(residuals[:at]))


def _change_at(residuals: FloatArray) -> int:
    """The number of residuals before a change of their level; 0 for none."""
    count = len(residuals)
    if count < 2 * MIN_LEVEL:
        return 0
    clipped = np.clip(residuals, -1.0, 1.0)
    sums = np.cumsum(clipped)
    sizes = np.arange(MIN_LEVEL, count - MIN_LEVEL + 1)
    left = sums[sizes - 1] / sizes
    right = (sums[-1] - sums[sizes - 1]) / (count - sizes)
    weight = np.sqrt(sizes * (count - sizes) / count)
    at = int(sizes[np.argmax(np.abs(left - right) * weight)])
    change = _level_after(residuals, at)
    spread = np.abs(np.diff(residuals))
    noise = SPREAD * float(np.median(spread)) / math.sqrt(2)
    evidence = abs(change) * math.sqrt(at * (count - at) / count) / max(noise, MIN_RESIDUAL)
    return at if abs(change) > MIN_CHANGE and evidence > MIN_EVIDENCE else 0
