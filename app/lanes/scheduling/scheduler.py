"""The scheduler of a router: the tasks of requests that wait in its queue.

Which request is planned when, and the place each gets, is decided by `RouterQueue`
(`app/routing/queueing/router_queue.py`). Requests that look for a place in one turn of the event
loop, such as those of one poll, take part in one pass of it.

Never here: decisions, the cost of waiting, and the end of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvlane.app.lanes.scheduling.model_availability import ModelAvailability
from kvlane.app.lanes.scheduling.waiting_tasks import WaitingTasks
from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.queueing.waiting_requests import WaitingRequests
from kvlane.app.routing.selection.decision import Decision, Wait
from kvlane.app.routing.selection.handover_rules import FirstPhase
from kvlane.streams.clock import BrokerClock
from kvlane.streams.records import LogRecord, ModelCard, WorkerCard


class Scheduler:
    """One per router. `count_awaited`: called with each change of the number of requests that wait,
    for which records of the ledger arrive sooner.
    """

    def __init__(
        self,
        queue: RouterQueue,
        model_availability: ModelAvailability,
        broker_clock: BrokerClock,
        count_awaited: Callable[[int], None],
    ) -> None:
        self.queue = queue
        self.model_availability = model_availability
        self._broker_clock = broker_clock
        self._count_awaited = count_awaited
        self._tasks = WaitingTasks(queue.waiting.wake_ups, broker_clock)
        self._turns: dict[RequestKey, asyncio.Future[None]] = {}
        """By request of the next pass."""
        self._planning = 0
        """Calls of `schedule` under way."""
        self._is_idle = asyncio.Event()
        """Set while there are none."""
        self._is_idle.set()

    @property
    def waiting(self) -> WaitingRequests:
        """The requests that wait, and their bounds."""
        return self.queue.waiting

    async def schedule(self, request: LaneRequest) -> Decision:
        """Decide about a request: a place, a wait, or a rejection.

        A place is free for as long as nothing is awaited after this.
        """
        loop = asyncio.get_running_loop()
        if not self._turns:
            loop.call_soon(self._start_pass)
        turn = self._turns[request.key] = loop.create_future()
        self.queue.look(request)
        self._planning += 1
        self._is_idle.clear()
        try:
            await turn
        finally:
            self._planning -= 1
            if not self._planning:
                self._is_idle.set()
            self._turns.pop(request.key, None)
        decision = self.queue.decide(request, self._broker_clock.now_ms())
        self._tasks.resume()
        return decision

    def _start_pass(self) -> None:
        turns, self._turns = self._turns, {}
        for key in self.queue.plan_pass(self._broker_clock.now_ms()):
            if not turns[key].done():
                turns[key].set_result(None)
        self._tasks.resume()

    async def wait_planned(self) -> None:
        """Wait until the requests of this turn of the event loop were planned, such as those of the
        same poll."""
        await asyncio.sleep(0)
        await self._is_idle.wait()

    def first_phase(self, request: LaneRequest, *, stays_whole: bool) -> FirstPhase:
        """The phase that a request begins with."""
        now_ms = self._broker_clock.now_ms()
        return self.queue.first_phase(request, now_ms, stays_whole=stays_whole)

    def is_backed_up(self, request: LaneRequest) -> bool:
        """See `RouterQueue.is_backed_up`."""
        return self.queue.is_backed_up(request)

    def dry_run(self, request: LaneRequest) -> Decision:
        """The decision for a request now, without a reservation or any other effect."""
        return self.queue.dry_run(request, self._broker_clock.now_ms())

    async def wait_for_change(self, request: LaneRequest, planned: Wait, until_ms: float) -> None:
        """Wait until a place for this request may be free, or its wait ends, at `until_ms`."""
        self.queue.wait(request, planned, self._broker_clock.now_ms(), until_ms)
        self._count_awaited(1)
        try:
            await self._tasks.wait(request.key)
        finally:
            self._count_awaited(-1)

    def leave(self, request: LaneRequest) -> None:
        """Remove a request that has a place, or that ended."""
        self.queue.leave(request)
        self._tasks.resume()

    # --- records of the log -----------------------------------------------------------------------

    def on_record(self, record: LogRecord, *, is_replay: bool) -> None:
        """A record of the ledger was applied."""
        self.queue.on_record(record, is_replay=is_replay)
        self._tasks.resume()

    def on_fleet_record(self, record: LogRecord) -> None:
        """A record of the registry or of kv-events was applied."""
        match record.record:
            case WorkerCard(model=model) | ModelCard(name=model):
                self.model_availability.on_card(model)

    def on_fleet_changed(self) -> None:
        """Other workers may be eligible now."""
        self.model_availability.on_fleet_changed()
        self.queue.on_fleet_changed()
        self._tasks.resume()
