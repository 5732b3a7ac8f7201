"""A client's connection to the in-memory broker, as seen by its readers, members and appends."""

from __future__ import annotations

from typing import Protocol

from kvlane.streams.memory.broker_faults import Operation
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.partition_log import Cursor


class ConnectionUser(Protocol):
    @property
    def cursor(self) -> Cursor:
        """The positions that it reads from."""

    async def close(self) -> None:
        """Stop; idempotent."""


class MemoryConnection(Protocol):
    """Implemented by `MemoryLog` (`streams/memory/memory_log.py`)."""

    @property
    def broker(self) -> MemoryBroker:
        """The broker, shared by all connections."""

    @property
    def client_id(self) -> str:
        """The name of this client in `BrokerFaults`."""

    @property
    def is_killed(self) -> bool:
        """Whether its process was killed."""

    @property
    def suspended_at(self) -> float | None:
        """When the client sent its last heartbeat, while it is stopped; by the broker's clock."""

    @property
    def cut_off_at(self) -> float | None:
        """Since when it does not reach the coordinator of its groups; by the broker's clock."""

    def check_open(self) -> None:
        """Raises LogClosed."""

    async def check_alive(self) -> None:
        """Return only if this client still exists. Raises LogClosed."""

    async def send_request(self, operation: Operation) -> bool:
        """The way to the broker; False when there will be no answer."""

    async def receive_answer(self, operation: Operation) -> None:
        """The way back."""

    def forget(self, user: ConnectionUser) -> None:
        """The user has closed itself."""
