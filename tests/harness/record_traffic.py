"""A stream of numbered records through a real log, with a reader and a group member behind it.

    async with Traffic(log, "ledger", partitions=4) as traffic:
        ...                      # hurt the broker
        await traffic.settle()   # everything acknowledged was read by both
    assert traffic.lost == []

Every lane has two senders, one that appends single records and one that appends batches. A sender
goes on only when its record is acknowledged, and repeats what failed, as the outbox does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple, Self

from kvlane.streams.errors import AppendFailed, OwnershipLost
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Appended, Entry, Partition

PAUSE_S = 0.02
COMMIT_EVERY_S = 0.2
SETTLE_S = 75.0
"""More than a reader or a member waits, 30 s here, before it replaces a connection that is silent
(`SILENT_TIMEOUTS`)."""


class NumberedRecord(NamedTuple):
    """A record of one sender, numbered in the order of sending."""

    sender: int
    number: int

    @property
    def value(self) -> bytes:
        return b"%d %d" % self

    @classmethod
    def parse(cls, value: bytes) -> NumberedRecord:
        return cls(*map(int, value.split()))


class RecordTraffic:
    """Sends and reads records, and checks their order and number."""

    def __init__(self, log: KafkaLog, topic: str, partitions: int) -> None:
        self.acknowledged: dict[tuple[int, int], NumberedRecord] = {}  # by partition and offset
        self.failed: Counter[NumberedRecord] = (
            Counter()
        )  # appends that were not acknowledged, and repeated
        self.log_of: dict[int, dict[int, NumberedRecord]] = defaultdict(
            dict
        )  # what the reader read
        self.out_of_order = 0  # offsets of the reader that did not rise
        self.group_got: Counter[tuple[int, int]] = Counter()  # what the member was given
        self.claims: list[dict[int, int]] = []
        self.revocations: list[frozenset[int]] = []
        self.longest_stall_s = 0.0
        self._log, self._topic, self._partitions = log, topic, partitions
        self._first_failure = asyncio.Event()
        self._stopping = False
        self._done = False
        self._tasks: list[asyncio.Task[None]] = []
        self._senders: list[asyncio.Task[None]] = []
        self._commits: dict[int, int] = {}
        self._member = log.member(topic, "traffic", self)
        self._reader = log.reader()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._take())]
        self._senders = [
            asyncio.create_task(self._send(sender, sender % self._partitions))
            for sender in range(2 * self._partitions)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (*self._senders, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._senders, *self._tasks, return_exceptions=True)
        await self._reader.close()
        await self._member.close()

    async def wait_acknowledged(self, records: int, within_s: float = SETTLE_S) -> None:
        """Wait until `records` more records are acknowledged in every partition."""
        before = Counter(partition for partition, _ in self.acknowledged)
        async with asyncio.timeout(within_s):
            while True:
                now = Counter(partition for partition, _ in self.acknowledged)
                if all(now[p] - before[p] >= records for p in range(self._partitions)):
                    return
                self._check()
                await asyncio.sleep(0.02)

    async def wait_failure(self, within_s: float) -> None:
        """Wait for the first append that fails."""
        await asyncio.wait_for(self._first_failure.wait(), within_s)

    async def settle(self) -> None:
        """Stop sending, and wait until the reader and the group have all that was acknowledged."""
        self._stopping = True
        try:
            async with asyncio.timeout(SETTLE_S):
                await asyncio.gather(*self._senders)
                while not self._everything_arrived():
                    self._check()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not settled within {SETTLE_S:g} s: {self._missing()}") from None
        self._done = True
        await asyncio.gather(*self._tasks)

    @property
    def lost(self) -> list[NumberedRecord]:
        """Records that were acknowledged but are not at their offset in the log."""
        return [
            sent
            for (partition, offset), sent in self.acknowledged.items()
            if self.log_of[partition].get(offset) != sent
        ]

    @property
    def duplicated(self) -> list[NumberedRecord]:
        """Records more than once in the log although no append of them failed."""
        copies = Counter(sent for lane in self.log_of.values() for sent in lane.values())
        return [sent for sent, n in copies.items() if n > 1 + self.failed[sent]]

    @property
    def reordered(self) -> list[NumberedRecord]:
        """Records that come after a later record of the same sender."""
        found = []
        for lane in self.log_of.values():
            latest: dict[int, int] = {}
            seen: set[NumberedRecord] = set()
            for offset in sorted(lane):
                sent = lane[offset]
                if sent not in seen and sent.number < latest.get(sent.sender, -1):
                    found.append(sent)
                seen.add(sent)
                latest[sent.sender] = max(sent.number, latest.get(sent.sender, -1))
        return found

    @property
    def given_twice(self) -> int:
        """Records that the group received more than once."""
        return sum(n > 1 for n in self.group_got.values())

    # --- Ownership ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        self.claims.append(dict(starts))
        for partition in starts:
            self._member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        self.revocations.append(partitions)
        for partition in partitions:
            self._commits.pop(partition, None)

    # --- tasks ---

    async def _send(self, sender: int, partition: int) -> None:
        number, clock = 0, asyncio.get_running_loop()
        while not self._stopping:
            sent, begun = NumberedRecord(sender, number), clock.time()
            appended = await self._persist(sent, partition)
            self.longest_stall_s = max(self.longest_stall_s, clock.time() - begun)
            self.acknowledged[partition, appended.offset] = sent
            number += 1
            await asyncio.sleep(PAUSE_S)

    async def _persist(self, sent: NumberedRecord, partition: int) -> Appended:
        entry, in_batches = Entry(b"key", sent.value), sent.sender >= self._partitions
        while True:
            try:
                if in_batches:
                    return await self._log.append_batch(self._topic, partition, [entry])
                return await self._log.append(self._topic, entry, partition)
            except AppendFailed:
                self.failed[sent] += 1
                self._first_failure.set()
                await asyncio.sleep(PAUSE_S)

    async def _read(self) -> None:
        self._reader.assign({Partition(self._topic, p): 0 for p in range(self._partitions)})
        while not self._done:
            for (_, partition), records in (await self._reader.poll(0.2)).items():
                lane = self.log_of[partition]
                for record in records:
                    self.out_of_order += bool(lane) and record.offset <= next(reversed(lane))
                    lane[record.offset] = NumberedRecord.parse(record.value or b"")

    async def _take(self) -> None:
        clock = asyncio.get_running_loop()
        committed_at = clock.time()
        while not self._done:
            for (_, partition), records in (await self._member.poll(0.2)).items():
                self.group_got.update((partition, record.offset) for record in records)
                self._commits[partition] = records[-1].offset + 1
            if self._commits and clock.time() - committed_at > COMMIT_EVERY_S:
                committed_at = clock.time()
                try:
                    await self._member.commit(self._commits)
                except (OwnershipLost, AppendFailed):
                    continue  # the next one counts
                self._commits = {}

    def _everything_arrived(self) -> bool:
        return not self.lost and self.acknowledged.keys() <= self.group_got.keys()

    def _missing(self) -> str:
        """Counts of open sends and of records not read, the first of them, and the claims."""
        sending = sum(not sender.done() for sender in self._senders)
        unread, lanes = self.lost, sorted(self.acknowledged.keys() - self.group_got.keys())
        return (
            f"{sending} senders wait for an acknowledgement, the reader lacks {len(unread)} records"
            f" {unread[:3]}, the group {len(lanes)} {lanes[:3]}; claims {self.claims},"
            f" revocations {self.revocations}"
        )

    def _check(self) -> None:
        for task in (*self._tasks, *self._senders):
            if task.done() and not task.cancelled():
                task.result()
