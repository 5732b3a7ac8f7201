"""The router process: follows what the logs say, owns lanes, answers for what is in them.

This file wires; what an owner does stands in `lane.py`, what is owed in `routing/obligations.py`,
where a request goes in `routing/plan.py`, who is dead in `deaths.py`.

    requests ──group──► Intake ──► LaneOwner ──► ledger, assignments, responses (Fence, End)
    ledger ───────────► Load  ┐
    registry, kv-events ► Fleet ┼─► what is due, who may work, who holds the prompt
    kv-events ────────► Index ┘
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.lanes.context import RouterContext
from app.lanes.deaths import DeathWatch
from app.lanes.owner import LaneOwner
from app.lanes.scan import Scanner
from app.lifetime import Lifetime, serve
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import Load
from app.settings import Settings
from streams.clock import BrokerClock
from streams.errors import BrokerUnavailable
from streams.follow import Follower
from streams.intake import Claim, Intake
from streams.outbox import Outbox
from streams.ports import Log, Partition
from streams.records import Blocks, Fact, Heartbeat, Probe
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
"""How often every unfinished request is looked at without an event: bounds how late a back-off,
a deadline or a missing start is noticed. Looking at one costs a microsecond or two."""

ENDS_S = 1.0
"""How often the ends of the response lanes are fetched (see `RouterContext.responses_ends`)."""

LEDGER_MARGIN_MS = 60_000
"""Added to how far back the ledger is read: our clock may differ from the broker's."""


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
        self._secret = settings.key_secret()
        self._index = Index(self._secret.fingerprint)
        self._name = name or settings.router_id or f"{socket.gethostname()}-{os.getpid()}"
        self._intake = Intake(
            log, REQUESTS, GROUP, self, life.clock, broker_clock=self._broker_clock
        )

    async def start(self) -> None:
        """Read the folds up to now, then join the group; returns when both is done."""
        life, clock = self._life, self._life.clock
        load_follower = Follower(
            self._log, self._load, [LEDGER], clock, broker_clock=self._broker_clock,
            start=self._ledger_start, on_applied=self._ledger_applied,
        )  # fmt: skip
        fleet_follower = Follower(
            self._log, self._fleet, [REGISTRY, KV_EVENTS], clock, broker_clock=self._broker_clock,
            on_applied=self._fleet_applied,
        )  # fmt: skip
        index_follower = Follower(self._log, self._index, [KV_EVENTS], clock)
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
            secret=self._secret,
            partitions={
                t: await self._log.partitions(t) for t in (REQUESTS, ASSIGNMENTS, KV_EVENTS)
            },
            resume=self._intake.resume,
        )
        self._lanes = self._context.partitions[REQUESTS]
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
        life.spawn("intake", self._intake.run())

    async def stop(self) -> None:
        """Leave the group with everything committed that is done; held requests are redelivered."""
        for owner in self._owners.values():
            owner.close()
        await self._intake.close()

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
            if is_news:
                self._context.places.told(fact)
            if owner is not None:
                owner.read_back(fact)

    def _fleet_applied(self, _: Partition, facts: Sequence[Fact]) -> None:
        context = self._context
        deaths_or_cards = False
        news = [fact for fact in facts if not isinstance(fact.record, Blocks | Probe)]
        if not news:
            return
        for fact in news:
            beat = fact.record
            context.places.told(fact)
            if not isinstance(beat, Heartbeat):
                deaths_or_cards = True
            elif self._fleet.is_lost(beat.worker, beat.epoch):
                if context.fleet_follower.caught_up:
                    self._life.spawn("tell again", self._deaths.tell_again(beat.worker, beat.epoch))
            else:
                self._reconcile(beat)
        context.places.fleet_changed()
        context.heard.ring()
        if deaths_or_cards:
            for owner in self._owners.values():
                owner.check_all()

    def _reconcile(self, beat: Heartbeat) -> None:
        """Compare what a worker says it runs with what the ledger says, in the lanes we own."""
        for run in beat.running:
            owner = self._owners.get(lane_of(run.id, self._lanes))
            if owner is not None:
                owner.reported(beat.worker, beat.epoch, run)

    async def _tick(self) -> None:
        while True:
            for owner in self._owners.values():
                owner.check_all()
            await self._life.clock.sleep(TICK_S)

    async def _follow_response_ends(self) -> None:
        lanes = range(self._lanes)
        while True:
            try:
                self._context.responses_ends = await self._log.end_offsets(RESPONSES, lanes)
            except BrokerUnavailable as e:  # older ends are lower, and lower ends are right too
                log.warning("cannot ask for the ends of the response lanes: %s", e)
            await self._life.clock.sleep(ENDS_S)

    async def _ledger_start(self, source: Partition) -> int:
        """Where the ledger is read from: no request lives longer than max_lifetime_s."""
        back_ms = int(2 * self._settings.max_lifetime_s * 1000) + LEDGER_MARGIN_MS
        since_ms = self._life.clock.wall_ms() - back_ms
        return await self._log.offset_at(source.topic, source.partition, max(0, since_ms))


def __getattr__(name: str) -> FastStream | Any:
    if name == "app":
        return serve("router", Router)
    raise AttributeError(name)
