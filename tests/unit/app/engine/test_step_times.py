"""Tests of the step model in time: a workload whose times an independent simulator has given.

That simulator reproduces the round-robin rows published for NVIDIA Dynamo's mock engine within
0.2 %. The workload is drawn from a linear congruence, so that no library's randomness is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvlane.app.engine.simulated.batch import BatchSequence, BatchState, EngineLimits
from kvlane.app.engine.simulated.step import add_sequence, run_step


class Arrival(NamedTuple):
    at_ms: float
    sequence: BatchSequence


class Times(NamedTuple):
    preemptions: int
    cached_tokens: int
    ttft_ms: float
    e2e_ms: float


def draws() -> Iterator[int]:
    x = 12345
    while True:
        x = (x * 1103515245 + 12345) % 2**31
        yield x // 7


def workload() -> list[Arrival]:
    """80 prompts of 2 to 11 thousand tokens; the first four blocks are one of six prefixes."""
    numbers = draws()
    arrivals = []
    at_ms = 0
    for key in range(80):
        at_ms += next(numbers) % 1200
        prefix, prompt = next(numbers) % 6, 2000 + next(numbers) % 9000
        names = [
            prefix * 1000 + block if block < 4 else 10**6 + key * 1000 + block
            for block in range(prompt // 512)
        ]
        sequence = BatchSequence(key, prompt, 20 + next(numbers) % 400, names)
        arrivals.append(Arrival(at_ms, sequence))
    return arrivals


def replayed(blocks: int) -> Times:
    """Sums over all requests; an engine at rest begins a step with what has arrived by then."""
    arrivals = workload()
    state = BatchState(EngineLimits(512, blocks))
    first: dict[BatchSequence, float] = {}
    last: dict[BatchSequence, float] = {}
    now = 0.0
    pending = iter(arrivals)
    upcoming = next(pending, None)
    while True:
        while upcoming is not None and upcoming.at_ms <= now:
            add_sequence(state, upcoming.sequence)
            upcoming = next(pending, None)
        done = run_step(state)
        if done is None:
            if upcoming is None:
                break
            now = upcoming.at_ms
            continue
        now += done.duration_ms
        for sequence in (chunk.sequence for chunk in done.chunks if chunk.is_last):
            first.setdefault(sequence, now)
        for sequence in done.finished:
            last[sequence] = now
    sequences = [a.sequence for a in arrivals]
    return Times(
        preemptions=sum(s.preemptions for s in sequences),
        cached_tokens=sum(s.cached_tokens for s in sequences),
        ttft_ms=math.fsum(first[a.sequence] - a.at_ms for a in arrivals),
        e2e_ms=math.fsum(last[a.sequence] - a.at_ms for a in arrivals),
    )


@pytest.mark.parametrize(
    ("blocks", "times"),
    [
        (400, Times(0, 151040, 12217.997556, 483822.780551)),
        (60, Times(3, 90624, 4582397.046023, 5220937.896559)),
    ],
    ids=["roomy", "short of blocks"],
)
def test_times_are_those_of_a_calibrated_simulator(blocks: int, times: Times) -> None:
    assert replayed(blocks) == pytest.approx(times, abs=1e-5)
