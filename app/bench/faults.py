"""Many seeds of the fault simulation: how many end as they must, and how fast.

With a mutation (`app/faults/mutations.py`) a rule is taken away first, and then seeds have to fail.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from app.bench.crew import crew
from app.bench.report import Bar, Report


class Seed(NamedTuple):
    """One seed's verdict, small enough to travel between processes."""

    seed: int
    problems: tuple[str, ...]
    virtual_s: float
    steps: int
    took_s: float


def judge(seed: int, mutation: str = "") -> Seed:
    """Simulate one seed, without the rules that `mutation` names."""
    from app.faults.mutations import applied, of_take_overs
    from app.faults.simulation import simulate

    began = time.perf_counter()
    with applied(mutation):
        verdict = simulate(seed, take_overs=of_take_overs(mutation))
    took_s = time.perf_counter() - began
    return Seed(seed, tuple(verdict.problems), verdict.ended_s, verdict.steps, took_s)


def run(
    seeds: int, first: int, jobs: int, done: Callable[[Seed], None], mutation: str = ""
) -> Report:
    """Simulate `seeds` seeds from `first` on, `jobs` at a time; `done` hears of each one."""
    began = time.perf_counter()
    with crew(jobs) as pool:
        found = []
        numbers = range(first, first + seeds)
        for seed in pool.map(partial(judge, mutation=mutation), numbers, chunksize=4):
            found.append(seed)
            done(seed)
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
        "failed seeds": " ".join(str(s.seed) for s in bad[:20]),
        "problems": ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()),
    }
    if mutation:
        row = {"without": mutation, **row}
        bars = [Bar("seeds that notice", len(bad), "seeds", "1 or more", bool(bad))]
    else:
        bars = [Bar("seeds with a problem", len(bad), "seeds", "0", not bad)]
    return Report("faults", [row], bars)


def replay(seed: int, about: str = "", mutation: str = "") -> str:
    """A seed's history, one line an event, then what is wrong with it.

    With `about`, records of other requests are left out.
    """
    from app.faults.mutations import applied, of_take_overs
    from app.faults.simulation import simulate

    with applied(mutation):
        return simulate(seed, take_overs=of_take_overs(mutation)).report(about)
