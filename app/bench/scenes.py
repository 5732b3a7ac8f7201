"""What the simulation bench plays, and what has to come of it.

    published   round robin: the simulation is right
    recorded    arrivals as recorded, in bursts on the ticks of the recording's clock
    spread      the same requests, spread over these ticks
    late        the same under hops and late notices
    unknown     engines whose pace no card tells, after some requests, beside the same with cards
    generated   other kinds of work, which nothing was tuned on

Bars compare means over seeds. Against Dynamo's cost the best of its settings counts, for each
figure the best one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from app.bench.report import Bar
from app.engine.curves import Curves
from app.simulation.conditions import ORDINARY, Conditions
from app.simulation.figures import Figures
from app.simulation.generated import KINDS, PREFIX
from app.simulation.runs import Run
from app.simulation.traffic import Pace

REQUESTS = 12_031
CONVERSATION = "conversation"
OURS = "predictive"
SCALES = ("dynamo", "dynamo:16", "dynamo:32", "dynamo:64", "dynamo:256")
OTHERS = ("round_robin", "random", "least_loaded", "power_of_two", "session_hash")
SPEED_POLICIES = (OURS, "dynamo")
CLOSE = 0.01
SPREAD_S = 3.0
"""Recorded arrivals stand on ticks of this many seconds; jittered, they are spread over them."""
LATE = (
    Conditions(hop_ms=1.0),
    Conditions(notice_ms=5.0),
    Conditions(notice_ms=100.0),
)
WARM_A_WORKER = 200
"""Requests for each worker, until its pace has to be known."""
LEARNED = 1.05
ENGINES = (
    Curves(),
    Curves((8.42e-7, 3.037e-2, 33.0), (-51.48, 108.02, 11.48), 2.0),
    Curves((2.1e-7, 7.592e-3, 8.251), (-12.87, 27.0, 2.87), 0.5),
    Curves((0.0, 2.2e-2, 4.0), (-10.0, 40.0, 8.0), 1.0),
)
"""The published one, one twice as slow, one twice as fast, one of another shape."""
GENERATED_WORKERS = 8


class Setup(NamedTuple):
    """A fleet, how fast the trace is played on it, and what is published of round robin there.

    `spread_e2e`: what E2E may be, to Dynamo's, with arrivals spread.
    """

    workers: int
    speed: float
    published: Figures
    is_timed: bool = True
    recorded_e2e: float = 1.0
    spread_e2e: float = 0.98

    @property
    def name(self) -> str:
        """As people call it."""
        return f"{self.workers}x{self.speed:g}"


SETUPS = (
    Setup(
        8, 1.0, Figures(REQUESTS, 0.08237, 320.9, 183.6, 2048.0, 7.588, 2913.0, 10890.0),
        recorded_e2e=1.01, spread_e2e=1.0,
    ),
    Setup(8, 4.0, Figures(REQUESTS, 0.08148, 475.1, 273.2, 2780.0, 25.84, 9302.0, 36640.0)),
    Setup(16, 8.0, Figures(REQUESTS, 0.07492, 410.2, 225.2, 2582.0, 25.71, 9193.0, 36600.0)),
    Setup(
        64, 16.0, Figures(REQUESTS, 0.0611, 277.5, 146.6, 1946.0, 10.16, 3748.0, 14970.0),
        is_timed=False,
    ),
)  # fmt: skip
ABSOLUTE = SETUPS[2]
MOST_TTFT_MS, LEAST_REUSE = 208.0, 0.32
"""What has to be reached in the set-up ABSOLUTE, whatever others reach."""


class Play(NamedTuple):
    """A run on one of the traces."""

    trace: str
    run: Run


class Done(NamedTuple):
    """What came of it, and how long it took."""

    play: Play
    found: Figures
    wall_s: float


class Form(NamedTuple):
    """How much is played. The policies beside ours and Dynamo's have one seed each."""

    scales: tuple[str, ...]
    seeds: int
    spread_seeds: int
    late: tuple[Conditions, ...] = ()
    engines: tuple[Curves, ...] = ()
    generated_seeds: int = 1


QUICK = Form(("dynamo", "dynamo:32", "dynamo:64"), 1, 0)
FULL = Form(SCALES, 3, 3, LATE, ENGINES, 3)


class Scene(NamedTuple):
    """Runs of one kind on one fleet; the policy and the seed make the run."""

    trace: str
    like: Run
    name: str

    def play(self, policy: str, seed: int) -> Play:
        """One of its runs. Round robin leaves nothing to chance but the arrivals."""
        drawn = policy != "round_robin" or self.like.pace.jitter_s
        return Play(self.trace, self.like._replace(policy=policy, seed=seed if drawn else 0))


def scene(setup: Setup, jitter_s: float = 0.0, conditions: Conditions = ORDINARY) -> Scene:
    """The conversation trace on a fleet."""
    like = Run("", setup.workers, Pace(setup.speed, jitter_s), conditions=conditions)
    how = f"{setup.name}{' spread' if jitter_s else ''}"
    return Scene(CONVERSATION, like, how)


def kind_scene(kind: str) -> Scene:
    """A generated trace."""
    return Scene(PREFIX + kind, Run("", GENERATED_WORKERS), kind)


def engine_scenes(setup: Setup, curves: Curves) -> tuple[Scene, Scene]:
    """A fleet of such engines, with cards that tell it and without."""
    like = Run(
        "", setup.workers, Pace(setup.speed, SPREAD_S), curves=curves,
        warm=WARM_A_WORKER * setup.workers,
    )  # fmt: skip
    unknown = like._replace(conditions=Conditions(tells_curves=False))
    return Scene(CONVERSATION, like, setup.name), Scene(CONVERSATION, unknown, setup.name)


LEARNING = (SETUPS[0], SETUPS[2])


def plays(form: Form) -> list[Play]:
    """All runs of a form, in their order, none twice."""
    found: list[Play] = []
    policies = (OURS, *form.scales)
    for setup in SETUPS:
        found += _all(scene(setup), policies, form.seeds) + _all(scene(setup), OTHERS, 1)
        if form.spread_seeds:
            spread = scene(setup, SPREAD_S)
            found += _all(spread, policies, form.spread_seeds) + _all(spread, OTHERS, 1)
    for kind in KINDS:
        found += _all(kind_scene(kind), policies, form.generated_seeds)
        found += _all(kind_scene(kind), OTHERS, 1)
    for setup, curves in product(LEARNING, form.engines):
        for each in engine_scenes(setup, curves):
            found += _all(each, (OURS,), form.spread_seeds)
    for conditions, setup, jitter_s in product(form.late, SETUPS, (0.0, SPREAD_S)):
        seeds = form.spread_seeds if jitter_s else form.seeds
        found += _all(scene(setup, jitter_s, conditions), policies, seeds)
    return list(dict.fromkeys(found))


def _all(of: Scene, policies: Sequence[str], seeds: int) -> list[Play]:
    return [of.play(policy, seed) for policy, seed in product(policies, range(seeds))]


class Verdicts:
    """Bars of the runs that were done; nan where there are none."""

    def __init__(self, form: Form, done: Sequence[Done]) -> None:
        self._form = form
        self._found = {each.play: each.found for each in done}

    def mean(self, of: Scene, policy: str, figure: str) -> float:
        """Over all seeds that were played."""
        plays = {of.play(policy, seed) for seed in range(max(self._form[1:3]) + 1)}
        found = [getattr(self._found[play], figure) for play in plays if play in self._found]
        return fmean(found) if found else math.nan

    def to_best(self, of: Scene, figure: str) -> float:
        """Ours to the best of Dynamo's settings: less is better, but for reuse."""
        theirs = [self.mean(of, policy, figure) for policy in self._form.scales]
        best = max(theirs) if figure == "reuse" else min(theirs)
        return self.mean(of, OURS, figure) / best

    def at_most(self, of: Scene, figure: str, most: float, what: str) -> Bar:
        """Ours has to be at most so many times the best of Dynamo's."""
        ratio = self.to_best(of, figure)
        name = f"{of.name}: {OURS}, {what} to dynamo's best setting"
        return Bar(name, ratio, "x", f"<= {most:g}", ratio <= most)

    def all(self) -> Iterator[Bar]:
        """Of all scenes of the form."""
        for setup in SETUPS:
            yield self.published(setup)
        for setup in SETUPS:
            yield from self.recorded(setup)
        reuse = self.mean(scene(ABSOLUTE), OURS, "reuse")
        ttft = self.mean(scene(ABSOLUTE), OURS, "ttft_mean")
        yield Bar(f"{ABSOLUTE.name}: {OURS}, mean TTFT", ttft, "ms", f"<= {MOST_TTFT_MS:g}",
                  ttft <= MOST_TTFT_MS)  # fmt: skip
        yield Bar(f"{ABSOLUTE.name}: {OURS}, reuse", reuse, "", f">= {LEAST_REUSE:g}",
                  reuse >= LEAST_REUSE)  # fmt: skip
        if self._form.spread_seeds:
            for setup in SETUPS:
                yield from self.spread(scene(setup, SPREAD_S), setup.spread_e2e)
        for conditions, setup in product(self._form.late, SETUPS):
            yield from self.late(setup, conditions)
        for setup, curves in product(LEARNING, self._form.engines):
            yield self.learned(setup, curves)
        for kind in KINDS:
            yield from self.spread(kind_scene(kind), 1.0)

    def published(self, setup: Setup) -> Bar:
        """Round robin beside what is published."""
        play = scene(setup).play("round_robin", 0)
        found = self._found.get(play)
        off = math.nan if found is None else distance(found, setup.published)
        return Bar(
            f"{setup.name}: round robin, the figure furthest from the published one",
            off * 100, "%", f"<= {CLOSE:.0%}", off <= CLOSE,
        )  # fmt: skip

    def recorded(self, setup: Setup, conditions: Conditions = ORDINARY) -> Iterator[Bar]:
        """With arrivals as they were recorded."""
        of = scene(setup, 0.0, conditions)
        yield self.at_most(of, "ttft_mean", 1.0, "mean TTFT")
        yield self.at_most(of, "e2e_mean", setup.recorded_e2e, "mean E2E")
        yield self.at_most(of, "ttft_p99", 1.03, "p99 TTFT")
        reuse = self.to_best(of, "reuse")
        yield Bar(f"{of.name}: {OURS}, reuse to dynamo's best setting", reuse, "x", "> 1",
                  reuse > 1)  # fmt: skip

    def spread(self, of: Scene, e2e: float) -> Iterator[Bar]:
        """With arrivals that come one by one."""
        yield self.at_most(of, "ttft_mean", 1.01, "mean TTFT")
        yield self.at_most(of, "e2e_mean", e2e, "mean E2E")

    def late(self, setup: Setup, conditions: Conditions) -> Iterator[Bar]:
        """The same, with what takes time."""
        late = f"hop {conditions.hop_ms:g} ms" if conditions.hop_ms else (
            f"notices {conditions.notice_ms:g} ms"
        )  # fmt: skip
        spread = self.spread(scene(setup, SPREAD_S, conditions), setup.spread_e2e)
        for bar in (*self.recorded(setup, conditions), *spread):
            yield Bar(f"{late}, {bar.name}", bar.value, bar.unit, bar.bar, bar.met)

    def learned(self, setup: Setup, curves: Curves) -> Bar:
        """Engines whose pace was not told, beside the same ones with cards."""
        told, unknown = (
            self.mean(each, OURS, "ttft_mean") for each in engine_scenes(setup, curves)
        )
        ratio = unknown / told
        a, b, c = curves.prefill
        return Bar(
            f"{setup.name}: curves learned from nothing to known ones, mean TTFT, prefill "
            f"{a:.2g} n^2 + {b:.2g} n + {c:.2g} ms",
            ratio, "x", f"<= {LEARNED:g}", ratio <= LEARNED,
        )  # fmt: skip


def verdicts(form: Form, done: Sequence[Done]) -> Iterator[Bar]:
    """What has to be reached, of all that a form plays."""
    return Verdicts(form, done).all()


def distance(found: Figures, published: Figures) -> float:
    """Of the figure that is furthest from the published one, as a share of that."""
    return max(abs(a / b - 1) for a, b in zip(found, published, strict=True))
