"""Tests of `kvlane dead-letters` against a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.cli import app
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode, pack_tokens
from kvlane.streams.errors import RecordError
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.reading.group_consumer import GroupConsumer, PartitionClaim
from kvlane.streams.records import Ended, LogRecord
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, REQUESTS, lane_of
from tests.harness.kafka_processes import provisioned

LANES = 4
STRAY = Request(id="job-7", model="demo", token_ids=pack_tokens([1, 2, 3]))
HEADERS = (("t", b"Request"), ("traceparent", b"00-1-2-01"))


class Strict:
    """Lanes that take nothing that belongs elsewhere, as routers do."""

    intake: GroupConsumer

    def on_claimed(self, claim: PartitionClaim) -> None:
        self.intake.resume(claim)

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        if lane_of(log_record.record.id, LANES) != claim.partition:  # type: ignore[union-attr]
            raise RecordError("it belongs in another lane")
        claim.mark_done(log_record.offset)

    def on_released(self, claim: PartitionClaim) -> None:
        pass


async def kvlane(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["dead-letters", *arguments])


async def ends(log: KafkaLog, topic: str) -> Mapping[int, int]:
    return await log.end_offsets(topic, range(await log.partitions(topic)))


async def test_stray_record_is_dead_lettered_listed_and_published_again(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", str(LANES))
    settings, clock, lanes = Settings(), SystemClock(), Strict()
    async with provisioned(settings) as log:
        right = lane_of(STRAY.id, LANES)
        entry = Entry(*encode(STRAY, STRAY.id)[:2], HEADERS)
        await log.append(REQUESTS, entry, (right + 1) % LANES)
        lanes.intake = GroupConsumer(log, REQUESTS, "router", lanes, clock)
        running = asyncio.create_task(lanes.intake.run())
        while not any((await ends(log, DEAD_LETTERS)).values()):
            await clock.sleep(0.05)
        await lanes.intake.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        listed = await kvlane("list")
        assert "it belongs in another lane" in listed.stdout
        name = listed.stdout.splitlines()[1].split()[0]
        shown = await kvlane("show", name)
        assert '"model": "demo"' in shown.stdout
        assert (await kvlane("retry", name)).exit_code == 0
        assert (await ends(log, REQUESTS))[right] == 1
        reader = log.reader()
        reader.assign({Partition(REQUESTS, right): 0})
        records = []
        while not records:
            records = [r for rs in (await reader.poll(1.0)).values() for r in rs]
        await reader.close()
        again = records[0]
        assert (again.key, again.value, tuple(again.headers)) == entry

        await log.append(LEDGER, encode(Ended(id=STRAY.id, code="lost"), STRAY.id))
        refused = await kvlane("retry", name)
        assert refused.exit_code == 1
        assert "ended (lost)" in refused.stderr
        assert (await ends(log, REQUESTS))[right] == 1
