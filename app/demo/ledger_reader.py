"""Readers of the ledger and the fleet: routing decisions of requests, and workers that are ready.

Follow the topics like any consumer; read only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing

from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.errors import RecordError
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.range_reader import tail
from kvlane.streams.records import Assigned, Finished, LogRecord, PrefillDone
from kvlane.streams.topics import KV_EVENTS, LEDGER, REGISTRY
from kvlane.streams.views.follower import Follower

READY_POLL_S = 0.1


class LedgerDecisions:
    """Routing decisions and cache hits of each request. `follow` must be running."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._assigned: defaultdict[str, list[Assigned]] = defaultdict(list)
        self._cached: dict[str, int] = {}
        self._prefill_cached: dict[str, int] = {}
        """Of prompts that were handed over: to a decode worker, all of their tokens are cached."""
        self._handed_over: set[str] = set()

    @property
    def handed_over_requests(self) -> int:
        """Requests that a decode worker continued from the prompt of a prefill worker."""
        return len(self._handed_over)

    def decisions(self, request_id: str) -> Sequence[Assigned]:
        """The decisions of a request so far, one for each phase of each attempt."""
        return self._assigned.get(request_id, ())

    def workers_of(self, request_id: str) -> list[str]:
        """The workers of a request, in order."""
        return [decision.worker for decision in self.decisions(request_id)]

    def answering_workers(self, request_id: str) -> list[str]:
        """The workers that generate its answer, in order: all but those of prefills."""
        return [d.worker for d in self.decisions(request_id) if d.phase != "prefill"]

    def cached_tokens(self, request_id: str) -> int | None:
        """Prompt tokens that the engine found in its cache; None before the run has ended.

        Of a prompt that was handed over, those that the prefill worker found.
        """
        return self._cached.get(request_id)

    async def end_positions(self) -> dict[Partition, int]:
        """Start positions: the present ends of the ledger."""
        lanes = range(await self._log.partitions(LEDGER))
        ends = await self._log.end_offsets(LEDGER, lanes)
        return {Partition(LEDGER, lane): end for lane, end in ends.items()}

    async def follow(self, positions: dict[Partition, int]) -> None:
        async with aclosing(tail(self._log, positions, moving=True)) as batches:
            async for records in batches:
                for record in records:
                    try:
                        fact = decode(record)
                    except RecordError:
                        continue
                    self.on_fact(fact)

    def on_fact(self, fact: AnyRecord) -> None:
        match fact:
            case Assigned():
                self._assigned[fact.id].append(fact)
            case PrefillDone(phase="prefill", attempt=0):
                self._prefill_cached[fact.id] = fact.cached_tokens
            case PrefillDone(phase="decode"):
                self._handed_over.add(fact.id)
            case Finished(attempt=0) if fact.phase != "prefill":
                self._cached[fact.id] = self._prefill_cached.get(fact.id, fact.cached_tokens)


class FleetObserver:
    """The workers that accept requests at the moment."""

    def __init__(self, log: Log, ctx: ProcessContext, worker_timeout_s: float) -> None:
        self._fleet = Fleet()
        self._clock = BrokerClock(ctx.clock)
        self._ctx = ctx
        self._silent = SilentWorkers(self._fleet, worker_timeout_s)
        self._follower = Follower(
            log, self._fleet, [REGISTRY, KV_EVENTS], ctx.clock, broker_clock=self._clock,
            on_applied=self._on_records,
        )  # fmt: skip

    def follow(self) -> None:
        self._ctx.spawn("crew", self._follower.run())

    def next_epoch(self) -> int:
        """An epoch above those of all workers so far."""
        return self._fleet.position(Partition(REGISTRY, 0)) or 0

    async def wait_ready(self, workers: int, timeout_s: float, since: int = 0) -> bool:
        """Wait until `workers_of` workers, with epochs of at least `since`, accept requests.

        False after `timeout_s`.
        """
        until = self._ctx.clock.now() + timeout_s
        while self._ready(since) < workers:
            if self._ctx.clock.now() > until:
                return False
            await self._ctx.clock.sleep(READY_POLL_S)
        return True

    def _ready(self, since: int) -> int:
        self._silent.update(self._ctx.clock.now())
        return sum(
            member.epoch >= since and self._fleet.is_ready(worker)
            for worker, member in self._fleet.members.items()
            if worker not in self._silent.names
        )

    def _on_records(self, _: Partition, facts: Sequence[LogRecord]) -> None:
        broker_ms = None if self._follower.caught_up else self._clock.now_ms()
        self._silent.on_records(facts, self._ctx.clock.now(), broker_ms)
