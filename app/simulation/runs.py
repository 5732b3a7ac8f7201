"""Runs that people ask for: a policy by its name, on a fleet, at a pace; and their rows.

A row is what tables and files show of a run, with the units in its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from app.engine.batch import Shape
from app.engine.curves import Curves
from app.routing.decisions import Tuning
from app.routing.policies import POLICIES, DynamoWeights
from app.simulation.conditions import ORDINARY, Conditions
from app.simulation.figures import Figures, figures
from app.simulation.replay import Life, prepared
from app.simulation.traffic import Pace, Traced, arrivals, asks_for_sessions, traced
from app.trace import CHUNK_TOKENS, TraceRow

BLOCKS = 2048
"""A million tokens in the cache of a worker, as in the published set-ups."""
LARGEST_SCALE = 1e6
NAMES = ("predictive", *(name for name in POLICIES if name != "direct"))
"""All but those that send a request where it says."""


class BadPolicy(Exception):
    """No policy that can be simulated; the message says which there are."""


class Run(NamedTuple):
    """One replay. `policy` as for `tuning_of`, `blocks`: what each worker's cache holds.

    `curves`: those of all engines. `warm`: how many requests come first that no figure counts.
    """

    policy: str
    workers: int
    pace: Pace = Pace()
    seed: int = 0
    blocks: int = BLOCKS
    conditions: Conditions = ORDINARY
    curves: Curves = Curves()
    warm: int = 0


class Trace:
    """The requests of a trace, prepared once for any number of runs."""

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        self.rows = rows
        self._requests = {False: traced(rows)}

    def requests(self, policy: str) -> list[Traced]:
        """As a policy needs them."""
        in_sessions = asks_for_sessions(policy)
        if in_sessions not in self._requests:
            self._requests[in_sessions] = traced(self.rows, in_sessions=in_sessions)
        return self._requests[in_sessions]

    @property
    def seconds(self) -> float:
        """From its first to its last arrival, as recorded."""
        return (self.rows[-1].timestamp - self.rows[0].timestamp) / 1000


def tuning_of(policy: str) -> Tuning:
    """The policy of a name, or `dynamo:64` for one with a prefill_load_scale. Raises BadPolicy."""
    name, _, scale = policy.partition(":")
    if name not in NAMES:
        raise BadPolicy(f"policy {name!r}: one of {', '.join(NAMES)}")
    if not scale:
        return Tuning(name)
    try:
        weights = DynamoWeights(prefill_load_scale=float(scale))
    except ValueError:
        weights = None
    if name != "dynamo" or weights is None or not 0 <= weights.prefill_load_scale <= LARGEST_SCALE:
        raise BadPolicy(f"policy {policy!r}: dynamo alone takes a number, its prefill_load_scale")
    return Tuning(name, weights)


def lived(trace: Trace, run: Run, progress: Callable[[int], None] = lambda _: None) -> list[Life]:
    """Do a run: what became of each request that counts, in the order of arrival.

    `progress` hears how many more requests have come. Raises as `prepared` says.
    """
    tuning = tuning_of(run.policy)
    coming = arrivals(trace.rows, trace.requests(tuning.policy), run.pace, run.seed)
    shape = Shape(CHUNK_TOKENS, run.blocks, curves=run.curves)
    replay = prepared(coming, run.workers, shape, tuning, run.seed, progress, run.conditions)
    return replay.run()[run.warm :]


def played(trace: Trace, run: Run, progress: Callable[[int], None] = lambda _: None) -> Figures:
    """The figures of a run, done as `lived` does it."""
    return figures(lived(trace, run, progress))


def row(run: Run, found: Figures, wall_s: float) -> dict[str, Any]:
    """A run as it is shown."""
    return {
        "policy": run.policy,
        "seed": run.seed,
        "workers": run.workers,
        "speed": run.pace.speed,
        "jitter_s": run.pace.jitter_s,
        "conditions": ", ".join(_circumstances(run)),
        "requests": found.requests,
        "reuse": found.reuse,
        "ttft_ms": {"mean": found.ttft_mean, "p50": found.ttft_p50, "p99": found.ttft_p99},
        "itl_ms": {"mean": found.itl_mean},
        "e2e_ms": {"mean": found.e2e_mean, "p99": found.e2e_p99},
        "wall_s": wall_s,
    }


def _circumstances(run: Run) -> Iterator[str]:
    """What is not as it is mostly, in words."""
    usual, there = Run("", 0), run.conditions
    if run.blocks != usual.blocks:
        yield f"{run.blocks} blocks"
    if there.routers > 1:
        yield f"{there.routers} routers"
        if not there.shares_ledger:
            yield "apart"
    if there.lag_ms:
        yield f"lag {there.lag_ms:g} ms"
    if there.hop_ms:
        yield f"hop {there.hop_ms:g} ms"
    if there.notice_ms:
        yield f"notices {there.notice_ms:g} ms"
    if run.curves != usual.curves:
        a, b, c = run.curves.prefill
        yield f"prefill {a:.3g} n^2 + {b:.3g} n + {c:.3g} ms"
    if not there.tells_curves:
        yield "curves unknown"
    if run.warm:
        yield f"after {run.warm}"
