"""A key filter for readers: records with other keys are skipped before they become objects."""

from __future__ import annotations

from collections.abc import Container


class KeyFilter:
    """The keys whose records a consumer returns; None: all.

    It is the consumer's key deserializer, which is the way from a consumer to its
    `PartitionRecords`.
    """

    def __init__(self) -> None:
        self.keys: Container[bytes | None] | None = None

    def __call__(self, key: bytes | None) -> bytes | None:
        """The key, unchanged."""
        return key
