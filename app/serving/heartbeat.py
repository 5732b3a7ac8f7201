"""Heartbeats of a worker: its state, its open runs and its engine, written to kv-events.

One that is not acknowledged is not repeated: the next is newer. Owns the time of the last
acknowledgement; `app/worker.py` has the times of sending.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvlane.app.engine.interface import Engine
from kvlane.app.engine.output_values import checked_stats
from kvlane.app.serving.kv_event_publisher import KvEventPublisher
from kvlane.app.serving.run_queue import RunQueue
from kvlane.streams.clock import Clock
from kvlane.streams.errors import AppendFailed
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Heartbeat, WorkerState
from kvlane.streams.topics import KV_EVENTS

log = logging.getLogger(__name__)


class HeartbeatSender:
    def __init__(
        self, publisher: RecordPublisher, clock: Clock, engine: Engine, worker: str
    ) -> None:
        self._publisher = publisher
        self._clock = clock
        self._engine = engine
        self._worker = worker
        self._acknowledged_at = clock.now()

    @property
    def age_s(self) -> float:
        return self._clock.now() - self._acknowledged_at

    async def send(
        self,
        runs: RunQueue,
        caches: Iterable[KvEventPublisher],
        state: WorkerState,
        reason: str,
        slot_offset: int,
    ) -> None:
        """Send one heartbeat of the epoch of `runs`, in a single attempt."""
        heartbeat = Heartbeat(
            worker=self._worker,
            epoch=runs.epoch,
            slot_offset=slot_offset,
            state=state,
            reason=reason,
            running=runs.progress(),
            waiting=runs.waiting_count,
            last_event_ids=tuple(events.last_event_id for events in caches),
            engine=checked_stats(self._engine.stats()),
        )
        try:
            await self._publisher.publish_once(KV_EVENTS, self._worker, heartbeat)
        except AppendFailed as e:
            log.warning("a heartbeat of %s was not acknowledged: %s", self._worker, e)
        else:
            self._acknowledged_at = self._clock.now()
