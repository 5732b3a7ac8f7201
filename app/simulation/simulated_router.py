"""Simulated routers: the queue of a real router (`RouterQueue`), and the delays around it.

A request goes at once where it may go; there are no refusals, no deadlines and no failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.selection.decision import Placement, Rejection, Wait
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import TransferSpeed
from kvlane.app.routing.selection.select import DEFAULT_BYTES_PER_TOKEN
from kvlane.app.simulation.shared_views import SimulatedLedger
from kvlane.streams.records import Phase


class NetworkConditions(NamedTuple):
    """Delays and routers. Default: one router, and only engines take time.

    `dispatch_delay_ms`: from a decision until its worker has the request. `event_delay_ms`: from an
    event on a worker until routers read it. `ledger_lag_ms`: from a ledger record until routers
    read it; each counts its own decisions at once. `shares_ledger`: whether routers read each
    other's decisions. `staggers_routers`: whether they take turns at each worker, by the lag.
    `transfer`: of KV caches; None: it takes no time.
    """

    dispatch_delay_ms: float = 0.0
    event_delay_ms: float = 0.0
    routers: int = 1
    ledger_lag_ms: float = 0.0
    shares_ledger: bool = True
    publishes_curves: bool = True
    transfer: TransferSpeed | None = None
    staggers_routers: bool = True

    def transfer_ms(self, tokens: int) -> float:
        if self.transfer is None:
            return 0.0
        size = 1000 * tokens * DEFAULT_BYTES_PER_TOKEN
        return self.transfer.latency_ms + size / self.transfer.bytes_per_s


DEFAULT_CONDITIONS = NetworkConditions()


class SimulationFailed(Exception):
    """A policy never scheduled a request, or rejected one, so the run has no figures."""


@dataclass(slots=True)
class SimulatedRouter:
    """`name`: in the records of its decisions; "" hides it from the others, which then do not take
    turns with it. `ledger`: as it reads it."""

    name: str
    queue: RouterQueue
    ledger: SimulatedLedger
    _requests: dict[RequestKey, LaneRequest] = field(default_factory=dict)
    _arrived: list[RequestKey] = field(default_factory=list)
    """Requests that were never planned."""

    @property
    def waiting_count(self) -> int:
        return len(self._requests)

    def on_arrival(
        self, prompt: PromptHashes, seed: int, now_ms: float, phase: Phase = "aggregated"
    ) -> None:
        """Add a request. `phase`: the one that it begins with if it stays whole, or decode."""
        key = RequestKey(0, prompt.request.id)
        waiting = self.queue.waiting_of(prompt.request.service_class)
        request = waiting.new_request(key, prompt, seed, int(now_ms))
        self._requests[key] = request if phase == request.phase else replace(request, phase=phase)
        self._arrived.append(key)

    def has_due(self, now_ms: float) -> bool:
        self.queue.wake_due(now_ms)
        return bool(self._arrived) or self.queue.has_woken

    def schedule(self, now_ms: float) -> Iterator[tuple[str, Placement]]:
        """Plan all due requests; the caller applies each decision before the next. Raises
        SimulationFailed."""
        queue, at_ms = self.queue, int(now_ms)
        while self.has_due(now_ms):
            due, self._arrived = [*self._arrived, *queue.take_woken()], []
            for key in due:
                queue.look(self._with_phase(key, at_ms))
            for key in queue.plan_pass(at_ms):
                request = self._requests[key]
                decision = queue.decide(request, at_ms)
                if isinstance(decision, Wait):
                    queue.wait(request, decision, at_ms, math.inf)
                    continue
                if isinstance(decision, Rejection):
                    raise SimulationFailed(f"request {key.id} was rejected: {decision.message}")
                queue.leave(self._requests.pop(key))
                yield key.id, decision

    def _with_phase(self, key: RequestKey, now_ms: int) -> LaneRequest:
        request = self._requests[key]
        if request.phase != "decode":
            phase = self.queue.first_phase(request, now_ms).phase
            if phase != request.phase:
                request = self._requests[key] = replace(request, phase=phase)
        return request
