"""A router queue with workers and a ledger that a test writes; requests go as soon as they may."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.router_queue import QueueConfig, RouterQueue
from kvlane.app.routing.selection.decision import Decision, Placement, Wait
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import Assigned, Finished, LogRecord, Phase, PrefillDone, RequestOffset
from kvlane.streams.request import Hints, Request
from tests.harness.routing_harness import NOW_MS, RoutingHarness

LEDGER = Partition("ledger", 0)
ORIGIN = RequestOffset(topic="requests", partition=0, offset=0)


class QueueHarness:
    """A queue of requests of model m, at a time of its own. `workers`: by request that has gone,
    its worker, in the order in which they went; `decisions`: all, in their order."""

    def __init__(self, routing: RoutingHarness, policy: str = "dynamo", **config: Any) -> None:
        self.ledger = LedgerState(60_000)
        self.queue = RouterQueue(
            "router", routing.fleet, routing.silent, self.ledger, routing.index,
            QueueConfig(RoutingConfig(policy), **config),
        )  # fmt: skip
        self.queue.on_fleet_changed()
        self.now_ms = NOW_MS
        self.requests: dict[RequestKey, LaneRequest] = {}
        self.workers: dict[str, str] = {}
        self.decisions: list[tuple[str, Decision]] = []
        self._runs: dict[str, dict[str, Any]] = {}

    def send(
        self, *names: str, tokens: int = 100, phase: Phase = "aggregated",
        deadline_ms: float = math.inf, model: str = "m", begins_alike: bool = False, **hints: Any,
    ) -> None:  # fmt: skip
        """Requests come at one moment, and are planned together."""
        for name in names:
            first = 0 if begins_alike else crc32(name.encode())
            token_ids = pack_tokens([first, *range(1, tokens)])
            request = Request(id=name, model=model, token_ids=token_ids, hints=Hints(**hints))
            lane_request = self.queue.waiting.new_request(
                RequestKey(0, name), PromptHashes(request), 0, self.now_ms, deadline_ms
            )
            self._look(replace(lane_request, phase=phase))
        self.plan()

    def _look(self, request: LaneRequest) -> None:
        self.requests[request.key] = request
        self.queue.look(request)

    def plan(self) -> None:
        """Plan all requests that look or were woken, until none does."""
        while True:
            for key in self.queue.take_woken():
                self.queue.look(self.requests[key])
            order = self.queue.plan_pass(self.now_ms)
            if not order:
                return
            for key in order:
                self._act(self.requests[key])

    def _act(self, request: LaneRequest) -> None:
        decision = self.queue.decide(request, self.now_ms)
        self.decisions.append((request.key.id, decision))
        if isinstance(decision, Wait):
            ends_ms = math.inf if request.deadline_ms is None else request.deadline_ms
            self.queue.wait(request, decision, self.now_ms, ends_ms)
            return
        self.leave(request.key.id)
        if isinstance(decision, Placement):
            place = decision.worker_rank
            self.workers[request.key.id] = place.worker
            self._runs[request.key.id] = {
                "id": request.key.id, "attempt": 0, "phase": request.phase,
                "worker": place.worker, "epoch": place.epoch,
            }  # fmt: skip
            self.record(Assigned(
                **self._runs[request.key.id], rank=place.rank, origin=ORIGIN,
                responses_from=0, deadline_ms=0, prompt_tokens=decision.tokens,
                prefill_tokens=decision.prefill_tokens, policy=decision.policy,
                prefix_marks=decision.prefix_marks,
            ))  # fmt: skip

    def leave(self, name: str) -> None:
        self.queue.leave(self.requests.pop(RequestKey(0, name)))

    def record(self, record: Any) -> None:
        """A record of the ledger is read."""
        position = self.ledger.position(LEDGER) or 0
        log_record = LogRecord(position, self.now_ms, record)
        self.ledger.apply(LEDGER, [log_record], position + 1)
        self.queue.on_record(log_record, self.now_ms)

    def prefilled(self, name: str) -> None:
        self.record(PrefillDone(**self._runs[name], run=0, cached_tokens=0, ttft_ms=0.0))
        self.plan()

    def finish(self, name: str, code: Any = "length", **fields: Any) -> None:
        self.record(Finished(**self._runs[name], code=code, **fields))
        self.plan()

    def pass_time(self, until_ms: float) -> None:
        """Let time pass, with all retries up to then."""
        while self.queue.next_wake_ms <= until_ms:
            self.now_ms = max(self.now_ms, math.ceil(self.queue.next_wake_ms))
            self.queue.wake_due(self.now_ms)
            self.plan()
        self.now_ms = int(until_ms)
