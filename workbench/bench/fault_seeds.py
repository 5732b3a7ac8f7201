"""Seeds of the fault simulation: number of violated invariants, and speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kvlane.app.runtime.process import tune_interpreter
from workbench.bench.process_pool import process_pool
from workbench.bench.report import Report, none_of

if TYPE_CHECKING:
    from workbench.testing.seed_simulation import SimulationResult


class SeedResult(NamedTuple):
    """The result of a seed, small enough for transfer between processes."""

    seed: int
    problems: tuple[str, ...]
    virtual_s: float
    steps: int
    took_s: float


@cache
def _simulation() -> Callable[[int], SimulationResult]:
    """The simulation of a seed, imported once into an interpreter that is tuned as a process of the
    product is: garbage collections of all modules would take a third of the time."""
    from workbench.testing.seed_simulation import simulate_seed

    tune_interpreter()
    return simulate_seed


def simulate_seed(seed: int) -> SeedResult:
    simulate = _simulation()
    began = time.perf_counter()
    verdict = simulate(seed)
    took_s = time.perf_counter() - began
    return SeedResult(seed, tuple(verdict.violations), verdict.ended_s, verdict.steps, took_s)


def simulate_seeds(
    seeds: int, first: int, jobs: int, on_seed: Callable[[SeedResult], None]
) -> Report:
    """Simulate `seeds` seeds from `first` on, `jobs` at a time; `on_seed` gets each result."""
    began = time.perf_counter()
    with process_pool(jobs) as pool:
        found = []
        numbers = range(first, first + seeds)
        for seed in pool.map(simulate_seed, numbers, chunksize=4):
            found.append(seed)
            on_seed(seed)
    took_s = time.perf_counter() - began
    bad = [s for s in found if s.problems]
    kinds = Counter(p.partition(":")[0] for s in bad for p in s.problems)
    row = {
        "seeds": seeds,
        "failed": len(bad),
        "virtual hours": sum(s.virtual_s for s in found) / 3600,
        "s a seed": sum(s.took_s for s in found) / seeds,
        "wall s": took_s,
        "seeds/s": seeds / took_s,
    }
    lines = [f"seed {s.seed}: {'; '.join(s.problems)}" for s in bad]
    lines += [f"{count} x {kind}" for kind, count in kinds.most_common()]
    thresholds = [none_of("seeds with a problem", len(bad), "seeds")]
    return Report("faults", [row], thresholds, lines=lines)


def seed_history(seed: int, request_id: str = "") -> str:
    """The history of a seed, one line per event, then its violations.

    With `request_id`, records of other requests are left out.
    """
    from workbench.testing.seed_simulation import simulate_seed

    return simulate_seed(seed).report(request_id)
