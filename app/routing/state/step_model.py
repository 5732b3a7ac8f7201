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
stays known. Workers of one kind share the coefficients and a factor, so that noise makes none of
equal ones the fastest, which would get all requests; a worker has one of its own where its
residuals differ from the others' by more than their spread explains.

The coefficients are used only if they explain the runs better than the prior with factors does:
with a true prior, and with few runs, the curves stay.

Pure: a function of a set of runs. Forgets by the number of runs that its caller keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.state.step_kernels import FloatArray, settle, solve

MIN_EQUATIONS, MIN_FACTOR_EQUATIONS = 24, 10
"""Fewest equations of a kind of engine from which coefficients are taken, and factors alone."""
MAX_ERROR_SHARE, MIN_GAIN = 0.5, 0.004
"""Largest median error of the coefficients, as a share of that of the prior with factors, and by
how much less it has to be. With the true prior it is 0.7 to 1 times as large, on simulated engines;
with a constant part four times as large 0.1 to 0.5."""
MIN_GAIN_ERRORS, MIN_NOISY_GAIN = 4.0, 0.03
"""Or by how many standard errors of it, about, and how much: where steps differ by noise, no
coefficients are that much better."""
LEVEL_ROUNDS = 3
"""Solutions, each with the times at the levels that the one before found."""
JOINT_MS = 2.0
"""First tokens of a worker that are no further apart are of one step, which takes longer."""


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
    """Equations of all workers, those of a worker together and in order of time.

    `terms`: f64 (equations, 5), terms of a², b, c, B and C. `counts`: equations of each worker,
    `independent`: those of different steps, since answers that begin together share their noise.
    """

    terms: FloatArray
    took_ms: FloatArray
    counts: NDArray[np.int64]
    independent: NDArray[np.int64]


class _Level(NamedTuple):
    """What coefficients leave: the times at the present level of a worker with factor 1, the factor
    of each worker with equations, and the median error."""

    took_ms: FloatArray
    factors: Sequence[float]
    error: float


def fit_steps(
    runs: Mapping[str, WorkerRuns], prior: PerfCurves, chunk_tokens: int, capacity_tokens: int
) -> StepFit | None:
    """Fit the coefficients of workers of one kind; None if there are too few runs.

    `chunk_tokens` and `capacity_tokens`: as in `EngineProfile`.
    """
    known = _coefficients(prior)
    bend = prior.decode[0] / prior.decode[1] if prior.decode[1] > 0 else 0.0
    names = [worker for worker, of in sorted(runs.items()) if of.first_tokens]
    each = _equations([runs[worker] for worker in names], chunk_tokens, capacity_tokens, bend)
    if len(each.took_ms) < MIN_FACTOR_EQUATIONS:
        return None
    seen = [worker for worker, count in zip(names, each.counts, strict=True) if count]
    prior_level = _settled(each, known)
    scaled = StepFit(prior, dict(zip(seen, prior_level.factors, strict=True)))
    if len(each.took_ms) < MIN_EQUATIONS:
        return scaled
    start = known * np.median(each.took_ms / np.maximum(each.terms @ known, 1e-9))
    found, level = np.empty(len(start)), prior_level._replace(took_ms=each.took_ms)
    for _ in range(LEVEL_ROUNDS):
        solve(each.terms, level.took_ms, start, found)
        level = _settled(each, found)
    curves = _curves(found, prior, bend)
    if curves is None or level.error > _largest_error(prior_level.error, len(each.took_ms)):
        return scaled
    return StepFit(curves, dict(zip(seen, level.factors, strict=True)))


def _settled(of: _Equations, found: FloatArray) -> _Level:
    levelled_ms, factors = np.empty(len(of.terms)), np.zeros(len(of.counts))
    error = settle(of.terms, of.took_ms, of.counts, of.independent, found, levelled_ms, factors)
    return _Level(levelled_ms, factors[of.counts > 0].tolist(), error)


def _largest_error(prior_error: float, equations: int) -> float:
    """The largest median error of coefficients that are better than the prior with factors."""
    clearly = min(MAX_ERROR_SHARE * prior_error, prior_error - MIN_GAIN)
    noisily = (1.0 - MIN_GAIN_ERRORS / math.sqrt(equations)) * prior_error
    return max(clearly, min(noisily, prior_error - MIN_NOISY_GAIN))


def _coefficients(curves: PerfCurves) -> FloatArray:
    return np.array([*curves.prefill, max(curves.decode[1], 0.0), max(curves.decode[2], 0.0)])


def _curves(found: FloatArray, prior: PerfCurves, bend: float) -> PerfCurves | None:
    a, b, c, slope, constant = map(float, found)
    if not all(map(math.isfinite, found)) or constant + slope <= 0:
        return None
    floor_ms = min(prior.min_decode_ms, constant)
    return PerfCurves((a, b, c), (bend * slope, slope, constant), floor_ms)


def _equations(runs: Sequence[WorkerRuns], chunk: int, capacity: int, bend: float) -> _Equations:
    """The equations of workers with first tokens.

    The times of each worker are moved to a range of their own, so that one search serves all.
    """
    if not runs:
        none = np.empty(0, np.int64)
        return _Equations(np.empty((0, 5)), np.empty(0), none, none)
    at_ms, _, took_ms, tokens, context, prompt_tokens, found_none = _columns(
        [of.first_tokens for of in runs], FirstToken
    )
    end_ms, _, since_ms, answer_ms, made = _columns([of.answers for of in runs], Answer)
    sizes = np.array([len(of.first_tokens) for of in runs])
    owner = np.repeat(np.arange(len(runs)), sizes)
    answerer = np.repeat(np.arange(len(runs)), [len(of.answers) for of in runs])
    is_kept = since_ms >= at_ms[np.append(0, np.cumsum(sizes)[:-1])][answerer]
    end_ms, since_ms, answer_ms, made, answerer = (
        column[is_kept] for column in (end_ms, since_ms, answer_ms, made, answerer)
    )
    first_ms = at_ms.min()
    range_ms = max(at_ms.max(), end_ms.max(initial=0.0)) - first_ms + 2 * JOINT_MS
    at_ms = at_ms - first_ms + range_ms * owner
    since_ms, end_ms = (each - first_ms + range_ms * answerer for each in (since_ms, end_ms))

    is_start = np.diff(at_ms, prepend=-np.inf) > JOINT_MS
    starts, group = np.flatnonzero(is_start), np.cumsum(is_start) - 1
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
    ends = at_ms[starts]
    low = np.searchsorted(ends, since_ms + JOINT_MS, "right")
    high = np.maximum(np.searchsorted(ends, end_ms, "right"), low)
    sums = np.vstack((np.zeros(3), np.cumsum((squares, totals, steps), axis=1).T))
    own = np.minimum(np.searchsorted(at_ms, since_ms, "left"), np.cumsum(sizes)[answerer] - 1)
    after = np.maximum(np.searchsorted(at_ms, end_ms, "right"), own + 1)
    loads = np.append(0.0, np.cumsum(context))
    kept = prompt_tokens[own] + made / 2
    held = np.maximum(
        (loads[after] - loads[own] + kept) / (after - own), _mean_load(since_ms, end_ms, kept)
    )
    decode = np.column_stack((made * _bent(held, capacity, bend), made))

    terms = np.vstack((firsts, np.hstack((sums[high] - sums[low], decode))))
    times, moments = np.append(took_ms[last], answer_ms), np.append(at_ms[last], end_ms)
    owners = np.append(owner[last], answerer)
    order = np.argsort(moments, kind="stable")
    order = order[times[order] > 0]
    counts = np.bincount(owners[order], minlength=len(runs))
    joint = np.bincount(owner[starts], minlength=len(runs))
    independent = np.where(counts > 2 * joint, joint, counts)
    return _Equations(terms[order], times[order], counts, independent)


def _mean_load(since_ms: FloatArray, end_ms: FloatArray, tokens: FloatArray) -> FloatArray:
    """The tokens of these answers in the cache, in the mean over the time of each.

    Decisions that are made at once see none of each other's: without it a burst seems to be decoded
    in an empty cache, and noise decides on the slope of decode.
    """
    signed = np.append(tokens, -tokens)
    moments = np.append(since_ms, end_ms)
    order = np.argsort(moments)
    moments, signed = moments[order], signed[order]
    sums = np.append(0.0, np.cumsum(signed)), np.append(0.0, np.cumsum(signed * moments))

    def until(time_ms: FloatArray) -> FloatArray:
        at = np.searchsorted(moments, time_ms)
        whole: FloatArray = sums[0][at] * time_ms - sums[1][at]
        return whole

    mean: FloatArray = (until(end_ms) - until(since_ms)) / np.maximum(end_ms - since_ms, 1.0)
    return mean


def _columns(runs: Sequence[Sequence[Any]], of: type[FirstToken | Answer]) -> FloatArray:
    """The fields of all runs: f64 (fields, runs)."""
    fields = chain.from_iterable(chain.from_iterable(runs))
    return np.fromiter(fields, np.float64).reshape(-1, len(of._fields)).T


def _bent(tokens: FloatArray, capacity: int, bend: float) -> FloatArray:
    """s(u) of the used share of the cache."""
    if not capacity:
        return np.zeros_like(tokens)
    usage = np.minimum(tokens / capacity, 1.0)
    bent: FloatArray = (bend * usage + 1.0) * usage
    return bent
