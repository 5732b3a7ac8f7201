"""How large the world of a seed is, and what is drawn once for all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from app.faults.node import Kind
from app.faults.weather import Climate
from app.settings import Settings
from streams.topics import ASSIGNMENTS, LEDGER, REGISTRY, REQUESTS, RESPONSES

MODELS = ("echo", "second")
SEQUENCES = 3
ROOMY = Settings.model_construct(
    max_attempts=4,
    worker_timeout_s=3.0,
    heartbeat_s=1.0,
    max_num_seqs=SEQUENCES,
    worker_queue=1,
    drain_grace_s=3.0,
    snapshot_every_s=2.0,
    canary_idle_s=2.0,
    canary_answer_s=1.0,
    engine_stall_s=2.5,
    engine_dead_s=6.0,
    model=MODELS[0],
    worker_id="-",
    router_id="-",
    cache_dir=Path("/dev/null/cache"),
)
CRAMPED = ROOMY.model_copy(update={"held_requests": 1, "worker_queue": 0})

COMMITS = "commits"
AMBUSHED = (LEDGER, RESPONSES, ASSIGNMENTS, REGISTRY, REQUESTS, COMMITS)
"""Topics on which the order of appends matters, and commits."""

CLIMATES = (
    Climate(),
    Climate(slow=0.02, lag=0.0),
    Climate(lost=0.06, twice=0.06),
    Climate(late=0.06, overtaken=0.06, latest_s=6.0),
    Climate(lag=0.4, longest_s=2.5),
    Climate(slow=0.4, lag=0.1),
)


class Shape(NamedTuple):
    """The counts are small: two or three of everything find most.

    `sequences`: what a worker runs at a time. `rush`: everything is asked within a second or two.
    `cancels`: the share of requests that are cancelled. `ambush`: how often a process is struck
    when a record of its own has landed on one of the topics `ambushed`. `skew_ms`: how far the
    clocks of two brokers are apart at most. `caches`: whether engines cache and tell of it.
    """

    routers: int
    workers: int
    preprocessors: int
    gateways: int
    models: int
    lanes: int
    slots: int
    requests: int
    sequences: int
    rush: bool
    cramped: bool
    faults_s: float
    cancels: float
    ambush: float
    ambushed: tuple[str, ...]
    skew_ms: int
    climate: Climate
    caches: bool = False
    indexers: int = 0

    @property
    def settings(self) -> Settings:
        """What all processes are set to."""
        return CRAMPED if self.cramped else ROOMY

    @property
    def population(self) -> dict[Kind, int]:
        """How many processes of each kind."""
        return {
            "router": self.routers,
            "worker": self.workers,
            "preprocessor": self.preprocessors,
            "gateway": self.gateways,
            "indexer": self.indexers,
        }

    @staticmethod
    def draw(rng: random.Random) -> Shape:
        """A shape from a seed; every fifth one is of take-overs."""
        workers = rng.choice((1, 2, 2, 3))
        shape = Shape(
            routers=rng.choice((1, 2, 2, 3)),
            workers=workers,
            preprocessors=rng.choice((0, 1, 2)),
            gateways=rng.choice((0, 0, 1, 2)),
            models=rng.choice((1, 1, 2)) if workers > 1 else 1,
            lanes=rng.choice((1, 2, 3)),
            slots=rng.choice((1, 2, 3)),
            requests=rng.randint(4, 16),
            sequences=rng.choice((1, SEQUENCES, SEQUENCES)),
            rush=rng.random() < 0.2,
            cramped=rng.random() < 0.15,
            faults_s=rng.uniform(8.0, 25.0),
            cancels=rng.choice((0.05, 0.15, 0.5)),
            ambush=rng.choice((0.0, 0.02, 0.05)),
            ambushed=tuple(rng.sample(AMBUSHED, rng.randint(1, len(AMBUSHED)))),
            skew_ms=rng.choice((0, 300, 700)),
            climate=rng.choice(CLIMATES),
        )
        return shape.of_take_overs() if rng.random() < 0.2 else shape

    def of_caches(self, rng: random.Random) -> Shape:
        """The same; every fourth one has engines that cache, and indexers that follow them."""
        if rng.random() >= 0.25:
            return self
        return self._replace(caches=True, indexers=rng.choice((0, 1, 2)))

    def of_take_overs(self) -> Shape:
        """The same, but lanes change hands in the middle of everything, and readers lag behind."""
        return self._replace(
            routers=max(self.routers, 2),
            workers=max(self.workers, 2),
            ambush=0.2,
            ambushed=(LEDGER, ASSIGNMENTS),
            climate=Climate(slow=0.1, lag=0.6, longest_s=4.0),
        )
