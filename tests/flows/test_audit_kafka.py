"""Tests of `kvlane replay` and `kvlane explain` against a real broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import (
    Assigned,
    Candidate,
    Chunk,
    Ended,
    Finished,
    ReportedWaits,
    RequestOffset,
    RouterCapacity,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, LEDGER, REQUESTS, RESPONSES, lane_of
from tests.harness.kafka_processes import kvlane, provisioned

LANES = 4
IDS = [f"job-{n}" for n in range(20)]


async def write(log: KafkaLog) -> None:
    """The stories of all ids."""
    publisher = RecordPublisher(log, SystemClock())
    for request_id in IDS:
        origin = RequestOffset(topic=REQUESTS, partition=lane_of(request_id, LANES), offset=0)
        run = {"id": request_id, "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": 1}
        assigned = Assigned(
            **run, origin=origin, responses_from=0, deadline_ms=1,
            listed=(Candidate(worker="w1", epoch=1, cost=0.5),),
        )  # fmt: skip
        chunk = Chunk(
            id=request_id, attempt=0, run="1", seq=0, index=0, token_ids=(1, 2), text="ab",
            finish_reason="stop",
        )  # fmt: skip
        for topic, record in (
            (REQUESTS, Request(id=request_id)),
            (LEDGER, assigned),
            (RESPONSES, chunk),
            (LEDGER, Finished(**run, code="stop", output_tokens=2)),
        ):
            await publisher.publish(topic, request_id, record)
    await publisher.publish(LEDGER, "lost", Ended(id="lost", code="lost"))
    queued = await publisher.publish(REQUESTS, "queued", Request(id="queued"))
    waits = ReportedWaits(reasons=("no worker is ready",), requests=(("queued", 1, 0),))
    positions = {lane_of("queued", LANES): queued.offset + 1}
    report = RouterCapacity(router="r1", positions=positions, waits=waits)
    await publisher.publish(CAPACITY, "r1", report)
    await publisher.publish(CAPACITY, "r1", replace(report, waits=None))


async def test_explain_reads_the_log_of_a_real_broker(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", str(LANES))
    async with provisioned(Settings()) as log:
        await write(log)
        results = []
        for name in ("one", "two"):
            file = tmp_path / name
            shown = await kvlane("replay", "--view", "load", "--json", str(file))
            assert "20" in shown
            results.append(json.loads(file.read_bytes()))
        assert results[0] == results[1]
        assert results[0]["summary"]["ended requests by code"] == {"stop": 20, "lost": 1}
        assert sum(p["records"] for p in results[0]["partitions"]) == 41
        none = await kvlane("replay", "--view", "load", "--at", "-1h")
        assert "ended requests by code" in none
        assert "stop" not in none
        timeline = await kvlane("explain", "job-7")
        assert [line.split()[2] for line in timeline.splitlines() if line.startswith("+")] == [
            "Request", "Assigned", "Shown", "Finished",
        ]  # fmt: skip
        assert timeline.splitlines()[-1] == "ended: stop"
        assert "queued in router r1: no worker is ready" in await kvlane("explain", "queued")
