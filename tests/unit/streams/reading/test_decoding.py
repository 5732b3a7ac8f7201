"""Tests of the decoding of views: skipped records, records that stop it, and the skip of an
operator."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kvlane.app.cli import app
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import RECORD_VERSION, encode
from kvlane.streams.errors import NewerRecord, NothingToSkip
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry, Partition, Unreadable
from kvlane.streams.reading.decoding import RecordDecoder, read_skips, skip_key, write_skip
from kvlane.streams.records import Assigned, Chunk, Ended, ModelCard, Skip, Tombstone
from kvlane.streams.topics import LEDGER, REGISTRY
from kvlane.streams.views.follower import Follower
from tests.harness.golden_records import GOLDEN
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test
from tests.harness.recording_view import RecordingView

CARDS, LANE = Partition(REGISTRY, 0), Partition(LEDGER, 0)
MARKED = Entry(b"x", b"\x80", (("t", b"Shiny"), ("r", b"%d" % (RECORD_VERSION + 1))))
_DECISION = msgspec.msgpack.decode(
    next(value for each, value in GOLDEN if isinstance(each, Assigned) and each.candidate_rows)
)
_DECISION["candidate_rows"]["rows"] += b"x"
ODD: list[Entry] = [
    Entry(b"junk", b"x", (("t", b"Foo"),)),
    Entry(b"junk", b"x", (("t", b"ArtifactPart"),)),
    Entry(b"junk", b"x", (("t", b"Prompt"),)),
    Entry(b"junk", b"x", (("t", None),)),
    Entry(None, None, (("t", None),)),
    Entry(b"\xff", None),
    Entry(b"junk", Unreadable(b"too large"), ()),
    encode(Chunk(id="a", attempt=0, run="1", seq=0, index=0), "a"),
    encode(Tombstone(key="a", epoch=1), "a"),
    Entry(b"a", msgspec.msgpack.encode(_DECISION), (("t", b"Assigned"),)),
]


async def following(
    world: MemoryWorld, *sources: str
) -> tuple[Follower, RecordingView, asyncio.Task[None]]:
    view = RecordingView()
    follower = Follower(await world.connect(), view, sources, world.clock)
    return follower, view, world.spawn(follower.run())


@scenario_test
async def test_malformed_ledger_records_are_skipped_and_counted(world: MemoryWorld) -> None:
    world.append_raw(LEDGER, 0, *ODD)
    world.append(LEDGER, 0, Ended(id="a", code="lost"))
    follower, view, _ = await following(world, LEDGER)
    await asyncio.wait_for(follower.wait_caught_up(), 60)
    assert view.offsets(LANE) == [len(ODD)]
    assert follower.malformed == len(ODD)


def test_one_of_each_kind_is_logged_with_its_position(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: MemoryWorld) -> None:
        decoding = RecordDecoder(await world.connect(), world.clock)
        world.append_raw(LEDGER, 0, *ODD, *ODD)
        for records in (world.records(LEDGER, 0), world.records(LEDGER, 0)):
            assert await decoding.decode_records(LANE, records) == []

    with caplog.at_level(logging.WARNING, "kvlane.streams.reading.decoding"):
        run_scenario(scenario)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "skipping malformed record ledger[0]@0: unknown record type 'Foo'" in lines[0]
    assert "skipping malformed record ledger[0]@3: no header 't'" in lines[1]


@scenario_test
async def test_error_names_the_record_the_version_and_the_command(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, Ended(id="a", code="lost"))
    world.append_raw(LEDGER, 0, MARKED)
    follower, view, running = await following(world, LEDGER)
    await asyncio.wait([running])
    error = running.exception()
    assert isinstance(error, NewerRecord)
    for part in (
        f"record version {RECORD_VERSION + 1}",
        "upgrade it",
        "kvlane topics skip ledger:0:1",
    ):
        assert part in str(error)
    assert not follower.caught_up
    assert view.position(LANE) == 0


@pytest.mark.parametrize("source", [LANE, CARDS])
@scenario_test
async def test_skipped_record_stops_no_process_at_any_start(
    world: MemoryWorld, source: Partition
) -> None:
    log = await world.connect()
    offset = world.append_raw(source.topic, 0, MARKED)
    _, _, running = await following(world, LEDGER, REGISTRY)
    await asyncio.wait([running])
    assert isinstance(running.exception(), NewerRecord)
    await write_skip(log, world.clock, source, offset)
    assert await read_skips(log, world.clock) == {(*source, offset)}
    last = world.append(REGISTRY, 0, ModelCard(name="m"), key="model/m")
    for _ in range(2):
        follower, view, running = await following(world, LEDGER, REGISTRY)
        await asyncio.wait_for(follower.wait_caught_up(), 60)
        assert view.offsets(CARDS)[-1] == last
        assert follower.malformed == 1
    world.append_raw(source.topic, 0, MARKED)  # another record, another decision
    await asyncio.wait([running])
    assert isinstance(running.exception(), NewerRecord)


@scenario_test
async def test_only_a_marked_record_can_be_skipped(world: MemoryWorld) -> None:
    log = await world.connect()
    world.append(LEDGER, 0, Ended(id="a", code="lost"))
    world.append_raw(LEDGER, 0, *ODD)
    with pytest.raises(NothingToSkip, match="ledger:0:0 stops no reader: it is a Ended"):
        await write_skip(log, world.clock, LANE, 0)
    with pytest.raises(NothingToSkip, match="is skipped: unknown record type 'Foo'"):
        await write_skip(log, world.clock, LANE, 1)
    for nowhere in (Partition(LEDGER, 0), Partition(LEDGER, 99), Partition("nothing", 0)):
        with pytest.raises(NothingToSkip, match="no record at"):
            await write_skip(log, world.clock, nowhere, 99)
    assert await read_skips(log, world.clock) == frozenset()


@scenario_test
async def test_junk_under_the_key_of_a_skip_skips_nothing(world: MemoryWorld) -> None:
    key = skip_key(LEDGER, 0, 0).encode()
    world.append_raw(REGISTRY, 0, Entry(key, b"\xc1", (("t", b"Skip"),)), MARKED._replace(key=key))
    world.append_raw(LEDGER, 0, MARKED)
    _, _, running = await following(world, LEDGER)
    await asyncio.wait([running])
    assert isinstance(running.exception(), NewerRecord)


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    monkeypatch.setenv("COLUMNS", "200")
    return connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)


def skip(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["topics", "skip", *arguments])


def test_command_writes_a_skip(memory: MemoryBroker) -> None:
    memory.append(LEDGER, 2, [MARKED])
    done = skip("ledger:2:0")
    assert done.exit_code == 0, done.output
    (record,) = memory.records(REGISTRY, 0)
    assert record.key == b"skip/ledger/2/0"
    assert record.value == encode(Skip(topic=LEDGER, partition=2, offset=0), "").value


@pytest.mark.parametrize("place", ["ledger", "ledger:0", "ledger:x:1", ":0:1", "ledger:0:-1"])
def test_command_refuses_malformed_positions(memory: MemoryBroker, place: str) -> None:
    done = skip(place)
    assert done.exit_code == 2
    assert "TOPIC:PARTITION:OFFSET" in done.output
    assert not memory.records(REGISTRY, 0)


def test_command_refuses_a_position_without_a_record(memory: MemoryBroker) -> None:
    done = skip("ledger:0:5")
    assert done.exit_code == 1
    assert "no record at ledger:0:5" in str(done.output) + str(done.exception)
    assert not memory.records(REGISTRY, 0)
