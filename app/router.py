"""The router process: follows what the logs say, owns lanes, answers for what is in them.

This file wires. What an owner does stands in `app/lanes/owner.py`, who is dead in
`app/lanes/deaths.py`; what is owed in `app/routing/obligations.py`, where a request goes in
`app/routing/plan.py`.

    requests ──group──► Intake ──► LaneOwner ──► ledger, assignments, responses (Fence, End)
    ledger ───────────► Load  ┐
    registry, kv-events ► Fleet ┼─► what is due, who may work, who holds the prompt
    kv-events ────────► Index ┘
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from app.audit.drift import MOST_BLOCKS, Alarm, Drift
from app.http.api import answer_errors
from app.http.drift_metrics import DriftMetrics
from app.http.probes import Probes
from app.http.server import Server
from app.lanes.context import RouterContext
from app.lanes.deaths import DeathWatch
from app.lanes.owner import LaneOwner
from app.lanes.scan import Scanner
from app.lifetime import Lifetime, serve
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import Load
from app.settings import Settings
from indexer.warm import compile_all
from streams.clock import BrokerClock
from streams.errors import BrokerUnavailable
from streams.follow import Follower
from streams.intake import Claim, Intake
from streams.outbox import Outbox
from streams.ports import Log, Partition
from streams.records import Fact, Heartbeat
from streams.snapshots import Snapshots
from streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
)

if TYPE_CHECKING:
    from faststream import FastStream

log = logging.getLogger(__name__)

GROUP = "router"

TICK_S = 0.25
"""How often every unfinished request is looked at without an event: bounds how late the end of a
back-off, a deadline, or a run that is missing is noticed. Looking at one costs a microsecond or
two."""

DRIFT_S = 10.0
"""How often is looked whether caches are what they are expected to be: 4 ms for 64 workers."""

ENDS_S = 1.0
"""How often the ends of the response lanes are fetched (see `RouterContext.responses_ends`)."""

BEATS_BACK = 4
"""Time-outs of workers for which heartbeats are read when a router starts."""

CLOCKS_DIFFER_MS = 60_000
"""Added to how far back a topic is read: our clock may differ from the broker's."""

LANES_REMEMBERED = 65_536
"""Ids whose lane is kept at hand: hashing one takes 23 us, and every open run is in every heartbeat
of its worker."""


class Router:
    """One router; any number of them share the lanes of a deployment."""

    def __init__(
        self, log: Log, settings: Settings, life: Lifetime, name: str | None = None
    ) -> None:
        self._log = log
        self._settings = settings
        self._life = life
        self._broker_clock = BrokerClock(life.clock)
        self._owners: dict[int, LaneOwner] = {}
        self._fleet = Fleet()
        self._load = Load(int(settings.dedup_window_s * 1000))
        self._index = Index(settings.key_secret())
        self._name = name or settings.router_id or f"{socket.gethostname()}-{os.getpid()}"
        self._drift = Drift()
        self._fleet_version = self._fleet.version
        self._server: Server | None = None
        self._intake = Intake(
            log, REQUESTS, GROUP, self, life.clock, broker_clock=self._broker_clock,
            keep_prompts=settings.keep_prompts,
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Where it listens, if it does. Only after `start`."""
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """Read the folds up to now, then join the group; returns when both is done."""
        compile_all()
        life, clock = self._life, self._life.clock
        load_follower = Follower(
            self._log, self._load, [LEDGER], clock, broker_clock=self._broker_clock,
            start=self._ledger_start, on_applied=self._ledger_applied,
        )  # fmt: skip
        fleet_follower = Follower(
            self._log, self._fleet, [REGISTRY, KV_EVENTS], clock, broker_clock=self._broker_clock,
            start=self._fleet_start, on_applied=self._fleet_applied,
        )  # fmt: skip
        index_follower = Follower(
            self._log, self._index, [KV_EVENTS], clock, snapshots=Snapshots(self._log, clock)
        )
        self._context = RouterContext(
            name=self._name,
            log=self._log,
            settings=self._settings,
            life=life,
            broker_clock=self._broker_clock,
            outbox=Outbox(self._log, clock, self._broker_clock),
            scanner=Scanner(self._log),
            load=self._load,
            load_follower=load_follower,
            fleet=self._fleet,
            fleet_follower=fleet_follower,
            index=self._index,
            partitions={
                t: await self._log.partitions(t) for t in (REQUESTS, ASSIGNMENTS, KV_EVENTS)
            },
            resume=self._intake.resume,
        )
        followers = {
            fold.name: follower
            for fold, follower in (
                (self._load, load_follower),
                (self._fleet, fleet_follower),
                (self._index, index_follower),
            )
        }
        await self._listen(followers)
        self._lanes = self._context.partitions[REQUESTS]
        self._lane_of = lru_cache(LANES_REMEMBERED)(partial(lane_of, lanes=self._lanes))
        self._deaths = DeathWatch(self._context)
        life.spawn("load", load_follower.run())
        life.spawn("fleet", fleet_follower.run())
        life.spawn("index", index_follower.run())
        life.spawn("scanner", self._context.scanner.run())
        await load_follower.wait_caught_up()
        await fleet_follower.wait_caught_up()
        await index_follower.wait_caught_up()
        life.spawn("deaths", self._deaths.run())
        life.spawn("response ends", self._follow_response_ends())
        life.spawn("tick", self._tick())
        life.spawn("drift", self._watch_drift())
        life.spawn("intake", self._intake.run())

    async def stop(self) -> None:
        """Leave the group with everything committed that is done; held requests are redelivered."""
        for owner in self._owners.values():
            owner.close()
        await self._intake.close()
        if self._server is not None:
            await self._server.stop()

    async def _listen(self, followers: Mapping[str, Follower]) -> None:
        """Answer probes from now on, so that `/readyz` can tell how far the start is."""
        context, life, settings = self._context, self._life, self._settings
        metrics = context.metrics
        metrics.watch(context.places, followers, self._index)
        metrics.registry.register(
            DriftMetrics(self._drift, self._model_of, self._broker_clock.now_ms)
        )
        self.http = FastAPI(title="kvlane router", docs_url=None, redoc_url=None, openapi_url=None)
        Probes(followers, metrics.page, lambda: life.failed is None).add_to(self.http)
        answer_errors(self.http)
        if settings.router_port is not None:
            life.spawn("loop delay", metrics.loop_delay.watch(life.clock))
            self._server = Server(self.http, settings.http_host, settings.router_port, life)
            await self._server.start()

    # --- Lanes: called by the intake -------------------------------------------------------------

    def opened(self, claim: Claim) -> None:
        """A lane was assigned to this router."""
        self._owners[claim.partition] = LaneOwner(self._context, claim)

    def received(self, claim: Claim, fact: Fact) -> None:
        """A record of `requests` arrived."""
        self._owners[claim.partition].received(fact)

    def closed(self, claim: Claim) -> None:
        """A lane was revoked."""
        self._owners.pop(claim.partition).close()

    # --- what the folds bring --------------------------------------------------------------------

    def _ledger_applied(self, source: Partition, facts: Sequence[Fact]) -> None:
        owner = self._owners.get(source.partition)
        is_news = self._context.load_follower.caught_up
        for fact in facts:
            self._context.places.learn(fact)
            self._drift.told(fact)
            if is_news:
                self._context.places.told(fact)
            if owner is not None:
                owner.read_back(fact)

    def _fleet_applied(self, _: Partition, facts: Sequence[Fact]) -> None:
        context, is_news = self._context, self._context.fleet_follower.caught_up
        for fact in facts:
            context.places.told(fact)
            beat = fact.record
            if not isinstance(beat, Heartbeat):
                continue
            context.heard.ring()
            if not self._fleet.is_lost(beat.worker, beat.epoch):
                self._reconcile(beat)
            elif is_news:
                self._life.spawn("tell again", self._deaths.tell_again(beat.worker, beat.epoch))
        if self._fleet_version != self._fleet.version:
            self._fleet_version = self._fleet.version
            context.places.fleet_changed()
            for owner in self._owners.values():
                owner.check_all()

    def _reconcile(self, beat: Heartbeat) -> None:
        """Compare what a worker says it runs with what the ledger says, in the lanes we own."""
        for run in beat.running:
            owner = self._owners.get(self._lane_of(run.id))
            if owner is not None:
                owner.reported(beat.worker, beat.epoch, run)

    async def _tick(self) -> None:
        while True:
            for owner in self._owners.values():
                owner.check_all()
            await self._life.clock.sleep(TICK_S)

    def _model_of(self, worker: str) -> str:
        member = self._fleet.members.get(worker)
        return "" if member is None else member.card.model

    async def _watch_drift(self) -> None:
        """Say once when caches are no longer what they are expected to be, and when they are."""
        alarm = Alarm()
        while True:
            for worker, now in alarm.changes(self._drift, self._broker_clock.now_ms()):
                log.log(
                    logging.INFO if now.holds else logging.WARNING,
                    "the cache of %s (%s) %s what it is expected to be: %.1f blocks in 95 of 100 "
                    "of %d runs, and at most %g are well",
                    worker, self._model_of(worker), "is again" if now.holds else "is not",
                    now.blocks, now.runs, MOST_BLOCKS,
                )  # fmt: skip
            await self._life.clock.sleep(DRIFT_S)

    async def _follow_response_ends(self) -> None:
        lanes = range(self._lanes)
        while True:
            try:
                self._context.responses_ends = await self._log.end_offsets(RESPONSES, lanes)
            except BrokerUnavailable as e:  # older ends are lower, and lower ends are right too
                log.warning("cannot ask for the ends of the response lanes: %s", e)
            await self._life.clock.sleep(ENDS_S)

    async def _ledger_start(self, source: Partition) -> int:
        """No request lives longer than its lifetime, and no id is recognised beyond the window."""
        s = self._settings
        return await self._offset_before(source, max(2 * s.max_lifetime_s, s.dedup_window_s))

    async def _fleet_start(self, source: Partition) -> int:
        """The registry from its start; heartbeats from a few time-outs ago.

        Who lives has sent one since. A death before that is in the registry, as a tombstone or a
        newer card; if the router that wrote it died before the tombstone, the card belongs to a
        worker that is silent, gets no work for it, and is declared lost again by the death watch.
        """
        if source.topic == REGISTRY:
            return 0
        return await self._offset_before(source, BEATS_BACK * self._settings.worker_timeout_s)

    async def _offset_before(self, source: Partition, seconds: float) -> int:
        since_ms = self._life.clock.wall_ms() - int(seconds * 1000) - CLOCKS_DIFFER_MS
        return await self._log.offset_at(source.topic, source.partition, max(0, since_ms))


def __getattr__(name: str) -> FastStream | Any:
    if name == "app":
        return serve("router", Router)
    raise AttributeError(name)
