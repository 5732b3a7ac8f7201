"""Parameters of a simulated world: counts, settings and network faults, drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvlane.app.settings import Settings
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.records import Role
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, REGISTRY, REQUESTS, RESPONSES
from workbench.testing.network_faults import FaultProfile

ProcessKind = Literal["router", "worker", "preprocessor", "gateway", "indexer", "collector"]

AbsentPart = ProcessKind | Literal["broker"]

MODELS = ("echo", "second")
MAX_SEQUENCES = 3
DEFAULT_SETTINGS = Settings.model_construct(
    max_attempts=4,
    worker_timeout_s=3.0,
    heartbeat_interval_s=1.0,
    max_num_seqs=MAX_SEQUENCES,
    worker_max_waiting=1,
    drain_grace_s=3.0,
    snapshot_interval_s=2.0,
    health_probe_idle_s=2.0,
    health_probe_timeout_s=1.0,
    engine_stall_timeout_s=2.5,
    engine_dead_timeout_s=6.0,
    model=MODELS[0],
    worker_id="-",
    router_id="-",
    status_port=None,
    cache_dir=Path("/dev/null/cache"),
)
TIGHT_SETTINGS = DEFAULT_SETTINGS.model_copy(
    update={"max_queued_requests": 1, "max_queued_batch_requests": 1, "worker_max_waiting": 0}
)

Scenario = Literal[
    "take-overs",
    "long answers",
    "choices",
    "backlog",
    "batch jobs",
    "compaction",
    "cut links",
    "clock skew",
    "replies",
    "absence",
    "keys",
    "limits",
    "batch",
    "caches",
    "roles",
    "agents",
    "cordons",
]
"""Scenarios that a seed adds to its world, several at a time:

    take-overs    lanes change owners all the time, and readers lag
    long answers  answers of more pieces than a reply buffers, resumed at any position received
    choices       HTTP requests for several answers
    backlog       batch prompts that wait through a peak of interactive requests, for longer than
                  ended ids are kept, while preprocessors restart and are added
    batch jobs    files are uploaded, and jobs run over them
    compaction    compacted topics keep the last record of each key when a process starts
    cut links     a process reaches all brokers but one, which may be the coordinator of its groups
    replies       prompts name topics for replies, of which one takes none and one does not exist
    absence       all processes of one kind, one of them, or the brokers are away for longer than
                  ended ids are kept and requests may take
    keys          HTTP clients of two tenants, whose API keys are revoked and replaced
    limits        a tenant with limits asks in parallel, at several gateways, for answers and jobs
    clock skew    the clocks of brokers differ by more than the time-out of workers, and partitions
                  move to other leaders more often; those of processes always differ by more
    batch         batch prompts, and collectors of results
    caches        engines cache, and indexers follow their events
    roles         workers that only compute prompts, and others that go on with them
    agents        answers with reasoning and tool calls, some of them with guided decoding
    cordons       an operator cordons workers, evacuates them, and lets them take work again
"""
SCENARIO_SHARES: Mapping[Scenario, float] = {
    "long answers": 0.1,
    "choices": 0.1,
    "backlog": 0.08,
    "cut links": 0.06,
    "replies": 0.06,
    "absence": 0.01,
    "keys": 0.06,
}
"""Shares of the seeds; `take-overs` is drawn with the other parameters."""
ADDED_SHARES: Mapping[Scenario, float] = {
    "batch jobs": 0.05,
    "compaction": 0.05,
    "clock skew": 0.05,
    "limits": 0.04,
    "agents": 0.1,
    "cordons": 0.06,
}
"""Shares that are drawn apart, so that the other seeds keep their worlds."""
FEATURE_SHARES: Mapping[str, float] = {"caches": 0.25, "batch": 0.2, "roles": 0.2}
"""Shares of the worlds with processes enough, drawn with the other parameters."""
CLOCK_SKEWS_MS = (4_000, 20_000, CLOCK_SKEW_MS)
"""Largest differences between the clocks of two brokers: more than the time-out of workers, and up
to the one that is supported, or the time for which ids are kept."""
PENDING_PIECES = 2
"""The limit of a reply's buffer where answers are long."""
SHORT_WINDOW_S = 15.0
"""Time for which the ids of ended requests are kept, and longest time limit of interactive ones,
in a world with a backlog."""
OPEN_REPLIES, DEAD_REPLIES, UNKNOWN_REPLIES = "replies.open", "replies.dead", "replies.unknown"
REPLY_TOPICS = {OPEN_REPLIES: 2, DEAD_REPLIES: 1}
"""Topics for replies that exist, and their partitions; no append reaches `DEAD_REPLIES`."""
ABSENCE_S = (1_210.0, 1_900.0)
"""Time for which a part is away: longer than `dedup_window_s`."""
SLOW_PERIODS = {
    "heartbeat_interval_s": 3.0,
    "worker_timeout_s": 9.0,
    "snapshot_interval_s": 60.0,
    "health_probe_idle_s": 60.0,
}
"""Settings of a world with an absence: an hour costs CPU time by what is repeated in it."""
ABSENT_PARTS: tuple[AbsentPart, ...] = (
    "router", "worker", "collector", "preprocessor", "gateway", "broker",
)  # fmt: skip
BOOTSTRAP_SHARE = 0.5
COMMITS = "commits"
TRIGGER_TOPICS = (LEDGER, RESPONSES, ASSIGNMENTS, REGISTRY, REQUESTS, COMMITS)
"""Topics where the order of appends matters, and offset commits."""

FAULT_PROFILES = (
    FaultProfile(),
    FaultProfile(slow=0.02, slow_poll=0.0),
    FaultProfile(lost=0.06, duplicated=0.06),
    FaultProfile(delayed=0.06, reordered=0.06, max_delay_s=6.0),
    FaultProfile(slow_poll=0.4, max_latency_s=2.5),
    FaultProfile(slow=0.4, slow_poll=0.1),
)


class Absence(NamedTuple):
    """A part that is away. `is_paused`: its processes are paused, not killed; `is_of_one`: only one
    of them."""

    part: AbsentPart
    begins_s: float
    ends_s: float
    is_paused: bool
    is_of_one: bool


class WorldParameters(NamedTuple):
    """Parameters of one seed. Counts are small: two or three of everything find most bugs.

    `sequences`: concurrent requests of a worker. `is_burst`: all requests arrive at once.
    `cancel_share`: share of requests that are cancelled. `trigger_share`: probability of a fault in
    a process right after its record was appended to one of the topics in `trigger_topics`.
    `batch_requests`: prompts of class batch, besides the requests. `skew_ms`: largest difference
    between the clocks of two brokers. `has_caches`: whether engines cache and publish cache events.
    `prefill_workers`: of the workers; with them the others have the role decode. `has_bootstrap`:
    whether their prefill and decode meet in rooms. `peak_s`: beginning and end of a peak of
    interactive requests.
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
    is_burst: bool
    is_tight: bool
    faults_s: float
    cancel_share: float
    trigger_share: float
    trigger_topics: tuple[str, ...]
    skew_ms: int
    network: FaultProfile
    has_caches: bool = False
    indexers: int = 0
    batch_requests: int = 0
    collectors: int = 0
    prefill_workers: int = 0
    has_bootstrap: bool = False
    scenarios: frozenset[Scenario] = frozenset()
    peak_s: tuple[float, float] | None = None
    absence: Absence | None = None

    def role_of(self, worker: str) -> Role:
        """The role of a worker of this name."""
        if not self.prefill_workers:
            return "aggregated"
        return "prefill" if int(worker.rpartition("-")[2]) < self.prefill_workers else "decode"

    @property
    def settings(self) -> Settings:
        """Settings of all processes."""
        settings = TIGHT_SETTINGS if self.is_tight else DEFAULT_SETTINGS
        changes: dict[str, Any] = {}
        if "backlog" in self.scenarios:
            limits = ("dedup_window_s", "max_lifetime_s", "deadline_s")
            changes |= {**dict.fromkeys(limits, SHORT_WINDOW_S), "max_queued_batch_requests": 2}
        if self.absence is not None:
            changes |= SLOW_PERIODS
        if "replies" in self.scenarios:
            changes["reply_topic_prefixes"] = "replies."
        return settings.model_copy(update=changes) if changes else settings

    @property
    def process_counts(self) -> dict[ProcessKind, int]:
        """Number of processes of each kind."""
        return {
            "router": self.routers,
            "worker": self.workers,
            "preprocessor": self.preprocessors,
            "gateway": self.gateways,
            "indexer": self.indexers,
            "collector": self.collectors,
        }

    @staticmethod
    def of_seed(seed: int, scenarios: Collection[Scenario] | None = None) -> WorldParameters:
        """The world of a seed, with these scenarios instead of those that it draws."""
        shares: dict[str, float] = dict(FEATURE_SHARES)
        shares.update((name, 1.0) for name in scenarios or ())
        shape = WorldParameters.draw(random.Random(f"{seed} shape")).with_parts(scenarios or ())
        shape = shape.with_caches(random.Random(f"{seed} caches"), shares["caches"])
        shape = shape.with_batch(random.Random(f"{seed} batch"), shares["batch"])
        shape = shape.with_roles(random.Random(f"{seed} roles"), shares["roles"])
        rng = random.Random(f"{seed} scenarios")
        if scenarios is None:
            added = random.Random(f"{seed} added scenarios")
            scenarios = [*_drawn(rng, SCENARIO_SHARES), *_drawn(added, ADDED_SHARES)]
        return shape.with_scenarios(rng, scenarios)

    @staticmethod
    def draw(rng: random.Random) -> WorldParameters:
        """Draw the parameters of a seed; every fifth world has frequent lane take-overs."""
        workers = rng.choice((1, 2, 2, 3))
        shape = WorldParameters(
            routers=rng.choice((1, 2, 2, 3)),
            workers=workers,
            preprocessors=rng.choice((0, 1, 2)),
            gateways=rng.choice((0, 0, 1, 2)),
            models=rng.choice((1, 1, 2)) if workers > 1 else 1,
            lanes=rng.choice((1, 2, 3)),
            slots=rng.choice((1, 2, 3)),
            requests=rng.randint(4, 16),
            sequences=rng.choice((1, MAX_SEQUENCES, MAX_SEQUENCES)),
            is_burst=rng.random() < 0.2,
            is_tight=rng.random() < 0.15,
            faults_s=rng.uniform(8.0, 25.0),
            cancel_share=rng.choice((0.05, 0.15, 0.5)),
            trigger_share=rng.choice((0.0, 0.02, 0.05)),
            trigger_topics=tuple(rng.sample(TRIGGER_TOPICS, rng.randint(1, len(TRIGGER_TOPICS)))),
            skew_ms=rng.choice((0, 300, 700)),
            network=rng.choice(FAULT_PROFILES),
        )
        return shape.with_take_overs() if rng.random() < 0.2 else shape

    def with_parts(self, scenarios: Collection[Scenario]) -> WorldParameters:
        """The same with the processes that batch prompts and roles need."""
        shape = self
        if "batch" in scenarios:
            shape = shape._replace(preprocessors=max(self.preprocessors, 1))
        if "roles" in scenarios:
            shape = shape._replace(workers=max(self.workers, 2), models=1)
        return shape

    def with_caches(self, rng: random.Random, share: float) -> WorldParameters:
        """The same; in a share of the worlds engines cache, and indexers follow their events."""
        if rng.random() >= share:
            return self
        return self._replace(has_caches=True, indexers=rng.choice((0, 1, 2)))

    def with_roles(self, rng: random.Random, share: float) -> WorldParameters:
        """The same; in a share of the worlds with workers enough, some only compute prompts."""
        if self.workers < 2 or self.models > 1 or rng.random() >= share:
            return self
        prefill_workers = rng.randint(1, self.workers - 1)
        sequences = rng.choice((1, self.sequences))  # with one, hand-overs wait for a place
        return self._replace(
            prefill_workers=prefill_workers,
            has_caches=True,
            sequences=sequences,
            has_bootstrap=rng.random() < BOOTSTRAP_SHARE,
        )

    def with_batch(self, rng: random.Random, share: float) -> WorldParameters:
        """The same; in a share of the worlds with preprocessors, batch prompts and collectors."""
        if not self.preprocessors or rng.random() >= share:
            return self
        return self._replace(batch_requests=rng.randint(2, 6), collectors=rng.choice((0, 1, 2)))

    def with_scenarios(self, rng: random.Random, wanted: Collection[Scenario]) -> WorldParameters:
        """The same with these scenarios."""
        scenarios = frozenset(wanted)
        shape = self.with_take_overs() if "take-overs" in scenarios else self
        has_http = scenarios & {"long answers", "choices", "batch jobs", "keys"}
        has_results = scenarios & {"batch jobs", "replies", "absence", "limits"}
        gateways = 2 if "limits" in scenarios else int(bool(has_http))
        shape = shape._replace(
            scenarios=scenarios,
            gateways=max(shape.gateways, gateways),
            preprocessors=max(shape.preprocessors, int(bool(has_results))),
            collectors=max(shape.collectors, int(bool(has_results))),
        )
        if "cordons" in scenarios:
            shape = shape._replace(workers=3, models=1, sequences=MAX_SEQUENCES)
        if "clock skew" in scenarios:
            most_ms = SHORT_WINDOW_S * 1000 if "backlog" in scenarios else CLOCK_SKEW_MS
            skews_ms = [skew_ms for skew_ms in CLOCK_SKEWS_MS if skew_ms <= most_ms]
            shape = shape._replace(skew_ms=rng.choice(skews_ms))
        if "absence" in scenarios:
            shape = shape.with_absence(rng)
        return shape.with_backlog(rng) if "backlog" in scenarios else shape

    def with_backlog(self, rng: random.Random) -> WorldParameters:
        """The same with batch prompts that wait through a peak."""
        begins_s = rng.uniform(4.0, 8.0)
        ends_s = begins_s + SHORT_WINDOW_S + rng.uniform(1.0, 8.0)
        return self._replace(
            preprocessors=max(self.preprocessors, 1),
            collectors=max(self.collectors, 1),
            batch_requests=rng.randint(8, 20),
            workers=min(self.workers, 2),
            prefill_workers=0,
            peak_s=(begins_s, ends_s),
            faults_s=ends_s + rng.uniform(2.0, 6.0),
        )

    def with_absence(self, rng: random.Random) -> WorldParameters:
        """The same with a part that is away, and batch prompts that wait for it."""
        begins_s = rng.uniform(0.3, 1.0) * self.faults_s
        return self._replace(
            batch_requests=max(self.batch_requests, rng.randint(2, 6)),
            absence=Absence(
                rng.choice(ABSENT_PARTS),
                begins_s,
                begins_s + rng.uniform(*ABSENCE_S),
                is_paused=rng.random() < 0.5,
                is_of_one=rng.random() < 0.3,
            ),
        )

    def with_take_overs(self) -> WorldParameters:
        """The same, with frequent lane take-overs between routers, and lagging readers."""
        return self._replace(
            routers=max(self.routers, 2),
            workers=max(self.workers, 2),
            trigger_share=0.2,
            trigger_topics=(LEDGER, ASSIGNMENTS),
            network=FaultProfile(slow=0.1, slow_poll=0.6, max_latency_s=4.0),
        )


def _drawn(rng: random.Random, shares: Mapping[Scenario, float]) -> list[Scenario]:
    return [name for name, share in shares.items() if rng.random() < share]
