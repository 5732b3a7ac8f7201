"""Model artifacts in the log: tokenizers and templates, in parts, by checksum.

A file's parts lie in one partition of `artifacts`, under `<sha256>/<part>`, written once. Where a
part is damaged, the last record under its key counts, so writing again heals it. A folder caches
files by checksum, verified at each read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from hashlib import sha256
from pathlib import Path

from kvlane.app.preprocess.prompt_errors import ArtifactUnavailable, BadModel
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import PART_BYTES, numbered_part, part_number
from kvlane.streams.errors import PositionLost
from kvlane.streams.ports import Log, Partition, Record
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Artifact
from kvlane.streams.topics import ARTIFACTS, partition_of

log = logging.getLogger(__name__)

MAX_ARTIFACT_BYTES = 128 * 1024 * 1024
"""Tokenizers have 2 to 35 MB. A card that names a larger file is wrong."""
ARTIFACT_TIMEOUT_S = 60.0

_PART = b"ArtifactPart"
_SHA256 = re.compile("[0-9a-f]{64}")


class ArtifactStore:
    """Writes and reads artifacts over one log, with a folder as cache (None: without)."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        pool: WorkPool,
        folder: Path | None,
        *,
        timeout_s: float = ARTIFACT_TIMEOUT_S,
    ) -> None:
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)
        self._pool = pool
        self._folder = folder
        self._timeout_s = timeout_s
        self._fetching: dict[str, asyncio.Lock] = {}

    async def publish(self, content: bytes) -> Artifact:
        """Put a file into the log, unless it is there; repeated until acknowledged. Raises BadModel
        for a file above MAX_ARTIFACT_BYTES, BrokerUnavailable."""
        if len(content) > MAX_ARTIFACT_BYTES:
            raise BadModel(f"a file of {len(content)} bytes: {MAX_ARTIFACT_BYTES} is the most")
        digest = await self._pool.run(lambda: sha256(content).hexdigest())
        artifact = Artifact(sha256=digest, size=len(content))
        try:
            await self._from_log(artifact)
        except ArtifactUnavailable:
            source = await self._source(artifact)
            for number in range(part_count(artifact)):
                part = content[number * PART_BYTES : (number + 1) * PART_BYTES]
                entry = numbered_part(_PART, digest, number, part)
                await self._publisher.publish_entry(ARTIFACTS, entry, source.partition)
        return artifact

    async def fetch(self, artifact: Artifact) -> bytes:
        """The content of a file, from the folder or from the log, with its checksum verified.
        Raises ArtifactUnavailable when parts are missing or damaged, BrokerUnavailable."""
        if not _SHA256.fullmatch(artifact.sha256):  # a path leads out of the folder, to any device
            raise ArtifactUnavailable(f"{artifact.sha256[:80]!r} is not a SHA-256 in hex")
        if artifact.size > MAX_ARTIFACT_BYTES:
            raise ArtifactUnavailable(f"{artifact.sha256}: {artifact.size} bytes are too many")
        lock = self._fetching.setdefault(artifact.sha256, asyncio.Lock())
        async with lock:  # the others find it in the folder
            cached = await self._pool.run(lambda: self._from_folder(artifact))
            if cached is not None:
                return cached
            content = await self._from_log(artifact)
            await self._pool.run(lambda: self._keep(artifact, content))
            return content

    # --- the log ---

    async def _source(self, artifact: Artifact) -> Partition:
        count = await self._log.partitions(ARTIFACTS)
        return Partition(ARTIFACTS, partition_of(artifact.sha256.encode(), count))

    async def _from_log(self, artifact: Artifact) -> bytes:
        parts: dict[int, bytes] = {}
        needed, damaged = part_count(artifact), False
        async with aclosing(self._records(await self._source(artifact), artifact)) as records:
            async for record in records:
                number = part_number(record, artifact.sha256)
                if number is None or number >= needed:
                    continue
                parts[number] = record.value or b""
                if len(parts) == needed:
                    content = await self._pool.run(lambda: _whole(parts, artifact))
                    if content is not None:
                        return content
                    damaged = True
        if damaged:
            raise ArtifactUnavailable(f"{artifact.sha256}: its content has another checksum")
        raise ArtifactUnavailable(f"{artifact.sha256}: {len(parts)} of {needed} parts are there")

    async def _records(self, source: Partition, artifact: Artifact) -> AsyncGenerator[Record, None]:
        """The records of the partition up to its present end. Raises ArtifactUnavailable."""
        start = (await self._log.start_offsets(ARTIFACTS, [source.partition]))[source.partition]
        end = (await self._log.end_offsets(ARTIFACTS, [source.partition]))[source.partition]
        timeout_s = self._timeout_s
        pieces = read_range(
            self._log,
            self._clock,
            {source: start},
            {source: end},
            timeout_s=timeout_s,
            batch_size=8,
        )
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    for record in piece.records:
                        yield record
        except (PositionLost, TimeoutError) as e:
            raise ArtifactUnavailable(f"{artifact.sha256}: {e}") from e

    # --- the folder ---

    def _from_folder(self, artifact: Artifact) -> bytes | None:
        if self._folder is None:
            return None
        path = self._folder / artifact.sha256
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if sha256(content).hexdigest() == artifact.sha256:
            return content
        log.warning("%s is damaged and is read from the log again", path)
        return None

    def _keep(self, artifact: Artifact, content: bytes) -> None:
        """Put it into the folder, whole or not at all; runs in the pool."""
        if self._folder is None:
            return
        new = self._folder / f"{artifact.sha256}.{os.getpid()}.{id(content):x}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content)
            new.replace(self._folder / artifact.sha256)
        except OSError as e:  # it only has to be read from the log the next time, too
            log.warning("%s could not be kept: %s", artifact.sha256, e)
            with suppress(OSError):
                new.unlink(missing_ok=True)


def part_count(artifact: Artifact) -> int:
    return max(-(-artifact.size // PART_BYTES), 1)


def _whole(parts: dict[int, bytes], artifact: Artifact) -> bytes | None:
    """The content, or None if its checksum differs."""
    content = b"".join(parts[number] for number in range(len(parts)))
    if len(content) == artifact.size and sha256(content).hexdigest() == artifact.sha256:
        return content
    return None
