"""The router process: follows the logs, owns lanes, and is responsible for the requests in them.

requests ──group──► GroupConsumer ──► LaneOwner ──► ledger, assignments, responses (Fence, End)
ledger ───────────────► LedgerState ┐
registry, kv-events ──► Fleet       ┼─► actions due, eligible workers, cached prompts
kv-events ────────────► KvIndexView ┘
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

from kvlane.app.audit.drift import MAX_ERROR_BLOCKS, DriftAlarm, DriftTracker
from kvlane.app.http.server.probes import ObservedProcess, Probes, StatusServer, catch_up_checks
from kvlane.app.lanes.context import LedgerListener, RouterContext
from kvlane.app.lanes.failure_detector import FailureDetector
from kvlane.app.lanes.owner import LaneOwner
from kvlane.app.lanes.periodic_records import CapacityReporter, EndedIdsWriter
from kvlane.app.lanes.shared_reads import SharedScanner
from kvlane.app.metrics.router_metrics import DriftCollector
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.settings import Settings
from kvlane.indexer.precompile import compile_all
from kvlane.streams.clock import CLOCK_SKEW_MS, BrokerClock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.group_consumer import GroupConsumer, PartitionClaim
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Assigned, Heartbeat, LogRecord, ModelCard, Probe, WorkerCard
from kvlane.streams.topics import (
    ASSIGNMENTS,
    ENDED_IDS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    TOPICS_BY_NAME,
    lane_of,
)
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import SnapshotStore
from kvlane.streams.views.tail_reader import TailReader

log = logging.getLogger(__name__)

GROUP = "router"

RECONCILE_INTERVAL_S = 0.25
"""Bounds how late a due action is noticed: a deadline, the end of a back-off, a silent worker."""

DRIFT_CHECK_INTERVAL_S = 10.0
"""Interval between drift checks. One check takes 4 ms for 64 workers."""

RESPONSE_ENDS_INTERVAL_S = 1.0
LEAST_IDLE_S = 60.0
"""Shortest time without records in a lane of the ledger that moves the start of its view."""

HEARTBEAT_WINDOW_TIMEOUTS = 4
"""Time before a router's start whose heartbeats are read, in worker time-outs."""


LANE_CACHE_SIZE = 65_536
"""Ids whose lane is cached: every open run is in every heartbeat of its worker."""


class Router(ObservedProcess):
    """One router; any number of them share the lanes of a deployment."""

    def __init__(
        self, log: Log, settings: Settings, ctx: ProcessContext, name: str | None = None
    ) -> None:
        self._log = log
        self._settings = settings
        self._ctx = ctx
        self._broker_clock = BrokerClock(ctx.clock)
        self._owners: dict[int, LaneOwner] = {}
        self._fleet = Fleet()
        self._silent_workers = SilentWorkers(self._fleet, settings.worker_timeout_s)
        self._ledger = LedgerState(int(settings.dedup_window_s * 1000))
        self._index = KvIndexView(settings.block_key_secret())
        self._name = name or settings.router_id or f"{socket.gethostname()}-{os.getpid()}"
        self._drift = DriftTracker()
        self._fleet_versions = self._present_fleet_versions
        self._has_joined = False
        self._intake = GroupConsumer(
            log, REQUESTS, GROUP, self, ctx.clock, broker_clock=self._broker_clock,
            keep_prompts=settings.keep_prompts,
        )  # fmt: skip

    async def start(self) -> None:
        """Read the views up to now, then join the group; returns when its lanes are served."""
        compile_all()
        ctx, clock = self._ctx, self._ctx.clock
        tail = TailReader(self._log, clock)
        ledger_follower = Follower(
            self._log, self._ledger, [LEDGER], clock, broker_clock=self._broker_clock,
            start=self._ledger_start, on_applied=self._ledger_applied, tail=tail,
        )  # fmt: skip
        ended_follower = Follower(
            self._log, self._ledger.ended_prompts, [ENDED_IDS], clock, tail=tail
        )
        fleet_follower = Follower(
            self._log, self._fleet, [REGISTRY, KV_EVENTS], clock, broker_clock=self._broker_clock,
            start=self._fleet_start, on_applied=self._fleet_applied, tail=tail,
        )  # fmt: skip
        index_follower = Follower(
            self._log, self._index, [KV_EVENTS], clock,
            snapshots=SnapshotStore(self._log, clock), tail=tail,
        )  # fmt: skip
        self._context = RouterContext(
            name=self._name,
            log=self._log,
            settings=self._settings,
            ctx=ctx,
            broker_clock=self._broker_clock,
            publisher=RecordPublisher(self._log, clock, self._broker_clock),
            scanner=SharedScanner(self._log),
            ledger=self._ledger,
            ledger_follower=ledger_follower,
            fleet=self._fleet,
            fleet_follower=fleet_follower,
            silent_workers=self._silent_workers,
            kv_index=self._index,
            partitions={
                t: await self._log.partitions(t) for t in (REQUESTS, ASSIGNMENTS, KV_EVENTS)
            },
            resume=self._intake.resume,
            pause=self._intake.pause,
            count_awaited=tail.count_awaited,
        )
        followers = {
            view.name: follower
            for view, follower in (
                (self._ledger, ledger_follower),
                (self._fleet, fleet_follower),
                (self._index, index_follower),
            )
        }
        await self._listen(followers)
        self._lanes = self._context.partitions[REQUESTS]
        self._lane_of = lru_cache(LANE_CACHE_SIZE)(partial(lane_of, lanes=self._lanes))
        self._failure_detector = FailureDetector(self._context)
        # The broker's time, which is where each log is read from: this machine's may be wrong.
        await self._context.publisher.publish(KV_EVENTS, self._name, Probe(by=self._name))
        ctx.spawn("tail", tail.run())
        ctx.spawn("fleet", fleet_follower.run())  # first, so that no heartbeat waits for others
        ctx.spawn("ended ids", ended_follower.run())
        await ended_follower.wait_caught_up()  # it has the offset from which the ledger is read
        ctx.spawn("load", ledger_follower.run())
        ctx.spawn("index", index_follower.run())
        ctx.spawn("scanner", self._context.scanner.run())
        await ledger_follower.wait_caught_up()
        await fleet_follower.wait_caught_up()
        await index_follower.wait_caught_up()
        ctx.spawn("failure detector", self._failure_detector.run())
        ctx.spawn("response ends", self._follow_response_ends())
        ctx.spawn("tick", self._tick())
        ctx.spawn("drift", self._watch_drift())
        ctx.spawn("capacity", CapacityReporter(self._context, self._owners).run())
        ctx.spawn("intake", self._intake.run())
        await self._intake.wait_joined()
        while not self._serves_lanes:
            await asyncio.wait({owner.take_over for owner in self._owners.values()})
        ctx.spawn("writer of ended ids", EndedIdsWriter(self._context, self._owners).run())
        self._has_joined = True

    @property
    def _serves_lanes(self) -> bool:
        """Whether every lane that the group has given to this router is served: perhaps none."""
        return all(owner.serving for owner in self._owners.values())

    async def stop(self) -> None:
        """Leave the group with everything committed that is done; held requests are redelivered."""
        for owner in self._owners.values():
            owner.close()
        await self._intake.close()
        await self._status.stop()

    async def _listen(self, followers: Mapping[str, Follower]) -> None:
        """Answer probes from now on, so that `/readyz` reports the progress of the start."""
        context, ctx = self._context, self._ctx
        metrics = context.metrics
        queue = context.queue
        metrics.watch(queue, self._fleet, followers, self._index)
        metrics.registry.register(
            DriftCollector(self._drift, self._model_of, self._broker_clock.now_ms)
        )
        probes = Probes(
            lambda: {
                **catch_up_checks(followers),
                "lanes_served": self._has_joined and self._serves_lanes,
                "lanes": len(self._owners),
                "log_answers": ctx.broker_answers,
            },
            metrics.page,
            lambda: ctx.error is None,
        )
        self._status = StatusServer(self._settings, ctx, probes, metrics)
        await self._status.start()

    # --- Lanes: called by the intake -------------------------------------------------------------

    def on_claimed(self, claim: PartitionClaim) -> None:
        self._owners[claim.partition] = LaneOwner(self._context, claim)

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        self._owners[claim.partition].on_request_record(log_record)

    def on_released(self, claim: PartitionClaim) -> None:
        self._owners.pop(claim.partition).close()

    # --- records of the views --------------------------------------------------------------------

    def _ledger_applied(self, source: Partition, log_records: Sequence[LogRecord]) -> None:
        owner = self._owners.get(source.partition)
        is_replay = not self._context.ledger_follower.caught_up
        context = self._context
        listeners: list[LedgerListener] = [context.scheduler, self._drift]
        if owner is not None:
            listeners.append(owner)
        for log_record in log_records:
            for listener in listeners:
                listener.on_record(log_record, is_replay=is_replay)
            if owner is not None and not is_replay:
                context.metrics.requests.on_record(log_record, self._model_of)
        if self._ledger.batch_runs and not is_replay:
            now_ms = self._broker_clock.now_ms()
            for place in _assigned_places(log_records):
                self._reconcile_each(context.queue.batch.giving_way_on(place, now_ms))

    def _reconcile_each(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            owner = self._owners.get(self._lane_of(request_id))
            if owner is not None:
                owner.reconcile(request_id)

    def _fleet_applied(self, _: Partition, log_records: Sequence[LogRecord]) -> None:
        context, is_news = self._context, self._context.fleet_follower.caught_up
        broker_ms = None if is_news else self._broker_clock.now_ms()
        self._silent_workers.on_records(log_records, self._ctx.clock.now(), broker_ms)
        for log_record in log_records:
            beat = log_record.record
            if isinstance(beat, WorkerCard):
                context.model_availability.on_card(beat.model)
            elif isinstance(beat, ModelCard):
                context.model_availability.on_card(beat.name)
            if not isinstance(beat, Heartbeat):
                continue
            context.heartbeat_read.notify_all()
            if not self._fleet.is_lost(beat.worker, beat.epoch):
                self._reconcile(beat)
            elif is_news:
                renotified = self._failure_detector.renotify(beat.worker, beat.epoch)
                self._ctx.spawn("notify again", renotified)
        if self._fleet_versions != (versions := self._present_fleet_versions):
            self._fleet_versions = versions
            context.on_fleet_changed()
            for owner in self._owners.values():
                owner.reconcile_due()

    @property
    def _present_fleet_versions(self) -> tuple[int, int]:
        return self._fleet.version, self._silent_workers.version

    def _reconcile(self, beat: Heartbeat) -> None:
        """Compare the runs that a worker lists with the ledger, in the lanes of this router."""
        for run in beat.running:
            owner = self._owners.get(self._lane_of(run.id))
            if owner is not None:
                owner.on_heartbeat_run(beat.worker, beat.epoch, run)
        if (last := self._fleet.heartbeats.get(beat.worker)) is not None:
            for owner in self._owners.values():
                owner.reconcile_unlisted(beat.worker, beat.epoch, last)

    async def _tick(self) -> None:
        while True:
            self._silent_workers.update(self._ctx.clock.now())
            for owner in self._owners.values():
                owner.reconcile_due()
                owner.resume_if_relieved()
            queue = self._context.queue
            self._reconcile_each(queue.batch.due(self._broker_clock.now_ms()))
            queue.waiting.deferred.grant_next()
            queue.batch.waiting.deferred.grant_next()
            await self._ctx.clock.sleep(RECONCILE_INTERVAL_S)

    def _model_of(self, worker: str) -> str:
        member = self._fleet.members.get(worker)
        return "" if member is None else member.card.model

    async def _watch_drift(self) -> None:
        """Log once when the index drifts from a worker's cache, and when it agrees again."""
        alarm = DriftAlarm()
        while True:
            for worker, now in alarm.take_changes(self._drift, self._broker_clock.now_ms()):
                log.log(
                    logging.INFO if now.is_within_limit else logging.WARNING,
                    "KV index drift %s for worker %s (%s): p95 %.1f blocks over %d runs "
                    "(threshold %g)",
                    "is over" if now.is_within_limit else "detected", worker,
                    self._model_of(worker),
                    now.blocks, now.runs, MAX_ERROR_BLOCKS,
                )  # fmt: skip
            await self._ctx.clock.sleep(DRIFT_CHECK_INTERVAL_S)

    async def _follow_response_ends(self) -> None:
        lanes = range(self._lanes)
        while True:
            try:
                self._context.response_end_offsets = await self._log.end_offsets(RESPONSES, lanes)
            except BrokerUnavailable as e:  # older ends are lower, and lower ends are right too
                log.warning("cannot fetch the ends of the response lanes: %s", e)
            await self._ctx.clock.sleep(RESPONSE_ENDS_INTERVAL_S)

    async def _ledger_start(self, source: Partition) -> int:
        """Far enough back for a request with the longest time limit that no router has ended for
        `max_lifetime_s` more, and for ends of prompts that are not on `ended-ids`. Counted from the
        lane's last record: while no router runs, no request ends."""
        s = self._settings
        longest_s = max(s.batch_run_limit_s, s.dedup_window_s) + s.max_lifetime_s
        end = (await self._log.end_offsets(LEDGER, [source.partition]))[source.partition]
        kept_s, idle_s = (TOPICS_BY_NAME[LEDGER].retention_ms or 0) / 1000, LEAST_IDLE_S
        while end and idle_s < kept_s and await self._offset_before(source, idle_s) >= end:
            idle_s *= 2
        start = await self._offset_before(source, longest_s + idle_s)
        saved = self._ledger.ended_prompts.saved_until(source.partition)
        return start if saved is None else min(start, saved)

    async def _fleet_start(self, source: Partition) -> int:
        """The registry from its start; heartbeats from a few time-outs ago: every live worker has
        sent one. An earlier loss is in the registry, or is declared again."""
        if source.topic == REGISTRY:
            return 0
        return await self._offset_before(
            source, HEARTBEAT_WINDOW_TIMEOUTS * self._settings.worker_timeout_s
        )

    async def _offset_before(self, source: Partition, seconds: float) -> int:
        since_ms = self._broker_clock.now_ms() - int(seconds * 1000) - CLOCK_SKEW_MS
        return await self._log.offset_at(source.topic, source.partition, max(0, since_ms))


def _assigned_places(log_records: Sequence[LogRecord]) -> dict[WorkerRank, None]:
    records = (r.record for r in log_records)
    return {
        WorkerRank(record.worker, record.epoch, record.rank): None
        for record in records
        if type(record) is Assigned
    }


__getattr__ = process_app("router", Router)
