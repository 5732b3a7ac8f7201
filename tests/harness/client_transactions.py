"""Transactions of clients in the in-memory broker."""

from __future__ import annotations

from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.partition_log import PartitionLog
from kvlane.streams.ports import Entry


class ClientTransaction:
    """A transaction as a client writes it: its records are in the log from their append, and can be
    read from its commit. Used once, by tests and the simulation."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._logs: dict[PartitionLog, None] = {}

    def append(self, topic: str, partition: int, *entries: Entry) -> None:
        log = self._broker.log(topic, partition)
        self._logs[log] = None
        log.append(entries, self._broker.now_ms(log), self)

    def end(self, *, is_committed: bool) -> None:
        for log in self._logs:
            log.end_transaction(self, is_committed=is_committed)
