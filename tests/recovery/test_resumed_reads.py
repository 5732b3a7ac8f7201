"""Tests of resumed reads of long answers over HTTP, on a real broker: each gets the rest and
nothing else.

`KVLANE_TEST_LONG=1 pytest -s tests/recovery/test_resumed_reads.py` resumes 20 answers of 2000
Chunks at 200 random positions each time; without it the answers are fewer and shorter.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import pytest

from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.ids import new_request_id
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Chunk
from kvlane.streams.responses.reply_stream import MAX_PENDING_PIECES
from kvlane.streams.topics import RESPONSES, lane_of
from tests.harness.kafka_processes import WAIT_S, app_process, provisioned, wait_answered

IS_LONG = "KVLANE_TEST_LONG" in os.environ
ANSWERS, CHUNKS, READS = (20, 2000, 200) if IS_LONG else (2, 3 * MAX_PENDING_PIECES, 20)
LANES = 4
WRITTEN_AT_ONCE = 50
CONCURRENT_READS = 8

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600 if IS_LONG else 300)]


class Event(NamedTuple):
    """An event of a stream: its id, and the text up to its end."""

    number: int
    text: str


@pytest.fixture
async def url(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[str]:
    """A gateway on a deployment of its own."""
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    monkeypatch.setenv("KVLANE_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("KVLANE_LANES", str(LANES))
    monkeypatch.setenv("KVLANE_HTTP_PORT", str(free_ports(1)[0]))
    settings = Settings()
    async with provisioned(settings):
        with app_process("gateway", tmp_path / "gateway.log") as process:
            base = f"http://127.0.0.1:{settings.http_port}"
            async with httpx.AsyncClient(base_url=base) as http:
                await wait_answered(process, http, "/livez", lambda _: True)
            yield base


async def write(publisher: RecordPublisher, ids: list[str]) -> dict[str, str]:
    """Write the answers side by side, in several batches each; returns their texts."""
    rng = random.Random(7)
    texts = dict.fromkeys(ids, "")
    for begin in range(0, CHUNKS, WRITTEN_AT_ONCE):
        records: dict[int, list[tuple[str, Chunk]]] = {}
        for request_id in ids:
            for seq in range(begin, min(begin + WRITTEN_AT_ONCE, CHUNKS)):
                text = rng.choice(("", "a", "né ", f"{seq} "))
                texts[request_id] += text
                chunk = Chunk(
                    id=request_id, attempt=0, run="1", seq=seq, index=seq, token_ids=(seq,),
                    text=text, chars=len(texts[request_id]),
                    finish_reason="stop" if seq == CHUNKS - 1 else None,
                )  # fmt: skip
                records.setdefault(lane_of(request_id, LANES), []).append((request_id, chunk))
        await asyncio.gather(*publisher.publish_many_once(RESPONSES, records).values())
    return texts


async def read(http: httpx.AsyncClient, request_id: str, after: int = 0) -> list[Event]:
    headers = {"Last-Event-ID": str(after)} if after else {}
    events, text, number = [], "", 0
    async with http.stream("GET", f"/v1/streams/{request_id}", headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: ") and line != "data: [DONE]":
                event = msgspec.json.decode(line[6:])
                text += event["choices"][0]["delta"].get("content", "")
                events.append(Event(number, text))
    return events


async def test_reads_that_resume_anywhere_in_a_long_answer_get_exactly_the_rest(
    kafka: Broker, url: str
) -> None:
    settings, clock, rng = Settings(), SystemClock(), random.Random(11)
    log = open_log(settings, "writer")
    await log.start()
    ids = [new_request_id(clock, rng) for _ in range(ANSWERS)]
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        reading = [asyncio.create_task(read(http, request_id)) for request_id in ids]
        texts = await write(RecordPublisher(log, clock), ids)
        whole = dict(zip(ids, await asyncio.gather(*reading), strict=True))
        assert {name: events[-1].text for name, events in whole.items()} == texts
        places = asyncio.Semaphore(CONCURRENT_READS)

        async def is_exact(request_id: str, event: Event) -> bool:
            async with places:
                rest = await read(http, request_id, event.number)
            return event.text + (rest[-1].text if rest else "") == texts[request_id]

        sent = [(name, event) for name in ids for event in whole[name]]
        tried = rng.sample(sent, READS)
        exact = await asyncio.gather(*(is_exact(*position) for position in tried))
    await log.close()
    sys.stdout.write(
        f"{sum(exact)} of {len(exact)} resumed reads are exact, at random positions of {len(ids)} "
        f"answers of {CHUNKS} Chunks, which had {len(sent)} events\n"
    )
    assert all(exact), [place for place, ok in zip(tried, exact, strict=True) if not ok][:3]
