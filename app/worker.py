"""The worker process: one engine behind one slot of `assignments`.

    assignments[slot] ─► RunQueue ─► engine ─► responses (Chunks), ledger (Started, Finished)
                                    └────► kv-events (Blocks, by KvEventPublisher), with heartbeats
    model folder ─► artifacts, registry (ModelCard); registry ─► conflicting worker ids

The order of the start makes an epoch safe: the end offset of the slot is read before the card is
written, so no assignment of this epoch precedes it; the cache events of the previous epoch are
cleared before the first heartbeat makes the worker routable.

An engine that does not answer makes the worker unhealthy until it does. A dead engine ends the
process, after a last heartbeat and the failure of its open runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from kvlane.app.engine.engine_factory import create_engine
from kvlane.app.engine.interface import Engine, EngineDead
from kvlane.app.engine.output_values import check_config, checked_stats
from kvlane.app.http.server.probes import Checks, ObservedProcess, Probes, StatusServer
from kvlane.app.metrics.worker_metrics import WorkerMetrics
from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import ProcessContext, process_app
from kvlane.app.serving.chunk_writer import ChunkWriter
from kvlane.app.serving.engine_health import EngineHealthMonitor, HealthTimeouts
from kvlane.app.serving.heartbeat import HeartbeatSender
from kvlane.app.serving.kv_event_publisher import KvEventPublisher
from kvlane.app.serving.registration import (
    REGISTER_TIMEOUT_S,
    Registration,
    check_role,
    interpret,
    with_adapters,
    worker_card,
)
from kvlane.app.serving.run_executor import Run, RunEnd, RunExecutor
from kvlane.app.serving.run_queue import RunLimits, RunQueue
from kvlane.app.serving.worker_model import ModelPublisher, WorkerModel
from kvlane.app.settings import Settings
from kvlane.indexer.cache_events.engine_events import EngineEvent
from kvlane.indexer.cache_events.event_normalizer import NormalizerCounters
from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError, StreamError
from kvlane.streams.ports import Log, Partition, Record
from kvlane.streams.reading.range_reader import end_offset_of, tail
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import (
    Assignment,
    CancelRun,
    EngineConfig,
    EngineStats,
    LogRecord,
    Lost,
    ModelCard,
    WorkerState,
)
from kvlane.streams.topics import ASSIGNMENTS, REGISTRY, RESPONSES, partition_of

log = logging.getLogger(__name__)

DRAIN_NOTICE_HEARTBEATS = 2
"""Heartbeats during which a draining worker still accepts runs, until routers have noticed."""
SHUTDOWN_STEP_S = 5.0


class WorkerIdTaken(OperatorError):
    """A newer process has registered the same worker id."""

    correction = "Set KVLANE_WORKER_ID to a value that no other worker has."


class Worker(ObservedProcess):
    """One worker process. `start` returns after the registration and the first heartbeat."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        ctx: ProcessContext,
        engine: Engine,
        *,
        worker_id: str | None = None,
        offer: ModelPublisher | None = None,
    ) -> None:
        """`offer`: publishes the files of the engine's model; without it tokens are bytes."""
        self.id = worker_id or settings.worker_id
        self._log = log
        self._settings = settings
        self._ctx = ctx
        self._clock = ctx.clock
        self._engine = engine
        self._broker_clock = BrokerClock(ctx.clock)
        self._publisher = RecordPublisher(log, ctx.clock, self._broker_clock)
        # Long enough for a killed worker to be declared lost, and for a draining one to leave.
        leaving_s = max(4 * settings.worker_timeout_s, settings.drain_grace_s + 2 * SHUTDOWN_STEP_S)
        self._model = WorkerModel(log, self._publisher, ctx, self.id, leaving_s, offer)
        self._state: WorkerState = "ready"
        self._fatal_reason = ""
        """"" unless this process is about to end with an error."""
        self._runs: RunQueue | None = None
        self._early_records: list[LogRecord] = []
        """Records of the registry that were read between two epochs, and may end the next one."""
        self._slot = Partition(ASSIGNMENTS, 0)
        self._slot_offset = 0
        self._cache_events: list[KvEventPublisher] = []
        """One for each data-parallel rank; empty until the engine has started."""
        self._loops: list[asyncio.Task[Any]] = []
        self._heartbeats = HeartbeatSender(self._publisher, ctx.clock, engine, self.id)
        self._metrics = WorkerMetrics(self)
        probes = Probes(self._checks, self._metrics.page, lambda: self.is_alive)
        self._status = StatusServer(settings, ctx, probes, self._metrics)

    @property
    def epoch(self) -> int | None:
        return self._runs.epoch if self._runs is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the process is live; False once its engine is dead."""
        return self._ctx.error is None and not self._fatal_reason

    @property
    def heartbeat_age_s(self) -> float:
        return self._heartbeats.age_s

    @property
    def open_runs(self) -> tuple[int, int]:
        """Runs of this epoch: those in the engine or closing, and those waiting for it."""
        runs = self._runs
        return (
            (0, 0)
            if runs is None
            else (len(runs.progress()) - runs.waiting_count, runs.waiting_count)
        )

    def engine_stats(self) -> EngineStats | None:
        return checked_stats(self._engine.stats())

    def cache_event_counters(self) -> list[NormalizerCounters]:
        return [events.normalizer.counters for events in self._cache_events]

    def _checks(self) -> Checks:
        is_fresh = self.heartbeat_age_s < self._settings.worker_timeout_s
        return {
            "registered": self._runs is not None,
            "engine_answers": self._runs is not None and not self._watch.unhealthy_reason,
            "heartbeats_acknowledged": is_fresh,
            "log_answers": self._ctx.broker_answers,
            "taking_requests": self._state == "ready" and self.is_alive,
        }

    async def start(self) -> None:
        """Raises errors of the engine and of the log, and SettingsError for a role that the engine
        cannot take."""
        await self._status.start()
        try:
            config = await self._start_engine()
            await self._register(config)
        except BaseException:
            await self._shutdown_step("cleanup", self._engine.cleanup())
            raise
        self._engine_owner = self._ctx.spawn("engine", self._own_engine())

    async def stop(self) -> None:
        """Drain and stop: announce it, finish or abort the runs, write the tombstone."""
        self._state = "draining"
        await _cancel_tasks(self._health_task)
        await self._send_heartbeat()
        await self._clock.sleep(DRAIN_NOTICE_HEARTBEATS * self._settings.heartbeat_interval_s)
        if self._runs is not None:
            await self._drain_runs(self._runs)
        await _cancel_tasks(*self._loops)
        self._drop_epoch()
        for events in self._cache_events:
            events.end_epoch()
        await self._shutdown_step("drain", self._engine.drain())
        await _cancel_tasks(self._engine_owner)
        try:
            await self._registration.write_tombstone(self._clock.now() + SHUTDOWN_STEP_S)
        except StreamError as e:
            log.warning("the tombstone of %s was not acknowledged: %s", self.id, e)
        await self._status.stop()

    async def _drain_runs(self, runs: RunQueue) -> None:
        """Let open runs end within the grace period, abort the rest."""
        runs.reject_new()
        if not await runs.wait_idle(self._clock.now() + self._settings.drain_grace_s):
            runs.abort_all("the worker stopped")
            await runs.wait_idle(self._clock.now() + SHUTDOWN_STEP_S)

    async def _shutdown_step(self, what: str, duty: Coroutine[Any, Any, None]) -> None:
        """Await a shutdown step of the engine within the grace period; log a failure."""
        try:
            async with asyncio.timeout(max(self._settings.drain_grace_s, SHUTDOWN_STEP_S)):
                await duty
        except Exception:
            log.exception("%s of the engine of %s failed", what, self.id)

    # --- epochs ----------------------------------------------------------------------------------

    async def _start_engine(self) -> EngineConfig:
        """Start the engine with its listener, and publish the files and card of its model."""
        self._engine.set_kv_event_listener(self._on_engine_events)
        started = await self._engine.start(self.id)
        check_config(started)
        config = with_adapters(started, self._engine.adapters(), self._settings)
        check_role(config, self._settings, self.id)
        model = config.served_model_name or config.model
        self._metrics.model = model
        self._cache_events = [
            KvEventPublisher(
                self._publisher,
                self._ctx,
                self.id,
                model,
                config.kv_cache_block_size or 0,
                self._settings.block_key_secret(),
                rank,
            )
            for rank in range(config.data_parallel_size or 1)
        ]
        await self._model.publish(model, config)
        return config

    def _on_engine_events(self, events: Sequence[EngineEvent], rank: int = 0) -> None:
        if self._cache_events:  # blocks cached during the start of the engine belong to no request
            self._cache_events[rank].on_engine_events(events)

    async def _register(self, config: EngineConfig) -> None:
        slot = partition_of(self.id.encode(), await self._log.partitions(ASSIGNMENTS))
        self._slot = Partition(ASSIGNMENTS, slot)
        self._chunks = ChunkWriter(
            self._publisher,
            self._ctx,
            await self._log.partitions(RESPONSES),
            with_tokens=config.gives_tokens,
        )
        self._limits = RunLimits(
            max_running=config.max_num_seqs or self._settings.max_num_seqs,
            max_waiting=self._settings.worker_max_waiting,
            remember_key_s=max(self._settings.dedup_window_s, self._settings.batch_run_limit_s),
        )
        self._lease_s = config.transfer_lease_s or 0.0
        self._slot_offset = await end_offset_of(self._log, self._clock, self._slot)
        registry = Partition(REGISTRY, 0)
        registry_offset = self._model.card_offset
        if registry_offset < 0:
            registry_offset = await end_offset_of(self._log, self._clock, registry)
        s = self._settings
        timeouts = HealthTimeouts(
            s.health_probe_idle_s,
            s.health_probe_timeout_s,
            s.engine_stall_timeout_s,
            s.engine_dead_timeout_s,
        )
        self._watch = EngineHealthMonitor(
            self._engine, self._ctx, timeouts, self._idle_output_s, self._health_changed
        )
        card = worker_card(
            self.id, slot, config, s, self._engine.versions(),
            max_runs=self._limits.max_running + self._limits.max_waiting,
        )  # fmt: skip
        adapters = self._engine.adapters()
        self._registration = Registration(self._publisher, self._ctx, card, adapters)
        await self._start_epoch(self._clock.now() + REGISTER_TIMEOUT_S)
        self._loops = [
            self._ctx.spawn(
                "registry", self._follow(registry, registry_offset, self._on_registry_record)
            ),
            self._ctx.spawn("heartbeats", self._heartbeat_loop()),
            self._ctx.spawn(
                "slot", self._follow(self._slot, self._slot_offset, self._on_slot_record)
            ),
        ]
        self._health_task = self._ctx.spawn("engine watch", self._health_loop())

    async def _start_epoch(self, until: float | None = None) -> None:
        """Raises AppendFailed past `until`."""
        epoch = await self._registration.begin_epoch(until)
        for events in self._cache_events:
            await events.begin_epoch(epoch, until)
        executor = RunExecutor(
            self._ctx, self._publisher, self._engine, self._chunks, self._model.text_model,
            self.id, epoch, broker_clock=self._broker_clock, lease_s=self._lease_s,
        )  # fmt: skip
        self._runs = RunQueue(
            executor, self._ctx, self._publisher, self._broker_clock, self._limits, self.id, epoch,
            self._run_ended,
        )  # fmt: skip
        if self._watch.unhealthy_reason or self._fatal_reason:
            self._runs.reject_new()
        log.info("worker %s serves slot %d as epoch %d", self.id, self._slot.partition, epoch)
        log_records, self._early_records = self._early_records, []
        registration = self._registration
        if any(
            interpret(f, registration.card, registration.card_offset) == "renew"
            for f in log_records
        ):
            self._restart_epoch("a record in the registry ended it while it began")
        await self._send_heartbeat()

    def _drop_epoch(self) -> bool:
        """Drop all runs of this epoch without a record, since routers consider it dead."""
        runs, self._runs = self._runs, None
        if runs is not None:
            runs.discard_all()
        return runs is not None

    def _restart_epoch(self, why: str) -> None:
        """Drop this epoch and begin another one; does nothing between two epochs."""
        if self._drop_epoch():
            log.warning("worker %s: epoch %d is over: %s", self.id, self._registration.epoch, why)
            self._loops = [loop for loop in self._loops if not loop.done()]
            self._loops.append(self._ctx.spawn("renew", self._start_epoch()))

    # --- the engine's health ---------------------------------------------------------------------

    async def _health_loop(self) -> None:
        try:
            await self._watch.run()
        except EngineDead as e:
            self._engine_died(e)

    def _idle_output_s(self) -> float | None:
        return self._runs.idle_output_s() if self._runs is not None else None

    def _health_changed(self, stalls: bool) -> None:  # noqa: FBT001 - the watch's callback
        runs = self._runs
        if runs is not None and not self._fatal_reason:
            runs.reject_new(rejecting=bool(self._watch.unhealthy_reason))
            if stalls:
                reason = f"the engine stalls: {self._watch.unhealthy_reason}"
                runs.abort_all(reason, stalled=True)
        self._ctx.spawn("judgement", self._send_heartbeat())

    def _run_ended(self, run: Run, outcome: RunEnd) -> None:
        self._metrics.on_finished(run, outcome.code)
        if outcome.fatal_error is not None:
            self._engine_died(outcome.fatal_error)

    def _engine_died(self, error: EngineDead) -> None:
        """The engine will never generate again: announce it, and end the process with an error."""
        if not self._fatal_reason:
            self._fatal_reason = f"the engine is dead: {error}"
            self._ctx.spawn("death", self._die(error))

    async def _die(self, error: EngineDead) -> None:
        """Send a heartbeat first, so that routers assign no more; then fail the open runs."""
        runs = self._runs
        try:
            async with asyncio.timeout(SHUTDOWN_STEP_S):
                if runs is not None:
                    runs.reject_new()
                await self._send_heartbeat()
                if runs is not None:
                    runs.abort_all(self._fatal_reason)
                    await runs.wait_idle(self._clock.now() + SHUTDOWN_STEP_S)
        except TimeoutError:
            log.warning("worker %s: not all runs were reported before the exit", self.id)
        self._ctx.fail(error)

    async def _own_engine(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._shutdown_step("cleanup", self._engine.cleanup())

    # --- loops -----------------------------------------------------------------------------------

    async def _follow(
        self, source: Partition, position: int, take: Callable[[Record], Awaitable[None]]
    ) -> None:
        async with aclosing(tail(self._log, {source: position})) as batches:
            async for records in batches:
                for record in records:
                    await take(record)

    async def _on_slot_record(self, record: Record) -> None:
        """Apply one record of the slot; the reported offset moves together with the state."""
        self._broker_clock.observe(record.timestamp)
        self._slot_offset = record.offset + 1
        try:
            order = decode(record)
        except RecordError as e:
            log.warning("%s[%d] offset %d skipped: %s", *self._slot, record.offset, e)
            return
        runs = self._runs
        if (
            not isinstance(order, Assignment | CancelRun | Lost)
            or runs is None
            or order.worker != self.id
            or order.epoch != runs.epoch
        ):
            return
        if isinstance(order, Assignment):
            runs.accept(order, record.timestamp)
        elif isinstance(order, CancelRun):
            runs.cancel(order)
        else:
            self._restart_epoch(
                f"{order.by or 'a router'} received no heartbeat for {order.silent_ms} ms"
            )

    async def _on_registry_record(self, record: Record) -> None:
        """Apply one record of the registry. Raises WorkerIdTaken, ModelMismatch."""
        try:
            log_record = LogRecord(record.offset, record.timestamp, decode(record))
        except RecordError as e:  # broken, or written by a newer version
            log.debug("registry offset %d skipped: %s", record.offset, e)
            return
        if isinstance(log_record.record, ModelCard):
            self._model.check(log_record.record)
        registration = self._registration
        match interpret(log_record, registration.card, registration.card_offset):
            case "rewrite" if self._runs is not None:  # between two epochs it is written anyway
                log.warning("worker %s: its card was overwritten; writing it again", self.id)
                await registration.rewrite_card()
            case "renew" if self._runs is None:
                self._early_records.append(log_record)
            case "renew":
                self._restart_epoch("a record in the registry ended it")
            case "stop":
                self._drop_epoch()
                raise WorkerIdTaken(
                    f"another process registered the worker id {self.id!r}: "
                    "set KVLANE_WORKER_ID to a unique value for each worker"
                )

    async def _heartbeat_loop(self) -> None:
        while True:
            await self._clock.sleep(self._settings.heartbeat_interval_s)
            if self._runs is not None:
                self._runs.abort_expired()
                await self._send_heartbeat()
                if self._runs is not None:
                    until = self._clock.now() + self._settings.heartbeat_interval_s
                    await self._registration.update_adapters(self._engine.adapters(), until)

    async def _send_heartbeat(self) -> None:
        runs = self._runs
        if runs is None:
            return
        state = self._state
        cache_problems = (events.unusable_reason for events in self._cache_events)
        reason = (
            self._fatal_reason
            or self._watch.unhealthy_reason
            or next(filter(None, cache_problems), "")
        )
        if reason and (state == "ready" or self._fatal_reason):
            state = "unhealthy"
        await self._heartbeats.send(runs, self._cache_events, state, reason, self._slot_offset)


async def _cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def build(log: Log, settings: Settings, ctx: ProcessContext) -> Worker:
    """A worker with the engine of the settings. Raises BadModel."""
    engine, files = create_engine(settings, ctx.clock)
    offer = None if files is None else ModelPublisher(log, settings, ctx, files)
    return Worker(log, settings, ctx, engine, offer=offer)


__getattr__ = process_app("worker", build)
