"""Tests of dead letters on the command line: listed, shown, and published again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.audit.dead_letter_retry import (
    InvalidDeadLetter,
    find_dead_letter,
    list_dead_letters,
    retry_dead_letter,
)
from kvlane.app.cli import app
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry
from kvlane.streams.reading.dead_letter_format import DeadLetter, DeadLetterWriter
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Assigned, Assignment, Ended, Finished, Refused, RequestOffset
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, PROMPTS, REQUESTS, RESPONSES, lane_of
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test

# --- the command line ----------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    monkeypatch.setenv("COLUMNS", "200")
    return connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)


def kvlane(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["dead-letters", *arguments])


def put_aside(
    broker: MemoryBroker,
    entry: Entry,
    topic: str = REQUESTS,
    reason: str = "no",
    *,
    kept: bool = False,
) -> str:
    """Append a record and its letter, as an intake does; the letter's name."""
    from kvlane.streams.reading.dead_letter_format import to_dead_letter

    at = broker.append(topic, 0, [entry])
    record = MemoryRecord(topic, at.partition, at.offset, at.timestamp_ms, *entry)
    letter = to_dead_letter(topic, record, reason, 1, keep_value=kept)
    stands = broker.append(DEAD_LETTERS, 1, [letter])
    return f"{stands.partition}:{stands.offset}"


def request(name: str = "job-7", **over: Any) -> Entry:
    return encode(Request(id=name, model="demo", token_ids=b"\1\0\0\0", **over), name)


def published(broker: MemoryBroker, name: str = "job-7", topic: str = REQUESTS) -> int:
    lane = lane_of(name, broker.partitions[topic])
    return sum(r.key == name.encode() for r in broker.records(topic, lane))


def test_letters_are_listed_with_their_reasons(memory: MemoryBroker, tmp_path: Path) -> None:
    put_aside(memory, request(), reason="it belongs in lane 2")
    put_aside(memory, Entry(b"\xff\n", b"{"), PROMPTS, reason="not a JSON object")
    shown = kvlane("list", "--json", str(tmp_path / "letters"))
    assert shown.exit_code == 0
    assert "it belongs in lane 2" in shown.stdout
    assert "requests/0:0" in shown.stdout
    assert "\\xff\\n" in shown.stdout
    assert "2 dead letters" in shown.stdout
    got = json.loads((tmp_path / "letters").read_bytes())
    assert [each["origin_topic"] for each in got] == [REQUESTS, PROMPTS]


def test_letters_are_chosen_by_topic_and_reason(memory: MemoryBroker) -> None:
    put_aside(memory, request(), reason="one")
    put_aside(memory, request("job-8"), PROMPTS, reason="two")
    put_aside(memory, request("job-9"), reason="two")
    assert "1 dead letters" in kvlane("list", "--topic", "requests", "--reason", "two").stdout
    assert "3 dead letters, showing the newest 1" in kvlane("list", "--limit", "1").stdout


def test_empty_list_of_letters_exits_with_success(memory: MemoryBroker) -> None:
    shown = kvlane("list")
    assert (shown.exit_code, shown.stdout) == (0, "0 dead letters\n")


def test_letter_that_can_be_read_is_shown_as_a_record(memory: MemoryBroker) -> None:
    shown = kvlane("show", put_aside(memory, request(tenant="acme"), kept=True))
    assert "kept in the dead letter, decoded" in shown.stdout
    assert '"tenant": "acme"' in shown.stdout


def test_redacted_letter_is_read_again_from_its_original_offset(memory: MemoryBroker) -> None:
    shown = kvlane("show", put_aside(memory, request(tenant="acme")))
    assert "read from requests/0:0, decoded" in shown.stdout


def test_letter_that_cannot_be_read_is_shown_in_hex(memory: MemoryBroker) -> None:
    bad = Entry(b"job-7", b"\xc1 not msgpack" * 100, (("t", b"Request"),))
    shown = kvlane("show", put_aside(memory, bad))
    assert "still malformed" in shown.stdout
    assert "c1 20 6e 6f 74" in shown.stdout
    assert "more bytes" in shown.stdout


def test_redacted_letter_names_the_setting_that_keeps_content(memory: MemoryBroker) -> None:
    name = put_aside(memory, request())
    memory.delete_records(REQUESTS, 0, 1)
    shown = kvlane("show", name)
    assert "KVLANE_KEEP_PROMPTS" in shown.stdout
    again = kvlane("retry", name)
    assert again.exit_code == 1
    assert "KVLANE_KEEP_PROMPTS" in again.stderr


def test_other_record_at_the_offset_of_a_letter_is_refused(memory: MemoryBroker) -> None:
    """The topic was deleted and made anew."""
    name = put_aside(memory, request())
    memory.log(REQUESTS, 0).records[0] = (
        memory.log(REQUESTS, 0).records[0]._replace(value=request("other").value)
    )
    assert kvlane("retry", name).exit_code == 1


@pytest.mark.parametrize("name", ["7", "a:b", "1:", "99:0", "1:5"])
def test_invalid_letter_name_is_explained(memory: MemoryBroker, name: str) -> None:
    assert kvlane("show", name).exit_code == 1
    assert "letter" in kvlane("retry", name).stderr


def test_record_is_published_again_with_its_key_and_headers(memory: MemoryBroker) -> None:
    key, value, headers = request()
    entry = Entry(key, value, (*headers, ("traceparent", b"00-1-2-01")))
    for kept in (True, False):
        name = put_aside(memory, entry, kept=kept)
        done = kvlane("retry", name)
        assert done.exit_code == 0, done.output
        assert f"{name}: job-7 is published again, requests/" in done.stdout
        lane = lane_of("job-7", 4)
        last = memory.records(REQUESTS, lane)[-1]
        assert (last.key, last.value, last.headers) == entry


def test_prompt_is_published_again_to_prompts(memory: MemoryBroker) -> None:
    body = b'{"id":"job-7","body":{"messages":[{"role":"user","content":"hi"}]}}'
    name = put_aside(memory, Entry(b"job-7", body), PROMPTS)
    before = published(memory, topic=PROMPTS)
    assert kvlane("retry", name).exit_code == 0
    assert published(memory, topic=PROMPTS) == before + 1


@pytest.mark.parametrize(
    ("entry", "topic", "why"),
    [
        (Entry(b"job-7", b"\xc1", (("t", b"Request"),)), REQUESTS, "still malformed"),
        (Entry(b"job-7", b"", (("t", b"Future"),)), REQUESTS, "unknown record type 'Future'"),
        (Entry(b"job-7", b"{", ()), PROMPTS, "still malformed"),
        (encode(Ended(id="job-7", code="lost"), "job-7"), REQUESTS, "does not belong"),
        (request("other")._replace(key=b"job-7"), REQUESTS, "its key is"),
        (request()._replace(key=None), REQUESTS, "its key is"),
        (encode(Refused(id="w", code="lost"), "w"), LEDGER, "can be retried"),
    ],
)
def test_retry_without_prospect_is_refused(
    memory: MemoryBroker, entry: Entry, topic: str, why: str
) -> None:
    name = put_aside(memory, entry, topic)
    before = len(memory.records(topic, 0))
    done = kvlane("retry", name)
    assert done.exit_code == 1
    assert why in done.stderr
    assert len(memory.records(topic, 0)) == before


def test_refused_letter_does_not_block_the_others(memory: MemoryBroker) -> None:
    bad = put_aside(memory, Entry(b"x", b"\xc1", (("t", b"Request"),)))
    good = put_aside(memory, request())
    done = kvlane("retry", bad, good)
    assert done.exit_code == 1
    assert "job-7 is published again" in done.stdout


def test_finished_request_is_not_published_again(memory: MemoryBroker) -> None:
    name = put_aside(memory, request())
    memory.append(LEDGER, lane_of("job-7", 4), [encode(Ended(id="job-7", code="lost"), "job-7")])
    done = kvlane("retry", name)
    assert done.exit_code == 1
    assert "job-7" in done.stderr
    assert "ended (lost)" in done.stderr
    assert "under another id" in done.stderr


def test_running_request_is_not_published_again(memory: MemoryBroker) -> None:
    name = put_aside(memory, request())
    assigned = Assigned(
        id="job-7", attempt=0, phase="aggregated", worker="w", epoch=1, deadline_ms=1,
        origin=RequestOffset(topic=REQUESTS, partition=0, offset=0), responses_from=0,
    )  # fmt: skip
    memory.append(LEDGER, lane_of("job-7", 4), [encode(assigned, "job-7")])
    done = kvlane("retry", name)
    assert done.exit_code == 1
    assert "is open" in done.stderr


# --- with a router -------------------------------------------------------------------------------


async def the_letter(world: MemoryWorld) -> DeadLetter:
    log = await world.connect("people")
    found: list[DeadLetter] = []

    async def look() -> None:
        while not found:
            found.extend((await list_dead_letters(log, world.clock, 10))[0])
            await world.sleep(0.1)

    await look()
    return found[0]


@scenario_test
async def test_request_in_a_wrong_lane_is_answered_after_a_retry(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    wrong = 1 - lane_of("a", world.lanes)
    world.append(REQUESTS, wrong, PROMPT, key="a")
    letter = await the_letter(world)
    assert "belongs in lane" in letter.reason
    log = await world.connect("people2")
    assert (await retry_dead_letter(log, world.clock, letter))[0] == "a"
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    assert assignment.request == PROMPT


@scenario_test
async def test_repeatedly_retried_letter_is_run_once(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    world.append(REQUESTS, 1 - lane_of("a", world.lanes), PROMPT, key="a")
    letter = await the_letter(world)
    log = await world.connect("people2")
    await asyncio.gather(*(retry_dead_letter(log, world.clock, letter) for _ in range(3)))
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    with pytest.raises(InvalidDeadLetter, match="is open"):
        await retry_dead_letter(log, world.clock, letter)
    append_record(world, RESPONSES, chunk(0, 7, finish_reason="stop"))
    worker.finish(run, "stop")
    await wait_for_items(world, lambda: read_records(world, LEDGER, Finished))
    with pytest.raises(InvalidDeadLetter, match="answered"):
        await retry_dead_letter(log, world.clock, letter)
    await world.sleep(30)
    assert len(worker.received(Assignment)) == 1


@scenario_test
async def test_malformed_request_ends_with_an_error(world: MemoryWorld) -> None:
    FakeWorker(world)
    await start_router(world)
    bad = Entry(b"a", b"\xc1", (("t", b"Request"),))
    world.append_raw(REQUESTS, lane_of("a", world.lanes), bad)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Ended))
    letter = await the_letter(world)
    log = await world.connect("people2")
    with pytest.raises(InvalidDeadLetter, match="still malformed"):
        await retry_dead_letter(log, world.clock, letter)


@scenario_test
async def test_letter_is_found_by_its_name(world: MemoryWorld) -> None:
    log = await world.connect("people")
    record = MemoryRecord(REQUESTS, 3, 41, 0, b"job-7", b"tell me", (("t", b"Request"),))
    stands = await DeadLetterWriter(RecordPublisher(log, world.clock)).write(
        REQUESTS, record, "why", tries=2
    )
    letter = await find_dead_letter(log, world.clock, f"{stands.partition}:{stands.offset}")
    assert (letter.key, letter.type, letter.reason) == (b"job-7", b"Request", "why")
    assert (letter.origin_topic, letter.origin_partition, letter.origin_offset) == (REQUESTS, 3, 41)
    assert (letter.tries, letter.value, letter.value_bytes) == (2, None, 7)
