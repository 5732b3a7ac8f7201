"""The worker process: one engine behind one slot of `assignments`.

    assignments[slot] ─► Runs ─► engine ─► responses (Chunks), ledger (Started, Finished)
                                    └────► kv-events (Blocks, by CacheEvents), with heartbeats
    the model's folder ► artifacts, registry (ModelCard); registry ─► who else uses our name

The order of the start is what makes an epoch safe: the slot's end is taken before the card is
written, so no assignment of this epoch can lie before it; cache events of the last life are cleared
before the first heartbeat makes the worker routable.

An engine that does not answer makes the worker unhealthy until it does; one that is dead ends the
process, which says so first and hands on what it had.

Wires and keeps time. Runs are `app/serving/runs.py`'s, cards `app/serving/registration.py`'s,
cache events `app/serving/cache_events.py`'s; which engine it is `app/engine/choice.py`'s, whether
it works `app/serving/watch.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from app.engine.choice import chosen
from app.engine.contract import Engine, EngineDead
from app.lifetime import Lifetime, OperatorError, serve
from app.preprocess.byte_model import ByteModel, Model
from app.serving.admission import admit, check
from app.serving.cache_events import CacheEvents
from app.serving.chunks import ChunkWriters
from app.serving.execution import Executor
from app.serving.offer import Offer, card_without_files
from app.serving.registration import REGISTER_S, Registration, judge
from app.serving.runs import Limits, Runs
from app.serving.watch import EngineWatch, Patience
from app.settings import Settings
from indexer.engine_events import EngineEvent
from streams.clock import BrokerClock
from streams.codecs import decode
from streams.errors import AppendFailed, RecordError, StreamError
from streams.outbox import Outbox
from streams.patience import until_answered
from streams.ports import Log, Partition, Record
from streams.records import (
    Assignment,
    CancelRun,
    EngineConfig,
    Fact,
    Heartbeat,
    Lost,
    ModelCard,
    WorkerCard,
    WorkerState,
)
from streams.topics import ASSIGNMENTS, KV_EVENTS, REGISTRY, RESPONSES, partition_of

if TYPE_CHECKING:
    from faststream import FastStream

log = logging.getLogger(__name__)

POLL_S = 1.0
NOTICE_BEATS = 2
"""Heartbeats for which a draining worker still takes work: routers notice within them."""
FAREWELL_S = 5.0
"""What a stopping worker gives each of its last words, in seconds."""


class NameTaken(OperatorError):
    """A newer process uses this worker's id. Give each worker its own KVLANE_WORKER_ID."""


class Worker:
    """One worker. `start` returns when it is registered and its first heartbeat is out."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        life: Lifetime,
        engine: Engine,
        *,
        worker_id: str | None = None,
        offer: Offer | None = None,
    ) -> None:
        """`offer`: the files of the engine's model; without them its tokens are bytes."""
        self.id = worker_id or settings.worker_id
        self._log = log
        self._settings = settings
        self._life = life
        self._clock = life.clock
        self._engine = engine
        self._offer = offer
        self._model: Model = ByteModel()
        self._card: ModelCard | None = None
        """What it has said of its model, if anything, and where in the registry."""
        self._card_at = -1
        self._broker_clock = BrokerClock(life.clock)
        self._outbox = Outbox(log, life.clock, self._broker_clock)
        self._state: WorkerState = "ready"
        self._dying = ""
        """Why this process ends by itself; "" while it does not."""
        self._runs: Runs | None = None
        self._slot = Partition(ASSIGNMENTS, 0)
        self._slot_offset = 0
        self._loops: list[asyncio.Task[Any]] = []

    @property
    def epoch(self) -> int | None:
        """The present epoch; None before the first and between two."""
        return self._runs.epoch if self._runs is not None else None

    async def start(self) -> None:
        """Start the engine, register, serve. Raises what the engine or the log raise."""
        try:
            config = await self._start_engine()
            await self._enter(config)
        except BaseException:
            await self._within("cleanup", self._engine.cleanup())
            raise
        self._engine_held = self._life.spawn("engine", self._hold_engine())

    async def stop(self) -> None:
        """Leave in good order: announce it, finish or break off what runs, say goodbye."""
        self._state = "draining"
        await _cancelled(self._watching)
        await self._beat()
        await self._clock.sleep(NOTICE_BEATS * self._settings.heartbeat_s)
        if self._runs is not None:
            await self._finish(self._runs)
        await _cancelled(*self._loops)
        self._lose()
        for events in self._cache_events:
            events.end()
        await self._within("drain", self._engine.drain())
        await _cancelled(self._engine_held)
        try:
            await self._registration.leave(self._clock.now() + FAREWELL_S)
        except StreamError as e:
            log.warning("the tombstone of %s was not acknowledged: %s", self.id, e)

    async def _finish(self, runs: Runs) -> None:
        """Hand new work back, let the old end within the grace, break off the rest."""
        runs.hand_back()
        if not await runs.idle(self._clock.now() + self._settings.drain_grace_s):
            runs.break_off("the worker stopped")
            await runs.idle(self._clock.now() + FAREWELL_S)

    async def _within(self, what: str, duty: Coroutine[Any, Any, None]) -> None:
        """One of the engine's last duties, within the grace; a failure is logged and swallowed."""
        try:
            async with asyncio.timeout(max(self._settings.drain_grace_s, FAREWELL_S)):
                await duty
        except Exception:
            log.exception("%s of the engine of %s failed", what, self.id)

    # --- lives -----------------------------------------------------------------------------------

    async def _start_engine(self) -> EngineConfig:
        """Start the engine with its listener, and put its model's files where others find them."""
        self._engine.listen(self._heard_of_blocks)
        config = _with_adapters(await self._engine.start(self.id), self._settings)
        self._adapters = self._engine.adapters()
        model = config.served_model_name or config.model
        self._cache_events = [
            CacheEvents(
                self._outbox,
                self._life,
                self.id,
                model,
                config.kv_cache_block_size or 0,
                self._settings.key_secret(),
                rank,
            )
            for rank in range(config.data_parallel_size or 1)
        ]
        if self._offer is not None:
            self._model = await self._offer.publish(model, config, self._announce)
        elif config.kind != "tokens":
            await self._announce(card_without_files(model, config))
        return config

    async def _announce(self, card: ModelCard) -> None:
        """Write a model's card. Raises PoolDiffers, BrokerUnavailable, AppendFailed."""
        s = self._settings
        # Long enough for one that was killed to be declared lost, and for one that drains.
        leaving_s = max(4 * s.worker_timeout_s, s.drain_grace_s + 2 * FAREWELL_S)
        await admit(card, self.id, self._log, self._life, leaving_s)
        self._card = card
        until = self._clock.now() + REGISTER_S
        written = await self._outbox.persist(REGISTRY, f"model/{card.name}", card, until=until)
        self._card_at = written.offset

    def _heard_of_blocks(self, events: Sequence[EngineEvent], rank: int = 0) -> None:
        self._cache_events[rank].feed(events)

    async def _enter(self, config: EngineConfig) -> None:
        slot = partition_of(self.id.encode(), await self._log.partitions(ASSIGNMENTS))
        self._slot = Partition(ASSIGNMENTS, slot)
        self._chunks = ChunkWriters(
            self._outbox,
            self._life,
            await self._log.partitions(RESPONSES),
            with_tokens=config.gives_tokens,
        )
        self._limits = Limits(
            running=config.max_num_seqs or self._settings.max_num_seqs,
            waiting=self._settings.worker_queue,
            remember_s=self._settings.max_lifetime_s,
        )
        self._slot_offset = await self._end_of(self._slot)
        registry = Partition(REGISTRY, 0)
        if self._card_at < 0:
            self._card_at = await self._end_of(registry)
        s = self._settings
        patience = Patience(s.canary_idle_s, s.canary_answer_s, s.engine_stall_s, s.engine_dead_s)
        self._watch = EngineWatch(
            self._engine, self._life, patience, self._engine_quiet_s, self._engine_judged
        )
        card = WorkerCard(
            id=self.id,
            slot=slot,
            model=config.served_model_name or config.model,
            config=config,
            ranks=config.data_parallel_size or 1,
            role=self._settings.worker_role,
            taints=self._settings.taint_names,
            versions={"kvlane": version("kvlane"), **self._engine.versions()},
            busy_cache=self._settings.busy_cache,
            busy_prefill_tokens=self._settings.busy_prefill_tokens,
            max_runs=self._limits.running + self._limits.waiting,
        )
        self._registration = Registration(self._outbox, self._life, card)
        await self._begin_life(self._clock.now() + REGISTER_S)
        self._loops = [
            self._life.spawn("registry", self._follow(registry, self._card_at, self._consider)),
            self._life.spawn("heartbeats", self._keep_beating()),
            self._life.spawn("slot", self._follow(self._slot, self._slot_offset, self._receive)),
        ]
        self._watching = self._life.spawn("engine watch", self._keep_watch())

    async def _end_of(self, source: Partition) -> int:
        ends = await until_answered(
            self._clock, lambda: self._log.end_offsets(source.topic, [source.partition])
        )
        return ends[source.partition]

    async def _begin_life(self, until: float | None = None) -> None:
        """Raises AppendFailed past `until`."""
        epoch = await self._registration.begin(until)
        for events in self._cache_events:
            await events.begin(epoch, until)
        executor = Executor(
            self._life, self._outbox, self._engine, self._chunks, self._model, self.id, epoch
        )
        self._runs = Runs(
            executor, self._life, self._outbox, self._broker_clock, self._limits, self.id, epoch,
            self._engine_died,
        )  # fmt: skip
        if self._watch.complaint or self._dying:
            self._runs.hand_back()
        log.info("worker %s serves slot %d as epoch %d", self.id, self._slot.partition, epoch)
        await self._beat()

    def _lose(self) -> bool:
        """This epoch is dead to everybody: forget its runs at once, without a word."""
        runs, self._runs = self._runs, None
        if runs is not None:
            runs.drop()
        return runs is not None

    def _renew(self, why: str) -> None:
        """Lose this epoch and begin another life; nothing to do between two lives."""
        if self._lose():
            log.warning("worker %s: epoch %d is lost: %s", self.id, self._registration.epoch, why)
            self._loops.append(self._life.spawn("renew", self._begin_life()))

    # --- the engine's health ---------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        try:
            await self._watch.run()
        except EngineDead as e:
            self._engine_died(e)

    def _engine_quiet_s(self) -> float | None:
        return self._runs.quiet_s() if self._runs is not None else None

    def _engine_judged(self, stalls: bool) -> None:  # noqa: FBT001 - the watch's callback
        """The watch thinks otherwise of the engine than before."""
        runs = self._runs
        if runs is not None and not self._dying:
            runs.hand_back(back=bool(self._watch.complaint))
            if stalls:
                runs.break_off(f"the engine stalls: {self._watch.complaint}")
        self._life.spawn("judgement", self._beat())

    def _engine_died(self, error: EngineDead) -> None:
        """The engine will never generate again: say so, and end the process with an error."""
        if not self._dying:
            self._dying = f"the engine is dead: {error}"
            self._life.spawn("death", self._die(error))

    async def _die(self, error: EngineDead) -> None:
        """The heartbeat first, so that nobody sends more; then what runs is handed on."""
        runs = self._runs
        try:
            async with asyncio.timeout(FAREWELL_S):
                if runs is not None:
                    runs.hand_back()
                await self._beat()
                if runs is not None:
                    runs.break_off(self._dying)
                    await runs.idle(self._clock.now() + FAREWELL_S)
        except TimeoutError:
            log.warning("worker %s could not say all of its last words", self.id)
        self._life.fail(error)

    async def _hold_engine(self) -> None:
        """Whatever ends this process in order or in failure, the engine is cleaned up once."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._within("cleanup", self._engine.cleanup())

    # --- loops -----------------------------------------------------------------------------------

    async def _follow(
        self, source: Partition, position: int, take: Callable[[Record], Awaitable[None]]
    ) -> None:
        reader = self._log.reader(moving=False)
        reader.assign({source: position})
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    for record in records:
                        await take(record)
        finally:
            await reader.close()

    async def _receive(self, record: Record) -> None:
        """One record of the slot; the heartbeat's offset moves with the state it describes."""
        self._broker_clock.observe(record.timestamp)
        self._slot_offset = record.offset + 1
        try:
            order = decode(record)
        except RecordError as e:
            log.warning("%s[%d] %d is skipped: %s", *self._slot, record.offset, e)
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
            runs.accept(order)
        elif isinstance(order, CancelRun):
            runs.cancel(order)
        else:
            self._renew(f"{order.by or 'a router'} heard nothing of it for {order.silent_ms} ms")

    async def _consider(self, record: Record) -> None:
        """One record of the registry. Raises NameTaken, PoolDiffers."""
        try:
            fact = Fact(record.offset, record.timestamp, decode(record))
        except RecordError as e:  # somebody else's, of a newer version or broken
            log.debug("registry %d is skipped: %s", record.offset, e)
            return
        if self._card is not None and isinstance(fact.record, ModelCard):
            check(self._card, fact.record)
        registration = self._registration
        match judge(fact, registration.card, registration.written_at):
            case "rewrite" if self._runs is not None:  # between two lives it is written anyway
                log.warning("worker %s: its card was overwritten, writing it again", self.id)
                await registration.rewrite()
            case "renew":
                self._renew("the registry says so")
            case "yield":
                self._lose()
                raise NameTaken(
                    f"another process took the worker id {self.id!r}: "
                    "give each worker its own KVLANE_WORKER_ID"
                )

    async def _keep_beating(self) -> None:
        while True:
            await self._clock.sleep(self._settings.heartbeat_s)
            if self._runs is not None:
                self._runs.expire()
                await self._beat()
                await self._tell_adapters()

    async def _tell_adapters(self) -> None:
        """Write the card anew when the engine has others than it said; one try, at each beat."""
        has = self._engine.adapters()
        if has == self._adapters or self._runs is None:
            return
        until = self._clock.now() + self._settings.heartbeat_s
        config = replace(self._registration.card.config, lora_names=has or None)
        try:
            await self._registration.tell(config, until)
        except AppendFailed as e:
            log.warning("the adapters of %s are not on its card yet: %s", self.id, e)
        else:
            self._adapters = has

    async def _beat(self) -> None:
        """One try: the next heartbeat says more than a late one."""
        runs = self._runs
        if runs is None:
            return
        state = self._state
        of_caches = (events.complaint for events in self._cache_events)
        reason = self._dying or self._watch.complaint or next(filter(None, of_caches), "")
        if reason and (state == "ready" or self._dying):
            state = "unhealthy"
        heartbeat = Heartbeat(
            worker=self.id,
            epoch=runs.epoch,
            slot_offset=self._slot_offset,
            state=state,
            reason=reason,
            running=runs.progress(),
            waiting=runs.waiting,
            last_event_ids=tuple(events.last_event_id for events in self._cache_events),
            engine=self._engine.figures(),
        )
        try:
            await self._outbox.send(KV_EVENTS, self.id, heartbeat)
        except AppendFailed as e:
            log.warning("a heartbeat of %s was not acknowledged: %s", self.id, e)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _with_adapters(config: EngineConfig, settings: Settings) -> EngineConfig:
    """What an engine says of itself; the adapters by the settings, if it says nothing of them."""
    if config.lora_names is not None or not (settings.adapters or settings.max_loras):
        return config
    return replace(config, lora_names=tuple(settings.adapters), max_loras=settings.max_loras)


def build(log: Log, settings: Settings, life: Lifetime) -> Worker:
    """A worker with the engine of the settings. Raises BadModel, SettingsError."""
    engine, files = chosen(settings, life.clock)
    offer = None if files is None else Offer(log, settings, life, files)
    return Worker(log, settings, life, engine, offer=offer)


def __getattr__(name: str) -> FastStream:
    if name == "app":
        return serve("worker", build)
    raise AttributeError(name)
