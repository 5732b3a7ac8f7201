"""Several routers that read of each other late, beside one that does all, on a production trace.

Simulated, as `simulate` has it: 16 workers, the trace eight times as fast, a lag of 5 ms. Arrivals
one by one, and in bursts as recorded; in bursts also beside routers that know only their own
requests, since equal views may be worse than none: all send to the worker that looks best.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from app.bench.ground import Said
from app.bench.report import Bar, Report
from app.bench.scenes import OURS, SPREAD_S
from app.bench.simulate import MISSING
from app.simulation.conditions import Conditions
from app.simulation.figures import Figures, figures
from app.simulation.replay import Life
from app.simulation.runs import Run, Trace, lived
from app.simulation.traffic import Pace
from app.trace import read_trace
from indexer.warm import compile_all

WORKERS, SPEED, LAG_MS = 16, 8.0, 5.0
MANY = 8
MOST_TTFT, MOST_LOST_REUSE = 1.05, 0.01


class Deployment(NamedTuple):
    """What is compared: how many routers, with or without each other's decisions."""

    routers: int
    jitter_s: float = SPREAD_S
    shares_ledger: bool = True

    @property
    def run(self) -> Run:
        """Its run."""
        conditions = Conditions(
            routers=self.routers, lag_ms=LAG_MS, shares_ledger=self.shares_ledger
        )
        return Run(OURS, WORKERS, Pace(SPEED, self.jitter_s), conditions=conditions)


QUICK = (Deployment(1), Deployment(MANY), Deployment(MANY, 0.0), Deployment(MANY, 0.0, False))
NUMBERS = (1, 2, 4, MANY)
FULL = (
    *(Deployment(n) for n in NUMBERS),
    *(Deployment(n, 0.0) for n in NUMBERS),
    *(Deployment(n, 0.0, False) for n in NUMBERS[1:]),
)


class Found(NamedTuple):
    """What came of a deployment. `collisions`: the share of decisions that met another's."""

    figures: Figures
    collisions: float


async def routers(
    deployments: Sequence[Deployment],
    file: Path | None,
    said: Said,
    progress: Callable[[float], None],
) -> Report:
    """Play it all, one run after the other; a coroutine like the other benchmarks."""
    if file is None:
        said(MISSING)
        return Report("routers", [], bars({}))
    compile_all()
    trace = Trace(read_trace(file))
    found: dict[Deployment, Found] = {}
    for each in deployments:
        lives = lived(trace, each.run)
        found[each] = Found(figures(lives), collisions(lives, LAG_MS))
        progress(1 / len(deployments))
    return Report("routers", [_row(*each) for each in found.items()], bars(found))


def collisions(lives: Sequence[Life], lag_ms: float) -> float:
    """The share of decisions of which another router knew nothing as it sent there as well."""
    sent: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for life in lives:
        sent[life.worker].append((life.sent_ms, life.router))
    met = 0
    for decisions in sent.values():
        decisions.sort()
        for at_ms, router in decisions:
            first = bisect_left(decisions, (at_ms - lag_ms, -1))
            last = bisect_left(decisions, (at_ms + lag_ms, -1))
            met += any(other != router for _, other in decisions[first:last])
    return met / len(lives)


def bars(found: dict[Deployment, Found]) -> list[Bar]:
    """What has to be reached; nan where the runs for it were not done."""

    def figure(of: Deployment, name: str) -> float:
        return getattr(found[of].figures, name) if of in found else math.nan

    one, many = Deployment(1), Deployment(MANY)
    ttft = figure(many, "ttft_mean") / figure(one, "ttft_mean")
    lost = figure(one, "reuse") - figure(many, "reuse")
    bursts = figure(Deployment(MANY, 0.0), "ttft_mean")
    apart = figure(Deployment(MANY, 0.0, False), "ttft_mean")
    return [
        Bar(f"1 -> {MANY} routers: mean TTFT", ttft, "x", f"<= {MOST_TTFT:g}", ttft <= MOST_TTFT),
        Bar(f"1 -> {MANY} routers: reuse lost", lost * 100, "points", "<= 1",
            lost <= MOST_LOST_REUSE),
        Bar(f"{MANY} routers in bursts: mean TTFT, to routers that know nothing of each other",
            bursts / apart, "x", "<= 1", bursts <= apart),
    ]  # fmt: skip


def _row(of: Deployment, found: Found) -> dict[str, object]:
    known = found.figures
    return {
        "routers": of.routers,
        "arrivals": "one by one" if of.jitter_s else "in bursts",
        "know of": "all" if of.shares_ledger else "their own",
        "lag_ms": LAG_MS,
        "requests": known.requests,
        "reuse": known.reuse,
        "ttft_ms": {"mean": known.ttft_mean, "p50": known.ttft_p50, "p99": known.ttft_p99},
        "e2e_ms": {"mean": known.e2e_mean},
        "collisions %": found.collisions * 100,
    }
