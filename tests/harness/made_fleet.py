"""A fleet from made records, without a log: its views, and the records at one time."""

from __future__ import annotations

from typing import Any

from kvlane.app.audit.diagnosis.facts import WorkerEvents
from kvlane.app.audit.fleet import fleet_view
from kvlane.app.audit.fleet.fleet_view import FleetView
from kvlane.app.audit.fleet.request_facts import EndedRequests
from kvlane.app.audit.fleet.request_rows import RequestRow, ended_requests_of, open_requests_of
from kvlane.app.audit.fleet.worker_rows import WorkerRow, worker_rows
from kvlane.streams.codecs import AnyRecord, pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    EngineConfig,
    Heartbeat,
    LogRecord,
    RequestOffset,
    Started,
    WorkerCard,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS, LEDGER, REGISTRY, REQUESTS

NOW_MS = 1_790_000_000_000
WINDOW_MS = 300_000
TIMEOUT_S = 5.0
ORIGIN = RequestOffset(topic=REQUESTS, partition=0, offset=0)


class MadeFleet:
    """A view, with records that are appended to partition 0 of their topics."""

    def __init__(self, ended: EndedRequests | None = None) -> None:
        self.view = FleetView(WINDOW_MS, ended=ended)
        self.events = WorkerEvents()
        self.offsets: dict[str, int] = {}
        for topic in fleet_view.SOURCES:
            self.view.apply(Partition(topic, 0), (), 0)

    def append(self, topic: str, record: AnyRecord, after_ms: int = 0) -> int:
        offset = self.offsets.get(topic, 0)
        self.offsets[topic] = offset + 1
        log_record = LogRecord(offset, NOW_MS + after_ms, record)
        self.view.apply(Partition(topic, 0), [log_record], offset + 1)
        self.events.add(Partition(topic, 0), [log_record])
        return offset

    def register(
        self,
        worker: str,
        model: str = "demo",
        after_ms: int = -60_000,
        role: str = "aggregated",
        version: str = "0.32",
        **config: Any,
    ) -> int:
        card: dict[str, Any] = {
            "id": worker, "slot": 0, "model": model, "role": role,
            "config": EngineConfig(model=model, **config), "versions": {"vllm": version},
        }  # fmt: skip
        epoch = self.append(REGISTRY, WorkerCard(**card), after_ms)
        self.append(REGISTRY, WorkerCard(**card, epoch=epoch), after_ms)
        return epoch

    def beat(self, worker: str, epoch: int, after_ms: int = 0, **over: Any) -> None:
        beat = Heartbeat(worker=worker, epoch=epoch, slot_offset=0, **over)
        self.append(KV_EVENTS, beat, after_ms)

    def ask(self, request_id: str, after_ms: int = 0, **over: Any) -> None:
        fields = {"model": "demo", "tenant": "acme", "token_ids": pack_tokens(range(100))}
        self.append(REQUESTS, Request(id=request_id, **(fields | over)), after_ms)

    def assign(self, request_id: str, epoch: int, after_ms: int = 0, **over: Any) -> dict[str, Any]:
        run = {
            "id": request_id,
            "attempt": 0,
            "phase": "aggregated",
            "worker": "w1",
            "epoch": epoch,
        } | {name: over.pop(name) for name in ("attempt", "phase", "worker") if name in over}
        fields = {"origin": ORIGIN, "responses_from": 0, "prompt_tokens": 100}
        decision = Assigned(**run, deadline_ms=NOW_MS + 600_000, **(fields | over))  # type: ignore[arg-type]
        self.append(LEDGER, decision, after_ms)
        return run

    def start(self, run: dict[str, Any], after_ms: int = 0) -> None:
        fields = {"origin": ORIGIN, "responses_from": 0, "deadline_ms": NOW_MS + 600_000}
        self.append(LEDGER, Started(**run, run=1, **fields), after_ms)  # type: ignore[arg-type]

    def workers(self, now_ms: int = NOW_MS) -> dict[str, WorkerRow]:
        return {row.id: row for row in worker_rows(self.view, now_ms, TIMEOUT_S)}

    def open(self, now_ms: int = NOW_MS) -> dict[str, RequestRow]:
        return {row.id: row for row in open_requests_of(self.view, now_ms)}

    def ended(self) -> dict[str, RequestRow]:
        return {row.id: row for row in ended_requests_of(self.view)}
