"""Tests of dead letters: kept and hidden parts, and a bounded size."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.reading.dead_letter_format import DeadLetterWriter
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.topics import DEAD_LETTERS, MAX_RECORD_BYTES, REQUESTS
from tests.harness.memory_world import MemoryWorld, scenario_test


def a_record(value: bytes | None = b"tell me", key: bytes | None = b"job-7") -> MemoryRecord:
    headers = (("t", b"Request"), ("other", b"not kept"))
    return MemoryRecord(REQUESTS, 3, 41, 0, key, value, headers)


async def dead_letters(world: MemoryWorld, *, keep_prompts: bool = False) -> DeadLetterWriter:
    return DeadLetterWriter(
        RecordPublisher(await world.connect(), world.clock), keep_prompts=keep_prompts
    )


@scenario_test
async def test_letter_has_its_reason_and_position(world: MemoryWorld) -> None:
    await (await dead_letters(world)).write(REQUESTS, a_record(), "not a Request", tries=2)
    (letter,) = world.records(DEAD_LETTERS, key="job-7")
    assert letter.key == b"job-7"
    headers = dict(letter.headers)
    assert headers["t"] == b"Request"
    assert headers["reason"] == b"not a Request"
    assert headers["origin_topic"] == b"requests"
    assert headers["origin_partition"] == b"3"
    assert headers["origin_offset"] == b"41"
    assert headers["tries"] == b"2"


@scenario_test
async def test_record_without_key_and_value_has_a_letter(world: MemoryWorld) -> None:
    await (await dead_letters(world)).write(REQUESTS, a_record(None, None), "no")
    (letter,) = world.records(DEAD_LETTERS, 0)
    assert (letter.key, letter.value) == (None, b"")


@scenario_test
async def test_letter_leaves_out_possible_prompt_text(world: MemoryWorld) -> None:
    await (await dead_letters(world)).write(REQUESTS, a_record(b"my secret"), "no")
    (letter,) = world.records(DEAD_LETTERS, key="job-7")
    assert b"secret" not in b"".join([letter.value or b"", *(v for _, v in letter.headers)])
    headers = dict(letter.headers)
    assert headers["value_bytes"] == b"9"
    assert headers["value_sha256"] == sha256(b"my secret").hexdigest().encode()


@scenario_test
async def test_values_are_kept_on_request(world: MemoryWorld) -> None:
    await (await dead_letters(world, keep_prompts=True)).write(REQUESTS, a_record(), "no")
    (letter,) = world.records(DEAD_LETTERS, key="job-7")
    assert letter.value == b"tell me"
    assert "value_sha256" not in dict(letter.headers)


@scenario_test
async def test_tombstone_stays_one(world: MemoryWorld) -> None:
    await (await dead_letters(world)).write(REQUESTS, a_record(None), "no")
    (letter,) = world.records(DEAD_LETTERS, key="job-7")
    assert letter.value is None


@scenario_test
async def test_record_without_key_gets_a_letter_too(world: MemoryWorld) -> None:
    await (await dead_letters(world)).write(REQUESTS, a_record(key=None), "no")
    (letter,) = world.all_records(DEAD_LETTERS)
    assert letter.key is None


@scenario_test
async def test_value_that_leaves_no_room_for_the_reason_is_dropped(world: MemoryWorld) -> None:
    large = a_record(bytes(MAX_RECORD_BYTES - 120))
    await (await dead_letters(world, keep_prompts=True)).write(REQUESTS, large, "no")
    (letter,) = world.records(DEAD_LETTERS, key="job-7")
    assert letter.value == b""
    assert dict(letter.headers)["value_bytes"] == b"%d" % (MAX_RECORD_BYTES - 120)


@scenario_test
async def test_key_that_leaves_no_room_for_the_reason_is_dropped(world: MemoryWorld) -> None:
    large = a_record(b"", bytes(MAX_RECORD_BYTES - 120))
    await (await dead_letters(world)).write(REQUESTS, large, "no")
    (letter,) = world.all_records(DEAD_LETTERS)
    assert letter.key is None


@pytest.mark.parametrize("kept", [True, False])
def test_letter_is_bounded_for_any_error_text(kept: bool) -> None:
    from kvlane.streams.reading.dead_letter_format import to_dead_letter

    record = a_record()._replace(headers=(("t", b"x" * 100_000),))
    letter = to_dead_letter(REQUESTS, record, "y" * 100_000, 1, keep_value=kept)
    assert sum(len(v) for _, v in letter.headers) < 1000


@scenario_test
async def test_letter_is_repeated_until_acknowledged(world: MemoryWorld) -> None:
    world.faults.next_fates(DEAD_LETTERS, *[AppendFate.LOST] * 5)
    await (await dead_letters(world)).write(REQUESTS, a_record(), "no")
    assert len(world.all_records(DEAD_LETTERS)) == 1
