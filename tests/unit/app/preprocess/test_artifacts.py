"""Tests of files of models in the log: whole or not at all, with any loss of parts."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from kvlane.app.preprocess.models import artifacts
from kvlane.app.preprocess.models.artifacts import ArtifactStore, part_count
from kvlane.app.preprocess.prompt_errors import ArtifactUnavailable, BadModel
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.streams.codecs import PART_BYTES
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry
from kvlane.streams.records import Artifact
from kvlane.streams.topics import ARTIFACTS
from tests.harness.memory_world import MemoryWorld, scenario_test

BIG = bytes(range(256)) * (PART_BYTES // 256 * 2 + 100)  # three parts
SMALL = b"{{ messages }}"
ONE_MIB = 1024 * 1024


async def opened(
    world: MemoryWorld, client: str = "client", folder: Path | None = None, timeout_s: float = 60.0
) -> ArtifactStore:
    return ArtifactStore(
        await world.connect(client), world.clock, InlinePool(), folder, timeout_s=timeout_s
    )


def artifact_of(content: bytes) -> Artifact:
    return Artifact(sha256=sha256(content).hexdigest(), size=len(content))


def parts(world: MemoryWorld, content: bytes) -> list[MemoryRecord]:
    prefix = artifact_of(content).sha256.encode()
    return [r for r in world.all_records(ARTIFACTS) if r.key and r.key.startswith(prefix)]


def damage(world: MemoryWorld, content: bytes, number: int, value: bytes) -> None:
    """Put another record under the key of a part."""
    part = parts(world, content)[0]
    key = f"{artifact_of(content).sha256}/{number}".encode()
    world.append_raw(ARTIFACTS, part.partition, Entry(key, value))


# --- writing --------------------------------------------------------------------------------------


@scenario_test
async def test_file_is_found_by_its_checksum(world: MemoryWorld) -> None:
    published = await (await opened(world, "worker")).publish(BIG)
    assert published == artifact_of(BIG)
    assert await (await opened(world, "gateway")).fetch(published) == BIG


@scenario_test
async def test_parts_of_a_file_are_records_of_one_partition(world: MemoryWorld) -> None:
    await (await opened(world)).publish(BIG)
    found = parts(world, BIG)
    assert [r.key for r in found] == [
        f"{artifact_of(BIG).sha256}/{number}".encode() for number in range(3)
    ]
    assert len({r.partition for r in found}) == 1


@scenario_test
async def test_part_with_all_that_belongs_to_it_is_below_a_mebibyte(world: MemoryWorld) -> None:
    await (await opened(world)).publish(BIG)
    for part in parts(world, BIG):
        overhead = len(part.key or b"") + sum(len(k) + len(v) for k, v in part.headers) + 100
        assert len(part.value or b"") + overhead < ONE_MIB


@scenario_test
async def test_file_is_written_once(world: MemoryWorld) -> None:
    for client in ("one", "other", "one"):
        await (await opened(world, client)).publish(BIG)
    assert len(parts(world, BIG)) == 3


@scenario_test
async def test_empty_file_is_a_file(world: MemoryWorld) -> None:
    store = await opened(world)
    assert await store.fetch(await store.publish(b"")) == b""


@scenario_test
async def test_part_is_sent_until_it_is_acknowledged(world: MemoryWorld) -> None:
    world.faults.next_fates(ARTIFACTS, AppendFate.LOST, AppendFate.UNREPORTED)
    store = await opened(world)
    assert await store.fetch(await store.publish(BIG)) == BIG


@scenario_test
async def test_file_that_is_there_in_part_is_written_whole(world: MemoryWorld) -> None:
    store = await opened(world)
    await store.publish(BIG)
    world.broker.delete_records(ARTIFACTS, parts(world, BIG)[0].partition, 1)
    assert len(parts(world, BIG)) == 2
    assert await store.fetch(await store.publish(BIG)) == BIG


@scenario_test
async def test_writing_again_heals_a_damaged_file(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = await store.publish(BIG)
    world.broker.delete_records(ARTIFACTS, parts(world, BIG)[0].partition, 1)
    damage(world, BIG, 0, b"damaged")
    with pytest.raises(ArtifactUnavailable):
        await store.fetch(artifact)
    await store.publish(BIG)
    assert await store.fetch(artifact) == BIG


@scenario_test
async def test_file_that_is_too_large_is_refused(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "MAX_ARTIFACT_BYTES", 10)
        with pytest.raises(BadModel, match="10 is the most"):
            await (await opened(world)).publish(b"x" * 11)


# --- reading --------------------------------------------------------------------------------------


@scenario_test
async def test_several_files_in_a_partition_do_not_mix(world: MemoryWorld) -> None:
    store = await opened(world)
    files = [bytes([n]) * (PART_BYTES + 1) for n in range(8)]
    published = [await store.publish(content) for content in files]
    for artifact, content in zip(published, files, strict=True):
        assert await store.fetch(artifact) == content


@scenario_test
async def test_file_that_was_never_written_is_unavailable(world: MemoryWorld) -> None:
    with pytest.raises(ArtifactUnavailable, match="0 of 1 parts"):
        await (await opened(world)).fetch(artifact_of(SMALL))


@scenario_test
async def test_file_without_one_of_its_parts_is_unavailable(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = await store.publish(BIG)
    world.broker.delete_records(ARTIFACTS, parts(world, BIG)[0].partition, 1)
    with pytest.raises(ArtifactUnavailable, match="2 of 3 parts"):
        await store.fetch(artifact)


@scenario_test
async def test_file_with_a_damaged_part_is_unavailable(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = await store.publish(SMALL)
    world.broker.delete_records(ARTIFACTS, parts(world, SMALL)[0].partition, 1)
    damage_key = f"{artifact.sha256}/0".encode()
    partition = (await store._source(artifact)).partition
    world.append_raw(ARTIFACTS, partition, Entry(damage_key, SMALL[::-1]))
    with pytest.raises(ArtifactUnavailable, match="another checksum"):
        await store.fetch(artifact)


@scenario_test
async def test_file_of_another_size_than_on_its_card_is_unavailable(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = await store.publish(SMALL)
    with pytest.raises(ArtifactUnavailable, match="another checksum"):
        await store.fetch(Artifact(sha256=artifact.sha256, size=artifact.size + 1))


@scenario_test
async def test_part_may_be_stored_twice(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = await store.publish(BIG)
    world.broker.delete_records(ARTIFACTS, parts(world, BIG)[0].partition, 1)
    for number in (2, 0, 1):
        damage(world, BIG, number, BIG[number * PART_BYTES : (number + 1) * PART_BYTES])
    assert await store.fetch(artifact) == BIG


@scenario_test
async def test_last_record_of_a_part_counts(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = artifact_of(SMALL)
    partition = (await store._source(artifact)).partition
    key = f"{artifact.sha256}/0".encode()
    world.append_raw(ARTIFACTS, partition, Entry(key, b"damaged"), Entry(key, SMALL))
    assert await store.fetch(artifact) == SMALL


@scenario_test
async def test_unknown_records_are_skipped(world: MemoryWorld) -> None:
    store = await opened(world)
    artifact = artifact_of(SMALL)
    partition = (await store._source(artifact)).partition
    for key in (None, b"", b"x", *(f"{artifact.sha256}{end}".encode() for end in ("", "/x", "/7"))):
        world.append_raw(ARTIFACTS, partition, Entry(key, b"x"))
    await store.publish(SMALL)
    assert await store.fetch(artifact) == SMALL


@scenario_test
async def test_reading_takes_no_longer_than_its_limit(world: MemoryWorld) -> None:
    store = await opened(world, timeout_s=5.0)
    partition = (await store._source(artifact_of(SMALL))).partition
    world.append_raw(ARTIFACTS, partition, *[Entry(b"other", b"x")] * 100)
    world.faults.slow["poll"] = 3.0
    with pytest.raises(ArtifactUnavailable, match="longer than 5 s"):
        await store.fetch(artifact_of(SMALL))


@scenario_test
async def test_card_of_a_huge_file_is_refused(world: MemoryWorld) -> None:
    with pytest.raises(ArtifactUnavailable, match="too many"):
        await (await opened(world)).fetch(msgspec.structs.replace(artifact_of(SMALL), size=2**50))


@pytest.mark.parametrize(
    ("size", "count"), [(0, 1), (1, 1), (PART_BYTES, 1), (PART_BYTES + 1, 2), (10 * PART_BYTES, 10)]
)
def test_file_has_as_many_parts_as_it_needs(size: int, count: int) -> None:
    assert part_count(Artifact(sha256="aa", size=size)) == count


# --- the folder -----------------------------------------------------------------------------------


@scenario_test
async def test_file_that_was_read_is_taken_from_the_folder(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "made" / "when needed"
        artifact = await (await opened(world, "worker")).publish(SMALL)
        assert await (await opened(world, "a", folder)).fetch(artifact) == SMALL
        world.broker.delete_records(ARTIFACTS, parts(world, SMALL)[0].partition, 1)
        assert await (await opened(world, "b", folder)).fetch(artifact) == SMALL


@scenario_test
async def test_damaged_file_in_the_folder_is_read_from_the_log_again(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        store = await opened(world, folder=Path(name))
        artifact = await store.publish(SMALL)
        path = Path(name) / artifact.sha256
        path.write_bytes(SMALL[:-1])
        assert await store.fetch(artifact) == SMALL
        assert path.read_bytes() == SMALL


@scenario_test
async def test_path_in_place_of_a_checksum_opens_no_file(world: MemoryWorld) -> None:
    """As of a card that names a device or a pipe, which would be read without end."""
    with TemporaryDirectory() as name:
        folder, outside = Path(name) / "folder", Path(name) / "outside"
        outside.write_bytes(SMALL)
        folder.mkdir()
        store = await opened(world, folder=folder)
        opened_files: list[Path] = []

        def read(path: Path) -> bytes:
            opened_files.append(path)
            return SMALL

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_bytes", read)
            for named in (str(outside), "../outside", "", "A" * 64):
                with pytest.raises(ArtifactUnavailable, match="not a SHA-256"):
                    await store.fetch(Artifact(sha256=named, size=len(SMALL)))
        assert opened_files == []


@scenario_test
async def test_unwritable_folder_is_no_error(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        occupied = Path(name) / "file"
        occupied.write_text("")
        store = await opened(world, folder=occupied)
        logging.disable(logging.WARNING)
        try:
            assert await store.fetch(await store.publish(SMALL)) == SMALL
        finally:
            logging.disable(logging.NOTSET)


@scenario_test
async def test_folder_holds_complete_files_only(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        store = await opened(world, folder=Path(name))
        artifact = await store.publish(BIG)
        await store.fetch(artifact)
        assert [p.name for p in Path(name).iterdir()] == [artifact.sha256]


@scenario_test
async def test_concurrent_requests_for_a_file_read_it_once(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        store = await opened(world, folder=Path(name))
        artifact = await store.publish(SMALL)
        world.faults.sent.clear()
        wanted = [world.spawn(store.fetch(artifact)) for _ in range(3)]
        assert [await content for content in wanted] == [SMALL] * 3
        assert world.faults.sent.count("poll") == 1
